"""Candidates in one run: each is timed as it is alone, and a bad one takes no good one with it."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.families import accepted_plans, load_families
from tools.hgemm import hgemm
from tools.records import MODES, Depth, Mode, Reason, TimingResult, Variant

pytestmark = pytest.mark.gpu
TASK = hgemm(512, 512, 512)


@pytest.fixture(scope="module")
def chosen() -> list[Variant]:
    """Of two families and both layouts, so that replays differ in kind."""
    families = {k: v for k, v in load_families().items() if k in ("wgmma_tile", "mma_cpasync")}
    plans = accepted_plans(families, TASK)
    return plans[:: len(plans) // 5][:5]


def ratio(result: TimingResult) -> float:
    row = result.row("cublaslt_auto")
    assert row is not None, result.detail
    return row.ratio


@pytest.mark.parametrize("mode", MODES)
def test_each_is_timed_as_it_is_alone(gpu: CudaDevice, chosen: list[Variant], mode: Mode) -> None:
    found = gpu.time_many(chosen, TASK, mode, "final")
    assert found is not None
    results, baselines = found
    assert baselines is not None and baselines.ok
    for candidate, result in zip(chosen, results, strict=True):
        alone = gpu.time(candidate, TASK, mode, "final")
        assert ratio(result) == pytest.approx(ratio(alone), rel=0.05 if mode == "server" else 0.02), candidate.label


@pytest.mark.parametrize("depth", ["quick", "full"])
def test_each_is_verified_as_it_is_alone(gpu: CudaDevice, chosen: list[Variant], depth: Depth) -> None:
    group = [candidate for candidate in chosen if candidate.b_layout == "nk"]
    found = gpu.verify_many(group, TASK, depth)
    assert found is not None
    for candidate, result in zip(group, found, strict=True):
        alone = gpu.verify(candidate, TASK, depth)
        assert result.ok and alone.ok
        assert [tier.tier for tier in result.tiers] == [tier.tier for tier in alone.tiers]


def test_a_bad_one_is_blamed_alone(gpu: CudaDevice, chosen: list[Variant]) -> None:
    good, bad = next(candidate for candidate in chosen if candidate.b_layout == "nk"), variant({"DROP": "- 16"})
    assert gpu.verify_many([good, bad], TASK, "quick") is None
    assert gpu.verify(good, TASK, "quick").ok
    assert gpu.verify(bad, TASK, "quick").reason is Reason.WRONG_RESULT
