"""The HGEMM task: C[M,N] = A[M,K] · B[K,N], FP16 in and out. A and C are row-major; B is stored ``kn`` or ``nk``."""

from __future__ import annotations

import itertools
import re
from typing import Literal

from tools.records import Task, TensorSpec

#: The paper's grid: all 1000 (M, N, K) from these.
GRID_DIMS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)


class ShapeError(ValueError):
    """The text is not three positive integers."""


def parse_shape(text: str) -> tuple[int, int, int]:
    """``"4096,4096,64"`` (or with x) → (M, N, K). Raises ShapeError with one sentence."""
    parts = text.lower().replace("x", ",").split(",")
    # Not whatever int() takes: to it "64_0" is 640.
    dims = tuple(int(p) for p in parts if re.fullmatch(r"\s*[0-9]{1,18}\s*", p, re.ASCII))
    if not len(dims) == len(parts) == 3 or any(d < 1 for d in dims):
        raise ShapeError(f"'{text}' is not a shape: give three positive integers M,N,K, for example 4096,4096,64")
    if any(d > 2**31 - 1 for d in dims):
        raise ShapeError(f"'{text}' has a dimension over 2^31 - 1, which no kernel here can index")
    return dims


def hgemm(m: int, n: int, k: int, accumulate: Literal["float32", "float16"] = "float32") -> Task:
    return Task(
        op="hgemm",
        dims={"M": m, "N": n, "K": k},
        tensors=(
            TensorSpec(role="A", dtype="float16", dims=("M", "K")),
            TensorSpec(role="B", dtype="float16", dims=("K", "N"), layouts=("kn", "nk")),
            TensorSpec(role="C", dtype="float16", dims=("M", "N"), output=True),
        ),
        accumulate=accumulate,
    )


def flops(task: Task) -> int:
    return 2 * task.dims["M"] * task.dims["N"] * task.dims["K"]


def min_bytes(task: Task) -> int:
    """A and B read once, C written once."""
    m, n, k = task.dims["M"], task.dims["N"], task.dims["K"]
    return 2 * (m * k + k * n + m * n)


def grid() -> list[tuple[int, int, int]]:
    return list(itertools.product(GRID_DIMS, GRID_DIMS, GRID_DIMS))
