"""A result that depends on the run, from a kernel that promises it does not."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)


def test_two_runs_are_compared_bitwise(gpu: CudaDevice) -> None:
    # Forwards or backwards over K, as a clock has it: both right, but their roundings differ in some outputs.
    backwards = (
        "if (clock() & 16) { sum = 0; for (int k = K - 1; k >= 0; k--) "
        "sum += widen(A[(long long)m * K + k]) * widen(B[(long long)n * K + k]); }"
    )
    task = hgemm(512, 512, 192)
    assert gpu.verify(variant({"SUM": backwards}), task, "quick").reason is Reason.NOT_DETERMINISTIC
    declared = gpu.verify(variant({"SUM": backwards}, deterministic=False), task, "quick")
    assert declared.ok
    assert declared.bitwise_repeatable is False
