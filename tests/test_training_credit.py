"""Advantages of logged groups: of rollouts and of their turns, in units of the group or of all groups. No model."""

import json
import math
from collections import Counter

import pytest
from training_kit import row

from policy.reward import RewardSettings
from training.credit import advantages, values_of
from training.rows import Row, RowCall, Turn
from training.settings import GrpoSettings


def advantage(
    *rows: Row, reward: RewardSettings | None = None, **settings: object
) -> tuple[dict[str, tuple[float, ...]], dict[str, int]]:
    left_out: Counter[str] = Counter()
    told = GrpoSettings.model_validate(settings)
    return advantages(rows, told, reward or RewardSettings(), left_out), dict(left_out)


def rollout(number: int, *ratios: float | None, group: str = "g", submit: int | None = None, **given: object) -> Row:
    """A turn for each ratio: None is not recorded, 0 failed; then a submit."""
    turns: list[Turn] = []
    for place, ratio in enumerate(ratios):
        status = "not_recorded" if ratio is None else "ok" if ratio else "failed"
        answer = {"key": f"k{place}", "status": status, **({"ratio": ratio} if ratio else {})}
        call = RowCall(id="call-0", name="evaluate_plan", arguments="{}")  # each turn counts its own calls
        turns.append(Turn(role="assistant", content="", tool_calls=(call,), trained=ratio is not None))
        turns.append(Turn(role="tool", content=json.dumps(answer), tool_call_id=call.id, name=call.name))
    if submit is not None:
        call = RowCall(id="call-s", name="submit", arguments=json.dumps({"key": f"k{submit}"}))
        turns.append(Turn(role="assistant", content="", tool_calls=(call,), trained=True))
    known = [ratio for ratio in ratios if ratio is not None]
    return row(number, group, reward=max(known, default=None), turns=tuple(turns), **given)


# --- a rollout's reward -----------------------------------------------------------------------------------------------


def test_rewards_are_normalised_within_their_group() -> None:
    found, left_out = advantage(
        row(0, reward=1.0), row(1, reward=2.0), row(0, "h", reward=5.0), row(1, "h", reward=9.0)
    )
    assert found == {"g-0": (-1.0,), "g-1": (1.0,), "h-0": (-1.0,), "h-1": (1.0,)} and not left_out


def test_in_units_of_all_groups_large_differences_weigh_more() -> None:
    rows = (row(0, reward=1.0), row(1, reward=1.02), row(0, "h", reward=1.0), row(1, "h", reward=1.2))
    found, _ = advantage(*rows, scale="all")
    assert found["h-1"][0] == pytest.approx(10 * found["g-1"][0]) and found["h-1"] == pytest.approx((2**0.5,), rel=0.01)
    assert advantage(*rows, scale="none")[0]["h-1"] == pytest.approx((0.1,))


def test_an_outlier_is_clipped() -> None:
    found, _ = advantage(*(row(i, reward=1.0) for i in range(9)), row(9, reward=100.0))
    assert found["g-9"] == (1.5,) and found["g-0"] == (pytest.approx(-1 / 3),)


@pytest.mark.parametrize(
    ("rows", "reasons"),
    [
        ([row(0)], {"alone in its group": 1}),
        ([row(0), row(1), row(2)], {"equal rewards in the group": 3}),
        ([row(0, reward=math.nan), row(1)], {"reward is no number": 1, "alone in its group": 1}),
        ([row(0, reward=math.inf), row(1)], {"reward is no number": 1, "alone in its group": 1}),
        ([row(0, reward=None), row(1)], {"no reward": 1, "alone in its group": 1}),
    ],
)
@pytest.mark.parametrize("scale", ["group", "all", "none"])
def test_groups_that_teach_nothing(rows: list[Row], reasons: dict[str, int], scale: str) -> None:
    assert advantage(*rows, scale=scale) == ({}, reasons)


def test_groups_that_differ_by_noise_teach_nothing() -> None:
    rows = (row(0, reward=1.0), row(1, reward=1.001), row(0, "h", reward=1.0), row(1, "h", reward=1.1))
    for scale in ("group", "all", "none"):
        found, left_out = advantage(*rows, reward=RewardSettings(min_std=0.003), scale=scale)
        assert set(found) == {"h-0", "h-1"} and left_out == {"equal rewards in the group": 2}


def test_what_is_not_known_does_not_count_in_the_mean() -> None:
    found, left_out = advantage(row(0, reward=1.0), row(1, reward=None), row(2, reward=3.0))
    assert found == {"g-0": (-1.0,), "g-2": (1.0,)} and left_out == {"no reward": 1}


# --- a turn's ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "turn", "gain"),
    [
        (rollout(0, 0.9, 1.1, 1.0), [0.9, 1.1, 1.0], [0.0, pytest.approx(0.1), 0.0]),
        (rollout(0, 1.1, submit=0), [1.1, 0.0], [1.1, 0.0]),
        (rollout(0, 0.9, 1.1, submit=0), [0.9, 1.1, pytest.approx(-0.2)], [0, pytest.approx(0.2), pytest.approx(-0.2)]),
        (rollout(0, None, 0.0, 0.8), [None, 0.0, 0.8], [None, 0.0, 0.8]),
        (rollout(0, 1.0, 1.0), [1.0, 1.0], [0.0, 0.0]),  # either would have done
        (rollout(0, None, submit=0), [None, None], [None, None]),
    ],
)
def test_what_a_turn_is_worth(made: Row, turn: list[float | None], gain: list[float | None]) -> None:
    assert values_of(made, GrpoSettings(credit="turn")) == turn
    assert values_of(made, GrpoSettings(credit="gain")) == gain


def test_the_best_of_a_rollout_is_worth_the_same_to_all_that_evaluated() -> None:
    made = rollout(0, 0.9, None, 1.1, submit=0)
    assert values_of(made, GrpoSettings(credit="best")) == [1.1, None, 1.1, pytest.approx(-0.2)]


def test_turns_are_compared_with_those_of_the_same_place() -> None:
    found, left_out = advantage(rollout(0, 1.0, 0.5), rollout(1, 0.8, 0.5), rollout(2, 0.9), credit="turn")
    assert not left_out and [round(own[0], 2) for own in found.values()] == [1.22, -1.22, 0.0]
    assert found["g-0"][1] == found["g-1"][1] == 0.0 and len(found["g-2"]) == 1


@pytest.mark.parametrize("credit", ["turn", "best", "gain"])
def test_a_submit_is_not_compared_with_an_evaluation(credit: str) -> None:
    found, _ = advantage(rollout(0, 1.0, submit=0), rollout(1, 0.9, 1.1, submit=1), credit=credit)
    assert found["g-0"][1] == found["g-1"][1] == 0.0  # the one's submit, the other's second evaluation
    found, _ = advantage(rollout(0, 1.0, 0.8, submit=0), rollout(1, 1.0, 0.8, submit=1), credit=credit)
    assert [tuple(map(round, own)) for own in found.values()] == [(0, 0, 1), (0, 0, -1)]


def test_why_a_row_has_no_values_is_told_by_its_credit() -> None:
    rows = (row(0), row(1, reward=math.nan), row(2, reward=None))  # their answers have no ratio
    assert advantage(*rows, credit="turn")[1] == {
        "nothing is known of its turns": 1,
        "reward is no number": 1,
        "no reward": 1,
    }


def test_turns_of_which_nothing_is_known_are_left_alone() -> None:
    found, left_out = advantage(rollout(0, None, 1.0), rollout(1, 0.8, 0.5), rollout(2, None), credit="turn")
    assert found == {"g-0": (0.0, 1.0), "g-1": (0.0, -1.0)} and left_out == {"no reward": 1}


def test_answers_that_are_no_verdicts_are_not_known() -> None:
    plain = row(0)  # its answer has no ratio
    assert values_of(plain, GrpoSettings(credit="turn")) == [None]
    broken = plain.turns[1].model_copy(update={"content": "no JSON"})
    assert values_of(row(0, turns=(plain.turns[0], broken)), GrpoSettings(credit="gain")) == [None]
