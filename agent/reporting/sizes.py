"""Sizes of HGEMM shapes, as tables and figures group them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agent.reporting.model import ShapeReport
from tools.hgemm import GRID_DIMS, grid

#: Label, and bounds of log2 MNK: the lower belongs to the bin, the upper does not.
SIZE_BINS: tuple[tuple[str, int | None, int | None], ...] = (
    ("< 2^24", None, 24),
    ("2^24 to 2^27", 24, 27),
    ("2^27 to 2^30", 27, 30),
    ("2^30 to 2^33", 30, 33),
    ("2^33 to 2^36", 33, 36),
    (">= 2^36", 36, None),
)
#: CUDA events tell times apart that differ by about this much.
EVENT_RESOLUTION_US = 0.5
#: The width of a band's bin, in powers of two, by panel.
PANELS: tuple[tuple[str, float], ...] = (("log2_mnk", 1.0), ("log2_mean_dim", 0.5), ("log2_max_dim", 0.5))


def in_bin(mnk: int, lo: int | None, hi: int | None) -> bool:
    return (lo is None or mnk >= 2**lo) and (hi is None or mnk < 2**hi)


def on_grid(shape: ShapeReport) -> bool:
    return {shape.m, shape.n, shape.k} <= set(GRID_DIMS)


def of_grid(shapes: Sequence[ShapeReport]) -> tuple[list[ShapeReport], list[ShapeReport]]:
    """What statistics are of, and the others: all and none where fewer than half are on the grid, for layers of models
    are on it only by chance."""
    there = [shape for shape in shapes if on_grid(shape)]
    others = [shape for shape in shapes if not on_grid(shape)]
    return (there, others) if len(there) >= len(others) else (list(shapes), [])


def grid_shapes(lo: int | None, hi: int | None) -> int:
    """Of the paper's 1,000 shapes, those in a bin."""
    return sum(in_bin(m * n * k, lo, hi) for m, n, k in grid())


def size_of(shape: ShapeReport, x: str) -> float:
    dims = (shape.m, shape.n, shape.k)
    value = {"log2_mnk": shape.mnk, "log2_mean_dim": sum(dims) / 3, "log2_max_dim": max(dims)}[x]
    return math.log2(value)
