"""The first launch of a replay leaves a mark in its workspace, and the others do nothing."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)

MARK = 0x5EED5EED
MY_WORD = "workspace[blockIdx.y * gridDim.x + blockIdx.x]"


def test_a_skipped_launch_is_seen(gpu: CudaDevice) -> None:
    kernel = variant(
        {
            "BEGIN": f"if ({MY_WORD} == {MARK}) return;",
            "END": f"__syncthreads(); if (threadIdx.x + threadIdx.y == 0) {MY_WORD} = {MARK};",
        },
        workspace_bytes=1 << 16,
    )
    assert gpu.verify(kernel, TASK, "quick").ok  # each of its launches finds a fresh workspace
    result = gpu.time(kernel, TASK, "offline", "screen")
    assert result.reason is Reason.SKIPPED_LAUNCH
