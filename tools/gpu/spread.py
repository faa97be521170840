"""The paper's second tier: how far cuBLAS's own variants lie apart on the same operands (reported, never rejecting)."""

from __future__ import annotations

import itertools
from typing import Any

import cupy as cp

from tools.gpu.data import new_stats, read_stats
from tools.gpu.references import LAYOUTS, Library, References
from tools.gpu.verify import Verifier
from tools.numerics import gamma32


def baseline_spread(references: References, verifier: Verifier, library: Library) -> float:
    """Largest |difference| between any two of cuBLAS, cuBLASLt first and cuBLASLt tuned, NN and TN, and FP64."""
    m, n, k = verifier.m, verifier.n, verifier.k
    kernels, stream = verifier.kernels, verifier.stream.ptr
    own = verifier.b.reshape(n, k) if verifier.variant.b_layout == "nk" else verifier.b.reshape(k, n)
    other = cp.ascontiguousarray(own.T)
    stored = {verifier.variant.b_layout: own, ("kn" if verifier.variant.b_layout == "nk" else "nk"): other}
    outputs: list[Any] = []
    a = int(verifier.a.data.ptr)
    for layout in LAYOUTS:
        b = int(stored[layout].data.ptr)
        lt = references.lt[layout]
        for algorithm in (None, references.heuristic(layout), references.tuned(layout)):
            out = cp.empty(m * n, cp.uint16)
            if algorithm is None:
                library.cublas.enqueue(m, n, k, layout, a, b, int(out.data.ptr), stream)
            else:
                lt.enqueue(algorithm, a, b, int(out.data.ptr), library.workspace_address, stream)
            outputs.append(out)
    pairs = list(itertools.combinations(range(len(outputs)), 2))
    stats = new_stats(len(pairs) + len(outputs))
    for row, (i, j) in enumerate(pairs):
        kernels.max_difference(outputs[i], outputs[j], stats[row])

    for rows, ref, bound, offset in verifier.product_blocks():
        for i, out in enumerate(outputs):
            kernels.compare(out[rows], ref, bound, offset, "interval", gamma32(k), stats[len(pairs) + i])
    return max(s.max_abs_error for s in read_stats(stats))
