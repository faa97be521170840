"""State that is not left as it was found would make the next call wrong, or faster."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)


def test_state_is_compared(gpu: CudaDevice) -> None:
    kernel = variant({"END": "if (m + n == 0) workspace[0] = 1;"}, workspace_bytes=64, state_bytes=64)
    assert gpu.verify(kernel, TASK, "quick").reason is Reason.WORKSPACE_STATE
