"""The reward: a table, and the properties that training leans on."""

from __future__ import annotations

import math
import pickle

import pytest
from fakes import ScriptedDevice, raw_variant
from hypothesis import given
from hypothesis import strategies as st

from policy.reward import (
    NOT_EXECUTABLE,
    RewardSettings,
    clipped_deviation,
    correct_reward,
    reward,
    smooth,
    wrong_reward,
)
from tools.gate import MemoryResults, Toolbox
from tools.hgemm import hgemm
from tools.records import Evaluation, Reason, Status, VerifyResult

S = RewardSettings(alpha=0.5, beta=1e-6)
TASK = hgemm(64, 64, 64)


def evaluated(wrong: Reason | Status | None = None, tool: str = "compile") -> Evaluation:
    device = ScriptedDevice(lambda name, variant, task: wrong if name == tool else None)
    return Toolbox(device, MemoryResults()).evaluate(raw_variant(), TASK)


@pytest.mark.parametrize(
    ("ratios", "deviations", "length", "value"),
    [
        ([1.2], [0.0], 0, 1.2),
        ([1.0, 1.4], [0.0], 0, 1.2),  # the mean over the repeats
        ([1.2], [0.25], 0, 1.2 - 0.5 * 0.25),
        ([1.2], [7.0], 0, 1.2 - 0.5),  # clipped to 1
        ([1.2], [math.nan], 0, 1.2 - 0.5),  # NaN counts 1
        ([1.2], [math.inf], 0, 1.2 - 0.5),
        ([1.2], [None], 0, 1.2),  # not measured
        ([1.2], [], 0, 1.2),
        ([1.2], [0.0, 1.0], 0, 1.2 - 0.25),
        ([1.2], [0.0], 50_000, 1.2 - 0.05),
    ],
)
def test_correct_candidate(ratios: list[float], deviations: list[float | None], length: int, value: float) -> None:
    found = correct_reward(ratios, deviations, length, S)
    assert found.value == pytest.approx(value)
    assert found.value == pytest.approx(sum(found.parts.values()))


def test_wrong_candidate_has_no_speed_term_and_the_full_penalty() -> None:
    found = wrong_reward(10_000, S)
    assert found.parts == {"speed": 0.0, "deviation": -0.5, "length": pytest.approx(-0.01)}
    assert found.value == pytest.approx(-0.51)


@pytest.mark.parametrize("reason", sorted(Reason))
def test_every_reason_has_its_reward(reason: Reason) -> None:
    tool = "compile" if reason in NOT_EXECUTABLE else "verify"
    found = reward(evaluated(reason, tool), 100, S)
    assert found is not None
    assert found.value == pytest.approx(-1.0 if reason in NOT_EXECUTABLE else -0.5001)


@pytest.mark.parametrize("status", [Status.NOT_RECORDED, Status.UNAVAILABLE])
@pytest.mark.parametrize("tool", ["compile", "verify", "time"])
def test_what_is_not_known_is_masked(status: Status, tool: str) -> None:
    assert reward(evaluated(status, tool), 100, S) is None


def test_of_an_evaluation_that_passed() -> None:
    evaluation = evaluated()
    assert evaluation.ratio is not None and isinstance(evaluation.verify, VerifyResult)
    found = reward(evaluation, 1000, S)
    assert found is not None
    assert found.value == pytest.approx(evaluation.ratio - 0.5 * 0.0078125 - 0.001)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], []),
        ([None, None], [None, None]),
        ([3.0], [0.0]),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        ([1.0, 1.0 + 1e-7], [0.0, 0.0]),  # std < 1e-6
        ([0.0, 2.0], [-1.0, 1.0]),
        ([0.0, None, 2.0], [-1.0, None, 1.0]),  # a gap does not count
        ([0.0] * 9 + [10.0], [-1 / 3] * 9 + [1.5]),  # 3 standard deviations, clipped
        ([10.0] * 9 + [0.0], [1 / 3] * 9 + [-1.5]),
    ],
)
def test_smoothing(rewards: list[float | None], expected: list[float | None]) -> None:
    assert smooth(rewards, S) == [None if e is None else pytest.approx(e) for e in expected]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_smoothing_keeps_order_and_bounds(rewards: list[float]) -> None:
    found = smooth(list(rewards), S)
    assert all(value is not None and -1.5 <= value <= 1.5 for value in found)
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    ranked = [found[i] or 0.0 for i in order]
    assert ranked == sorted(ranked)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_deviation_is_between_0_and_1(value: float) -> None:
    assert 0.0 <= clipped_deviation(value) <= 1.0


def test_settings_survive_a_process_boundary() -> None:
    assert pickle.loads(pickle.dumps(S)) == S
