"""Threads of a block exchange a value through shared memory without a barrier."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)


def test_racecheck_names_the_race(gpu: CudaDevice) -> None:
    kernel = variant(
        {
            "BEGIN": "__shared__ float box[256]; const int t = threadIdx.y * 16 + threadIdx.x; box[t] = (float)t;",
            "SUM": "sum += 1e-30f * box[(t + 37) % 256];",
        }
    )
    assert gpu.sanitize(kernel, [TASK]).reason is Reason.RACE
