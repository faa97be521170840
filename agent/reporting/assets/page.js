"use strict";
// Unpacks Plotly, which the page carries compressed, and draws the figures. Nothing is fetched from anywhere.

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const CONFIG = { displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"], responsive: false };
const MINUS = "\u2212";

async function unpackPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function link(text, anchor) {
  const element = make("a", text);
  element.href = "#" + anchor;
  return element;
}

// --- explorer -------------------------------------------------------------------------------------------------------

class Explorer {
  constructor(data) {
    this.data = data;
    this.byShape = new Map(data.shapes.map((s) => [s.dims.join("x"), s]));
    this.plot = document.getElementById("figure-explorer");
    this.choices = {};
    const controls = document.getElementById("controls");
    this.addChoice(controls, "mode", "Mode", data.modes.map((m) => [m, m]));
    this.addChoice(controls, "reference", "Reference", data.references.map((title, index) => [String(index), title]));
    this.addChoice(controls, "slice", "One map for each", [["2", "K"], ["0", "M"], ["1", "N"]]);
  }

  addChoice(parent, name, title, options) {
    const select = make("select");
    for (const [value, text] of options) select.append(new Option(text, value));
    const label = make("label", title + " ");
    label.append(select);
    parent.append(label);
    select.addEventListener("change", () => this.draw());
    this.choices[name] = select;
  }

  // A cell's dims from the slice's value and its place in the map.
  dims(slice, value, row, column) {
    const dims = [];
    const [rowAxis, columnAxis] = [0, 1, 2].filter((axis) => axis !== slice);
    dims[slice] = value;
    dims[rowAxis] = row;
    dims[columnAxis] = column;
    return dims;
  }

  rowOf(shape, mode, reference) {
    const timing = shape && shape.timings[mode];
    return timing && timing.rows[reference];
  }

  hover(dims, shape) {
    const name = dims.join("x");
    if (!shape) return name + "<br>not measured";
    if (shape.kernel === null) return name + "<br>no kernel: " + shape.why;
    const lines = ["<b>" + name + "</b>", this.data.kernels[shape.kernel].label];
    for (const mode of this.data.modes) {
      const row = this.rowOf(shape, mode, this.choices.reference.value);
      const time = shape.timings[mode];
      lines.push(row ? `${mode}: ${time.us} us against ${row[3]} us, ratio ${row[0]} [${row[1]}, ${row[2]}]`
        : `${mode}: not measured`);
    }
    lines.push("click for source and ncu record");
    return lines.join("<br>");
  }

  draw() {
    const grid = this.data.grid;
    const mode = this.choices.mode.value;
    const reference = this.choices.reference.value;
    const slice = Number(this.choices.slice.value);
    const axes = [0, 1, 2].filter((axis) => axis !== slice).map((axis) => "MNK"[axis]);
    const short = grid.map((d) => (d >= 1024 ? d / 1024 + "k" : String(d)));
    const columns = 5, gapX = 0.018, gapY = 0.13;
    const wide = (1 - gapX * (columns - 1)) / columns, high = (1 - gapY) / 2;
    const hatch = "data:image/svg+xml," + encodeURIComponent(
      '<svg xmlns="http://www.w3.org/2000/svg" width="200" height="200"><defs><pattern id="h" width="7" height="7" ' +
      'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="7" stroke="#bbb" ' +
      'stroke-width="1"/></pattern></defs><rect width="200" height="200" fill="url(#h)"/></svg>');
    const traces = [], images = [], annotations = [];
    const layout = {
      width: 1080, height: 560, margin: { l: 52, r: 84, t: 34, b: 52 }, paper_bgcolor: "white",
      plot_bgcolor: "rgba(0,0,0,0)", hoverlabel: { align: "left", bgcolor: "white" },
      font: { family: "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif", size: 12, color: "#111" },
      coloraxis: {
        cmin: -1, cmax: 1,
        colorscale: [[0, "#8c3a00"], [0.25, "#d55e00"], [0.42, "#f5c9a3"], [0.5, "#f7f7f7"], [0.58, "#a9d0ea"],
          [0.75, "#0072b2"], [1, "#003a5c"]],
        colorbar: {
          title: { text: "ratio", side: "top" }, thickness: 14, len: 1, x: 1.015, outlinewidth: 0.5,
          tickvals: [0.5, 0.7, 0.85, 1, 1.2, 1.4, 1.7, 2].map(Math.log2),
          ticktext: ["≤ 0.5", "0.7", "0.85", "1", "1.2", "1.4", "1.7", "≥ 2"],
        },
      },
    };
    grid.forEach((value, index) => {
      const column = index % columns, row = Math.floor(index / columns);
      const suffix = index === 0 ? "" : String(index + 1);
      const z = [], text = [], hover = [], keys = [];
      for (const a of grid) {
        const zs = [], ts = [], hs = [], ks = [];
        for (const b of grid) {
          const dims = this.dims(slice, value, a, b);
          const shape = this.byShape.get(dims.join("x"));
          const found = this.rowOf(shape, mode, reference);
          zs.push(found ? Math.max(-1, Math.min(1, Math.log2(found[0]))) : null);
          ts.push(found && found[0] < 1 ? MINUS : shape && shape.kernel === null ? "?" : "");
          hs.push(this.hover(dims, shape));
          ks.push(dims.join("x"));
        }
        z.push(zs); text.push(ts); hover.push(hs); keys.push(ks);
      }
      traces.push({
        type: "heatmap", x: short, y: short, z, text, hovertext: hover, customdata: keys, texttemplate: "%{text}",
        textfont: { size: 12 }, hoverinfo: "text", hoverongaps: true, coloraxis: "coloraxis",
        xaxis: "x" + suffix, yaxis: "y" + suffix, xgap: 1, ygap: 1,
      });
      const x0 = column * (wide + gapX), y0 = row === 0 ? high + gapY : 0;
      const axis = { type: "category", ticks: "", showgrid: false, linecolor: "#444", mirror: true, tickfont: { size: 10 },
        fixedrange: true };
      layout["xaxis" + suffix] = { ...axis, domain: [x0, x0 + wide], anchor: "y" + suffix, tickangle: -90,
        title: row === 1 ? { text: axes[1], standoff: 4 } : undefined };
      layout["yaxis" + suffix] = { ...axis, domain: [y0, y0 + high], anchor: "x" + suffix, showticklabels: column === 0,
        title: column === 0 ? { text: axes[0], standoff: 2 } : undefined };
      images.push({ source: hatch, xref: "paper", yref: "paper", x: x0, y: y0 + high, sizex: wide, sizey: high,
        sizing: "stretch", layer: "below" });
      annotations.push({ text: "<b>" + "MNK"[slice] + " = " + value + "</b>", showarrow: false, xref: "paper",
        yref: "paper", x: x0 + wide / 2, y: y0 + high, xanchor: "center", yanchor: "bottom", font: { size: 12 } });
    });
    Plotly.react(this.plot, traces, { ...layout, images, annotations }, CONFIG).then(() => {
      if (this.listening) return;
      this.listening = true;
      this.plot.on("plotly_click", (event) => this.show(event.points[0].customdata));
    });
  }

  show(name) {
    const panel = document.getElementById("detail");
    const shape = this.byShape.get(name);
    panel.replaceChildren(make("h3", name));
    if (!shape) return void panel.append(make("p", "not measured"));
    if (shape.kernel === null) return void panel.append(make("p", "no kernel passed the whole gate: " + shape.why));
    const kernel = this.data.kernels[shape.kernel];
    const line = make("p");
    line.append("Kernel ", link(kernel.label, "kernel-" + kernel.key), ". Source: ");
    line.append(kernel.source ? link(kernel.source, "source-" + kernel.source) : kernel.note, ". ");
    line.append("ncu record: ", shape.ncu ? link("open", "ncu-" + name) : "not measured", ". ");
    line.append("Row: ", link("every shape", "shape-" + name), ".");
    const table = make("table"), body = make("tbody"), head = make("tr");
    for (const title of ["mode", "reference", "kernel us", "reference us", "ratio", "95 % interval"]) {
      head.append(make("th", title));
    }
    body.append(head);
    for (const mode of this.data.modes) {
      for (const [reference, title] of this.data.references.entries()) {
        const row = this.rowOf(shape, mode, reference);
        const tr = make("tr");
        const cells = row ? [mode, title, shape.timings[mode].us, row[3], row[0], `${row[1]} … ${row[2]}`]
          : [mode, title, "not measured", "", "", ""];
        cells.forEach((cell, index) => tr.append(make("td", String(cell), index < 2 ? "text" : "")));
        body.append(tr);
      }
    }
    table.append(body);
    const folded = make("details");
    folded.open = true;
    folded.append(make("summary", "Every reference"), table);
    panel.append(line, folded);
  }
}

// --- folded parts ---------------------------------------------------------------------------------------------------

function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  target.scrollIntoView();
}

function openForPrint() {
  const closed = [...document.querySelectorAll("details.print:not([open])")];
  closed.forEach((d) => (d.open = true));
  window.addEventListener("afterprint", () => closed.forEach((d) => (d.open = false)), { once: true });
}

async function main() {
  window.addEventListener("hashchange", openTarget);
  window.addEventListener("beforeprint", openForPrint);
  openTarget();
  try {
    await unpackPlotly();
    for (const [name, figure] of Object.entries(read("figures"))) {
      await Plotly.newPlot("figure-" + name, figure.data, figure.layout, CONFIG);
    }
    new Explorer(read("explorer-data")).draw();
    document.documentElement.dataset.drawn = "yes";
  } catch (error) {
    for (const place of document.querySelectorAll(".figure")) {
      place.replaceChildren(make("p", "The figure could not be drawn (" + error + "): it needs a browser of 2023 or " +
        "later. Its numbers are in the tables.", "failed"));
    }
  }
}

main();
