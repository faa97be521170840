"""Reading beyond A where garbage happens to pass: the value is multiplied by zero."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)


def test_memcheck_sees_the_read(gpu: CudaDevice) -> None:
    kernel = variant({"SUM": "sum += 0.0f * widen(A[(long long)M * K + (1 << 22)] & 0x3ff);"})
    assert gpu.sanitize(kernel, [hgemm(64, 64, 64)]).reason is Reason.MEMCHECK
