"""Uninitialised output that may land on freed memory which holds the reference: poison survives."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)


@pytest.mark.parametrize("condition", ["return;", "if (m == 5 && n == 7) return;"])
def test_unwritten_output_is_seen(gpu: CudaDevice, condition: str) -> None:
    assert gpu.verify(variant({"BEGIN": condition}), TASK, "quick").reason is Reason.UNWRITTEN_OUTPUT
