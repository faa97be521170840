"""The gate's numbers, pure: bounds on inputs, error bounds, and FP16 rounding as the device side does it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

#: An FP16 NaN that no kernel produces by accident; an output that still holds it was never written.
POISON = 0x7E5A


def integer_bound(k: int) -> int:
    """v = floor(190 / K^(1/4)), capped so that K v^2 < 2^24, at least 1.

    Uniform integers in [-v, v] then have every partial sum under 2^24 in any order: FP32 accumulation is exact (for
    K < 2^24), while sums have a standard deviation near 12,000, far past the 2048 where FP16 accumulation rounds.
    """
    return max(1, min(math.floor(190 / math.sqrt(math.sqrt(k))), math.isqrt((2**24 - 1) // k)))


def gamma32(k: int) -> float:
    """Relative bound of a K-term FP32 dot product with truncating adds: K u / (1 - K u), u = 2^-23 (tensor cores
    truncate; Higham, Accuracy and Stability of Numerical Algorithms, section 3.1)."""
    ku = k * 2.0**-23
    return ku / (1.0 - ku) if ku < 1 else math.inf


def binary_density(k: int) -> float:
    """Density of ones so that a dot product of {0,1} vectors is about 512: under 2048 but rarely 0 (CUDA-L2, 3.4)."""
    return min(0.5, math.sqrt(512 / k))


def fl16(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to FP16 (nearest even, overflow to infinity) without going through FP32; the twin of gate.cu's fl16."""
    x = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        _, exponent = np.frexp(np.where(np.isfinite(x), x, 1.0))
        quantum = np.ldexp(1.0, np.maximum(exponent - 1, -14) - 10)
        rounded = np.rint(x / quantum) * quantum
        rounded = np.where(np.abs(rounded) >= 65536.0, np.copysign(np.inf, x), rounded)
    return np.where(np.isfinite(x), rounded, x)
