from __future__ import annotations

import pytest

from tools.hgemm import hgemm
from tools.records import Reason
from tools.verdicts import Rejected, SideEffects, Stats, Tier, baseline_bounded, judge, tiers

TASK = hgemm(64, 32, 16)
CLEAN = Stats(0, 0, 0.01, None)
HARMLESS = SideEffects()
NORMAL = Tier("normal", ("normal", 1.0), ("normal", 1.0), ("interval", "clause"))


def verdict(
    stats: tuple[Stats, Stats] = (CLEAN, CLEAN),
    repeat: Stats = CLEAN,
    loose: Stats = CLEAN,
    side: SideEffects = HARMLESS,
    deterministic: bool = True,
) -> Reason | None:
    try:
        result = judge(NORMAL, stats, repeat, loose, side, TASK, deterministic)
    except Rejected as error:
        assert str(error)
        return error.reason
    assert result.ok
    assert result.checked == 64 * 32
    return None


WRONG = Stats(3, 0, 9.0, 33)
POISONED = Stats(5, 5, 0.0, 0)


@pytest.mark.parametrize(
    ("expected", "kwargs"),
    [
        (None, {}),
        (Reason.WRONG_RESULT, {"stats": (WRONG, CLEAN)}),
        (Reason.WRONG_RESULT, {"stats": (CLEAN, WRONG)}),
        (Reason.UNWRITTEN_OUTPUT, {"stats": (POISONED, POISONED)}),
        (Reason.UNWRITTEN_OUTPUT, {"repeat": POISONED}),  # only the second run left something unwritten
        (Reason.WROTE_OUT_OF_BOUNDS, {"side": SideEffects(guard_words=1), "stats": (WRONG, WRONG)}),
        (Reason.MODIFIED_INPUT, {"side": SideEffects(inputs_changed=True)}),
        (Reason.WORKSPACE_STATE, {"side": SideEffects(state_words=2)}),
        (Reason.NOT_DETERMINISTIC, {"repeat": Stats(1, 0, 0.0, None)}),
        (None, {"repeat": Stats(1, 0, 0.0, None), "deterministic": False}),
        (Reason.NOT_DETERMINISTIC, {"repeat": WRONG, "loose": WRONG, "deterministic": False}),
    ],
)
def test_each_fault_has_its_name(expected: Reason | None, kwargs: dict[str, object]) -> None:
    assert verdict(**kwargs) is expected  # type: ignore[arg-type]


def test_a_wrong_result_names_the_first_place() -> None:
    with pytest.raises(Rejected, match="row 1, column 1"):
        judge(NORMAL, (WRONG, CLEAN), CLEAN, CLEAN, SideEffects(), TASK, True)


def test_quick_is_part_of_full() -> None:
    quick, full = tiers(512, "quick"), tiers(512, "full")
    assert [t.name for t in quick] == ["integer", "normal"]
    assert all(t in full for t in quick)
    assert {t.name for t in full} >= {"binary", "uniform", "large", "cancellation", "subnormal_a", "special"}


def test_the_reviewers_clause_is_not_asked_under_cancellation() -> None:
    by_name = {t.name: t for t in tiers(512, "full")}
    assert "clause" not in by_name["cancellation"].modes
    assert "clause" in by_name["normal"].modes


def test_baseline_bounded_reports_and_never_rejects() -> None:
    assert baseline_bounded(0.1, 0.2, TASK).ok
    assert "beyond" in baseline_bounded(0.1, 0.2, TASK).detail
