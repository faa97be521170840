"""A report as sections of tables of text, which html.py and markdown.py render alike. Pure.

Speedups are shown in per cent, ratios and times as measured; a cell that was not measured says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from agent.reporting.model import Comparison, Layout, MaxStats, Report, ShapeReport, Stats
from agent.reporting.sizes import EVENT_RESOLUTION_US, SIZE_BINS, of_grid, on_grid
from tools.hgemm import GRID_DIMS
from tools.records import HEADLINE_REFERENCE, MODES, Mode

NOT_MEASURED = "not measured"
REFERENCE_NAMES = {
    "torch": "torch.matmul",
    "cublas": "cuBLAS",
    "cublaslt_heuristic": "cuBLASLt heuristic",
    "cublaslt_auto": "cuBLASLt auto-tuned",
}
#: Longer lists are folded on the page; none is cut.
FOLD_ROWS = 25

FigureName = Literal["speedup", "explorer", "roofline", "accuracy"]


class Link(NamedTuple):
    """A cell that leads to another place of the page."""

    text: str
    anchor: str


Cell = str | Link


class Row(NamedTuple):
    cells: tuple[Cell, ...]
    anchor: str = ""


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    text_columns: int = 1  # how many leading columns are text, not numbers
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """``figure`` comes after the text, before the tables."""

    anchor: str
    title: str
    text: tuple[str, ...] = ()
    figure: FigureName | None = None
    tables: tuple[Table, ...] = ()


def sections(report: Report) -> Iterator[Section]:
    from agent.reporting import details

    yield Section("table-1", "Table 1. Mean speedup", _TABLE_1_TEXT, None, tuple(_table_1(report)))
    yield Section("table-2", "Table 2. max(custom, reference)", _TABLE_2_TEXT, None, tuple(_table_2(report)))
    yield Section("table-3", "Table 3. By size", _TABLE_3_TEXT, None, tuple(_table_3(report)))
    if report.off_grid:
        yield Section("off-grid", "Off the grid", _OFF_GRID_TEXT, None, tuple(_off_grid(report)))
    yield Section("figure-3", "Figure 3. Speedup against size", _FIGURE_TEXT, "speedup", tuple(_bands(report)))
    yield Section("explorer", "Explorer", (_explorer_text(report),), "explorer")
    yield Section("losses", "Losses and worst cases", _LOSSES_TEXT, None, tuple(_losses(report)))
    yield details.roofline(report)
    yield details.accuracy(report)
    yield details.rejections(report)
    yield details.published(report)
    yield details.every_shape(report)
    yield details.kernels(report)
    yield details.profiles(report)
    yield details.provenance(report)


# --- words -----------------------------------------------------------------------------------------------------------


def percent(speedup: float | None) -> str:
    return NOT_MEASURED if speedup is None else f"{100 * speedup:+.1f} %"


def deviation(std: float | None) -> str:
    """A standard deviation, of which there is none for one shape."""
    return "-" if std is None else f"{100 * std:.1f} %"


def interval(lo: float | None, hi: float | None) -> str:
    return "-" if lo is None or hi is None else f"{100 * lo:+.1f} … {100 * hi:+.1f} %"


def ratio(value: float) -> str:
    return f"{value:.3f}"


def time_us(value: float) -> str:
    return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"


def p_value(value: float | None) -> str:
    if value is None:
        return "-"
    return "< 1e-12" if value < 1e-12 else f"{value:.1g}" if value < 0.001 else f"{value:.3f}"


def share(count: int, of: int) -> str:
    return f"{100 * count / of:.0f} % ({count})"


def reference_label(reference: str, layout: Layout) -> str:
    return f"{REFERENCE_NAMES[reference]}, {layout}"


def headline(report: Report) -> list[str]:
    """What the report says, in sentences."""
    lines = []
    for mode in MODES:
        stats = report.headline(mode)
        if stats is None:
            lines.append(f"{mode}: {NOT_MEASURED}")
            continue
        lines.append(f"{mode}: {_in_words(stats, 'shapes of the grid' if report.off_grid else 'shapes')}")
    weighted = {mode: report.grid_weighted[mode] for mode in MODES}
    if 0 < measured_on_grid(report) < len(GRID_DIMS) ** 3 and any(value is not None for value in weighted.values()):
        means = ", ".join(f"{mode} {NOT_MEASURED if v is None else percent(v)}" for mode, v in weighted.items())
        lines.append(f"mean speedup with each size of Table 3 weighted by its share of the grid: {means}")
    lines += [
        f"off the grid, {off.mode}: {_in_words(off.stats, 'shapes')}"
        for off in report.off_grid
        if off.m is None and off.stats is not None
    ]
    known, passed = report.shapes_known, report.shapes_with_kernel
    lines.append(
        f"{known} shapes in the database, {passed} with a kernel that passed the whole gate, "
        f"{known - passed} with none; " + coverage(report)
    )
    return lines


def _in_words(stats: Stats, shapes: str) -> str:
    mean = f"{percent(stats.mean_speedup)} (95 % interval {interval(stats.mean_lo, stats.mean_hi)})"
    return (
        f"mean speedup {mean} over {stats.shapes} {shapes}, geometric mean {ratio(stats.geo_mean_ratio)}x, "
        f"faster at {share(stats.wins, stats.shapes)}, worst {ratio(stats.worst_ratio)}x at {stats.worst_shape}"
    )


def measured_on_grid(report: Report) -> int:
    return sum(on_grid(shape) and shape.best is not None for shape in report.shapes)


def coverage(report: Report) -> str:
    measured = measured_on_grid(report)
    if measured == len(GRID_DIMS) ** 3:
        return "the whole grid of 1,000 shapes is measured"
    return f"{measured} of the grid's 1,000 shapes are measured, and means are over these, not over the grid"


READING = (
    "ratio = t_ref / t; speedup = ratio - 1; both times are medians of one interleaved run, so clocks hit both alike. "
    "A speedup without a name is against auto-tuned cuBLASLt, the better layout of B on both sides.",
    "The kernel of a shape is the candidate with the best offline ratio at the final budget among those that passed "
    "verify at full depth and the sanitizer. Being chosen by it, the offline ratio is slightly flattered; rotating and "
    "server are runs of their own with the same kernel.",
    "offline: back to back, operands hot. rotating: operand sets rotated, L2 evicted before each replay. server: one "
    "call at a time after an idle gap, L2 evicted; the gap is not timed.",
    "The 95 % interval of a mean is a bootstrap over the shapes; the interval of a shape's ratio is a bootstrap over "
    "its timed rounds. A clear win or loss is a shape whose own interval lies wholly above or below 1.",
    'What was not measured is shown as "not measured", never estimated.',
)

# --- tables 1 to 3 ---------------------------------------------------------------------------------------------------

_TABLE_1_TEXT = (
    "NN and TN compare the best kernel with B row-major or transposed against the reference at that same layout; max "
    "takes the better layout on both sides. Columns may cover different shapes where a layout was not measured: the "
    "detailed tables count them.",
)
_TABLE_2_TEXT = (
    "What a deployment gets that keeps the reference as a fallback: at each shape the faster of the two, as measured. "
    "In the last column the custom kernel is used only at clear wins.",
)
_TABLE_3_TEXT = ("Against auto-tuned cuBLASLt, the better layout on both sides, by the product MNK.",)
_OFF_GRID_TEXT = (
    "Shapes with a dimension that the grid has not, by M. They are in no other mean of speedups; the losses name "
    "theirs apart.",
)
_FIGURE_TEXT = (
    "Speedup over auto-tuned cuBLASLt, each shape a point; the line is the mean and the band one standard deviation "
    "either side, over bins of one power of two of MNK and half a power of two of the mean and the largest dimension.",
)
_LOSSES_TEXT = ("Every shape at which the reference is faster, worst first.",)

_STATS = (
    *("shapes", "mean", "95 % interval", "std. dev.", "geo. mean ratio", "wins", "clear wins, losses"),
    *("worst", "at", "best", "total-time ratio", "Wilcoxon p"),
)


def stats_cells(stats: Stats | None) -> tuple[Cell, ...]:
    if stats is None:
        return ("0", NOT_MEASURED, *("-",) * (len(_STATS) - 2))
    return (
        str(stats.shapes),
        percent(stats.mean_speedup),
        interval(stats.mean_lo, stats.mean_hi),
        deviation(stats.std_speedup),
        ratio(stats.geo_mean_ratio),
        share(stats.wins, stats.shapes),
        f"{stats.clear_wins}, {stats.clear_losses}",
        ratio(stats.worst_ratio),
        Link(stats.worst_shape, shape_anchor(stats.worst_shape)),
        ratio(stats.best_ratio),
        ratio(stats.total_time_ratio),
        p_value(stats.wilcoxon_p),
    )


def _by_reference(report: Report) -> dict[tuple[str, Layout], dict[Mode, Comparison]]:
    found: dict[tuple[str, Layout], dict[Mode, Comparison]] = {}
    for comparison in report.comparisons:
        found.setdefault((comparison.reference, comparison.layout), {})[comparison.mode] = comparison
    return found


def _table_1(report: Report) -> Iterator[Table]:
    grouped = _by_reference(report)
    yield Table(
        "Mean speedup over each reference",
        ("reference, layout", *MODES),
        tuple(
            Row(
                (reference_label(*name), *(percent(s.mean_speedup if (s := c.stats) else None) for c in modes.values()))
            )
            for name, modes in grouped.items()
        ),
    )
    for mode in MODES:
        yield Table(
            f"In detail, {mode}",
            ("reference, layout", *_STATS),
            tuple(Row((reference_label(*n), *stats_cells(modes[mode].stats))) for n, modes in grouped.items()),
        )
    net = report.server_net
    if net is not None:
        yield Table(
            f"Server, gross and net of an empty kernel (median {time_us(net.empty_kernel_us_median)} us) measured the "
            f"same way; left out of both rows: {len(net.not_above_empty)} shapes of which a side is within "
            f"{EVENT_RESOLUTION_US} us of it, what events resolve",
            ("time", *_STATS),
            (Row(("gross", *stats_cells(net.gross))), Row(("net", *stats_cells(net.net)))),
        )


def _table_2(report: Report) -> Iterator[Table]:
    columns = (
        "shapes",
        "mean",
        "95 % interval",
        "std. dev.",
        "geo. mean ratio",
        "custom used",
        "mean, clear wins only",
    )
    grouped = _by_reference(report)
    for mode in MODES:
        rows = (Row((reference_label(*n), *_max_cells(modes[mode].with_fallback))) for n, modes in grouped.items())
        yield Table(mode.capitalize(), ("reference, layout", *columns), tuple(rows))


def _max_cells(stats: MaxStats | None) -> tuple[Cell, ...]:
    if stats is None:
        return ("0", NOT_MEASURED, "-", "-", "-", "-", "-")
    return (
        str(stats.shapes),
        percent(stats.mean_speedup),
        interval(stats.mean_lo, stats.mean_hi),
        deviation(stats.std_speedup),
        ratio(stats.geo_mean_ratio),
        share(stats.custom_used, stats.shapes),
        percent(stats.mean_speedup_if_clear),
    )


def _table_3(report: Report) -> Iterator[Table]:
    for mode in MODES:
        bins = [b for b in report.sizes if b.mode == mode]
        yield Table(
            mode.capitalize(),
            ("MNK", "in database", *_STATS),
            tuple(Row((b.label, str(b.shapes_known), *stats_cells(b.stats))) for b in bins),
        )


def _off_grid(report: Report) -> Iterator[Table]:
    for mode in MODES:
        rows = [off for off in report.off_grid if off.mode == mode]
        yield Table(
            f"{mode.capitalize()}, off the grid",
            ("M", *_STATS),
            tuple(Row(("all" if off.m is None else str(off.m), *stats_cells(off.stats))) for off in rows),
        )


# --- figure 3, explorer, losses --------------------------------------------------------------------------------------

PANEL_NAMES = {
    "log2_mnk": "log2 of M*N*K",
    "log2_mean_dim": "log2 of the mean of M, N, K",
    "log2_max_dim": "log2 of the largest of M, N, K",
}


def _bands(report: Report) -> Iterator[Table]:
    for x, name in PANEL_NAMES.items():
        by_mode = {panel.mode: {band.x: band for band in panel.bands} for panel in report.panels if panel.x == x}
        at = sorted({x for bands in by_mode.values() for x in bands})
        rows = []
        for value in at:
            cells: list[Cell] = [f"{value:g}"]
            for mode in MODES:
                band = by_mode[mode].get(value)
                cells += [str(band.shapes), percent(band.mean_speedup)] if band else ["0", NOT_MEASURED]
                cells.append(deviation(band.std_speedup) if band else "-")
            rows.append(Row(tuple(cells)))
        columns = tuple(f"{mode} {what}" for mode in MODES for what in ("shapes", "mean", "std. dev."))
        yield Table(f"Bands against {name}", (name, *columns), tuple(rows), folded=True)


def _explorer_text(report: Report) -> str:
    there = sum(on_grid(shape) for shape in report.shapes)
    text = f"{there} of the 1,000 shapes of the grid are in the database; the rest is hatched."
    if report.off_grid:
        text += f" Off the grid, in a section of their own: {len(report.shapes) - there}."
    return text + " Losses carry a minus sign. Point at a cell for its times; click it for its source and ncu record."


def shape_anchor(label: str) -> str:
    return f"shape-{label}"


def kernel_anchor(key: str) -> str:
    return f"kernel-{key}"


def profile_anchor(label: str) -> str:
    return f"ncu-{label}"


def kernel_link(report_labels: dict[str, str], key: str) -> Link:
    return Link(report_labels.get(key, key), kernel_anchor(key))


def _losses(report: Report) -> Iterator[Table]:
    counted, others = of_grid(report.shapes)
    labels = {kernel.key: kernel.label for kernel in report.kernels}
    for mode in MODES:
        yield _losses_of(counted, labels, mode, mode.capitalize())
        if others:
            yield _losses_of(others, labels, mode, f"{mode.capitalize()}, off the grid")


def _losses_of(shapes: Sequence[ShapeReport], labels: dict[str, str], mode: Mode, title: str) -> Table:
    rows: list[tuple[float, Row]] = []
    measured = 0
    for shape in shapes:
        timing = shape.timing(mode)
        row = timing.row(HEADLINE_REFERENCE) if timing else None
        measured += row is not None
        if timing is None or row is None or row.ratio >= 1 or shape.best is None:
            continue
        cells: tuple[Cell, ...] = (
            Link(shape.label, shape_anchor(shape.label)),
            kernel_link(labels, shape.best),
            ratio(row.ratio),
            f"{ratio(row.ratio_lo)} … {ratio(row.ratio_hi)}",
            "clear" if row.ratio_hi < 1 else "within noise",
            time_us(timing.time_us),
            time_us(row.ref_us),
        )
        rows.append((row.ratio, Row(cells)))
    rows.sort(key=lambda pair: pair[0])
    return Table(
        f"{title}: {len(rows)} losses among {measured} shapes",
        ("shape", "kernel", "ratio", "95 % interval", "loss", "kernel us", "cuBLASLt us"),
        tuple(row for _, row in rows),
        text_columns=2,
        folded=len(rows) > FOLD_ROWS,
    )


def size_labels() -> Sequence[str]:
    return [label for label, _, _ in SIZE_BINS]
