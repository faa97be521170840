"""A deterministic device and two small families for tests: no GPU, no compiler, no clock."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from tools.launching import accepts
from tools.records import (
    BaselineResult,
    BaselineTime,
    Budget,
    CompileResult,
    Depth,
    DeviceInfo,
    Family,
    Knob,
    LaunchSpec,
    Mode,
    ProfileResult,
    Reason,
    SanitizeCheck,
    SanitizeResult,
    Status,
    Task,
    TierResult,
    TimingResult,
    TimingRow,
    Variant,
    VerifyResult,
    content_hash,
)

#: What a test may script: the tool's name, the variant, the task (None for compile and sanitize) → what goes wrong.
Script = Callable[[str, Variant, Task | None], Reason | Status | None]

MEASURED_AT = "2026-01-02T03:04:05+00:00"
_REFERENCE_FACTOR = {
    "torch": 1.10,
    "cublas": 1.05,
    "cublaslt_heuristic": 1.04,
    "cublaslt_auto": 1.02,
    "torch_max": 1.08,
    "cublas_max": 1.03,
    "cublaslt_heuristic_max": 1.02,
    "cublaslt_auto_max": 1.00,
}
_MODE_FACTOR = {"offline": 1.0, "rotating": 1.15, "server": 1.3}


class Call(NamedTuple):
    tool: str
    key: str
    task_id: str
    setting: str


class ScriptedDevice:
    """Times follow a smooth convex function of the knobs, so that a tuner can find the optimum; ``script`` makes any
    call fail. ``calls`` holds every call, so that a test can say that nothing was measured twice."""

    def __init__(
        self, script: Script | None = None, *, sleep_s: float = 0.0, name: str = "Scripted GPU", driver: str = "1.0"
    ) -> None:
        self._script = script
        self._sleep_s = sleep_s
        self._lock = threading.Lock()
        self.calls: list[Call] = []
        self.closed = False
        self.info = DeviceInfo(
            name=name,
            label=f"{name} (scripted)",
            kind="fake",
            sm_count=132,
            compute_capability="9.0",
            memory_bytes=141 << 30,
            l2_bytes=60 << 20,
            smem_per_block_bytes=232_448,
            driver=driver,
            cuda_runtime="13.0",
        )

    def compile(self, variant: Variant) -> CompileResult:
        wrong = self._called("compile", variant, None)
        if wrong:
            return CompileResult(**wrong, variant_id=variant.variant_id)
        return CompileResult(
            status=Status.OK,
            elapsed_s=0.5,
            variant_id=variant.variant_id,
            build_id=content_hash([variant.variant_id, "scripted"]),
            compiler="scripted 1.0",
            cubin_sha256=hashlib.sha256(variant.source.encode()).hexdigest(),
            registers=64,
            spill_bytes=0,
            smem_static_bytes=0,
            mma={"HMMA.16816.F32": 8},
            log="a log that a record file leaves out",
        )

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult:
        wrong = self._called("verify", variant, task, depth) or self._not_accepted(variant, task)
        if wrong:
            return VerifyResult(**wrong, variant_key=variant.key, task_id=task.task_id, depth=depth)
        names = ("integer", "normal") if depth == "quick" else ("binary", "integer", "normal", "interval", "special")
        checked = prod(task.dims.values())
        return VerifyResult(
            status=Status.OK,
            elapsed_s=0.003,
            variant_key=variant.key,
            task_id=task.task_id,
            depth=depth,
            tiers=tuple(TierResult(tier=n, ok=True, checked=checked, max_abs_error=0.0078125) for n in names),
            bitwise_repeatable=True,
            max_abs_error=0.0078125,
            cublas_max_abs_error=0.0078125,
            peak_memory_bytes=6 * checked,
        )

    def sanitize(self, variant: Variant, tasks: Sequence[Task]) -> SanitizeResult:
        wrong = self._called("sanitize", variant, None, *(t.task_id for t in tasks))
        if wrong:
            return SanitizeResult(**wrong, variant_key=variant.key)
        tools = ("memcheck", "racecheck", "initcheck", "synccheck")
        checks = tuple(SanitizeCheck(tool=tool, dims=t.dims, ok=True, errors=0) for t in tasks for tool in tools)
        return SanitizeResult(status=Status.OK, elapsed_s=5.0, variant_key=variant.key, checks=checks)

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
        wrong = self._called("time", variant, task, mode, budget) or self._not_accepted(variant, task)
        same = {"task_id": task.task_id, "mode": mode, "budget": budget}
        if wrong:
            return TimingResult(**wrong, **same, variant_key=variant.key)
        time_us = self.time_us(variant, task, mode)
        rows = []
        for reference, factor in _REFERENCE_FACTOR.items():
            ref_us = factor * ideal_us(task) * _MODE_FACTOR[mode]
            rows.append(
                TimingRow(
                    **same,
                    dims=task.dims,
                    b_layout=variant.b_layout,
                    reference=reference,
                    ratio=ref_us / time_us,
                    ratio_lo=0.99 * ref_us / time_us,
                    ratio_hi=1.01 * ref_us / time_us,
                    time_us=time_us,
                    ref_us=ref_us,
                    samples={"screen": 15, "final": 100, "certify": 3000}[budget],
                    key=variant.key,
                    device=self.info.name,
                    driver=self.info.driver,
                    measured_at=MEASURED_AT,
                )
            )
        return TimingResult(
            status=Status.OK,
            elapsed_s=0.01,
            **same,
            variant_key=variant.key,
            rows=tuple(rows),
            spread=0.015,
            empty_kernel_us=1.25 if mode == "server" else None,
        )

    def profile(self, variant: Variant, task: Task) -> ProfileResult:
        wrong = self._called("profile", variant, task) or self._not_accepted(variant, task)
        if wrong:
            return ProfileResult(**wrong, variant_key=variant.key, task_id=task.task_id)
        return ProfileResult(
            status=Status.OK,
            elapsed_s=2.8,
            variant_key=variant.key,
            task_id=task.task_id,
            metrics={"time_us": self.time_us(variant, task), "tensor_pipe_pct": 42.0},
            stalls={"long_scoreboard": 3.5},
            sentences=("One.", "Two.", "Three."),
        )

    def baselines(self, task: Task, mode: Mode, budget: Budget) -> BaselineResult:
        with self._lock:
            self.calls.append(Call("baselines", "", task.task_id, f"{mode}/{budget}"))
        times = tuple(
            BaselineTime(reference=name, b_layout=layout, time_us=factor * ideal_us(task) * _MODE_FACTOR[mode])
            for name, factor in _REFERENCE_FACTOR.items()
            if not name.endswith("_max")
            for layout in ("kn", "nk")
        )
        return BaselineResult(
            status=Status.OK, task_id=task.task_id, mode=mode, budget=budget, times=times, library="scripted BLAS 1"
        )

    def close(self) -> None:
        self.closed = True

    def time_us(self, variant: Variant, task: Task, mode: Mode = "offline") -> float:
        """0.8 of the reference at the best knobs, more away from them; a raw source is at 1.0 to 1.3."""
        size = math.log2(prod(task.dims.values())) / 42
        knobs = variant.plan.knobs if variant.plan else {}
        away = sum((math.log2(1 + value) - 3 - 4 * size - 2 * _unit(name)) ** 2 for name, value in knobs.items())
        factor = 0.8 + 0.01 * away if knobs else 1.0 + 0.3 * _unit(variant.variant_id)
        return factor * ideal_us(task) * _MODE_FACTOR[mode] * (1.0 if variant.b_layout == "nk" else 1.01)

    def count(self, tool: str) -> int:
        return sum(call.tool == tool for call in self.calls)

    def _called(self, tool: str, variant: Variant, task: Task | None, *settings: str) -> dict[str, object] | None:
        """Notes the call; the status, reason and detail that the script wants, if any."""
        with self._lock:
            self.calls.append(Call(tool, variant.key, task.task_id if task else "", "/".join(settings)))
        if self._sleep_s:
            time.sleep(self._sleep_s)
        found = self._script(tool, variant, task) if self._script else None
        if isinstance(found, Reason):
            return {"status": Status.FAILED, "reason": found, "detail": f"scripted: {tool} found {found.value}"}
        if found is not None:
            return {"status": found, "detail": f"scripted: {tool} is {found.value}"}
        return None

    def _not_accepted(self, variant: Variant, task: Task) -> dict[str, object] | None:
        why = accepts(variant, task, self.info.sm_count)
        return {"status": Status.FAILED, "reason": Reason.NOT_ACCEPTED, "detail": why} if why else None


class BatchingDevice(ScriptedDevice):
    """With the optional capabilities of a real GPU's device."""

    def compile_many(self, variants: Sequence[Variant], jobs: int) -> list[CompileResult]:
        return [self.compile(variant) for variant in variants]

    def profile_many(self, pairs: Sequence[tuple[Variant, Task]]) -> list[ProfileResult]:
        self.calls.append(Call("profile_many", "", "", str(len(pairs))))
        return [self.profile(variant, task) for variant, task in pairs]


def ideal_us(task: Task) -> float:
    return 1.4 + prod(task.dims.values()) / 4e8


def _unit(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int(content_hash(text), 16) / 16**16


def toy_launch() -> LaunchSpec:
    return LaunchSpec.model_validate(
        {
            "launches": [
                {
                    "entry": "gemm",
                    "grid": ["ceil_div(M, BM)", "ceil_div(N, BN)", 1],
                    "block": [128, 1, 1],
                    "args": ["A", "B", "C", {"i32": "M"}, {"i32": "N"}, {"i32": "K"}],
                }
            ]
        }
    )


def toy_families() -> dict[str, Family]:
    """``toy`` takes every shape (18 plans); ``toy_even`` only even N and K, with a run-time knob (8 plans)."""
    knobs = {
        "BM": Knob(values=(32, 64, 128), doc="tile rows"),
        "BN": Knob(values=(32, 64, 128), doc="tile columns"),
    }
    toy = Family(
        name="toy",
        revision=1,
        summary="for tests",
        op="hgemm",
        b_layouts=("kn", "nk"),
        knobs=knobs,
        launch=toy_launch(),
        source='extern "C" __global__ void gemm() {}\n',
        sanitize_dims=({"M": 64, "N": 64, "K": 64}, {"M": 67, "N": 35, "K": 33}),
    )
    even = Family(
        name="toy_even",
        revision=2,
        summary="for tests",
        op="hgemm",
        b_layouts=("nk",),
        knobs={
            "BM": Knob(values=(64, 128), doc="tile rows"),
            "BN": Knob(values=(64, 128), doc="tile columns"),
            "SPLIT": Knob(values=(1, 4), doc="slices of K", runtime=True),
        },
        accepts=("N % 2 == 0", "K % 2 == 0"),
        launch=toy_launch(),
        source='extern "C" __global__ void gemm() { /* even */ }\n',
        sanitize_dims=({"M": 64, "N": 64, "K": 64}, {"M": 67, "N": 34, "K": 34}),
    )
    return {family.name: family for family in (toy, even)}


def raw_variant(text: str = "", accepts: tuple[str, ...] = ()) -> Variant:
    """A source that belongs to no family."""
    launch = toy_launch().model_copy(update={"constants": {"BM": 64, "BN": 64}})
    return Variant(source=f'extern "C" __global__ void gemm() {{}} // {text}\n', launch=launch, accepts=accepts)
