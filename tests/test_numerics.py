"""The gate's bounds do what they promise, by simulation in NumPy: no false reject, and the known cheats seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.numerics import POISON, binary_density, fl16, gamma32, integer_bound

KS = (64, 100, 512, 2048, 16384)


def integers(rng: np.random.Generator, shape: tuple[int, int], k: int) -> np.ndarray:
    v = integer_bound(k)
    return rng.integers(-v, v + 1, shape).astype(np.float64)


def accumulate_fp16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """K in steps of 16 with an FP16 accumulator, as HMMA.16816.F16 does."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float16)
    for k in range(0, a.shape[1], 16):
        total = (total.astype(np.float32) + (a[:, k : k + 16] @ b[k : k + 16]).astype(np.float32)).astype(np.float16)
    return total


def accumulate_truncating_fp32(a: np.ndarray, b: np.ndarray, step: int = 4) -> np.ndarray:
    """Chunks added in FP32 with truncation toward zero: the least accurate a tensor core may be."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float64)
    for k in range(0, a.shape[1], step):
        total += a[:, k : k + step] @ b[k : k + step]
        mantissa, exponent = np.frexp(total)
        total = np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24)
    return total.astype(np.float32).astype(np.float16)


@given(st.floats(width=64, allow_nan=False, allow_infinity=False, min_value=-70000, max_value=70000))
@settings(max_examples=300)
def test_fl16_agrees_with_numpy(x: float) -> None:
    with np.errstate(over="ignore"):
        assert fl16(np.array([x]))[0] == np.float16(x)


@pytest.mark.parametrize(
    "x", [65504.0, 65519.99, 65520.0, -65520.0, 2.0**-25, 2.0**-24 * 1.5, 0.0, math.inf, -math.inf]
)
def test_fl16_at_the_edges(x: float) -> None:
    with np.errstate(over="ignore"):
        assert fl16(np.array([x]))[0] == np.float16(x)


def test_fl16_keeps_nan() -> None:
    assert np.isnan(fl16(np.array([np.nan]))[0])


@given(st.integers(1, 2**24 - 1))
def test_integer_partial_sums_are_exact_in_fp32(k: int) -> None:
    assert k * integer_bound(k) ** 2 < 2**24


@pytest.mark.parametrize("k", KS)
def test_integer_tier_catches_fp16_accumulation(k: int) -> None:
    rng = np.random.default_rng(k)
    a, b = integers(rng, (32, k), k), integers(rng, (k, 32), k)
    expected = fl16(a @ b)
    assert np.mean(accumulate_fp16(a, b).astype(np.float64) != expected) > 0.2


@pytest.mark.parametrize("k", KS)
def test_binary_tier_cannot_see_fp16_accumulation(k: int) -> None:
    """Why the paper's tier is not enough: its sums stay where FP16 is exact."""
    rng = np.random.default_rng(k)
    p = binary_density(k)
    a, b = (rng.random((32, k)) < p).astype(np.float64), (rng.random((k, 32)) < p).astype(np.float64)
    assert np.array_equal(accumulate_fp16(a, b).astype(np.float64), fl16(a @ b))


@pytest.mark.parametrize("k", KS)
def test_integer_tier_sees_one_dropped_k(k: int) -> None:
    rng = np.random.default_rng(k)
    a, b = integers(rng, (32, k), k), integers(rng, (k, 32), k)
    assert np.mean(fl16(a[:, :-1] @ b[:-1]) != fl16(a @ b)) > 0.5


@pytest.mark.parametrize("k", KS)
def test_interval_admits_the_least_accurate_tensor_core(k: int) -> None:
    rng = np.random.default_rng(k)
    a = rng.standard_normal((24, k)).astype(np.float16).astype(np.float64)
    b = rng.standard_normal((k, 24)).astype(np.float16).astype(np.float64)
    beta = gamma32(k) * (np.abs(a) @ np.abs(b))
    c, exact = accumulate_truncating_fp32(a, b).astype(np.float64), a @ b
    assert np.all((fl16(exact - beta) <= c) & (c <= fl16(exact + beta)))


def test_interval_rejects_fp16_accumulation_at_small_k() -> None:
    rng = np.random.default_rng(0)
    k = 256
    a = rng.standard_normal((32, k)).astype(np.float16).astype(np.float64)
    b = rng.standard_normal((k, 32)).astype(np.float16).astype(np.float64)
    beta = gamma32(k) * (np.abs(a) @ np.abs(b))
    c, exact = accumulate_fp16(a, b).astype(np.float64), a @ b
    assert np.mean((c < fl16(exact - beta)) | (c > fl16(exact + beta))) > 0.2


def test_poison_is_a_nan_with_a_payload() -> None:
    value = np.array([POISON], np.uint16).view(np.float16)[0]
    assert np.isnan(value)
    assert np.array([np.float16("nan")]).view(np.uint16)[0] != POISON
