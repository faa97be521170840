"""The one seam between the loop and whatever answers it: a GPU worker, recorded measurements, or a test's script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tools.records import (
    BaselineResult,
    Budget,
    ClockTrace,
    CompileResult,
    Depth,
    DeviceInfo,
    Mode,
    ProfileResult,
    SanitizeResult,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)


class DeviceBroken(RuntimeError):
    """The machinery, not the candidate, failed: no driver, a truncated record file, an unstartable worker."""


class Device(Protocol):
    """Every method returns a value for every candidate, however bad. DeviceBroken means that no answer can be had.

    A device does not keep the gate's order; ``tools.gate.Toolbox`` does, for all devices alike.
    """

    @property
    def info(self) -> DeviceInfo: ...

    def compile(self, variant: Variant) -> CompileResult: ...

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult: ...

    def sanitize(self, variant: Variant, tasks: Sequence[Task]) -> SanitizeResult: ...

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult: ...

    def profile(self, variant: Variant, task: Task) -> ProfileResult: ...

    def baselines(self, task: Task, mode: Mode, budget: Budget) -> BaselineResult: ...

    def close(self) -> None: ...


@runtime_checkable
class CertifyTimer(Protocol):
    """A device whose certify budget takes its seconds from the caller, and tells how the clocks went meanwhile."""

    def time_certify(
        self, variant: Variant, task: Task, mode: Mode, *, warm_s: float, aim_s: float
    ) -> tuple[TimingResult, ClockTrace | None]:
        """``time`` at budget certify: ``warm_s`` seconds of warm-up, then as long as gives the candidate and each
        reference ``aim_s`` seconds together: all of them run in turn."""
        ...
