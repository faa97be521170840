"""A kernel that never ends, or faults, costs its own worker; the next one is measured as if nothing had been."""

from __future__ import annotations

import pytest

from tests.hacks.kernels import variant
from tools.cuda_device import CudaDevice
from tools.hgemm import hgemm
from tools.records import Reason

pytestmark = pytest.mark.gpu
TASK = hgemm(96, 80, 192)


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ({"BEGIN": "while (((volatile int*)C)[0] != 12345678) {}"}, Reason.HANG),
        ({"SUM": "sum += widen(((u16*)8)[n]);"}, Reason.ILLEGAL_ACCESS),
        ({"BEGIN": 'asm volatile("trap;");'}, Reason.LAUNCH_FAILED),
    ],
)
def test_the_next_kernel_is_unharmed(gpu: CudaDevice, edits: dict[str, str], reason: Reason) -> None:
    assert gpu.verify(variant(edits), TASK, "quick").reason is reason
    assert gpu.verify(variant(), TASK, "quick").ok


def test_too_much_shared_memory_is_refused(gpu: CudaDevice) -> None:
    honest = variant()
    launch = honest.launch.launches[0].model_copy(update={"smem_bytes": 300_000})
    greedy = honest.model_copy(update={"launch": honest.launch.model_copy(update={"launches": (launch,)})})
    assert gpu.verify(greedy, TASK, "quick").reason is Reason.TOO_MUCH_SHARED_MEMORY


def test_more_ctas_than_fit_cannot_be_cooperative(gpu: CudaDevice) -> None:
    result = gpu.verify(variant(cooperative=True), hgemm(4096, 4096, 16), "quick")
    assert result.reason is Reason.NOT_CO_RESIDENT
