from __future__ import annotations

import numpy as np
import pytest

from tools.stats import paired_ratio, relative_iqr, strongest


def test_ratio_is_of_medians_and_inside_its_interval() -> None:
    rng = np.random.default_rng(1)
    drift = np.linspace(1.0, 1.3, 60)  # a clock that falls while both are measured
    own, ref = 10 * drift * rng.normal(1, 0.01, 60), 12 * drift * rng.normal(1, 0.01, 60)
    r = paired_ratio(own, ref)
    assert r.ratio == pytest.approx(np.median(ref) / np.median(own))
    assert r.lo <= r.ratio <= r.hi
    assert r.lo > 1.15
    assert r.hi < 1.25


def test_interval_covers_the_truth_about_95_percent_of_the_time() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for trial in range(200):
        own, ref = rng.normal(10, 0.5, 40), rng.normal(11, 0.5, 40)
        r = paired_ratio(own, ref, seed=trial, resamples=300)
        covered += r.lo <= 1.1 <= r.hi
    assert 175 <= covered <= 200


@pytest.mark.parametrize("n", [2, 3, 5, 11, 16, 60, 511, 512])
def test_intervals_are_those_of_plain_medians_bit_for_bit(n: int) -> None:
    rng = np.random.default_rng(n)
    for digits in (6, 1):  # and with many equal samples
        own, ref = rng.normal(10, 1, n).round(digits), rng.normal(11, 1, n).round(digits)
        picks = np.random.default_rng(0).integers(0, n, (2000, n))
        ratios = np.median(ref[picks], axis=1) / np.median(own[picks], axis=1)
        low, high = np.percentile(ratios, (2.5, 97.5))
        r = paired_ratio(own, ref)
        assert (r.lo, r.hi) == (min(low, r.ratio), max(high, r.ratio))


def test_a_zero_time_cannot_enter() -> None:
    with pytest.raises(ValueError, match="zero or negative"):
        paired_ratio(np.array([1.0, 0.0]), np.array([1.0, 1.0]))


def test_needs_paired_samples() -> None:
    with pytest.raises(ValueError, match="equally many"):
        paired_ratio(np.array([1.0, 2.0]), np.array([1.0]))


def test_relative_iqr() -> None:
    assert relative_iqr(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == pytest.approx(2 / 3)


def test_auto_tuned_is_never_slower_than_what_it_chose_among() -> None:
    samples = {
        "cublaslt_auto/nk": np.array([2.3, 2.2, 2.4]),
        "cublaslt_heuristic/nk": np.array([2.1, 2.0, 9.0]),
        "cublas/nk": np.array([2.5, 2.5, 2.5]),
        "cublas/kn": np.array([1.0, 1.0, 1.0]),
    }
    assert strongest(samples, "cublaslt_auto", "nk") == "cublaslt_heuristic/nk"
    assert strongest(samples, "cublas", "nk") == "cublas/nk"


def test_auto_tuned_alone_stands_for_itself() -> None:
    assert strongest({"cublaslt_auto/kn": np.array([2.0])}, "cublaslt_auto", "kn") == "cublaslt_auto/kn"
