"""How much is timed: both sides of a ratio alike, whatever the candidate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.records import Budget, Mode
from tools.timing_plan import EFFORTS, LAUNCH_CHOICES, REPLAY_US, launches_per_replay, rounds, sets_in_use

US = st.floats(0.5, 1e6)


@given(US, US, st.sampled_from(["offline", "rotating", "server"]), st.integers(2, 2**30), st.integers(2, 65))
def test_launches_fit_the_ring_and_are_a_choice(ref: float, own: float, mode: Mode, size: int, slots: int) -> None:
    launches = launches_per_replay(ref, own, mode, size, slots)
    assert launches in LAUNCH_CHOICES
    assert launches <= max(1, slots - 1)
    assert mode != "server" or launches == 1


@given(US, st.floats(0.5, 50), st.floats(0.5, 50))
def test_ordinary_candidates_of_a_task_are_timed_alike(ref: float, one: float, other: float) -> None:
    assert launches_per_replay(ref, one, "offline", 8192, 65) == launches_per_replay(ref, other, "offline", 8192, 65)


def test_a_short_kernel_fills_the_replay_and_a_long_one_is_alone() -> None:
    assert launches_per_replay(2.2, 1.5, "offline", 8192, 65) == 40
    assert launches_per_replay(REPLAY_US, REPLAY_US, "offline", 8192, 65) == 1
    assert launches_per_replay(2.2, 1000.0, "offline", 8192, 65) == 4  # a slow one shortens the replay for all


@given(st.sampled_from(["offline", "rotating", "server"]), st.sampled_from(LAUNCH_CHOICES), st.integers(2, 64))
def test_sets_in_use_exist(mode: Mode, launches: int, sets: int) -> None:
    assert 2 <= sets_in_use(mode, launches, sets) <= sets


@pytest.mark.parametrize("budget", ["screen", "final"])
def test_rounds_stay_between_their_limits(budget: Budget) -> None:
    effort = EFFORTS[budget]
    assert rounds(budget, "offline", 3, 1e-9) == effort.most
    assert rounds(budget, "offline", 3, 10.0) == (3 if budget == "screen" else effort.least)
