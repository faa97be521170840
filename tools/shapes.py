"""Sets of HGEMM shapes: the regime a shape belongs to, a spread over all regimes, and a user's own CSV.

HGEMM only: regimes come from floors over M, N, K and hold for one H200 (132 SMs). Pure, but for reading the CSV.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Literal

from tools.expr import ceil_div
from tools.hgemm import ShapeError, flops, grid, hgemm, min_bytes, parse_shape
from tools.records import Task
from tools.text_files import UnreadableFile, read_text

#: Of a CSV of shapes: a million lines.
SHAPES_BYTES = 32 << 20

Shape = tuple[int, int, int]
Regime = Literal["tiny", "launch-bound", "few-tiles", "memory-bound", "compute-short", "compute-long"]

# What one H200 reaches at best; with these the grid falls into 27 + 341 + 201 + 98 + 104 + 229 shapes.
PEAK_FLOP_PER_US = 790e6
DRAM_BYTES_PER_US = 4.3e6
LAUNCH_US = 1.4  # launch, one memory round trip, store
SM_COUNT = 132

#: From here on one timing costs seconds of GPU time, so a spread holds few of them.
HEAVY_MNK = 2**39
MAX_HEAVY = 4

#: Shapes that every spread of 120 or more holds: the cubes people ask for and the corners of the grid.
LANDMARKS: tuple[Shape, ...] = (
    (64, 64, 64),
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 16384, 16384),
    (64, 64, 16384),
    (64, 4096, 4096),
    (4096, 64, 4096),
    (4096, 4096, 64),
    (8192, 512, 2048),
    (12288, 256, 4096),
    (16384, 16384, 64),
    (64, 16384, 64),
)

# One turn of the round robin. The two regimes that hold over half of the grid get two turns.
_TURN: tuple[Regime, ...] = (
    "tiny",
    "launch-bound",
    "few-tiles",
    "memory-bound",
    "compute-short",
    "compute-long",
    "launch-bound",
    "few-tiles",
)


def floor_us(task: Task) -> float:
    """The least time an H200 can need: arithmetic, memory traffic, or one launch."""
    return max(flops(task) / PEAK_FLOP_PER_US, min_bytes(task) / DRAM_BYTES_PER_US, LAUNCH_US)


def regime(task: Task) -> Regime:
    """What limits a good kernel at this shape; the first that fits, in the order of ``Regime``."""
    m, n, k = task.dims["M"], task.dims["N"], task.dims["K"]
    compute_us = flops(task) / PEAK_FLOP_PER_US
    if max(m, n, k) <= 256:
        return "tiny"
    if floor_us(task) < 3.0:
        return "launch-bound"
    if ceil_div(m, 128) * ceil_div(n, 128) < SM_COUNT and k >= 2048:
        return "few-tiles"
    if min_bytes(task) / DRAM_BYTES_PER_US >= compute_us:
        return "memory-bound"
    return "compute-short" if compute_us < 50.0 else "compute-long"


def spread(n: int = 128) -> list[Shape]:
    """``n`` grid shapes, the same ones every time, such that any prefix covers every regime.

    Landmarks come first within their regime and the ``MAX_HEAVY`` largest shapes last of all, so that an interrupted
    recording has lost depth, not breadth. More than ``MAX_HEAVY`` heavy shapes appear only when ``n`` leaves no choice.
    """
    if not 1 <= n <= len(grid()):
        raise ValueError(f"a spread has 1 to {len(grid())} shapes, not {n}")
    order = list(_ordered())
    heavy = [s for s in order if prod(s) >= HEAVY_MNK]
    light = [s for s in order if prod(s) < HEAVY_MNK]
    room = min(MAX_HEAVY, n // 30) if n - MAX_HEAVY <= len(light) else n - len(light)
    return light[: n - room] + heavy[:room]


def _ordered() -> Iterator[Shape]:
    """The whole grid, regimes in turn, each regime from its landmarks to ever finer subdivisions of its size range."""
    queues: dict[Regime, list[Shape]] = {name: [] for name in _TURN}
    for shape in sorted(grid(), key=lambda s: (prod(s), s[2], s)):
        queues[regime(hgemm(*shape))].append(shape)
    for name, shapes in queues.items():
        landmarks = [s for s in LANDMARKS if s in shapes]
        rest = [s for s in shapes if s not in landmarks]
        by_subdivision = sorted(range(len(rest)), key=lambda i: _bit_reversed(i, len(rest)))
        # Popped from the end.
        queues[name] = (landmarks + [rest[i] for i in by_subdivision])[::-1]
    while any(queues.values()):
        for name in _TURN:
            if queues[name]:
                yield queues[name].pop()


def _bit_reversed(index: int, length: int) -> int:
    bits = max(1, (length - 1).bit_length())
    return int(format(index, f"0{bits}b")[::-1], 2)


def parse_shapes_csv(path: Path, on_repeat: Callable[[int, Shape], None] | None = None) -> list[Shape]:
    """Shapes from a CSV: columns M, N, K by name where there is a header, else the first three. Order is kept, repeats,
    blank lines and lines that start with # are dropped; ``on_repeat`` hears of each repeat and its line. Raises
    ShapeError with the file and line."""
    try:
        text = read_text(path, "the shapes file", SHAPES_BYTES)
    except UnreadableFile as error:
        raise ShapeError(str(error)) from error
    columns = (0, 1, 2)
    shapes: dict[Shape, None] = {}
    rows = csv.reader(text.splitlines())
    first = True
    try:
        for row in rows:
            cells = [cell.strip() for cell in row]
            if not any(cells) or cells[0].startswith("#"):
                continue
            upper = [cell.upper() for cell in cells]
            if first and {"M", "N", "K"} <= set(upper):
                columns = (upper.index("M"), upper.index("N"), upper.index("K"))
            else:
                shape = _shape(cells, columns)
                if shape in shapes and on_repeat is not None:
                    on_repeat(rows.line_num, shape)
                shapes[shape] = None
            first = False
    except (ShapeError, csv.Error) as error:
        raise ShapeError(f"{path} line {rows.line_num}: {error}") from error
    if not shapes:
        raise ShapeError(f"{path} holds no shapes: give one M,N,K a line")
    return list(shapes)


def _shape(cells: list[str], columns: tuple[int, int, int]) -> Shape:
    if len(cells) == 1:  # "64x64x64", one cell
        return parse_shape(cells[0])
    if len(cells) <= max(columns):
        raise ShapeError(f"'{','.join(cells)}' has {len(cells)} columns; M,N,K are three")
    return parse_shape(",".join(cells[c] for c in columns))
