"""FP16 accumulation without tensor cores, where no MMA in the SASS gives it away: the integer tier does."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)


def test_integer_tier_sees_it(gpu: CudaDevice) -> None:
    body = (
        "sum = 0; for (int k = 0; k < K; k++) "
        "sum = widen(narrow(sum + widen(A[(long long)m * K + k]) * widen(B[(long long)n * K + k])));"
    )
    result = gpu.verify(variant({"SUM": body}), TASK, "quick")
    assert result.reason is Reason.WRONG_RESULT
    assert "integer" in result.detail
