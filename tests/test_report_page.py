"""The page: all tables, no request to anywhere, links that lead somewhere, and its figures in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agent.report_cli import write_report
from agent.reporting.data import build
from agent.reporting.html import render_html
from agent.reporting.model import Report
from agent.reporting.published import load_peaks, load_published
from agent.reporting.source import load
from agent.reporting.tables import Link, sections
from tests.report_kit import FAMILIES, HOPELESS, OFF_GRID, make_record
from tools.records import MODES

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
#: A page of a few hundred shapes; Plotly alone is 2 MB of it.
MAX_PAGE_BYTES = 3_500_000


class Page(HTMLParser):
    """What the tests look at: ids, links, elements that could fetch, cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetching: list[str] = []
        self.rows: list[list[str]] = []
        self._cell: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.append(given["id"] or "")
        if tag == "a":
            self.links.append(given.get("href") or "")
        if tag in ("link", "img", "iframe", "object", "embed") or "src" in given:
            self.fetching.append(f"{tag} {given}")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = ""

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            self.rows[-1].append(self._cell)
            self._cell = None


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = make_record(tmp_path_factory.mktemp("page") / "r.sqlite")
    return build(load(path), FAMILIES, load_published(), load_peaks("NVIDIA H200"))


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    return render_html(report)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_page_has_every_table_of_the_report(report: Report, page: Page) -> None:
    expected = []
    for section in sections(report):
        for table in section.tables:
            if table.rows:
                expected.append(list(table.columns))
                expected += [
                    [cell.text if isinstance(cell, Link) else cell for cell in row.cells] for row in table.rows
                ]
    assert page.rows == expected


def test_every_link_leads_to_a_place_on_the_page(page: Page) -> None:
    assert len(set(page.ids)) == len(page.ids), "ids are unique"
    assert page.links
    assert [link for link in page.links if link[:1] != "#" or link[1:] not in page.ids] == []


def test_the_page_needs_and_may_fetch_nothing(html: str, page: Page) -> None:
    assert page.fetching == []
    assert "default-src 'none'" in html
    assert len(html.encode()) < MAX_PAGE_BYTES


def test_the_same_report_is_the_same_page(report: Report, html: str) -> None:
    assert render_html(report) == html


def test_the_explorer_knows_every_shape(report: Report, html: str) -> None:
    data = json.loads(re.search(r'id="explorer-data">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    assert {tuple(s["dims"]) for s in data["shapes"]} == {(s.m, s.n, s.k) for s in report.shapes}
    hopeless = next(s for s in data["shapes"] if tuple(s["dims"]) == HOPELESS)
    assert hopeless["kernel"] is None
    assert data["references"][0] == "cuBLASLt auto-tuned, max(NN, TN)"
    for shape, shown in zip(report.shapes, data["shapes"], strict=True):
        for mode in MODES:
            timing = shape.timing(mode)
            row = timing.row("cublaslt_auto_max") if timing else None
            if timing is not None and row is not None:
                assert shown["timings"][mode]["rows"][0] == pytest.approx(
                    [row.ratio, row.ratio_lo, row.ratio_hi, row.ref_us], rel=1e-4
                )
                assert shown["timings"][mode]["us"] == pytest.approx(timing.time_us, rel=1e-4)


# --- in a browser ----------------------------------------------------------------------------------------------------

#: Hovers over the first cell of the first map, clicks one, changes the mode, and writes down what happened.
PROBE = """<script>
const begun = setInterval(() => {
  if (document.documentElement.dataset.drawn !== "yes") return;
  clearInterval(begun);
  const plot = document.getElementById("figure-explorer"), select = document.querySelector("#controls select");
  const losses = () => plot.data.flatMap((map) => map.text.flat()).filter((text) => text === "\\u2212").length;
  const seen = { offline: losses() };
  const area = plot.querySelector(".draglayer .xy .nsewdrag"), box = area.getBoundingClientRect();
  const at = { bubbles: true, clientX: box.left + 0.05 * box.width, clientY: box.top + 0.95 * box.height };
  for (const type of ["mouseover", "mousemove"]) area.dispatchEvent(new MouseEvent(type, at));
  setTimeout(() => {
    seen.hover = plot.querySelector(".hoverlayer").textContent;
    plot.emit("plotly_click", { points: [{ customdata: "64x64x64" }] });
    seen.links = [...document.querySelectorAll("#detail a")].map((a) => a.hash.slice(1));
    seen.found = seen.links.every((id) => document.getElementById(id));
    const last = seen.links[seen.links.length - 1];
    location.hash = last;
    select.value = "server";
    select.dispatchEvent(new Event("change"));
    setTimeout(() => {
      seen.server = losses();
      seen.opened = document.getElementById(last).closest("details").open;
      const figures = [...document.querySelectorAll(".figure")];
      seen.figures = Object.fromEntries(figures.map((f) => [f.id, f.querySelectorAll(".main-svg").length > 0]));
      seen.failed = document.querySelectorAll(".failed").length;
      const points = [...document.querySelectorAll("#figure-speedup .scatterlayer .points path")];
      seen.points = points.length;
      seen.colours = [...new Set(points.map((point) => getComputedStyle(point).fill))].sort();
      const note = document.createElement("pre");
      note.id = "probe";
      note.textContent = JSON.stringify(seen);
      document.body.append(note);
    }, 500);
  }, 500);
}, 50);
</script></body>"""


def browse(tmp_path: Path, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Headless, without a network, in a profile of its own."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=1200,9000", "--virtual-time-budget=20000", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@needs_browser
def test_figures_hover_click_and_redraw_in_chromium(report: Report, html: str, tmp_path: Path) -> None:
    page = tmp_path / "probe.html"
    page.write_text(html.replace("</body>", PROBE))
    done = browse(tmp_path, page, "--dump-dom")
    note = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert note, done.stderr[-2000:]
    seen = json.loads(note[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert not re.search(r"CONSOLE.*(Error|Refused|violates)", done.stderr), done.stderr[-2000:]
    assert seen["failed"] == 0
    assert seen["figures"] == {f"figure-{n}": True for n in ("speedup", "explorer", "roofline", "accuracy")}
    on_grid = [s for s in report.shapes if (s.m, s.n, s.k) not in OFF_GRID]
    assert seen["points"] == 3 * sum(t is not None for s in on_grid for t in map(s.timing, MODES))
    okabe_ito = {"rgb(0, 114, 178)", "rgb(213, 94, 0)", "rgb(0, 158, 115)"}
    assert set(seen["colours"]) == okabe_ito
    tiny = next(s for s in report.shapes if s.label == "64x64x64")
    timing = tiny.timing("offline")
    assert timing is not None
    assert seen["hover"].startswith("64x64x64")
    assert f"offline: {timing.time_us:.5g} us against" in seen["hover"]
    assert seen["links"] == [
        f"kernel-{tiny.best}",
        f"source-{next(k.source for k in report.kernels if k.key == tiny.best)}",
        *(["ncu-64x64x64"] if tiny.choice().profiled else []),  # type: ignore[union-attr]
        "shape-64x64x64",
    ]
    assert seen["found"]
    assert seen["opened"], "a link into a folded part opens it"
    for mode in ("offline", "server"):
        rows = [t.row("cublaslt_auto_max") for s in on_grid if (t := s.timing(mode))]
        assert seen[mode] == sum(row is not None and row.ratio < 1 for row in rows)


@needs_browser
def test_it_prints_on_landscape_pages(report: Report, tmp_path: Path) -> None:
    write_report(report, tmp_path / "out")
    target = tmp_path / "page.pdf"
    browse(tmp_path, tmp_path / "out" / "report.html", f"--print-to-pdf={target}", "--no-pdf-header-footer")
    data = target.read_bytes()
    boxes = {tuple(float(v) for v in box.split()) for box in re.findall(rb"/MediaBox \[([\d. ]+)\]", data)}
    assert len(boxes) == 1
    _, _, width, height = boxes.pop()
    assert width == pytest.approx(842, abs=1)
    assert height == pytest.approx(595, abs=1)
