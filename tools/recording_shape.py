"""What is done at one shape: baselines, every plan as far as a screen timing, the best few as far as final timings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.gate import MemoryResults, Toolbox
from tools.recording_device import TOGETHER, RecordingDevice
from tools.recording_scope import Deadline, Job, Scope
from tools.records import HEADLINE_REFERENCE, Evaluation, Family, Mode, Status, Task, Variant
from tools.shapes import regime

#: Starting ncu costs as much as some ten profiles; a deadline loses what waits for the batch to fill.
PROFILE_BATCH = 16
#: A candidate that fails verify full or sanitize gives its place to the next, up to this many times ``top``.
FINALISTS_PER_PLACE = 2


@dataclass(frozen=True)
class Recorded:
    """``best``: the best finalist, which is worth a profile. ``complete``: this host lacked no tool for it."""

    best: Variant | None
    complete: bool
    measured: int  # tool calls that went to the device; the rest was in the file
    seconds: float
    line: str


def record_shape(
    through: RecordingDevice, families: Mapping[str, Family], job: Job, scope: Scope, deadline: Deadline
) -> Recorded:
    """Raises OutOfTimeError at the deadline, which is looked at between tool calls, and DeviceBroken."""
    before, lacking, started = through.measured, through.unavailable, time.monotonic()
    best, said = _Shape(through, families, job.task, scope, deadline).record(job.variants)
    seconds, measured = time.monotonic() - started, through.measured - before
    line = f"{job.task.label} {regime(job.task)}: {said} ({measured} measured in {seconds:.1f} s"
    return Recorded(best, through.unavailable == lacking, measured, seconds, line)


class _Shape:
    def __init__(
        self,
        through: RecordingDevice,
        families: Mapping[str, Family],
        task: Task,
        scope: Scope,
        deadline: Deadline,
    ) -> None:
        self._through = through
        self._toolbox = Toolbox(through, MemoryResults(), families)
        self._task, self._scope, self._deadline = task, scope, deadline

    def record(self, variants: Sequence[Variant]) -> tuple[Variant | None, str]:
        self._deadline.check()
        self._toolbox.baselines(self._task, "offline", "screen")
        evaluated: list[tuple[Variant, Evaluation]] = []
        for start in range(0, len(variants), TOGETHER):
            evaluated += self._screened(variants[start : start + TOGETHER])
        timed = [(variant, evaluation) for variant, evaluation in evaluated if evaluation.ok]
        timed.sort(key=lambda pair: (-(pair[1].ratio or 0.0), (pair[1].timing and pair[1].timing.time_us) or 0.0))
        finalists, extra = self._finalists([variant for variant, _ in timed])
        for mode in self._scope.modes:
            self._final(self._in_server(finalists, extra) if mode == "server" else [*finalists, *extra], mode)
        finalists += extra
        line = f"{len(evaluated)} plans, {len(timed)} timed, {len(finalists)} finalists"
        if not timed:
            return None, line
        if not finalists:
            return timed[0][0], f"{line}, best screened {timed[0][1].ratio or 0:.3f}x {timed[0][0].label}"
        ratios = {variant.key: self._ratio(variant) for variant in finalists}
        winner = max(finalists, key=lambda variant: ratios[variant.key])
        return winner, f"{line}, best {ratios[winner.key]:.3f}x {winner.label}"

    def _screened(self, variants: Sequence[Variant]) -> list[tuple[Variant, Evaluation]]:
        self._deadline.check()
        compiled = [variant for variant in variants if self._toolbox.compile(variant).ok]
        self._through.verify_many(compiled, self._task, "quick")
        verified = []
        for variant in compiled:
            self._deadline.check()
            if self._toolbox.verify(variant, self._task, "quick").ok:
                verified.append(variant)
        self._through.time_many(verified, self._task, "offline", "screen")
        evaluated = []
        for variant in variants:
            self._deadline.check()
            evaluated.append((variant, self._toolbox.evaluate(variant, self._task)))
        return evaluated

    def _finalists(self, ranked: Sequence[Variant]) -> tuple[list[Variant], list[Variant]]:
        """The best screened, and the best of a layout of B that none of these has: winners are kept per layout, each
        against the baseline of its own layout."""
        top = self._scope.top
        self._deadline.check()
        self._through.verify_many(ranked[:top], self._task, "full")
        places: list[Variant] = []
        for variant in ranked[: top * FINALISTS_PER_PLACE]:
            if len(places) < top and self._passes(variant):
                places.append(variant)
        extra: list[Variant] = []
        for layout in dict.fromkeys(variant.b_layout for variant in ranked):
            if layout not in {variant.b_layout for variant in places}:
                of_layout = [variant for variant in ranked if variant.b_layout == layout][:FINALISTS_PER_PLACE]
                found = next((variant for variant in of_layout if self._passes(variant)), None)
                extra += [found] if found is not None else []
        return places, extra

    def _in_server(self, finalists: Sequence[Variant], extra: Sequence[Variant]) -> list[Variant]:
        """The best by their final offline timings, if those come first, and the best of each layout: whatever is
        reported as the shape's kernel is among them."""
        ranked = sorted(finalists, key=self._ratio, reverse=True) if "offline" in self._scope.modes else finalists
        chosen = list(ranked[: self._scope.server_top])
        for variant in (*ranked, *extra):
            if variant.b_layout not in {one.b_layout for one in chosen}:
                chosen.append(variant)
        return chosen

    def _passes(self, variant: Variant) -> bool:
        """Verify full and sanitize. No sanitizer here is no failure."""
        self._deadline.check()
        if not self._toolbox.verify(variant, self._task, "full").ok:
            return False
        self._deadline.check()
        return not self._scope.sanitize or self._toolbox.sanitize(variant, self._task).status is not Status.FAILED

    def _final(self, finalists: Sequence[Variant], mode: Mode) -> None:
        self._deadline.check()
        self._through.time_many(finalists, self._task, mode, "final")
        for variant in finalists:
            self._deadline.check()
            self._toolbox.time(variant, self._task, mode, "final")
        self._deadline.check()
        self._toolbox.baselines(self._task, mode, "final")

    def _ratio(self, variant: Variant) -> float:
        row = self._toolbox.time(variant, self._task, "offline", "final").row(HEADLINE_REFERENCE)
        return 0.0 if row is None else row.ratio


class Profiles:
    """Profiles to be taken, gathered over shapes because starting ncu costs more than a profile."""

    def __init__(self, through: RecordingDevice, families: Mapping[str, Family], deadline: Deadline) -> None:
        self._through = through
        self._toolbox = Toolbox(through, MemoryResults(), families)
        self._deadline = deadline
        self._waiting: list[tuple[Variant, Task]] = []

    def add(self, variant: Variant, task: Task) -> None:
        self._waiting.append((variant, task))
        if len(self._waiting) >= PROFILE_BATCH:
            self.flush()

    def flush(self, late: bool = False) -> None:
        """``late``: although the deadline has passed, as the last call of shapes that are complete but for it."""
        if self._waiting and not late:
            self._deadline.check()
        waiting, self._waiting = self._waiting, []
        self._through.profile_many(waiting)
        for variant, task in waiting:
            self._toolbox.compile(variant)
            self._toolbox.verify(variant, task, "quick")
            self._toolbox.profile(variant, task)
