"""Do recorded winners come out again? Shapes drawn at random from a record file, timed anew, both ratios side by side.

A fresh measurement goes to a record file of its own, through the same gate but for what costs much and says nothing
here: offline only, no sanitizer, no profile.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path

from tools.admission import hindrance
from tools.device import DeviceBroken
from tools.families import plans, render
from tools.record_file import RecordReader
from tools.recording_farm import FarmSummary, Gpu, record_on
from tools.recording_scope import Echo, Scope
from tools.records import Depth, Family, Record, Status, TimingResult

#: Of a ratio, as a part of it; and the part of the shapes that should be within.
WITHIN = 0.05
SHARE = 0.9
SCOPE = Scope(top=1, server_top=0, profiles=False, modes=("offline",), sanitize=False)


class Again(Record):
    """A shape's winner as recorded and as measured again, offline at the final budget. The reference is auto-tuned
    cuBLASLt, the better of NN and TN, of the same run. ``why``: there is no second measurement, in one sentence."""

    task_id: str
    label: str
    key: str
    plan: str
    ratio: float
    time_us: float
    ref_us: float
    ratio_again: float | None = None
    time_us_again: float | None = None
    ref_us_again: float | None = None
    why: str = ""

    @property
    def off(self) -> float | None:
        """How far the second ratio is from the first, as a part of it."""
        return None if self.ratio_again is None else self.ratio_again / self.ratio - 1.0


class CheckReport(Record):
    recorded: str
    recorded_again: str
    seed: int
    within: float = WITHIN
    share_wanted: float = SHARE
    share: float | None  # of the shapes that were measured again
    median_off: float | None
    shapes: tuple[Again, ...]

    @property
    def agrees(self) -> bool:
        """Every shape drawn was measured again, and enough of them are within."""
        measured = all(shape.off is not None for shape in self.shapes)
        return measured and self.share is not None and self.share >= self.share_wanted

    def text(self) -> str:
        lines = [f"{'shape':<20} {'recorded':>9} {'again':>9} {'off':>8}   winner"]
        for shape in self.shapes:
            again = "-" if shape.ratio_again is None else f"{shape.ratio_again:.3f}"
            off = "-" if shape.off is None else f"{100 * shape.off:+.1f} %"
            mark = "" if shape.off is None or abs(shape.off) <= self.within else " *"
            said = f": {shape.why}" if shape.why else ""
            lines.append(f"{shape.label:<20} {shape.ratio:9.3f} {again:>9} {off:>8}{mark:<2} {shape.plan}{said}")
        lines.append(f"recorded: {self.recorded}; again: {self.recorded_again}")
        if self.share is None:
            return "\n".join([*lines, "none of the shapes was measured again"])
        measured = [shape.off for shape in self.shapes if shape.off is not None]
        inside = sum(abs(off) <= self.within for off in measured)
        lines.append(
            f"{inside} of {len(measured)} shapes ({100 * self.share:.0f} %) agree within {100 * self.within:.0f} %, "
            f"{100 * self.share_wanted:.0f} % should; the "
            f"median of again / recorded - 1 is {100 * (self.median_off or 0):+.2f} %"
        )
        if missing := len(self.shapes) - len(measured):
            lines.append(f"{missing} shapes were not measured again")
        return "\n".join(lines)


def check(
    recorded: Path,
    count: int,
    seed: int,
    gpus: Callable[[], Sequence[Gpu]],
    families: Mapping[str, Family],
    out: Path,
    *,
    deadline_s: float,
    processes: int,
    echo: Echo,
) -> tuple[CheckReport, FarmSummary | None]:
    """``count`` 0: the shapes that ``out`` holds, since of a file that has grown others are drawn. The summary is None
    where nothing had to be measured: ``out`` held it already. Raises DeviceBroken."""
    if out.exists() and recorded.exists() and out.samefile(recorded):
        raise DeviceBroken(f"--out {out} is the file that is checked: give another, for the fresh measurements")
    reader = RecordReader(recorded)
    try:
        winners = _winners(reader)
        if not winners:
            raise DeviceBroken(f"{recorded} has no shape with a winner timed offline at the final budget")
        drawn = random.Random(seed).sample(sorted(winners), min(count, len(winners))) if count else _held(out, winners)
        rendered = {v.key: v for family in families.values() for v in (render(family, p) for p in plans(family))}
        given = {}
        for task_id in drawn:
            variant = rendered.get(winners[task_id].variant_key)
            if variant is not None and reader.is_of(variant):
                given[task_id] = (variant,)
        summary = None
        if lacking := _lacking(out, [winners[task_id] for task_id in given]):
            dims = {task.task_id: task.dims for task in reader.tasks()}
            shapes = [(dims[task_id]["M"], dims[task_id]["N"], dims[task_id]["K"]) for task_id in lacking]
            summary = record_on(
                gpus(), families, shapes, out,
                deadline_s=deadline_s, scope=SCOPE, given=given, processes=processes, echo=echo,
            )  # fmt: skip
        again = RecordReader(out) if out.exists() else None
        try:
            return _report(reader, again, [winners[task_id] for task_id in drawn], given, seed), summary
        finally:
            if again is not None:
                again.close()
    finally:
        reader.close()


def _winners(reader: RecordReader) -> dict[str, TimingResult]:
    """By task_id: the fastest against the reference of what passed the whole gate."""
    failed = reader.failed_timings()
    found: dict[str, TimingResult] = {}
    for task_id, key, mode in reader.timed_keys("final"):
        timed = reader.timed(key, task_id, "offline", "final") if mode == "offline" else None
        if timed is None or (row := timed.row()) is None:
            continue
        depths: tuple[Depth, ...] = ("quick", "full")
        verified = [(depth, v.status) for depth in depths if (v := reader.verified(key, task_id, depth))]
        sanitized = reader.sanitized(key)
        timings = [("offline/final", timed.status), *([("", Status.FAILED)] if (task_id, key) in failed else [])]
        if hindrance(verified, [sanitized.status] if sanitized else [], timings) is not None:
            continue
        best = found[task_id].row() if task_id in found else None
        if best is None or row.ratio > best.ratio:
            found[task_id] = timed
    return found


def _held(out: Path, winners: Container[str]) -> list[str]:
    if not out.is_file() or not out.stat().st_size:
        raise DeviceBroken(f"there is nothing in {out} to compare: say how many shapes to draw with --random")
    reader = RecordReader(out)
    try:
        held = [task.task_id for task in reader.tasks() if task.task_id in winners]
    finally:
        reader.close()
    if not held:
        raise DeviceBroken(f"{out} has none of the shapes: say how many to draw with --random")
    return held


def _lacking(out: Path, winners: Sequence[TimingResult]) -> list[str]:
    """Where there is no second timing yet."""
    try:
        reader = RecordReader(out)
    except DeviceBroken:  # not begun, or a recording to be gone on with, or whatever the recording will say of it
        return [winner.task_id for winner in winners]
    try:
        return [winner.task_id for winner in winners if _again(reader, winner) is None]
    finally:
        reader.close()


def _again(out: RecordReader, winner: TimingResult) -> TimingResult | None:
    return out.timed(winner.variant_key, winner.task_id, "offline", "final")


def _report(
    reader: RecordReader,
    out: RecordReader | None,
    winners: Sequence[TimingResult],
    measurable: Container[str],
    seed: int,
) -> CheckReport:
    labels = {plan.plan_id: plan.label for plan in reader.plans()}
    shapes = []
    for winner in winners:
        first, second = winner.row(), _again(out, winner) if out is not None else None
        assert first is not None  # else it had not been chosen
        then = second.row() if second is not None else None
        shapes.append(
            Again(
                task_id=winner.task_id,
                label="x".join(str(size) for size in first.dims.values()),
                key=winner.variant_key,
                plan=labels.get(winner.variant_key, winner.variant_key),
                ratio=first.ratio,
                time_us=first.time_us,
                ref_us=first.ref_us,
                ratio_again=then.ratio if then else None,
                time_us_again=then.time_us if then else None,
                ref_us_again=then.ref_us if then else None,
                why="" if then else _why(out, winner, winner.task_id in measurable),
            )
        )
    off = [shape.off for shape in shapes if shape.off is not None]
    return CheckReport(
        recorded=_origin(reader),
        recorded_again=_origin(out) if out is not None else "nothing",
        seed=seed,
        shapes=tuple(shapes),
        share=sum(abs(part) <= WITHIN for part in off) / len(off) if off else None,
        median_off=statistics.median(off) if off else None,
    )


def _why(out: RecordReader | None, winner: TimingResult, measurable: bool) -> str:
    if not measurable:
        return "its source is not the recorded one any more"
    if out is not None:
        key, task_id = winner.variant_key, winner.task_id
        gate = (out.compiled(key), out.verified(key, task_id, "quick"), out.verified(key, task_id, "full"))
        for result in (*gate, _again(out, winner)):
            if result is not None and not result.ok:
                return f"{result.reason or result.status}: {result.detail}"
    return "not measured yet"


def _origin(reader: RecordReader) -> str:
    return f"{reader.device.name}, driver {reader.device.driver}, {(reader.meta('recorded_on') or '')[:10]}"
