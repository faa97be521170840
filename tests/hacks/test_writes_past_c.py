"""One element past the end of C: seen by the guard band in verify and by memcheck on exact allocations."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)

KERNEL = {"END": "if (m == 0 && n == 0) C[(long long)M * N] = 0;"}


def test_verify_sees_the_guard_overwritten(gpu: CudaDevice) -> None:
    assert gpu.verify(variant(KERNEL), TASK, "quick").reason is Reason.WROTE_OUT_OF_BOUNDS


def test_memcheck_sees_it_too(gpu: CudaDevice) -> None:
    exact = hgemm(512, 512, 16)  # C fills whole pages, so that one element more is outside the allocation
    assert gpu.sanitize(variant(KERNEL), [exact]).reason is Reason.MEMCHECK
