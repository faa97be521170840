"""Statistics over shapes. Pure and deterministic: the bootstrap has a fixed seed.

The interval of a mean says how far it would move with another draw of shapes like these; it knows nothing of the error
of each measurement (each shape's own interval says that) and of shapes unlike these. The shapes of a grid are not
independent, so the signed-rank test's p-value is a description, not a probability to act on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.reporting.model import MaxStats, Stats

RESAMPLES = 2_000
#: The signed-rank test counts all sign patterns up to this many shapes.
EXACT_UP_TO = 50


@dataclass(frozen=True)
class Sample:
    """A kernel at a shape against one reference."""

    shape: str
    ratio: float
    ratio_lo: float
    ratio_hi: float
    time_us: float
    ref_us: float


def summarise(samples: Sequence[Sample]) -> Stats | None:
    """None without samples."""
    if not samples:
        return None
    ratios = np.array([s.ratio for s in samples])
    speedups = ratios - 1.0
    lo, hi = mean_interval(speedups)
    worst, best = samples[int(ratios.argmin())], samples[int(ratios.argmax())]
    return Stats(
        shapes=len(samples),
        mean_speedup=float(speedups.mean()),
        std_speedup=std(speedups),
        mean_lo=lo,
        mean_hi=hi,
        geo_mean_ratio=float(np.exp(np.log(ratios).mean())),
        wins=int((ratios > 1).sum()),
        clear_wins=sum(s.ratio_lo > 1 for s in samples),
        clear_losses=sum(s.ratio_hi < 1 for s in samples),
        worst_ratio=worst.ratio,
        worst_shape=worst.shape,
        best_ratio=best.ratio,
        best_shape=best.shape,
        total_time_ratio=sum(s.ref_us for s in samples) / sum(s.time_us for s in samples),
        wilcoxon_p=signed_rank_p(ratios),
    )


def with_fallback(samples: Sequence[Sample]) -> MaxStats | None:
    """The better of kernel and reference at each shape, as measured. None without samples."""
    if not samples:
        return None
    ratios = np.maximum([s.ratio for s in samples], 1.0)
    clear = [s.ratio if s.ratio_lo > 1 else 1.0 for s in samples]
    lo, hi = mean_interval(ratios - 1.0)
    return MaxStats(
        shapes=len(samples),
        mean_speedup=float((ratios - 1.0).mean()),
        std_speedup=std(ratios),
        mean_lo=lo,
        mean_hi=hi,
        geo_mean_ratio=float(np.exp(np.log(ratios).mean())),
        custom_used=int((ratios > 1).sum()),
        mean_speedup_if_clear=float(np.mean(clear)) - 1.0,
    )


def mean_interval(values: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """95 % percentile bootstrap of the mean; (None, None) for fewer than two values."""
    if values.size < 2:
        return None, None
    picks = np.random.default_rng(0).integers(0, values.size, (RESAMPLES, values.size))
    lo, hi = np.percentile(values[picks].mean(axis=1), (2.5, 97.5))
    return float(lo), float(hi)


def std(values: NDArray[np.float64]) -> float | None:
    return float(values.std(ddof=1)) if values.size > 1 else None


def signed_rank_p(ratios: NDArray[np.float64]) -> float | None:
    """Wilcoxon's signed-rank test, two-sided, of log ratio: exact up to 50 shapes without ties, else the normal
    approximation. None if no ratio differs from 1."""
    from scipy.stats import wilcoxon

    logs = np.log(ratios)
    if not logs.any():
        return None
    distinct = np.unique(np.abs(logs[logs != 0])).size == logs.size
    return float(wilcoxon(logs, method="exact" if distinct and logs.size <= EXACT_UP_TO else "asymptotic").pvalue)
