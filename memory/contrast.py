"""Earlier variants as a prompt shows them: scores, differences, profiles and failures, within a budget of tokens. Pure.

selection (memory/exemplars_read.py) → blocks by priority → text (memory/contrast_budget.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_uppercase

from memory.contrast_budget import PREFACE, Block, barred, fit, one_line, source_lines
from memory.contrast_diff import difference
from memory.contrast_metrics import compare_profiles, metric_table
from memory.exemplars_read import Selection, Tried
from tools.compile_errors import relevant_lines
from tools.records import CompileResult, Task, TimingResult, TimingRow, VerifyResult

MAX_LOG_BYTES = 1200

# What is left out first when there is too little room: the highest number.
_SCORES, _VERDICT, _KNOBS, _SENTENCES, _FAILURES, _METRICS, _SOURCE = range(7)


def memory_text(selection: Selection, task: Task, budget_tokens: int) -> str:
    """Everything the policy is told of earlier variants. Never more than ``budget_tokens`` by our estimate; empty if
    there is nothing to tell."""
    blocks = list(_blocks(selection, task))
    return fit(blocks, budget_tokens) if blocks else ""


def _blocks(selection: Selection, task: Task) -> Iterator[Block]:
    shown = selection.exemplars
    if not shown and not selection.failures:
        return
    names = [_name(i) for i in range(len(shown))]
    yield Block("preface", (PREFACE,), _SCORES)
    yield Block("counts", (_counts(selection, task),), _SCORES)
    if shown:
        where = "" if shown[0].task == task else f" at {shown[0].task.label}, not at this shape"
        yield Block("scores", tuple(score_table(shown, names)), _SCORES, title=f"## Measured variants{where}")
    for i in range(1, len(shown)):
        yield from contrast(shown[0], shown[i], (names[0], names[i]), i)
    if shown and shown[0].profile is not None:
        limits = tuple(f"- {sentence}" for sentence in shown[0].profile.sentences)
        yield Block("limits", limits, _SENTENCES, title=f"What limits {names[0]}, by its profile:")
    if shown:
        lines = tuple(source_lines(shown[0].variant.source.rstrip()))
        yield Block("source", lines, _SOURCE, "cuda", f"Source of {names[0]}:", cuttable=True)
    if selection.own:
        lines = tuple(f"- {_in_a_line(one)}" for one in selection.own)
        yield Block("own variants", lines, _SCORES, title="## At this shape so far", cuttable=True)
    for index, one in enumerate(selection.failures):
        title = "## Rejected: do not repeat these" if index == 0 else ""
        yield Block("rejected variants", tuple(failure_lines(one)), _FAILURES, title=title, cuttable=True)


def contrast(better: Tried, worse: Tried, names: tuple[str, str], rank: int = 1) -> Iterator[Block]:
    """Blocks that set two variants apart; the first pair's before any further one's."""
    later = 10 * (rank - 1)
    title = f"## {names[0]} against {names[1]}"
    yield Block("verdict", (verdict(better, worse, names),), _VERDICT + later, title=title)
    yield difference(worse.variant, better.variant, (names[1], names[0]), _KNOBS + later)
    if better.profile is not None and worse.profile is not None:
        sentence = compare_profiles(better.profile, worse.profile, names)
        yield Block("comparison", (sentence,), _SENTENCES + later)
    elif better.profile is not None or worse.profile is not None:
        known = names[0] if better.profile is not None else names[1]
        yield Block("comparison", (f"Only {known} was profiled.",), _SENTENCES + later)
    table = metric_table(better.profile, worse.profile, names)
    if table:
        yield Block("profile table", tuple(table), _METRICS + later)


def verdict(better: Tried, worse: Tried, names: tuple[str, str]) -> str:
    """Which is faster by how much, and whether the measurement can tell."""
    a, b = _row(better.timing()), _row(worse.timing())
    if a is None or b is None:
        return f"{names[0]} and {names[1]} have no comparable times."
    gain = 100 * (a.ratio / b.ratio - 1)
    text = f"{names[0]} is {abs(gain):.1f} % {'faster' if gain >= 0 else 'slower'} than {names[1]}"
    text += f" ({a.time_us:.3f} against {b.time_us:.3f} us)."
    if a.ratio_lo <= b.ratio_hi and b.ratio_lo <= a.ratio_hi:
        text += " Their 95 % intervals overlap, so the order may be noise."
    return text


def score_table(shown: tuple[Tried, ...], names: list[str]) -> list[str]:
    """A column a variant; rows that no variant has a value for are left out."""
    rows = {
        "variant": [one_line(one.variant.label) for one in shown],
        "key": [one.key for one in shown],
        "measured on": [one_line(one.origin) for one in shown],
        "ratio, offline": [_ratio(one.timing()) for one in shown],
        "time": [f"{row.time_us:.3f} us" if (row := _row(one.timing())) else "" for one in shown],
        "reference": [f"{row.ref_us:.3f} us {row.reference}" if (row := _row(one.timing())) else "" for one in shown],
        **{
            f"ratio, {mode}, final": [_ratio(one.timing(mode, ("certify", "final"))) for one in shown]
            for mode in ("offline", "rotating", "server")
        },
        "registers, spilled bytes": [_registers(one.compiled) for one in shown],
        "tensor-core instructions": [_mma(one.compiled) for one in shown],
        "verify": [_verify(one.verified) for one in shown],
        "sanitize": ["passed" if one.sanitized is not None and one.sanitized.ok else "" for one in shown],
    }
    kept = {name: cells for name, cells in rows.items() if any(cells)}
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    return lines + [
        f"| {name} | {' | '.join(c.replace('|', '/') or '-' for c in cells)} |" for name, cells in kept.items()
    ]


def failure_lines(one: Tried) -> list[str]:
    """A rejected variant: what it was, which verdict, its sentence, and of a compiler's log what matters."""
    failure = one.failure
    if failure is None or failure.reason is None:
        return []
    lines = [f"- {one_line(one.variant.label)} (key {one.key}): {failure.reason.value}"]
    lines += [f"  > {one_line(failure.detail)}"]
    if isinstance(failure, CompileResult) and failure.log:
        lines += [f"  {line}" for line in barred(relevant_lines(failure.log, MAX_LOG_BYTES))]
    return lines


def _counts(selection: Selection, task: Task) -> str:
    return f"At {task.label}: {selection.scored} variants measured, {selection.rejected} rejected so far."


def _in_a_line(one: Tried) -> str:
    return f"{one_line(one.variant.label)} (key {one.key}): ratio {_ratio(one.timing())}"


def _row(timing: TimingResult | None) -> TimingRow | None:
    return timing.row() if timing is not None else None


def _ratio(timing: TimingResult | None) -> str:
    row = _row(timing)
    return f"{row.ratio:.3f} [{row.ratio_lo:.3f}, {row.ratio_hi:.3f}]" if row is not None else ""


def _registers(compiled: CompileResult | None) -> str:
    return f"{compiled.registers}, {compiled.spill_bytes or 0}" if compiled is not None and compiled.ok else ""


def _mma(compiled: CompileResult | None) -> str:
    return ", ".join(f"{n} {name}" for name, n in compiled.mma.items()) if compiled is not None else ""


def _verify(verified: VerifyResult | None) -> str:
    if verified is None or not verified.ok:
        return ""
    error = f", largest error {verified.max_abs_error:.3g}" if verified.max_abs_error is not None else ""
    return f"{verified.depth} passed{error}"


def _name(index: int) -> str:
    return ascii_uppercase[index] if index < len(ascii_uppercase) else f"V{index + 1}"
