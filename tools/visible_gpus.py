"""The GPUs of this machine, asked of NVML: no CUDA context is made."""

from __future__ import annotations

import os
from dataclasses import dataclass

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


def gpus_to_share() -> list[str]:
    """What CUDA programs that we start see, as CUDA_VISIBLE_DEVICES names it; empty where there is one or none."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in told.split(",")] if told is not None else [str(g.ordinal) for g in visible_gpus()]
    names = [name for name in names if name]
    return names if len(names) > 1 else []


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
