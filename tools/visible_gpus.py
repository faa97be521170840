"""The GPUs of this machine, asked of NVML: no CUDA context is made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import takewhile

#: sm_90a: wgmma and TMA.
NEEDED_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class VisibleGpu:
    ordinal: int
    name: str
    capability: tuple[int, int]

    @property
    def usable(self) -> bool:
        return self.capability == NEEDED_CAPABILITY


def named_gpus() -> list[str] | None:
    """As CUDA_VISIBLE_DEVICES names them, up to the first that is none, where CUDA stops reading; None without it."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return None
    names = [name.strip() for name in told.split(",")]
    return list(takewhile(lambda name: name not in ("", "-1"), names))


def gpus_to_share() -> list[dict[str, str]]:
    """For each GPU that CUDA programs started by us see, the environment of one that sees only this; empty where there
    are fewer than two. NVML counts by the bus, CUDA, unless it is told so, the fastest first."""
    names, order = named_gpus(), {}
    if names is None:
        names, order = [str(gpu.ordinal) for gpu in visible_gpus()], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return [{"CUDA_VISIBLE_DEVICES": name, **order} for name in names] if len(names) > 1 else []


def visible_gpus() -> list[VisibleGpu]:
    """All that the driver shows; empty without NVML, driver or GPU."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        found = []
        for ordinal in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(ordinal)
            name = pynvml.nvmlDeviceGetName(handle)
            capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
            found.append(VisibleGpu(ordinal, name.decode() if isinstance(name, bytes) else str(name), capability))
        return found
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
