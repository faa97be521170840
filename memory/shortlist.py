"""Which plans should do well at a shape, before anything is measured there: the analytical model, corrected by what was
measured at the nearest shapes. Pure.

A plan's estimate is multiplied by how far the model was off for that very plan at the nearest shapes that measured it,
in the geometric mean, weighted by nearness. Where little is known of the plan it is drawn towards what is known of its
family, and that towards no correction. docs/training.md has the figures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from memory.exemplars_read import Tried, distance
from tools.model import estimates_us
from tools.model_terms import Constants, Gpu
from tools.records import Plan, Task, TimingRow

#: Near shapes that are asked; of these, as many as a plan is judged by; and plans that a prompt lists. At most shapes
#: only the plans were measured that the model ranks first there. Chosen on training shapes, each left out in turn.
ASKED = 16
NEAR = 4
LISTED = 8
#: Weight of a shape that is one octave (a factor of two in all dims together) away: exp(-1 / _OCTAVES).
_OCTAVES = 1.5
#: Weight of what is known of the family, against the shapes' own; and of "the model is right", against the family's.
_PRIOR = 0.2


class Measured(NamedTuple):
    """Of one shape: microseconds by plan_id, of plans that passed, as at one state of the clocks."""

    task: Task
    times_us: Mapping[str, float]


def measured(task: Task, tried: Iterable[Tried]) -> Measured:
    """Ratios times the reference's median. At large shapes the power limit makes one run 8 % slower than another; the
    ratio is of the run, so a plan is not the quicker one for having been timed on a cool GPU."""
    rows: dict[str, TimingRow] = {}
    for one in tried:
        timing = one.timing()
        row = timing.row() if timing is not None else None
        if row is not None and one.failure is None:
            rows[one.key] = row
    ref_us = median(row.ref_us for row in rows.values()) if rows else 0.0
    return Measured(task, {key: ref_us / row.ratio for key, row in rows.items()})


class Expected(NamedTuple):
    plan: Plan
    time_us: float


def expected(
    plans: Sequence[Plan],
    task: Task,
    gpu: Gpu,
    near: Sequence[Measured],
    constants: Constants | None = None,
    measured_on: Gpu | None = None,
) -> list[Expected]:
    """Quickest first; plans that the model knows nothing of are left out. ``near`` has the closest shape first, and was
    measured on ``measured_on``, or on ``gpu`` where that is not given."""
    estimates = estimates_us(plans, task, gpu, constants)
    names = sorted({plan.family for plan in plans})
    family = np.array([names.index(plan.family) for plan in plans], dtype=int)
    of_plan, of_family = _Mean(len(plans)), _Mean(len(names))
    of_family.add(np.arange(len(names)), 0.0, _PRIOR)
    for shape in near:
        known = np.array([i for i, plan in enumerate(plans) if plan.plan_id in shape.times_us], dtype=int)
        if not known.size:
            continue
        there = [plans[i] for i in known]
        took_us = np.array([shape.times_us[plan.plan_id] for plan in there])
        off = np.log(took_us / estimates_us(there, shape.task, measured_on or gpu, constants))
        sound = np.isfinite(off) & (of_plan.count[known] < NEAR)
        known, off = known[sound], off[sound]
        weight = float(np.exp(-distance(task, shape.task) / _OCTAVES))
        of_plan.add(known, off, weight)
        for one in np.unique(family[known]):
            of_family.add(np.array([one]), float(np.median(off[family[known] == one])), weight)
    of_plan.add(np.arange(len(plans)), of_family.value[family], _PRIOR)
    times = estimates * np.exp(of_plan.value)
    order = [int(i) for i in np.argsort(times, kind="stable") if np.isfinite(times[i])]  # NaN last
    return [Expected(plans[i], float(times[i])) for i in order]


class _Mean:
    """Weighted, of several things at once."""

    def __init__(self, size: int) -> None:
        self._sum, self._weight = np.zeros(size), np.zeros(size)
        self.count = np.zeros(size, dtype=int)

    def add(self, places: np.ndarray, values: np.ndarray | float, weight: float) -> None:
        self._sum[places] += weight * np.asarray(values)
        self._weight[places] += weight
        self.count[places] += 1

    @property
    def value(self) -> np.ndarray:
        return np.asarray(self._sum / self._weight)


def shortlist(ranked: Sequence[Expected], tried: Collection[str], count: int = LISTED) -> list[Expected]:
    """The first that were not tried yet."""
    return [one for one in ranked if one.plan.plan_id not in tried][:count]
