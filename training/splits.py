"""Which shapes are trained on: by a hash of the shape, so that every file and every machine agrees. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import cache

from tools.hgemm import grid
from tools.records import Task
from training.errors import TrainingError
from training.rows import Split

#: Of the grid's shapes, so many in a hundred are held out.
HELDOUT_PERCENT = 20


def split_of(task: Task) -> Split:
    """``off_grid`` for shapes that the paper's grid does not have: never trained on, to see what generalises."""
    dims = (task.dims.get("M", 0), task.dims.get("N", 0), task.dims.get("K", 0))
    if dims not in _grid():
        return "off_grid"
    return "heldout" if _percentile(task) < HELDOUT_PERCENT else "train"


def _percentile(task: Task) -> int:
    """[0, 100). Not Python's hash, which differs from process to process."""
    name = ",".join(f"{dim}={size}" for dim, size in sorted(task.dims.items()))
    return int.from_bytes(hashlib.sha256(f"hgemm-split-1 {name}".encode()).digest()[:8], "big") % 100


@cache
def _grid() -> frozenset[tuple[int, int, int]]:
    return frozenset(grid())


def is_asked(task: Task, asked: Collection[str]) -> bool:
    return "all" in asked or split_of(task) in asked


def asked_splits(text: str) -> tuple[str, ...]:
    """One, or several with commas between. Raises TrainingError for one that there is not."""
    asked = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in asked if name not in ("heldout", "off_grid", "train", "all")]:
        raise TrainingError(f"--split is heldout, off_grid, train or all, not '{unknown[0]}'")
    return asked
