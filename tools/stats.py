"""Statistics of paired samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
#: Samples up to which all resamples are drawn at once. A certify run has 1e5 samples, whose resamples would be GBs.
_FEW = 512


@dataclass(frozen=True)
class PairedRatio:
    """median(reference) / median(candidate) and its 95 % percentile-bootstrap interval."""

    ratio: float
    lo: float
    hi: float
    time_us: float
    ref_us: float


def paired_ratio(
    candidate_us: NDArray[np.float64], reference_us: NDArray[np.float64], seed: int = 0, resamples: int = RESAMPLES
) -> PairedRatio:
    """Ratio of medians of samples paired by round; rounds are resampled together, so that drift common to both sides
    of a round cancels. Needs at least two positive samples a side (ValueError otherwise)."""
    if candidate_us.shape != reference_us.shape or candidate_us.size < 2:
        raise ValueError(f"need equally many samples, at least 2; got {candidate_us.size} and {reference_us.size}")
    if not (np.all(candidate_us > 0) and np.all(reference_us > 0)):
        raise ValueError("a sample is zero or negative: the clock did not see the kernel")
    time_us, ref_us = float(np.median(candidate_us)), float(np.median(reference_us))
    n = candidate_us.size
    if n <= _FEW:
        times = _times_picked(n, resamples, seed)
        ratios = _medians(reference_us, times) / _medians(candidate_us, times)
    else:
        rng = np.random.default_rng(seed)
        medians = [_Medians(reference_us), _Medians(candidate_us)]
        ratios = np.empty(resamples)
        for i in range(resamples):
            picked = np.bincount(rng.integers(0, n, n), minlength=n)
            ratios[i] = medians[0].of(picked) / medians[1].of(picked)
    lo, hi = np.percentile(ratios, (2.5, 97.5))
    ratio = ref_us / time_us
    return PairedRatio(ratio, min(float(lo), ratio), max(float(hi), ratio), time_us, ref_us)


@lru_cache(maxsize=32)
def _times_picked(n: int, resamples: int, seed: int) -> NDArray[np.uint16]:
    """n x resamples: how often each resample holds each sample. The same for every run of so many samples."""
    picks = np.random.default_rng(seed).integers(0, n, (resamples, n))
    numbered = picks + n * np.arange(resamples)[:, None]
    found = np.bincount(numbered.ravel(), minlength=n * resamples).reshape(resamples, n)
    times = np.ascontiguousarray(found.T, dtype=np.uint16)
    times.flags.writeable = False  # it is kept
    return times


def _medians(values: NDArray[np.float64], times: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Of every resample, bit for bit what ``np.median`` makes of it, in a sixth of the time: a final timing takes up to
    eight intervals, which cost more than the timing itself."""
    order = np.argsort(values)
    ranked = values[order]
    ranks = np.cumsum(times[order], axis=0, dtype=np.uint16)
    middle: NDArray[np.float64] = ranked[(ranks <= (values.size - 1) // 2).sum(axis=0)]
    if values.size % 2 == 0:
        middle = (middle + ranked[(ranks <= values.size // 2).sum(axis=0)]) / 2
    return middle


class _Medians:
    """Medians of resamples of one array, which is sorted once: some ten times faster than gather and partition."""

    def __init__(self, values: NDArray[np.float64]) -> None:
        self._order = np.argsort(values)
        self._sorted = values[self._order]

    def of(self, times: NDArray[np.int64]) -> float:
        """Of the array in which the value at index i occurs ``times[i]`` times."""
        ranks = np.cumsum(times[self._order])
        n = int(ranks[-1])
        low, high = np.searchsorted(ranks, ((n - 1) // 2, n // 2), side="right")
        return float(self._sorted[low] + self._sorted[high]) / 2


def relative_iqr(samples_us: NDArray[np.float64]) -> float:
    """(p75 - p25) / median."""
    q25, q50, q75 = np.percentile(samples_us, (25, 50, 75))
    return float((q75 - q25) / q50)


def strongest(samples_us: Mapping[str, NDArray[np.float64]], reference: str, b_layout: str) -> str:
    """The subject, ``<reference>/<layout>``, that stands for a reference in a run.

    Auto-tuning picks by an earlier run, and among near equals by luck. cuBLASLt's first suggestion and cublasGemmEx are
    candidates of the tuning too, so where they ran beside its pick and were faster, they are the pick.
    """
    names = [reference, "cublaslt_heuristic", "cublas"] if reference == "cublaslt_auto" else [reference]
    present = [subject for subject in (f"{name}/{b_layout}" for name in names) if subject in samples_us]
    return min(present, key=lambda subject: float(np.median(samples_us[subject])))
