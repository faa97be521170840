"""A recorder's device on the simulated GPU: families whose kernels are NumPy and cost what their knobs say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.fakes import ScriptedDevice, toy_launch
from tests.simulated_gpu import SimulatedModule, honest, simulated_worker
from tools.records import (
    BaselineResult,
    Budget,
    Depth,
    Family,
    Knob,
    Mode,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)

COSTS = {"first": 60.0, "second": 50.0, "gemmex": 55.0}
Kernel = Callable[..., None]


def family() -> Family:
    """Six plans; ``cost_us`` of each differs."""
    knobs = {"BM": Knob(values=(32, 64), doc="tile rows"), "BN": Knob(values=(32, 64, 128), doc="tile columns")}
    return Family(
        name="numpy", revision=1, summary="for tests", op="hgemm", b_layouts=("nk",), knobs=knobs,
        launch=toy_launch(), source='extern "C" __global__ void gemm() {}\n',
    )  # fmt: skip


def cost_us(variant: Variant) -> float:
    assert variant.plan is not None
    return 40.0 + variant.plan.knobs["BM"] / 4 + variant.plan.knobs["BN"] / 8


class SimulatedDevice(ScriptedDevice):
    """Compiles as scripted; verifies and times on the simulated GPU, one by one. ``kernels``: by key, what is not
    ``honest``."""

    def __init__(self, kernels: dict[str, Kernel] | None = None) -> None:
        super().__init__(name="simulated", driver="unknown")
        self.kernels = kernels or {}
        self.asked: list[str] = []  # operations, with how many candidates

    def ask(self, task: Task, variants: Sequence[Variant], request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(f"{request['op']} {len(variants)}")
        modules = {
            variant.key: SimulatedModule(self.kernels.get(variant.key, honest), cost_us(variant), task.dims)
            for variant in variants
        }
        request = {**request, "task": task.model_dump(mode="json")}
        candidates = [{"variant": variant.model_dump(mode="json"), "cubin": variant.key} for variant in variants]
        request |= {"candidates": candidates} if request["op"].endswith("many") else dict(*candidates)
        with simulated_worker(honest, 1.0, task.dims, COSTS) as gpu:
            gpu.worker.module = modules.__getitem__
            gpu.worker._baseline_spread = lambda _: 0.0
            reply: dict[str, Any] = gpu.ask(request)
        return reply

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult:
        return VerifyResult.model_validate(self.ask(task, [variant], {"op": "verify", "depth": depth})["record"])

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
        request = {"op": "time", "mode": mode, "budget": budget, "warm_s": 0.0}
        return TimingResult.model_validate(self.ask(task, [variant], request)["record"])

    def baselines(self, task: Task, mode: Mode, budget: Budget) -> BaselineResult:
        self.asked.append("baselines")
        request = {"op": "baselines", "mode": mode, "budget": budget, "task": task.model_dump(mode="json")}
        with simulated_worker(honest, 1.0, task.dims, COSTS) as gpu:
            return BaselineResult.model_validate(gpu.ask(request)["record"])


class TogetherDevice(SimulatedDevice):
    """Several at once."""

    def verify_many(self, variants: Sequence[Variant], task: Task, depth: Depth) -> list[VerifyResult] | None:
        record = self.ask(task, variants, {"op": "verify_many", "depth": depth}).get("record")
        return record and [VerifyResult.model_validate(result) for result in record["results"]]

    def time_many(
        self, variants: Sequence[Variant], task: Task, mode: Mode, budget: Budget
    ) -> tuple[list[TimingResult], BaselineResult | None] | None:
        record = self.ask(task, variants, {"op": "time_many", "mode": mode, "budget": budget}).get("record")
        if record is None:
            return None
        baselines = record["baselines"] and BaselineResult.model_validate(record["baselines"])
        return [TimingResult.model_validate(result) for result in record["results"]], baselines
