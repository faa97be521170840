"""Which plans should do well at a shape, before anything is measured there: the analytical model, corrected by what was
measured at the nearest shapes. Pure.

A plan's estimate is multiplied by how far the model was off for that very plan at each near shape, in the geometric
mean, weighted by nearness, and drawn towards no correction where little is known. docs/training.md has the figures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from memory.exemplars_read import Tried, distance
from tools.model import estimates_us
from tools.model_terms import Constants, Gpu
from tools.records import Plan, Task

#: Near shapes that are asked, and plans that a prompt lists. Chosen on training shapes, each left out in turn.
NEAR = 4
LISTED = 8
#: Weight of a shape that is one octave (a factor of two in all dims together) away: exp(-1 / _OCTAVES).
_OCTAVES = 1.5
#: Weight of "the model is right", against the shapes' own.
_PRIOR = 0.2


class Measured(NamedTuple):
    """Of one shape: microseconds by plan_id, of plans that passed."""

    task: Task
    times_us: Mapping[str, float]


def measured(task: Task, tried: Iterable[Tried]) -> Measured:
    times: dict[str, float] = {}
    for one in tried:
        timing = one.timing()
        row = timing.row() if timing is not None else None
        if row is not None and one.failure is None:
            times[one.key] = row.time_us
    return Measured(task, times)


class Expected(NamedTuple):
    plan: Plan
    time_us: float


def expected(
    plans: Sequence[Plan],
    task: Task,
    gpu: Gpu,
    near: Sequence[Measured],
    constants: Constants | None = None,
) -> list[Expected]:
    """Quickest first; plans that the model knows nothing of are left out. ``gpu`` is that of the measurements too."""
    estimates = estimates_us(plans, task, gpu, constants)
    corrections, weights = np.zeros(len(plans)), np.full(len(plans), _PRIOR)
    for shape in near:
        known = [i for i, plan in enumerate(plans) if plan.plan_id in shape.times_us]
        if not known:
            continue
        there = [plans[i] for i in known]
        measured = np.array([shape.times_us[plan.plan_id] for plan in there])
        off = np.log(measured / estimates_us(there, shape.task, gpu, constants))
        weight = np.exp(-distance(task, shape.task) / _OCTAVES)
        sound = np.isfinite(off)
        places = np.array(known)[sound]
        corrections[places] += weight * off[sound]
        weights[places] += weight
    times = estimates * np.exp(corrections / weights)
    order = [int(i) for i in np.argsort(times, kind="stable") if np.isfinite(times[i])]  # NaN last
    return [Expected(plans[i], float(times[i])) for i in order]


def shortlist(ranked: Sequence[Expected], tried: Collection[str], count: int = LISTED) -> list[Expected]:
    """The first that were not tried yet."""
    return [one for one in ranked if one.plan.plan_id not in tried][:count]
