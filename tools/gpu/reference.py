"""The FP64 product of FP16 operands and its error scale, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cupy as cp

from tools.memory_needs import BLOCK_BYTES
from tools.records import BLayout


def product_blocks(
    a: Any, b: Any, m: int, n: int, k: int, b_layout: BLayout, bounded: bool = True
) -> Iterator[tuple[slice, Any, Any, int]]:
    """(flat slice of C, C64, |A||B|, offset) for blocks of rows of at most BLOCK_BYTES.

    ``a`` and ``b`` are flat FP16 words, B as stored. Without ``bounded`` the second product, which exact comparisons do
    not look at, is left out and C64 given twice. Memory: 8 KN bytes for B in FP64, the same again for |B|, and blocks.
    """
    a16 = a.view(cp.float16).reshape(m, k)
    b16 = b.view(cp.float16)
    b64 = (b16.reshape(n, k).T if b_layout == "nk" else b16.reshape(k, n)).astype(cp.float64)
    b_abs = cp.abs(b64) if bounded else b64
    rows = max(1, min(m, BLOCK_BYTES // (16 * (k + n))))
    for start in range(0, m, rows):
        block = a16[start : start + rows].astype(cp.float64)
        ref = cp.matmul(block, b64)
        bound = cp.matmul(cp.abs(block, out=block), b_abs) if bounded else ref
        offset = start * n
        yield slice(offset, offset + ref.size), ref, bound, offset
