"""If the inputs are zero, so is the reference: the inputs are hashed before and after."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)


def test_modified_input_is_seen(gpu: CudaDevice) -> None:
    kernel = variant({"END": "if (m < M && n < K) ((u16*)A)[(long long)m * K + n] = 0;"})
    assert gpu.verify(kernel, TASK, "quick").reason is Reason.MODIFIED_INPUT
