"""Candidates verified and timed together: the numbers that each would have alone, and never one that another spoilt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simulated_device import COSTS, SimulatedDevice, TogetherDevice, cost_us, family
from tests.simulated_gpu import honest, store, words
from tools.families import accepted_plans
from tools.hgemm import hgemm
from tools.record_file import RecordReader
from tools.recording import record
from tools.recording_scope import Scope
from tools.records import MODES, Budget, Mode, Reason, TimingResult

FAMILIES = {"numpy": family()}
SHAPE = (24, 16, 40)
TASK = hgemm(*SHAPE)
PLANS = accepted_plans(FAMILIES, TASK)


@pytest.fixture(autouse=True)
def no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between calls of server mode: nothing here depends on them but the time that the tests take."""
    monkeypatch.setattr("tools.timing_plan.SERVER_GAP_S", 0.0)


def together(device: TogetherDevice, mode: Mode, budget: Budget) -> tuple[list[TimingResult], Any]:
    found = device.time_many(PLANS, TASK, mode, budget)
    assert found is not None
    return found


@pytest.mark.parametrize("budget", ["screen", "final"])
@pytest.mark.parametrize("mode", MODES)
def test_each_is_timed_as_it_would_be_alone(mode: Mode, budget: Budget) -> None:
    results, baselines = together(TogetherDevice(), mode, budget)
    assert [result.variant_key for result in results] == [variant.key for variant in PLANS]
    for variant, result in list(zip(PLANS, results, strict=True))[::3]:
        alone = SimulatedDevice().time(variant, TASK, mode, budget)
        assert [row.reference for row in result.rows] == [row.reference for row in alone.rows]
        for row, lone in zip(result.rows, alone.rows, strict=True):
            assert row.ratio == pytest.approx(lone.ratio, rel=1e-6)
            assert row.samples >= lone.samples, "no fewer rounds for being among others"
        assert result.ok and result.time_us == pytest.approx(cost_us(variant), rel=1e-6)
        assert (result.empty_kernel_us is None) == (alone.empty_kernel_us is None)
    if budget == "screen":
        assert baselines is None
    else:
        lone = SimulatedDevice().baselines(TASK, mode, budget)
        assert {(t.reference, t.b_layout, t.algorithm) for t in baselines.times} == {
            (t.reference, t.b_layout, t.algorithm) for t in lone.times
        }
        assert baselines.best_us() == pytest.approx(COSTS["second"])


def test_one_that_is_far_slower_does_not_shorten_the_replays_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches in a replay are a candidate's own; those with as many run together."""
    slow = PLANS[2]
    costs = {variant.key: 5000.0 if variant.key == slow.key else cost_us(variant) for variant in PLANS}
    monkeypatch.setattr("tests.simulated_device.cost_us", lambda variant: costs[variant.key])
    results, _ = together(TogetherDevice(), "offline", "screen")
    for variant, result in list(zip(PLANS, results, strict=True))[1:3]:
        alone = SimulatedDevice().time(variant, TASK, "offline", "screen")
        assert result.time_us == pytest.approx(costs[variant.key], rel=1e-6)
        assert result.rows[0].samples >= alone.rows[0].samples


@pytest.mark.parametrize("depth", ["quick", "full"])
def test_each_is_verified_as_it_would_be_alone(depth: Any) -> None:
    results = TogetherDevice().verify_many(PLANS, TASK, depth)
    assert results is not None
    for variant, result in zip(PLANS, results, strict=True):
        alone = SimulatedDevice().verify(variant, TASK, depth)
        assert result.variant_key == variant.key and result.ok and alone.ok
        assert [tier.tier for tier in result.tiers] == [tier.tier for tier in alone.tiers]
        assert (result.cublas_max_abs_error is None) == (alone.cublas_max_abs_error is None)
    assert len({result.max_abs_error for result in results}) == 1, "of the same operands"


# --- among bad ones ---------------------------------------------------------------------------------------------------


def drops_the_last_k(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
    m, n, k = SHAPE
    a = words(buffers["A"], m * k).view(np.float16).reshape(m, k)[:, :-1].astype(np.float32)
    b = words(buffers["B"], n * k).view(np.float16).reshape(n, k)[:, :-1].astype(np.float32)
    store(buffers, (a @ b.T).astype(np.float16).view(np.uint16).ravel())


def writes_over_b(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
    """Right itself, and ruin for whatever runs after it."""
    honest(buffers, workspace, dims)
    words(buffers["B"], 4)[...] = 0x3C00


def fails(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
    raise RuntimeError("a fault")


@pytest.mark.parametrize("kernel", [drops_the_last_k, writes_over_b, fails])
def test_one_that_is_bad_and_all_are_asked_for_alone(kernel: Any) -> None:
    device = TogetherDevice({PLANS[1].key: kernel})
    assert device.verify_many(PLANS, TASK, "quick") is None
    assert device.time_many(PLANS, TASK, "offline", "final") is None


@pytest.mark.parametrize("kernel", [drops_the_last_k, writes_over_b])
def test_a_recording_blames_the_one_that_is_bad(tmp_path: Path, kernel: Any) -> None:
    bad = min(PLANS, key=cost_us)
    out = tmp_path / "r.sqlite"
    device = TogetherDevice({bad.key: kernel})
    record(device, FAMILIES, [SHAPE], out, deadline_s=600, scope=Scope(top=2, profiles=False), echo=lambda _: None)
    reader = RecordReader(out)
    reason = {drops_the_last_k: Reason.WRONG_RESULT, writes_over_b: Reason.MODIFIED_INPUT}[kernel]
    for variant in PLANS:
        verified = reader.verified(variant.key, TASK.task_id, "quick")
        assert verified is not None and verified.reason == (reason if variant is bad else None)
        timed = reader.timed(variant.key, TASK.task_id, "offline", "screen")
        assert (timed is None) == (variant is bad)


# --- a recording ------------------------------------------------------------------------------------------------------


def test_a_recording_together_is_that_of_one_by_one_in_a_third_of_the_runs(tmp_path: Path) -> None:
    files, asked = [], []
    for together in (False, True):
        device, out = TogetherDevice(), tmp_path / f"{together}.sqlite"
        scope = Scope(top=3, server_top=2, profiles=False, together=together)
        record(device, FAMILIES, [SHAPE], out, deadline_s=600, scope=scope, echo=lambda _: None)
        files.append(RecordReader(out))
        asked.append(device.asked)
    one, many = files
    assert one.counts() == many.counts()
    assert one.best_of(TASK.task_id) == many.best_of(TASK.task_id)
    for variant in PLANS:
        for mode in MODES:
            budgets: tuple[Budget, ...] = ("screen", "final")
            for budget in budgets:
                a = one.timed(variant.key, TASK.task_id, mode, budget)
                b = many.timed(variant.key, TASK.task_id, mode, budget)
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    for mine, theirs in zip(a.rows, b.rows, strict=True):
                        assert mine.ratio == pytest.approx(theirs.ratio, rel=1e-5)
    assert len(asked[0]) == 1 + 6 + 6 + 3 + (3 + 3 + 2) + 3
    assert asked[1] == [
        "baselines",
        "verify_many 6",
        "time_many 6",
        "verify_many 3",
        "time_many 3",
        "time_many 3",
        "time_many 2",
    ]
