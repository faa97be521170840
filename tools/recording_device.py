"""A device that answers from record files where it can, and otherwise measures and adds to one of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from tools.device import Device
from tools.record_file import Records
from tools.record_writer import RecordWriter, merged_sanitize
from tools.records import (
    BaselineResult,
    Budget,
    Clocks,
    CompileResult,
    Depth,
    DeviceInfo,
    Mode,
    Outcome,
    ProfileResult,
    SanitizeResult,
    Status,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)
from tools.replay import covers

COMMIT_EVERY_S = 5.0
#: Candidates that are verified or timed together: each holds outputs of its own for all operands.
TOGETHER = 8

R = TypeVar("R", bound=Outcome)


@runtime_checkable
class CompilesMany(Protocol):
    """A device that compiles several variants at once, on ``jobs`` processes; results in the order asked."""

    def compile_many(self, variants: Sequence[Variant], jobs: int) -> list[CompileResult]: ...


@runtime_checkable
class ProfilesMany(Protocol):
    """A device that profiles several candidates under one ncu process; results in the order asked."""

    def profile_many(self, pairs: Sequence[tuple[Variant, Task]]) -> list[ProfileResult]: ...


@runtime_checkable
class SanitizesMany(Protocol):
    """A device that sanitizes several candidates in one process; results in the order asked."""

    def sanitize_many(self, items: Sequence[tuple[Variant, Sequence[Task]]]) -> list[SanitizeResult]: ...


@runtime_checkable
class VerifiesMany(Protocol):
    """A device that verifies candidates of one layout of B on the same operands, in the order asked; or answers None,
    and then they are to be asked for one by one."""

    def verify_many(self, variants: Sequence[Variant], task: Task, depth: Depth) -> list[VerifyResult] | None: ...


@runtime_checkable
class TimesMany(Protocol):
    """A device that times candidates in one run with the references, in the order asked, and where all references took
    part says what these took; or answers None, and then they are to be asked for one by one."""

    def time_many(
        self, variants: Sequence[Variant], task: Task, mode: Mode, budget: Budget
    ) -> tuple[list[TimingResult], BaselineResult | None] | None: ...


class RecordingDevice:
    """A ``tools.device.Device``; ``measured`` and ``unavailable`` count what was asked of the real one.

    ``base`` answers too; what is measured goes to ``writer``, and is committed every ``commit_every_s`` seconds. Not
    ``together``: candidates are verified and timed one by one, whatever the device can.
    """

    def __init__(
        self,
        device: Device,
        writer: RecordWriter,
        base: Records | None = None,
        commit_every_s: float | None = None,
        together: bool = True,
    ) -> None:
        self._device = device
        self._together = together
        self._writer = writer
        self._base = base
        self._commit_every_s = COMMIT_EVERY_S if commit_every_s is None else commit_every_s
        self._committed = time.monotonic()
        self._clocks: tuple[int, int] | None = None
        self._profiled: dict[tuple[str, str], ProfileResult] = {}  # also what the file does not keep (UNAVAILABLE)
        self.measured = 0
        self.unavailable = 0  # answers that this host could not give; profiles are looked after by RecordWriter.is_done

    @property
    def info(self) -> DeviceInfo:
        return self._device.info

    def compile(self, variant: Variant) -> CompileResult:
        known = self._known(lambda records: records.compiled(variant.key))
        return known or self._keep_compile(variant, self._device.compile(variant))

    def compile_many(self, variants: Sequence[Variant], jobs: int) -> bool:
        """False if the device cannot. Warms the device's own cache too, so recorded compiles are asked for again."""
        if not isinstance(self._device, CompilesMany):
            return False
        for variant, result in zip(variants, self._device.compile_many(variants, jobs), strict=True):
            self._keep_compile(variant, result)
        return True

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult:
        known = self._verified(variant, task, depth)
        return known or self._keep_verify(variant, task, self._device.verify(variant, task, depth))

    def verify_many(self, variants: Sequence[Variant], task: Task, depth: Depth) -> None:
        """Measures ahead what the file does not hold, where the device can do several at once. All must compile."""
        if not self._together or not isinstance(self._device, VerifiesMany):
            return
        todo = [variant for variant in variants if self._verified(variant, task, depth) is None]
        for layout in dict.fromkeys(variant.b_layout for variant in todo):
            of_layout = [variant for variant in todo if variant.b_layout == layout]
            for start in range(0, len(of_layout), TOGETHER):
                group = of_layout[start : start + TOGETHER]
                found = self._device.verify_many(group, task, depth) if len(group) > 1 else None
                for variant, result in zip(group, found or [], strict=found is not None):
                    self._keep_verify(variant, task, result)

    def sanitize(self, variant: Variant, tasks: Sequence[Task]) -> SanitizeResult:
        known = self._sanitized(variant, tasks)
        if known is None:
            known = self._device.sanitize(variant, tasks)
            self._writer.put_sanitize(variant, known)
            self._count(known)
        return known

    def _sanitized(self, variant: Variant, tasks: Sequence[Task]) -> SanitizeResult | None:
        known = self._writer.sanitized(variant.key)
        if self._base is not None and (before := self._base.sanitized(variant.key)) is not None:
            known = before if known is None else merged_sanitize(before, known)
        return known if known is not None and (known.status is Status.FAILED or covers(known, tasks)) else None

    @property
    def sanitizes_many(self) -> bool:
        return isinstance(self._device, SanitizesMany)

    def sanitize_many(self, items: Sequence[tuple[Variant, Sequence[Task]]]) -> None:
        """Plans whose result is known are left out."""
        todo = [(variant, tasks) for variant, tasks in items if self._sanitized(variant, tasks) is None]
        if todo and isinstance(self._device, SanitizesMany):
            for (variant, _), result in zip(todo, self._device.sanitize_many(todo), strict=True):
                self._writer.put_sanitize(variant, result)
                self._count(result)

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
        known = self._timed(variant, task, mode, budget)
        return known or self._keep_timing(variant, task, self._device.time(variant, task, mode, budget))

    def time_many(self, variants: Sequence[Variant], task: Task, mode: Mode, budget: Budget) -> None:
        """Measures ahead what the file does not hold, where the device can do several at once; with them the baselines,
        where all references take part. All must have passed what ``time`` asks for."""
        if not self._together or not isinstance(self._device, TimesMany):
            return
        todo = [variant for variant in variants if self._timed(variant, task, mode, budget) is None]
        for start in range(0, len(todo), TOGETHER):
            group = todo[start : start + TOGETHER]
            lacks_baselines = budget != "screen" and self._baselines(task, mode, budget) is None
            found = self._device.time_many(group, task, mode, budget) if len(group) > 1 or lacks_baselines else None
            if found is None:
                continue
            results, baselines = found
            for variant, result in zip(group, results, strict=True):
                self._keep_timing(variant, task, result)
            if lacks_baselines and baselines is not None:
                self._keep_baselines(task, baselines)

    def profile(self, variant: Variant, task: Task) -> ProfileResult:
        known = self._profiled.get((variant.key, task.task_id)) or self._recorded_profile(variant, task)
        return known or self._keep_profile(variant, task, self._device.profile(variant, task))

    def profile_many(self, pairs: Sequence[tuple[Variant, Task]]) -> None:
        todo = [pair for pair in pairs if self._recorded_profile(*pair) is None]
        if todo and isinstance(self._device, ProfilesMany):
            for (variant, task), result in zip(todo, self._device.profile_many(todo), strict=True):
                self._keep_profile(variant, task, result)

    def baselines(self, task: Task, mode: Mode, budget: Budget) -> BaselineResult:
        known = self._baselines(task, mode, budget)
        return known or self._keep_baselines(task, self._device.baselines(task, mode, budget))

    def close(self) -> None:
        """The device belongs to the caller."""

    def _keep_compile(self, variant: Variant, result: CompileResult) -> CompileResult:
        self._writer.put_compile(variant, result)
        self._writer.put_meta({"compiler": result.compiler or ""})
        self._count(result)
        return result

    def _keep_verify(self, variant: Variant, task: Task, result: VerifyResult) -> VerifyResult:
        self._writer.put_verify(variant, task, result)
        self._count(result)
        return result

    def _keep_timing(self, variant: Variant, task: Task, result: TimingResult) -> TimingResult:
        self._writer.put_timing(variant, task, result)
        self._note_clocks(result.clocks)
        self._count(result)
        return result

    def _keep_baselines(self, task: Task, result: BaselineResult) -> BaselineResult:
        self._writer.put_baselines(task, result)
        self._writer.put_meta({"library": result.library})
        self._count(result)
        return result

    def _keep_profile(self, variant: Variant, task: Task, result: ProfileResult) -> ProfileResult:
        self._writer.put_profile(variant, task, result)
        self._profiled[variant.key, task.task_id] = result
        self._count(None)
        return result

    def _known(self, look: Callable[[Records], R | None]) -> R | None:
        """The first that is recorded."""
        found = None if self._base is None else look(self._base)
        return look(self._writer) if found is None else found

    def _verified(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult | None:
        return self._known(lambda records: records.verified(variant.key, task.task_id, depth))

    def _timed(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult | None:
        return self._known(lambda records: records.timed(variant.key, task.task_id, mode, budget))

    def _recorded_profile(self, variant: Variant, task: Task) -> ProfileResult | None:
        return self._known(lambda records: records.profiled(variant.key, task.task_id))

    def _baselines(self, task: Task, mode: Mode, budget: Budget) -> BaselineResult | None:
        return self._known(lambda records: records.baselines(task.task_id, mode, budget))

    def _note_clocks(self, clocks: Clocks | None) -> None:
        if clocks is not None:
            low, high = self._clocks or (clocks.sm_mhz_median, clocks.sm_mhz_median)
            self._clocks = (min(low, clocks.sm_mhz_median), max(high, clocks.sm_mhz_median))
            self._writer.put_meta({"clocks": json.dumps({"sm_mhz_median_range": self._clocks})})

    def _count(self, result: Outcome | None) -> None:
        self.measured += 1
        self.unavailable += result is not None and result.status is Status.UNAVAILABLE
        if time.monotonic() - self._committed >= self._commit_every_s:
            self._writer.commit()
            self._committed = time.monotonic()
