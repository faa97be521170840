"""Means over shapes with their intervals. Pure and deterministic: the bootstrap has a fixed seed.

The 95 % interval of a mean says how far it would move with another draw of shapes like these. It knows nothing of the
error of each measurement: each shape's own interval says that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tools.records import Record

if TYPE_CHECKING:
    from numpy.typing import NDArray

RESAMPLES = 2000


class Estimate(Record):
    value: float
    lo: float
    hi: float


def mean(values: Sequence[float]) -> Estimate:
    """Arithmetic mean."""
    import numpy as np

    return _bootstrap(np.asarray(values, dtype=float), lambda sample: sample.mean(axis=-1))


def geometric_mean(values: Sequence[float]) -> Estimate:
    """Of positive values: the fair mean of ratios, where 2 and 1/2 cancel."""
    import numpy as np

    return _bootstrap(np.log(np.asarray(values, dtype=float)), lambda sample: np.exp(sample.mean(axis=-1)))


def share(hits: Sequence[bool]) -> Estimate:
    """Of shapes for which something holds."""
    return mean([float(hit) for hit in hits])


def _bootstrap(values: NDArray[Any], statistic: Callable[[NDArray[Any]], Any]) -> Estimate:
    """Percentile bootstrap over shapes. Raises ValueError without values."""
    import numpy as np

    if values.size == 0:
        raise ValueError("a mean of nothing")
    picks = np.random.default_rng(0).integers(0, values.size, (RESAMPLES, values.size))
    lo, hi = np.percentile(statistic(values[picks]), (2.5, 97.5))
    return Estimate(value=float(statistic(values)), lo=float(lo), hi=float(hi))
