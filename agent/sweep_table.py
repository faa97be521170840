"""What a sweep came to, over all its shapes: JSON, CSV, and tables for people. Pure but for the console it is given."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from agent.compare_stats import Estimate, geometric_mean, mean
from agent.sweep_rows import SweepRow
from agent.tables import print_table
from tools.records import MODES, Mode, Record

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Shapes up to which the table shows every one.
ALL_SHAPES = 40
EXTREMES = 5


class ModeMeans(Record):
    """Ratios (reference time / kernel time) of the winners of all shapes that have one. ``with_fallback`` is the mean
    of max(ratio, 1) over all measured shapes: what a library that keeps cuBLASLt beside the kernels would give."""

    mode: Mode
    shapes: int
    mean: Estimate
    geo_mean: Estimate
    wins: int  # ratio over 1
    clear_wins: int  # the whole interval of the shape over 1
    with_fallback: Estimate


class SweepSummary(Record):
    config_id: str
    config: str
    device: str
    db: str
    shapes: int
    states: dict[str, int]
    unfinished: dict[str, str] = Field(default_factory=dict)
    modes: tuple[ModeMeans, ...] = ()
    evaluations: int = 0
    rejected: dict[str, int] = Field(default_factory=dict)
    not_recorded_evaluations: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
    rows: tuple[SweepRow, ...] = ()


def summarise(
    rows: Sequence[SweepRow], *, config_id: str, device: str, db: str, unfinished: dict[str, str]
) -> SweepSummary:
    rejected: Counter[str] = Counter()
    for row in rows:
        rejected.update(row.rejected)
    return SweepSummary(
        config_id=config_id,
        config=rows[0].config if rows else "",
        device=device,
        db=db,
        shapes=len(rows) + len(unfinished),
        states=dict(Counter(row.status for row in rows)),
        unfinished=unfinished,
        modes=tuple(found for mode in MODES if (found := means(rows, mode)) is not None),
        evaluations=sum(row.evaluations for row in rows),
        rejected=dict(rejected.most_common()),
        not_recorded_evaluations=sum(row.not_recorded for row in rows),
        tokens=sum(row.tokens for row in rows),
        cost_usd=sum(row.cost_usd for row in rows),
        rows=tuple(rows),
    )


def means(rows: Sequence[SweepRow], mode: Mode) -> ModeMeans | None:
    """None where no winner was timed in this mode."""
    timed = [timing for row in rows if (timing := row.timing(mode)) is not None]
    if not timed:
        return None
    ratios = [timing.ratio for timing in timed]
    without = sum(row.status == "no_kernel" for row in rows)
    return ModeMeans(
        mode=mode,
        shapes=len(ratios),
        mean=mean(ratios),
        geo_mean=geometric_mean(ratios),
        wins=sum(ratio > 1 for ratio in ratios),
        clear_wins=sum(timing.ratio_lo > 1 for timing in timed),
        with_fallback=mean([max(ratio, 1.0) for ratio in ratios] + [1.0] * without),
    )


# --- CSV ------------------------------------------------------------------------------------------------------------


def to_csv(rows: Sequence[SweepRow]) -> str:
    """One line a shape. Free of clocks and hosts: two runs on the same recording give the same text."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(rows[0].dims) if rows else []
    timing_names = [f"{mode}_{name}" for mode in MODES for name in ("ratio", "lo", "hi", "time_us", "ref_us")]
    writer.writerow(
        [*names, "status", "b_layout", *timing_names, "variant_key", "kernel", "evaluations", "passed", "rejected",
         "not_recorded", "detail"]
    )  # fmt: skip
    for row in rows:
        timings = [cell for mode in MODES for cell in _timing_cells(row, mode)]
        writer.writerow(
            [*(row.dims.get(name, "") for name in names), row.status, row.b_layout or "", *timings,
             row.variant_key or "", row.label or "", row.evaluations, row.passed, sum(row.rejected.values()),
             row.not_recorded, row.detail]
        )  # fmt: skip
    return out.getvalue()


def _timing_cells(row: SweepRow, mode: Mode) -> list[str]:
    timing = row.timing(mode)
    if timing is None:
        return [""] * 5
    ratios = [f"{value:.4f}" for value in (timing.ratio, timing.ratio_lo, timing.ratio_hi)]
    return [*ratios, f"{timing.time_us:.3f}", f"{timing.ref_us:.3f}"]


# --- text -----------------------------------------------------------------------------------------------------------


def print_summary(summary: SweepSummary, console: Console) -> None:
    if len(summary.rows) <= ALL_SHAPES:
        print_table(shape_table(summary.rows, "Shapes"), console)
    elif any(row.timing() for row in summary.rows):
        timed = sorted((r for r in summary.rows if r.timing()), key=_offline)
        print_table(shape_table(timed[:EXTREMES], "Worst shapes"), console)
        print_table(shape_table(timed[-EXTREMES:], "Best shapes"), console)
    if summary.modes:
        print_table(mode_table(summary), console)
    for line in lines(summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _offline(row: SweepRow) -> float:
    timing = row.timing()
    return timing.ratio if timing else 0.0


def shape_table(rows: Sequence[SweepRow], title: str) -> Table:
    from rich.table import Table

    table = Table(title=f"{title}: time of auto-tuned cuBLASLt / time of the kernel", title_justify="left")
    table.add_column("shape")
    for mode in MODES:
        table.add_column(mode, justify="right")
    table.add_column("kernel")
    for row in rows:
        cells = [f"{timing.ratio:.3f}" if (timing := row.timing(mode)) else "-" for mode in MODES]
        table.add_row(row.shape, *cells, row.label or f"{row.status}: {row.detail}")
    return table


def mode_table(summary: SweepSummary) -> Table:
    from rich.table import Table

    table = Table(title=f"{summary.config} on {summary.device}", title_justify="left")
    for name in ("mode", "shapes", "mean ratio", "95 % interval", "geo-mean", "wins", "clear wins", "max(kernel, lib)"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for found in summary.modes:
        table.add_row(
            found.mode,
            str(found.shapes),
            f"{found.mean.value:.3f}",
            f"{found.mean.lo:.3f} … {found.mean.hi:.3f}",
            f"{found.geo_mean.value:.3f}",
            str(found.wins),
            str(found.clear_wins),
            f"{found.with_fallback.value:.3f}",
        )
    return table


_WORDS = {
    "won": "with a kernel that passed the whole gate",
    "no_kernel": "without one",
    "not_recorded": "not recorded",
    "too_large": "too large for the device",
}


def lines(summary: SweepSummary) -> Iterator[str]:
    states = [f"{summary.states[name]} {words}" for name, words in _WORDS.items() if summary.states.get(name)]
    yield f"{summary.shapes} shapes: {', '.join(states) or 'none done'}"
    rejected = ", ".join(f"{count} {reason}" for reason, count in summary.rejected.items())
    text = f"{summary.evaluations} evaluations, {sum(summary.rejected.values())} rejected"
    text += f" ({rejected})" if rejected else ""
    if summary.not_recorded_evaluations:
        text += f", {summary.not_recorded_evaluations} not recorded"
    yield text
    if summary.tokens:
        yield f"{summary.tokens} tokens, ${summary.cost_usd:.2f}"
    for label, why in list(summary.unfinished.items())[:EXTREMES]:
        yield f"unfinished: {label}: {why}"
    yield f"database: {summary.db}"
