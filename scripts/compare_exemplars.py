"""Contrastive against other exemplars, on replay: regret of a scripted policy that uses what it is shown.

    python scripts/compare_exemplars.py                      # every recorded shape, 10 seeds
    python scripts/compare_exemplars.py --seeds 3 --shapes 24

The policy is deterministic: it takes the better exemplar and moves its knobs away from the worse one's (or, where they
are no plans of one family and layout, one knob at random), to the nearest plan that was not tried. Everything else is
the same for all strategies: the first random plans, the budget, the seeds. Each round draws one pair, as a group of
rollouts shares one prompt. Times are the recorded ones, offline, screen budget.

Regret: time of the best plan found over that of the best recorded plan of the shape, minus 1. Intervals are 95 %
bootstrap over shapes (means over seeds are taken first: seeds of one shape are not independent shapes).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from memory.exemplars import MemorySettings, Scored, StrategyName, choose
from tools.records import Plan, Task, content_hash
from tools.replay import ReplayDevice

BUDGETS = (16, 32, 64)
RESAMPLES = 2000
NONE = "no exemplars (random plans)"


@dataclass(frozen=True)
class Table:
    """What was recorded at one shape: score (ratio) and time of every plan."""

    task: Task
    plans: Mapping[str, Plan]
    ratio: Mapping[str, float]
    time_us: Mapping[str, float]


class Space:
    """Plans as points: the index of each knob's value among those that occur in its family and layout."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        arms: dict[tuple[str, str], list[Plan]] = {}
        for plan in plans:
            arms.setdefault((plan.family, plan.b_layout), []).append(plan)
        self._points: dict[str, tuple[int, ...]] = {}
        self._arm: dict[str, tuple[str, str]] = {}
        self._members: dict[tuple[str, str], list[str]] = {}
        for arm, members in arms.items():
            names = dict.fromkeys(name for m in members for name in m.knobs)
            values = {name: sorted({m.knob(name) for m in members}) for name in names}
            for m in members:
                self._points[m.plan_id] = tuple(values[name].index(m.knob(name)) for name in names)
                self._arm[m.plan_id] = arm
            self._members[arm] = sorted(m.plan_id for m in members)

    def mutate(self, better: str, worse: str | None, tried: set[str], rng: random.Random) -> str | None:
        """A plan that was not tried: the better one's knobs, moved away from the worse one's by the sign of their
        difference; some of the moves, so that the rollouts of a group differ. None if its arm is used up."""
        arm, here = self._arm[better], self._points[better]
        moves = [0] * len(here)
        if worse is not None and self._arm[worse] == arm:
            away = [(a > b) - (a < b) for a, b in zip(here, self._points[worse], strict=True)]
            moves = [step if rng.random() < 0.7 else 0 for step in away]
        if not any(moves):
            moves[rng.randrange(len(moves))] = rng.choice((-1, 1))
        target = [x + step for x, step in zip(here, moves, strict=True)]

        def distance(key: str) -> tuple[int, int, float]:
            steps = [abs(x - t) for x, t in zip(self._points[key], target, strict=True)]
            return sum(s > 0 for s in steps), sum(steps), rng.random()

        open_keys = [key for key in self._members[arm] if key not in tried]
        return min(open_keys, key=distance, default=None)


def search(
    table: Table, space: Space, settings: MemorySettings | None, seed: int, budget: int, group: int, start: int
) -> list[str]:
    """Keys in the order of their trial; without settings no exemplars are used: random plans all the way."""
    first = random.Random(content_hash(["start", table.task.task_id, seed]))  # the same for every strategy
    keys = sorted(table.plans)
    tried = first.sample(keys, min(start if settings else budget, budget, len(keys)))
    rng = random.Random(content_hash(["moves", table.task.task_id, seed]))
    round_number = 0
    while settings is not None and len(tried) < min(budget, len(keys)):
        scored = [Scored(key, table.ratio[key]) for key in tried]
        pair = choose(scored, 2, [table.task.task_id, seed, round_number], settings)
        round_number += 1
        for _ in range(min(group, budget - len(tried), len(keys) - len(tried))):
            known = set(tried)
            found = space.mutate(pair[0], pair[1] if len(pair) > 1 else None, known, rng)
            tried.append(found or rng.choice([key for key in keys if key not in known]))
    return tried


def regrets(table: Table, tried: Sequence[str]) -> list[float]:
    """At each of BUDGETS."""
    best = min(table.time_us.values())
    return [min(table.time_us[key] for key in tried[:n]) / best - 1 for n in BUDGETS]


def tables(shapes: int | None) -> list[Table]:
    device = ReplayDevice()
    try:
        found = []
        plans = {plan.plan_id: plan for plan in device.records.plans()}
        for task in device.records.tasks()[:shapes]:
            timings = {key: device.records.timed(key, task.task_id, "offline", "screen") for key in plans}
            rows = {key: t.row() for key, t in timings.items() if t is not None and t.ok}
            kept = {key: row for key, row in rows.items() if row is not None}
            found.append(
                Table(
                    task,
                    {key: plans[key] for key in kept},
                    {key: row.ratio for key, row in kept.items()},
                    {key: row.time_us for key, row in kept.items()},
                )
            )
        return found
    finally:
        device.close()


def interval(values: Sequence[float], rng: random.Random) -> tuple[float, float, float]:
    """Mean, and the 95 % bootstrap interval of it."""
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLES))
    return sum(values) / len(values), means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


def percent(values: Sequence[float], sign: str = "") -> str:
    mean, low, high = (100 * v for v in interval(values, random.Random(0)))
    return f"{mean:{sign}.2f} [{low:{sign}.2f}, {high:{sign}.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--shapes", type=int, default=None, help="the first so many recorded shapes; default: all")
    parser.add_argument("--group", type=int, default=4, help="candidates from one pair of exemplars")
    parser.add_argument("--temperature", type=float, default=MemorySettings().temperature)
    parser.add_argument("--start", type=int, default=8, help="random plans before the first pair")
    options = parser.parse_args()
    recorded = tables(options.shapes)
    mean: dict[str, list[list[float]]] = {}  # strategy → budget → a mean over seeds for each shape
    for strategy in (*get_args(StrategyName), NONE):
        known = strategy != NONE
        settings = MemorySettings(strategy=strategy, temperature=options.temperature) if known else None
        rows = []
        for table in recorded:
            space = Space(list(table.plans.values()))
            runs = [
                regrets(table, search(table, space, settings, seed, max(BUDGETS), options.group, options.start))
                for seed in range(options.seeds)
            ]
            rows.append([sum(column) / len(column) for column in zip(*runs, strict=True)])
        mean[strategy] = [list(column) for column in zip(*rows, strict=True)]
    print(f"{len(recorded)} shapes, {options.seeds} seeds, temperature {options.temperature:g}", end=", ")
    print(f"groups of {options.group} after {options.start} random plans\n")
    heads = " | ".join(f"{n} evaluations" for n in BUDGETS)
    print(f"| mean regret, % [95 %] | {heads} |\n|---{'|---' * len(BUDGETS)}|")
    for strategy, columns in mean.items():
        print(f"| {strategy} | {' | '.join(percent(column) for column in columns)} |")
    print(f"\n| contrastive minus, points [95 %] | {heads} |\n|---{'|---' * len(BUDGETS)}|")
    ours = mean["contrastive"]
    for strategy, columns in mean.items():
        if strategy != "contrastive":
            differences = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(ours, columns, strict=True)]
            print(f"| {strategy} | {' | '.join(percent(column, '+') for column in differences)} |")


if __name__ == "__main__":
    main()
