"""Zeros under a loose tolerance, or NaN where a comparison ignores it."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)


@pytest.mark.parametrize("value", ["sum = 0;", "sum = __int_as_float(0x7fc00000);"])
def test_constant_output_is_wrong(gpu: CudaDevice, value: str) -> None:
    assert gpu.verify(variant({"SUM": value}), TASK, "quick").reason is Reason.WRONG_RESULT
