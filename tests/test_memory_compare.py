"""The comparison of exemplar strategies: its policy does what it says, and the same seed gives the same run."""

from __future__ import annotations

import random

import pytest

from memory.exemplars import MemorySettings, StrategyName
from scripts.compare_exemplars import BUDGETS, Space, Table, interval, regrets, search
from tools.hgemm import hgemm
from tools.records import Plan

PLANS = [
    Plan(family="toy", revision=1, b_layout="nk", knobs={"X": x, "Y": y})
    for x in (1, 2, 4, 8, 16)
    for y in (1, 2, 4, 8, 16)
]
BY_KNOBS = {(p.knobs["X"], p.knobs["Y"]): p.plan_id for p in PLANS}


def table() -> Table:
    """Fastest in one corner, smoothly slower away from it."""
    times = {p.plan_id: 10.0 + (16 - p.knobs["X"]) + (16 - p.knobs["Y"]) for p in PLANS}
    return Table(hgemm(64, 64, 64), {p.plan_id: p for p in PLANS}, {k: 10 / t for k, t in times.items()}, times)


def test_the_policy_moves_away_from_the_worse_one() -> None:
    space = Space(PLANS)
    found = [space.mutate(BY_KNOBS[4, 4], BY_KNOBS[1, 4], set(), random.Random(seed)) for seed in range(40)]
    moved = [key for key in found if key == BY_KNOBS[8, 4]]
    assert len(moved) > 20, "X grew, as from the worse to the better one"
    assert found.count(BY_KNOBS[2, 4]) < 10, "only where the coin left no move"
    assert space.mutate(BY_KNOBS[4, 4], None, set(BY_KNOBS.values()), random.Random(0)) is None


@pytest.mark.parametrize("strategy", ["contrastive", "islands", "best-k", "random"])
def test_a_search_is_reproducible_and_tries_nothing_twice(strategy: StrategyName) -> None:
    settings = MemorySettings(strategy=strategy)
    runs = [search(table(), Space(PLANS), settings, 3, 20, 4, 6) for _ in range(2)]
    assert runs[0] == runs[1] and len(set(runs[0])) == len(runs[0]) == 20
    assert runs[0][:6] == search(table(), Space(PLANS), None, 3, 20, 4, 6)[:6], "all begin alike"


def test_regret_falls_with_the_budget_and_ends_at_nothing() -> None:
    everything = search(table(), Space(PLANS), MemorySettings(), 0, 64, 4, 6)
    assert len(everything) == len(PLANS) < max(BUDGETS)
    found = regrets(table(), everything)
    assert found == sorted(found, reverse=True) and found[-1] == 0.0
    assert regrets(table(), [BY_KNOBS[1, 1]])[0] == pytest.approx(3.0)


def test_the_interval_holds_the_mean() -> None:
    mean, low, high = interval([0.0, 1.0] * 50, random.Random(1))
    assert mean == 0.5 and 0.38 < low < 0.45 < 0.55 < high < 0.62
