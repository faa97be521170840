"""A summary as text for people. Pure but for the console it is given; says "not recorded" where that is so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agent.summary import Entry, ModeResult, StageResult, Summary
from agent.tables import print_table
from tools.records import HEADLINE_REFERENCE, Status, TimingRow

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LAYOUT = {"kn": "NN (B row-major)", "nk": "TN (B transposed)"}


def print_summary(summary: Summary, console: Console) -> None:
    for line in heading(summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    chosen = summary.best or summary.provisional
    if chosen is not None:
        print_table(mode_table(chosen, [m.mode for m in summary.references] or [m.mode for m in chosen.modes]), console)
        for line in gate_lines(chosen):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if any(reference.times for reference in summary.references):
        print_table(reference_table(summary), console)
    for line in count_lines(summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def heading(summary: Summary) -> Iterator[str]:
    yield f"session   {summary.session_id}"
    yield f"task      {summary.task.op} {summary.task.label}, {summary.task.accumulate} accumulation"
    yield f"device    {summary.device.label}"
    if summary.device.protocol_remark:
        yield f"          {summary.device.protocol_remark}"
    if not summary.finished:
        yield f"unfinished: go on with `agent resume {summary.session_id}`"
    if summary.best is not None:
        yield f"best      {summary.best.label}"
        yield f"source    {summary.source_path}"
        ratio = summary.best.final_ratio
        if ratio is not None:
            yield f"speedup   {percent(ratio)} over auto-tuned cuBLASLt, offline ({ratio:.3f}x)"
    elif summary.finished:
        yield "best      no variant passed the whole gate"
        if summary.provisional is not None:
            yield f"          best of the screen, not a result: {summary.provisional.label}"
            yield f"          {summary.provisional.why}"


def mode_table(entry: Entry, modes: list[str]) -> Table:
    from rich.table import Table

    table = Table(title="Final timing against auto-tuned cuBLASLt (better of NN and TN)", title_justify="left")
    for name in ("mode", "ratio", "95 % interval", "kernel us", "cuBLASLt us", "same layout", "remark"):
        table.add_column(name, justify="left" if name in ("mode", "remark") else "right")
    for mode in modes:
        found = next((m for m in entry.modes if m.mode == mode), None)
        row = found.row() if found else None
        if found is None or row is None:
            table.add_row(mode, status_word(found), "", "", "", "", found.detail if found else "")
            continue
        same = found.row(HEADLINE_REFERENCE.removesuffix("_max"))
        table.add_row(
            mode,
            f"{row.ratio:.3f}",
            interval(row),
            f"{row.time_us:.3f}",
            f"{row.ref_us:.3f}",
            f"{same.ratio:.3f}" if same else "",
            remark(found),
        )
    return table


def status_word(found: ModeResult | StageResult | None) -> str:
    if found is None:
        return "not run"
    words = {Status.NOT_RECORDED: "not recorded", Status.FAILED: "rejected", Status.UNAVAILABLE: "unavailable"}
    return words.get(found.status, found.status.value)


def interval(row: TimingRow) -> str:
    return f"{row.ratio_lo:.3f} … {row.ratio_hi:.3f}"


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def remark(found: ModeResult) -> str:
    words = []
    if found.empty_kernel_us is not None:
        words.append(f"empty kernel {found.empty_kernel_us:.2f} us, included")
    if found.throttled:
        words.append("throttled")
    if found.noisy:
        words.append("noisy")
    return ", ".join(words)


def gate_lines(entry: Entry) -> Iterator[str]:
    yield f"layout    {_LAYOUT[entry.b_layout]}"
    for name, stage in (("verified", entry.verify), ("sanitized", entry.sanitize)):
        detail = f": {stage.detail}" if stage and stage.detail else ""
        yield f"{name:<9} {status_word(stage)}{detail}"
    if entry.profile is not None:
        sentences = entry.profile.sentences or (entry.profile.detail or status_word(entry.profile),)
        for index, sentence in enumerate(sentences):
            yield f"{'profile' if index == 0 else '':<9} {sentence}"


def reference_table(summary: Summary) -> Table:
    from rich.table import Table

    names = list(dict.fromkeys(t.reference for r in summary.references for t in r.times))
    table = Table(title="Reference times from a run of their own, us (NN / TN)", title_justify="left")
    table.add_column("reference")
    for reference in summary.references:
        table.add_column(reference.mode, justify="right")
    for name in names:
        cells = []
        for reference in summary.references:
            by_layout = {t.b_layout: t.time_us for t in reference.times if t.reference == name}
            both = [f"{by_layout[x]:.3f}" if x in by_layout else "-" for x in ("kn", "nk")]
            cells.append(" / ".join(both) if by_layout else "not recorded")
        table.add_row(name, *cells)
    return table


def count_lines(summary: Summary) -> Iterator[str]:
    total = sum(summary.rejected.values())
    text = f"{summary.evaluations} evaluations by {summary.policy} (seed {summary.seed}): {summary.passed} passed"
    text += f", {total} rejected" + (f" ({reasons(summary)})" if total else "")
    if summary.not_recorded:
        text += f", {summary.not_recorded} not recorded"
    yield text
    others = [e for e in summary.leaderboard if e.admitted and e != summary.best]
    for other in others[:4]:
        yield f"  next: {other.final_ratio or 0:.3f}x {other.label}"
    for out in [e for e in summary.leaderboard if not e.admitted and e.why][:3]:
        yield f"  out:  {out.screen_ratio:.3f}x {out.label}: {out.why}"
    if summary.unrecorded_finalists:
        yield f"  {summary.unrecorded_finalists} more passed the screen, but their full gate was not recorded"
    if summary.input_tokens or summary.output_tokens:
        cost = f"${summary.cost_usd:.2f}" if summary.cost_known else "cost unknown (no price for this model)"
        yield f"{summary.input_tokens} input and {summary.output_tokens} output tokens, {cost}"
    if summary.stopped_by == "floor":
        yield "the search ended early: a candidate was near the analytical floor"
    elif summary.stopped_by:
        yield f"the search ended early: the budget {summary.stopped_by} was spent"


def print_leaderboard(summary: Summary, console: Console) -> None:
    from rich.table import Table

    if not summary.leaderboard:
        return
    table = Table(title="Leaderboard (offline, final budget)", title_justify="left")
    for name in ("", "ratio", "screen", "key", "variant", "gate"):
        table.add_column(name, justify="right" if name in ("", "ratio", "screen") else "left")
    for rank, found in enumerate(summary.leaderboard, start=1):
        final = f"{found.final_ratio:.3f}" if found.final_ratio is not None else "-"
        gate = "passed" if found.admitted else found.why
        table.add_row(str(rank), final, f"{found.screen_ratio:.3f}", found.key, found.label, gate)
    print_table(table, console)


def print_curve(summary: Summary, console: Console) -> None:
    """Every rise of the best screen ratio."""
    for count, ratio in summary.best_curve:
        console.print(f"after {count:>4} variants: {ratio:.3f}x", markup=False, highlight=False)


def reasons(summary: Summary) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in summary.rejected.items())
