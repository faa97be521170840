"""Cells of an evaluation → the table: mean regret with a 95 % interval, at each budget, and differences in pairs. Pure.

Regret at k: 1 - (best ratio of the first k evaluations) / (best recorded ratio), of shapes where every accepted plan is
recorded; 1 where none of the k passed. The interval resamples shapes, and seeds within a shape: seeds of one shape are
too alike to count as so many shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tools.records import Record
from training.evaluate import Cell
from training.replaying import Shape

RESAMPLES = 2000


class Estimate(Record):
    """Fractions."""

    mean: float
    lo: float
    hi: float


class PolicyRow(Record):
    """``regret`` by budget; None where no cell has a known optimum. ``difference``: own regret less that of ``against``
    at the same shape and seed; below 0 is better."""

    policy: str
    shapes: int
    cells: int
    regret: dict[int, Estimate | None]
    difference: dict[int, Estimate | None]
    evaluations: int  # proposals that cost one
    not_recorded: int
    calls: int
    invalid: int
    empty: int  # cells in which nothing could be proposed


def regret(cell: Cell, budget: int, best: float) -> float:
    passed = [ratio for ratio in cell.ratios[:budget] if ratio is not None]
    return 1 - max(passed, default=0.0) / best


def table(
    cells: Sequence[Cell],
    shapes: Sequence[Shape],
    budgets: Sequence[int],
    quota_of: Mapping[str, Callable[[int], int]],
    against: str | None,
) -> list[PolicyRow]:
    """A row a policy, in the order of ``quota_of``, which says with which quota a policy plays a budget. A cell counts
    for budgets up to its own: of more evaluations than were played nothing is known."""
    best = {shape.task.task_id: shape.best for shape in shapes if shape.is_complete and shape.best > 0}
    found: dict[str, dict[int, dict[tuple[str, int], float]]] = defaultdict(lambda: defaultdict(dict))
    for cell in cells:
        for budget in budgets:
            is_played = budget <= cell.budget and cell.quota == quota_of[cell.policy](budget)
            if is_played and cell.task_id in best and not cell.empty:
                at = (cell.task_id, cell.seed)
                found[cell.policy][budget][at] = regret(cell, budget, best[cell.task_id])
    rows = []
    for policy in quota_of:
        mine = [cell for cell in cells if cell.policy == policy]
        regrets = found[policy]
        other = found[against] if against is not None and against in quota_of and against != policy else None
        rows.append(
            PolicyRow(
                policy=policy,
                shapes=len({cell.task_id for cell in mine}),
                cells=len({(cell.task_id, cell.seed) for cell in mine}),
                regret={budget: estimate(regrets[budget]) for budget in budgets},
                difference={b: estimate(_apart(regrets[b], other[b])) for b in budgets} if other is not None else {},
                evaluations=sum(len(cell.ratios) for cell in mine),
                not_recorded=sum(cell.not_recorded for cell in mine),
                calls=sum(cell.calls for cell in mine),
                invalid=sum(cell.invalid for cell in mine),
                empty=sum(cell.empty for cell in mine),
            )
        )
    return rows


def _apart(
    mine: Mapping[tuple[str, int], float], other: Mapping[tuple[str, int], float]
) -> dict[tuple[str, int], float]:
    return {at: value - other[at] for at, value in mine.items() if at in other}


def estimate(values: Mapping[tuple[str, int], float]) -> Estimate | None:
    """Of values by (shape, seed); None of nothing."""
    if not values:
        return None
    by_shape: dict[str, list[float]] = defaultdict(list)
    for (task_id, _), value in sorted(values.items()):
        by_shape[task_id].append(value)
    means = _resampled(list(by_shape.values()), np.random.default_rng(0))
    lo, hi = np.quantile(means, [0.025, 0.975])
    return Estimate(mean=float(np.mean(list(values.values()))), lo=float(lo), hi=float(hi))


def _resampled(groups: Sequence[Sequence[float]], rng: np.random.Generator) -> NDArray[np.float64]:
    """Means of samples of shapes, each with a sample of its seeds."""
    width = max(map(len, groups))
    table = np.array([[*group, *[0.0] * (width - len(group))] for group in groups])
    sizes = np.array([len(group) for group in groups])
    shapes = rng.integers(len(groups), size=(RESAMPLES, len(groups)))
    seeds = (rng.random((RESAMPLES, len(groups), width)) * sizes[shapes][:, :, None]).astype(int)
    drawn = table[shapes[:, :, None], seeds]
    used = np.arange(width)[None, None, :] < sizes[shapes][:, :, None]
    means: NDArray[np.float64] = (drawn * used).sum((1, 2)) / used.sum((1, 2))
    return means


# --- as text ----------------------------------------------------------------------------------------------------------


def lines(rows: Sequence[PolicyRow], budgets: Sequence[int], against: str | None, markdown: bool) -> list[str]:
    head = [*_head(budgets), "not recorded", "invalid calls"]
    body = [_counted(row, [row.policy, *(_percent(row.regret[budget]) for budget in budgets)]) for row in rows]
    return [*_shown([head, *body], markdown), *difference_lines(rows, budgets, against, markdown)]


def difference_lines(
    rows: Sequence[PolicyRow], budgets: Sequence[int], against: str | None, markdown: bool
) -> list[str]:
    """Empty where nothing is compared."""
    differing = [[row.policy, *(_percent(row.difference[b]) for b in budgets)] for row in rows if row.difference]
    if not differing:
        return []
    told = f"Regret less that of {against} at the same shape and seed, in % of the optimum:"
    return ["", told, "", *_shown([_head(budgets), *differing], markdown)]


def _head(budgets: Sequence[int]) -> list[str]:
    return ["policy", *(f"{budget} evaluations" if budget > 1 else "1 evaluation" for budget in budgets)]


def _shown(table: Sequence[Sequence[str]], markdown: bool) -> list[str]:
    return _grid(table) if markdown else _aligned(table)


def _counted(row: PolicyRow, body: list[str]) -> list[str]:
    return [*body, f"{row.not_recorded} of {row.evaluations}", f"{row.invalid} of {row.calls}"]


def _percent(found: Estimate | None) -> str:
    return f"{100 * found.mean:.2f} [{100 * found.lo:.2f}, {100 * found.hi:.2f}]" if found is not None else "-"


def _grid(table: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ["| " + " | ".join(row) + " |" for row in table]
    return [head, "|---" * len(table[0]) + "|", *body]


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
