"""A device that answers from a record file where it can, and otherwise measures and adds to the file."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tools.device import Device
from tools.record_writer import RecordWriter
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


class RecordingDevice:
    """A ``tools.device.Device``; ``measured`` and ``unavailable`` count what was asked of the real one."""

    def __init__(self, device: Device, writer: RecordWriter) -> None:
        self._device = device
        self._writer = writer
        self._committed = time.monotonic()
        self._clocks: tuple[int, int] | None = None
        self._profiled: dict[tuple[str, str], ProfileResult] = {}  # also what the file does not keep (UNAVAILABLE)
        self.measured = 0
        self.unavailable = 0  # answers that this host could not give; profiles are looked after by RecordWriter.is_done

    @property
    def info(self) -> DeviceInfo:
        return self._device.info

    def compile(self, variant: Variant) -> CompileResult:
        known = self._writer.compiled(variant.key)
        return known or self._keep_compile(variant, self._device.compile(variant))

    def compile_many(self, variants: Sequence[Variant], jobs: int) -> bool:
        """False if the device cannot. Warms the device's own cache too, so recorded compiles are asked for again."""
        if not isinstance(self._device, CompilesMany):
            return False
        for variant, result in zip(variants, self._device.compile_many(variants, jobs), strict=True):
            self._keep_compile(variant, result)
        return True

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult:
        known = self._writer.verified(variant.key, task.task_id, depth)
        if known is None:
            known = self._device.verify(variant, task, depth)
            self._writer.put_verify(variant, task, known)
            self._count(known)
        return known

    def sanitize(self, variant: Variant, tasks: Sequence[Task]) -> SanitizeResult:
        known = self._sanitized(variant, tasks)
        if known is None:
            known = self._device.sanitize(variant, tasks)
            self._writer.put_sanitize(variant, known)
            self._count(known)
        return known

    def _sanitized(self, variant: Variant, tasks: Sequence[Task]) -> SanitizeResult | None:
        known = self._writer.sanitized(variant.key)
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
        known = self._writer.timed(variant.key, task.task_id, mode, budget)
        if known is None:
            known = self._device.time(variant, task, mode, budget)
            self._writer.put_timing(variant, task, known)
            self._note_clocks(known.clocks)
            self._count(known)
        return known

    def profile(self, variant: Variant, task: Task) -> ProfileResult:
        known = self._profiled.get((variant.key, task.task_id)) or self._writer.profiled(variant.key, task.task_id)
        return known or self._keep_profile(variant, task, self._device.profile(variant, task))

    def profile_many(self, pairs: Sequence[tuple[Variant, Task]]) -> None:
        todo = [pair for pair in pairs if self._writer.profiled(pair[0].key, pair[1].task_id) is None]
        if todo and isinstance(self._device, ProfilesMany):
            for (variant, task), result in zip(todo, self._device.profile_many(todo), strict=True):
                self._keep_profile(variant, task, result)

    def baselines(self, task: Task, mode: Mode, budget: Budget) -> BaselineResult:
        known = self._writer.baselines(task.task_id, mode, budget)
        if known is None:
            known = self._device.baselines(task, mode, budget)
            self._writer.put_baselines(task, known)
            self._writer.put_meta({"library": known.library})
            self._count(known)
        return known

    def close(self) -> None:
        """The device belongs to the caller."""

    def _keep_compile(self, variant: Variant, result: CompileResult) -> CompileResult:
        self._writer.put_compile(variant, result)
        self._writer.put_meta({"compiler": result.compiler or ""})
        self._count(result)
        return result

    def _keep_profile(self, variant: Variant, task: Task, result: ProfileResult) -> ProfileResult:
        self._writer.put_profile(variant, task, result)
        self._profiled[variant.key, task.task_id] = result
        self._count(None)
        return result

    def _note_clocks(self, clocks: Clocks | None) -> None:
        if clocks is not None:
            low, high = self._clocks or (clocks.sm_mhz_median, clocks.sm_mhz_median)
            self._clocks = (min(low, clocks.sm_mhz_median), max(high, clocks.sm_mhz_median))
            self._writer.put_meta({"clocks": json.dumps({"sm_mhz_median_range": self._clocks})})

    def _count(self, result: Outcome | None) -> None:
        self.measured += 1
        self.unavailable += result is not None and result.status is Status.UNAVAILABLE
        if time.monotonic() - self._committed > COMMIT_EVERY_S:
            self._writer.commit()
            self._committed = time.monotonic()
