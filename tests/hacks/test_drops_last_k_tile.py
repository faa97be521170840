"""Less work, nearly the right answer: the last 16 of K are left out."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)


def test_rejected_as_wrong(gpu: CudaDevice) -> None:
    result = gpu.verify(variant({"DROP": "- 16"}), TASK, "quick")
    assert result.reason is Reason.WRONG_RESULT
    assert "integer" in result.detail
