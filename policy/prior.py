"""A rough cost model of a plan at a shape: where a search looks first. Pure; never reported, never a measurement.

It reads the conventional knob names BM, BN (tile), SPLIT… and CLUSTER_K (parts of K). A family without them ranks in
its manifest's order. HGEMM only. Rates are per SM of an H200: 790 TFLOP/s, 6 TB/s from L2, 132 SMs, 1.4 us floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.expr import ceil_div
from tools.records import Plan, Task

_FLOP_PER_US_PER_SM = 790e6 / 132
_BYTES_PER_US_PER_SM = 6e6 / 132
_LAUNCH_US = 1.4
_TILE_US = 0.4  # prologue and epilogue of one tile
_SPLIT_NAMES = ("SPLIT", "CLUSTER_K")
_SPLIT_US = 0.6  # reduction over the parts of K


def estimate_us(plan: Plan, task: Task, sm_count: int) -> float | None:
    """None where the plan's knobs or the task's dims are not the ones the model knows."""
    dims, knobs = task.dims, plan.knobs
    if not {"M", "N", "K"} <= set(dims) or not {"BM", "BN"} <= set(knobs):
        return None
    bm, bn, splits = knobs["BM"], knobs["BN"], _splits(knobs)
    tiles = ceil_div(dims["M"], bm) * ceil_div(dims["N"], bn) * splits
    k = ceil_div(dims["K"], splits)
    compute = 2 * bm * bn * k / _FLOP_PER_US_PER_SM
    memory = 2 * (bm + bn) * k / _BYTES_PER_US_PER_SM
    waves = ceil_div(tiles, sm_count)
    return _LAUNCH_US + waves * (max(compute, memory) + _TILE_US) + (_SPLIT_US if splits > 1 else 0.0)


def _splits(knobs: Mapping[str, int]) -> int:
    return max([1, *(value for name, value in knobs.items() if name.startswith(_SPLIT_NAMES))])


def ranked(plans: Sequence[Plan], task: Task, sm_count: int) -> list[Plan]:
    """Most promising first; plans the model does not know keep their order, after the known ones."""
    estimates = [estimate_us(plan, task, sm_count) for plan in plans]
    order = sorted(range(len(plans)), key=lambda i: (estimates[i] is None, estimates[i] or 0.0, i))
    return [plans[i] for i in order]
