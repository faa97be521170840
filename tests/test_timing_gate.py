"""The timing tool's own logic on a simulated GPU: honest kernels are timed right, cheats of every kind are named."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.simulated_gpu import honest, multiply, simulated_worker, store, variant, words
from tools.hgemm import hgemm
from tools.records import MODES, Budget, Mode, Reason, TimingResult, VerifyResult

TASK = hgemm(24, 16, 40)
COSTS = {"first": 3.0, "second": 2.0, "gemmex": 2.5}
WORKSPACE = 1 << 14
Kernel = Callable[[dict[str, int], int, dict[str, int]], None]


def timed(
    kernel: Kernel, mode: Mode = "offline", budget: Budget = "screen", cost_us: float = 1.0, **spec: Any
) -> TimingResult:
    with simulated_worker(kernel, cost_us, TASK.dims, COSTS) as gpu, pytest.MonkeyPatch.context() as patch:
        # Which words change between two launches: of operands this small, one time in forty they are among those that
        # a cheat below looks at.
        patch.setattr(importlib.import_module("tools.gpu.candidate"), "seed", lambda: 1)
        request = {"op": "time", "mode": mode, "budget": budget, "cubin": "", "warm_s": 0.0}
        request |= {"variant": variant(**spec).model_dump(mode="json"), "task": TASK.model_dump(mode="json")}
        reply = gpu.ask(request)
    assert "record" in reply, reply
    return TimingResult.model_validate(reply["record"])


@pytest.mark.parametrize("budget", ["screen", "final"])
@pytest.mark.parametrize("mode", MODES)
def test_an_honest_kernel_is_timed_against_the_best_algorithm(mode: Mode, budget: Budget) -> None:
    result = timed(honest, mode, budget)
    assert result.ok, result.detail
    row = result.row()
    assert row is not None
    # The clock before the first kernel is the same 0 us on both sides here, so the ratio is that of the costs.
    assert row.ratio == pytest.approx(COSTS["second"] / 1.0, rel=1e-6)
    names = {r.reference for r in result.rows}
    assert ("cublas_max" in names) == (budget == "final")
    assert (result.empty_kernel_us is not None) == (mode == "server")


def test_both_layouts_and_every_reference_have_their_row() -> None:
    rows = {r.reference: r.ratio for r in timed(honest, budget="final").rows}
    assert rows["cublaslt_auto"] == pytest.approx(2.0)
    assert rows["cublas"] == pytest.approx(2.5)
    assert rows["cublaslt_heuristic_max"] == pytest.approx(3.0)


def test_a_slow_kernel_is_measured_as_slow() -> None:
    row = timed(honest, cost_us=5000.0).row()
    assert row is not None
    assert row.ratio == pytest.approx(2.0 / 5000.0)


# --- cheats -----------------------------------------------------------------------------------------------------------


def skips_after_the_first(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
    mark = words(workspace, 2)
    if (mark[0], mark[1]) == (0x5EED, 0x5EED):
        return
    honest(buffers, workspace, dims)
    mark[...] = 0x5EED


def _answers_from(tag: Callable[[dict[str, int]], int]) -> Kernel:
    """Keeps the last answer, out of the harness's sight, for as long as ``tag`` of the operands stays."""
    kept: dict[int, np.ndarray] = {}  # type: ignore[type-arg]

    def kernel(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
        key = tag(buffers)
        if key not in kept:
            kept.clear()
            kept[key] = multiply(buffers, dims)
        store(buffers, kept[key])

    return kernel


def _pointer(buffers: dict[str, int]) -> int:
    return buffers["A"]


def _pointer_and_samples(buffers: dict[str, int]) -> int:
    a, b = words(buffers["A"], 24 * 40), words(buffers["B"], 16 * 40)
    return hash((buffers["A"], *a[:9].tolist(), *b[-9:].tolist()))


def copies_its_neighbour(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
    """The output of the launch before lies one slot below, and is right as long as the operands are the same."""
    n, stride = 24 * 16, 512
    before = words(buffers["C"] - 2 * stride, n)
    if _neighbour_is_an_output(before):
        words(buffers["C"], n)[...] = before
    else:
        honest(buffers, workspace, dims)


def _neighbour_is_an_output(before: np.ndarray) -> bool:  # type: ignore[type-arg]
    values = before.view(np.float16)
    return bool(np.all(np.isfinite(values))) and 2.0 < float(np.std(values.astype(np.float32))) < 20.0


def writes_beside_c(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
    honest(buffers, workspace, dims)
    words(buffers["C"], 24 * 16 + 3)[-1] = 0


def changes_its_input(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
    honest(buffers, workspace, dims)
    words(buffers["A"] + 2 * 24 * 40, 8)[...] = 0x3C00  # padding behind A: no output depends on it


@pytest.mark.parametrize(
    ("kernel", "budget", "spec", "reason"),
    [
        (skips_after_the_first, "screen", {"workspace_bytes": WORKSPACE}, Reason.SKIPPED_LAUNCH),
        (_answers_from(_pointer), "screen", {}, Reason.SKIPPED_LAUNCH),
        (_answers_from(_pointer_and_samples), "screen", {}, Reason.SKIPPED_LAUNCH),
        (writes_beside_c, "screen", {}, Reason.WROTE_OUT_OF_BOUNDS),
        (changes_its_input, "final", {}, Reason.MODIFIED_INPUT),
    ],
)
def test_cheats_are_named(kernel: Kernel, budget: Budget, spec: dict[str, Any], reason: Reason) -> None:
    result = timed(kernel, budget=budget, **spec)
    assert result.reason is reason, result.detail


def test_the_output_before_is_no_answer() -> None:
    """Outside the ring it may find an older output below its own, which is wrong already there."""
    assert timed(copies_its_neighbour).reason in (Reason.SKIPPED_LAUNCH, Reason.WRONG_RESULT)


def test_faster_than_the_hardware_is_refused() -> None:
    assert timed(honest, cost_us=1e-8).reason is Reason.SKIPPED_LAUNCH


def test_a_workspace_may_be_used_honestly() -> None:
    def kernel(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
        c = multiply(buffers, dims)
        words(workspace, c.size)[...] = c
        store(buffers, words(workspace, c.size))

    assert timed(kernel, workspace_bytes=WORKSPACE).ok


# --- verify -----------------------------------------------------------------------------------------------------------


def verified(kernel: Kernel, depth: str = "quick") -> VerifyResult:
    with simulated_worker(kernel, 1.0, TASK.dims, COSTS) as gpu:
        gpu.worker._baseline_spread = lambda _: 0.0
        request = {"op": "verify", "depth": depth, "cubin": ""}
        request |= {"variant": variant().model_dump(mode="json"), "task": TASK.model_dump(mode="json")}
        reply = gpu.ask(request)
    assert "record" in reply, reply
    return VerifyResult.model_validate(reply["record"])


def test_an_honest_kernel_is_verified() -> None:
    result = verified(honest)
    assert result.ok, result.detail
    assert result.bitwise_repeatable


def test_a_dropped_k_is_wrong() -> None:
    def kernel(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
        a = words(buffers["A"], 24 * 40).reshape(24, 40)
        kept = a[:, -1].copy()
        a[:, -1] = 0
        honest(buffers, workspace, dims)
        a[:, -1] = kept

    assert verified(kernel).reason is Reason.WRONG_RESULT


def test_an_output_left_alone_is_unwritten() -> None:
    assert verified(lambda *_: None).reason is Reason.UNWRITTEN_OUTPUT


def test_a_guard_word_overwritten_is_seen() -> None:
    assert verified(writes_beside_c).reason is Reason.WROTE_OUT_OF_BOUNDS


# --- baselines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_baselines_name_the_algorithm_that_stands_for_each_reference(mode: Mode) -> None:
    with simulated_worker(honest, 1.0, TASK.dims, COSTS) as gpu:
        request = {"op": "baselines", "task": TASK.model_dump(mode="json"), "mode": mode, "budget": "final"}
        reply = gpu.ask(request)
    assert "record" in reply, reply
    times = {(t["reference"], t["b_layout"]): t for t in reply["record"]["times"]}
    for layout in ("kn", "nk"):
        assert times["cublaslt_auto", layout]["time_us"] == pytest.approx(COSTS["second"])
        assert times["cublaslt_auto", layout]["algorithm"].startswith("second")
        assert times["cublaslt_heuristic", layout]["algorithm"].startswith("first")
        assert times["cublas", layout]["algorithm"] == "cublasGemmEx"
