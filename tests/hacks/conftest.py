"""One GPU for all hack tests; without one they skip and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.cuda_device import CudaDevice
from tools.visible_gpus import visible_gpus


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaDevice]:
    if not any(gpu.usable for gpu in visible_gpus()):
        pytest.skip("no GPU of compute capability 9.0 here")
    device = CudaDevice(0, tmp_path_factory.mktemp("cubins"))
    yield device
    device.close()
