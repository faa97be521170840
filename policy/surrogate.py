"""Which plans to evaluate next, from what is expected of all and told of some: a Gaussian process. Pure.

A told ratio says by how much the expectation was off for this plan. It was so for the other plans of its family in
part, and the more the fewer steps of the knobs lie between. A batch is chosen greedily by the mean of log time less
``daring`` standard deviations, as if each chosen plan had been told already, so that a batch spreads (GP-BUCB). 8 of
up to about 370 plans are chosen in some milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from policy.base import Trial
from tools.model import Ranked
from tools.records import Plan, Status

#: Of log time: by how much expectations of a whole family are off, those of one plan, and one measurement; as standard
#: deviations. Chosen on the shapes with every plan recorded; half or twice of each finds about the same.
_FAMILY, _PLAN, _NOISE = 0.1, 0.08, 0.02
#: Knob steps (a factor of two, a flag) after which what is known of one plan says 1/e of that of another.
_STEPS = 6.0
#: Of all plans alike: a ratio's reference is not known. Wide enough to say nothing.
_OFFSET = 10.0
#: A rejected plan counts as this much slower than expected, which speaks against its like. Of log time.
_REJECTED = float(np.log(2))
#: Added to what is chosen only if nothing else is left.
_LAST = 1e6

Array = NDArray[np.float64]


def choose(
    expected: Sequence[Ranked],
    trials: Sequence[Trial],
    open_ids: Collection[str],
    first: Sequence[Plan],
    count: int,
    daring: float,
) -> list[Plan]:
    """Up to ``count`` plans out of those of ``expected`` that are open, ``first`` before any other. Of a family whose
    times nothing is expected of, no more than that before one of it was told."""
    plans = [one.plan for one in expected]
    place = {plan.plan_id: i for i, plan in enumerate(plans)}
    mean, spread = _log_times(expected), _covariance(plans)
    told = _told(trials, place, mean)
    if told:
        mean, spread = _given(mean, spread, told)
    heard = {plans[i].family for i in told}
    late = np.array([_LAST * (one.time_us is None and one.plan.family not in heard) for one in expected])
    left = [place[plan_id] for plan_id in place if plan_id in open_ids]
    queue = [place[plan.plan_id] for plan in first if plan.plan_id in open_ids]
    chosen: list[int] = []
    while len(chosen) < count and left:
        bound = mean + late - daring * np.sqrt(np.maximum(np.diagonal(spread), 0.0))
        best = queue.pop(0) if queue else min(left, key=lambda i: float(bound[i]))
        chosen.append(best)
        left.remove(best)
        spread = spread - np.outer(spread[best], spread[best]) / (spread[best, best] + _NOISE**2)
    return [plans[i] for i in chosen]


def _log_times(expected: Sequence[Ranked]) -> Array:
    """A plan of which nothing is expected may be as quick as the quickest."""
    known = [one.time_us for one in expected if one.time_us is not None]
    best = min(known, default=1.0)
    return np.log([best if one.time_us is None else one.time_us for one in expected])


def _told(trials: Sequence[Trial], place: dict[str, int], mean: Array) -> dict[int, float]:
    """How far off the expectation was, up to a constant that all share."""
    passed = {place[t.key]: -float(np.log(t.ratio)) - mean[place[t.key]] for t in trials if t.key in place and t.ratio}
    rejected = [place[t.key] for t in trials if t.key in place and t.status is Status.FAILED]
    usual = float(np.median(list(passed.values()))) if passed else 0.0
    return {**dict.fromkeys(rejected, usual + _REJECTED), **passed}


def _given(mean: Array, spread: Array, told: dict[int, float]) -> tuple[Array, Array]:
    at = list(told)
    known = spread[np.ix_(at, at)] + _NOISE**2 * np.eye(len(at))
    weights = np.linalg.solve(known, spread[at]).T
    return mean + weights @ np.array(list(told.values())), spread - weights @ spread[at]


def _covariance(plans: Sequence[Plan]) -> Array:
    found = np.full((len(plans), len(plans)), _OFFSET**2)
    families: dict[str, list[int]] = {}
    for i, plan in enumerate(plans):
        families.setdefault(plan.family, []).append(i)
    for members in families.values():
        names = dict.fromkeys(name for i in members for name in plans[i].knobs)
        values = np.array([[plans[i].knob(name) for name in names] for i in members], float)
        at = np.column_stack([np.log2(1.0 + values), [plans[i].b_layout == "nk" for i in members]])
        steps = np.minimum(np.abs(at[:, None] - at[None, :]), 1.0).sum(-1)
        found[np.ix_(members, members)] += _FAMILY**2 + _PLAN**2 * np.exp(-steps / _STEPS)
    return found
