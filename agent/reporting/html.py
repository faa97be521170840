"""A report as one HTML page that needs nothing else: styles, script, data and Plotly are in it. Pure.

The page forbids itself any request by a Content-Security-Policy, so it is the same without a network. Plotly travels
gzipped in base64 (2 MB in place of 5) and is unpacked by the browser (DecompressionStream, 2023 and
later); without it, or without scripts, every number is still in the tables.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from agent.reporting.charts import figures
from agent.reporting.details import source_anchor
from agent.reporting.model import RatioRow, Report, ShapeReport
from agent.reporting.tables import (
    NOT_MEASURED,
    READING,
    REFERENCE_NAMES,
    Cell,
    Link,
    Section,
    Table,
    headline,
    interval,
    percent,
    ratio,
    sections,
    share,
)
from tools.hgemm import GRID_DIMS
from tools.records import MODES, REFERENCES

_ASSETS = Path(__file__).resolve().parent / "assets"
_CSP = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
#: Tables with more columns than this get a smaller print.
_WIDE = 15
#: Sections whose folded tables are opened for printing.
_PRINTED = frozenset(("figure-3", "losses", "shapes"))
#: The headline's first.
_SHOWN_REFERENCES = REFERENCES[::-1]
#: A text cell longer than this may break over lines.
_WRAP_CHARS = 42


def render_html(report: Report) -> str:
    """Needs plotly (ImportError without it)."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    parts = list(sections(report))
    title = f"HGEMM on {report.device}"
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_CSP}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>"
    yield f"<style>{_asset('page.css')}</style></head><body>"
    yield f"<h1>{escape(title)}</h1>"
    yield (
        '<p class="faint">FP16 in and out, FP32 accumulation: the best kernel of each shape against auto-tuned '
        f"cuBLASLt. Driver {escape(report.driver)}, protocol version {report.protocol_version}.</p>"
    )
    yield from _tiles(report)
    yield f"<p>{escape(headline(report)[-1])}.</p>"
    yield f'<div class="reading">{"".join(f"<p>{escape(line)}</p>" for line in READING)}</div>'
    links = [(part.anchor, part.title) for part in parts] + [("sources", "Sources")]
    yield "<nav>" + "".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name in links) + "</nav>"
    yield '<noscript><p class="failed">Without scripts: no figures, but every number is in the tables.</p></noscript>'
    for part in parts:
        yield from _section(part)
    yield from _sources(report)
    drawn = {name: json.loads(figure.to_json()) for name, figure in figures(report).items()}
    yield _data("figures", drawn)
    yield _data("explorer-data", explorer_data(report))
    yield f'<script type="application/octet-stream" id="plotly">{_plotly()}</script>'
    yield f"<script>{_asset('page.js')}</script>"
    yield "</body></html>"


def _tiles(report: Report) -> Iterator[str]:
    shapes = "shapes of the grid" if report.off_grid else "shapes"
    yield '<div class="tiles">'
    for mode in MODES:
        stats = report.headline(mode)
        yield f'<div class="tile"><span>{mode}, mean speedup</span>'
        if stats is None:
            yield f"<b>-</b><span>{NOT_MEASURED}</span></div>"
            continue
        yield f"<b>{percent(stats.mean_speedup)}</b>"
        yield f"<span>95 % interval {interval(stats.mean_lo, stats.mean_hi)}</span>"
        yield f"<span>geometric mean ratio {ratio(stats.geo_mean_ratio)}</span>"
        yield f"<span>faster at {share(stats.wins, stats.shapes)} of {stats.shapes} {shapes}</span>"
        yield f"<span>worst {ratio(stats.worst_ratio)} at {escape(stats.worst_shape)}</span></div>"
    yield "</div>"


def _section(section: Section) -> Iterator[str]:
    yield f'<section><div class="head"><h2 id="{section.anchor}">{escape(section.title)}</h2>'
    for text in section.text:
        yield f"<p>{escape(text)}</p>"
    yield "</div>"
    if section.figure == "explorer":
        yield '<div class="controls" id="controls"></div>'
    if section.figure is not None:
        yield f'<div class="figure" id="figure-{section.figure}"></div>'
    if section.figure == "explorer":
        yield '<div id="detail"><p class="faint">Click a cell for its times, source and ncu record.</p></div>'
    for table in section.tables:
        yield from _table(table, section.anchor in _PRINTED)
    yield "</section>"


def _table(table: Table, printed: bool) -> Iterator[str]:
    if table.folded:
        yield f"<details{' class=print' if printed else ''}><summary>{escape(table.title)}</summary>"
    elif table.title:
        yield f"<h3>{escape(table.title)}</h3>"
    if not table.rows:
        yield '<p class="faint">None.</p>'
    else:
        yield f'<div class="scroll"><table{" class=wide" if len(table.columns) > _WIDE else ""}><thead><tr>'
        yield "".join(
            f"<th{' class=text' if i < table.text_columns else ''}>{escape(name)}</th>"
            for i, name in enumerate(table.columns)
        )
        yield "</tr></thead><tbody>"
        for row in table.rows:
            anchor = f' id="{escape(row.anchor)}"' if row.anchor else ""
            cells = "".join(_cell(cell, i < table.text_columns) for i, cell in enumerate(row.cells))
            yield f"<tr{anchor}>{cells}</tr>"
        yield "</tbody></table></div>"
    if table.folded:
        yield "</details>"


def _cell(cell: Cell, text: bool) -> str:
    words = cell.text if isinstance(cell, Link) else cell
    names = ["text"] if text else []
    names += ["wrap"] if len(words) > _WRAP_CHARS else []
    names += ["none"] if words == NOT_MEASURED else []
    inner = f'<a href="#{escape(cell.anchor)}">{escape(words)}</a>' if isinstance(cell, Link) else escape(words)
    return f'<td class="{" ".join(names)}">{inner}</td>' if names else f"<td>{inner}</td>"


def _sources(report: Report) -> Iterator[str]:
    yield '<section><h2 id="sources">Sources</h2>'
    yield (
        "<p>The source of a family, its includes inlined; a kernel is this text after its macros. Run-time knobs are "
        "launch arguments.</p>"
    )
    for source in report.sources:
        yield f'<details id="{source_anchor(source.source_id)}"><summary>{escape(source.title)}</summary>'
        yield f"<pre>{escape(source.text)}</pre></details>"
    yield "</section>"


# --- data for the script ---------------------------------------------------------------------------------------------


def explorer_data(report: Report) -> dict[str, Any]:
    """``rows`` of a timing are in the order of ``references``: ratio, its interval, and the reference's time, to five
    digits; what was not measured is null."""
    index = {kernel.key: i for i, kernel in enumerate(report.kernels)}
    return {
        "grid": list(GRID_DIMS),
        "modes": list(MODES),
        "references": [_reference_title(name) for name in _SHOWN_REFERENCES],
        "kernels": [
            {"key": k.key, "label": k.label, "source": k.source, "note": k.source_note} for k in report.kernels
        ],
        "shapes": [_explorer_shape(shape, index) for shape in report.shapes],
    }


def _reference_title(name: str) -> str:
    base = name.removesuffix("_max")
    return f"{REFERENCE_NAMES[base]}, {'max(NN, TN)' if name != base else 'same layout'}"


def _explorer_shape(shape: ShapeReport, index: dict[str, int]) -> dict[str, Any]:
    choice = shape.choice()
    return {
        "dims": [shape.m, shape.n, shape.k],
        "kernel": index[shape.best] if shape.best else None,
        "why": shape.why_none,
        "ncu": bool(choice and choice.profiled),
        "timings": {
            mode: {
                "us": _short(timing.time_us),
                "rows": [_explorer_row(timing.row(name)) for name in _SHOWN_REFERENCES],
            }
            for mode, timing in (choice.timings if choice else {}).items()
        },
    }


def _explorer_row(row: RatioRow | None) -> list[float] | None:
    return None if row is None else [_short(v) for v in (row.ratio, row.ratio_lo, row.ratio_hi, row.ref_us)]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _data(name: str, value: Any) -> str:
    """JSON that cannot end its script element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    # No time stamp, so that the same report is the same page.
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
