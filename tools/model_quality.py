"""How good an order of plans is against what was measured: regret at k and rank correlation, by regime. Pure.

Regret at k: how much slower the best of the first k is than the best of all that were measured, 1 - ratio / best ratio,
offline at screen budget. Only shapes where every plan was timed count: elsewhere the optimum is not known. Every figure
of the model uses constants that were fitted without that shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import comb
from typing import NamedTuple

import numpy as np

from tools.families import accepted_plans
from tools.model import Fitted, columns, estimates_us, held_out
from tools.model_terms import Array, Case, Gpu, by_tile
from tools.record_file import Records
from tools.records import Family, Plan, Record, Task
from tools.shapes import regime

KS = (1, 4, 8, 16, 24)
ORDERS = ("model", "tile cost", "random")


class Measured(NamedTuple):
    """One shape: plans and their ratios to the headline reference, and microseconds brought to the same reference time
    (ratios are of interleaved runs, so clocks cancel)."""

    task: Task
    plans: tuple[Plan, ...]
    ratios: Array
    times_us: Array


class Spread(Record):
    mean: float
    p90: float
    worst: float


class Quality(Record):
    """One order over one regime's shapes. Regrets are fractions."""

    regime: str
    order: str
    shapes: int
    spearman: float | None = None
    regret: dict[int, Spread]


def recorded_families(records: Records, families: Mapping[str, Family]) -> dict[str, Family]:
    """Those of which the record file holds plans: not a new one that waits for its recording."""
    recorded = {plan.family for plan in records.plans()}
    return {name: family for name, family in families.items() if name in recorded}


def measured(records: Records, families: dict[str, Family]) -> tuple[list[Measured], int]:
    """The shapes with a timing of every plan of ``families`` that accepts them, and how many others have some. A family
    of which nothing was recorded yet does not count."""
    families = recorded_families(records, families)
    found, partial = [], 0
    for task in records.tasks():
        plans, ratios, refs = [], [], []
        accepted = [(v, v.plan) for v in accepted_plans(families, task, records.device.sm_count) if v.plan is not None]
        for variant, plan in accepted:
            known = records.is_of(variant)  # an edited source has no times yet
            timing = records.timed(plan.plan_id, task.task_id, "offline", "screen") if known else None
            row = timing.row() if timing is not None else None
            if row is not None:
                plans.append(plan)
                ratios.append(row.ratio)
                refs.append(row.ref_us)
        if plans and len(plans) == len(accepted):
            times = float(np.median(refs)) / np.array(ratios)
            found.append(Measured(task, tuple(plans), np.array(ratios), times))
        else:
            partial += bool(plans)
    return found, partial


def regrets(ratios_in_order: Array) -> list[float]:
    """At each of KS, for one order."""
    best = float(np.max(ratios_in_order))
    return [1 - float(np.max(ratios_in_order[:k])) / best for k in KS]


def random_regrets(ratios: Array) -> list[float]:
    """Expected over all random orders: the best of k without replacement, exactly."""
    ordered = np.sort(ratios)
    n = len(ordered)
    out = []
    for k in KS:
        k = min(k, n)
        weights = np.array([comb(i, k - 1) / comb(n, k) for i in range(n)])  # that element i is the largest of k
        out.append(1 - float(weights @ ordered) / float(ordered[-1]))
    return out


def spearman(a: Array, b: Array) -> float:
    """Rank correlation; equal values share their mean rank."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean_rank: Array = (ends - (counts - 1) / 2)[inverse]
    return mean_rank


def tile_cost_us(plans: Sequence[Plan], task: Task, gpu: Gpu) -> Array:
    """The cost from tile and split alone, for every family that has both: what there was before this model."""
    out = np.full(len(plans), np.inf)
    case = Case.of(task.dims["M"], task.dims["N"], task.dims["K"], gpu)
    groups: dict[str, list[int]] = defaultdict(list)
    for i, plan in enumerate(plans):
        if {"BM", "BN"} <= set(plan.knobs):
            groups[plan.family].append(i)
    for members in groups.values():
        out[members] = by_tile(columns([plans[i] for i in members]), case)
    return out


def evaluate(shapes: Sequence[Measured], gpu: Gpu, fitted: Fitted) -> list[Quality]:
    """All regimes together (``all``), then each regime, for each of ORDERS."""
    estimators: dict[str, Callable[[Measured], Array]] = {
        "model": lambda s: estimates_us(s.plans, s.task, gpu, held_out(s.task, fitted)),
        "tile cost": lambda s: tile_cost_us(s.plans, s.task, gpu),
    }
    rows: dict[tuple[str, str], list[tuple[float | None, list[float]]]] = defaultdict(list)
    for shape in shapes:
        for order in ORDERS:
            if order in estimators:
                estimated = estimators[order](shape)
                correlation: float | None = spearman(estimated, shape.times_us)
                found = regrets(shape.ratios[np.argsort(estimated, kind="stable")])
            else:
                correlation, found = None, random_regrets(shape.ratios)
            for group in ("all", regime(shape.task)):
                rows[group, order].append((correlation, found))
    groups = ["all", *sorted({group for group, _ in rows} - {"all"})]
    return [_quality(group, order, rows[group, order]) for group in groups for order in ORDERS]


def _quality(group: str, order: str, rows: list[tuple[float | None, list[float]]]) -> Quality:
    known = [correlation for correlation, _ in rows if correlation is not None]
    table = np.array([found for _, found in rows])
    spreads = {
        k: Spread(mean=float(col.mean()), p90=float(np.quantile(col, 0.9)), worst=float(col.max()))
        for k, col in zip(KS, table.T, strict=True)
    }
    mean = float(np.mean(known)) if known else None
    return Quality(regime=group, order=order, shapes=len(rows), spearman=mean, regret=spreads)
