"""The control of every hack: the unedited kernel passes the whole gate, with and without a workspace."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)


@pytest.mark.parametrize("workspace_bytes", [0, 4096])
def test_the_honest_kernel_passes(gpu: CudaDevice, workspace_bytes: int) -> None:
    kernel = variant(workspace_bytes=workspace_bytes, state_bytes=workspace_bytes // 2)
    assert gpu.compile(kernel).ok
    for depth in ("quick", "full"):
        result = gpu.verify(kernel, TASK, depth)
        assert result.ok, result.detail
    assert gpu.sanitize(kernel, [TASK]).ok
    timing = gpu.time(kernel, TASK, "offline", "screen")
    assert timing.ok, timing.detail
    row = timing.row()
    assert row is not None
    assert row.ratio < 1  # slow, and said to be
