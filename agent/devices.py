"""``cuda:N``, ``replay:h200``, ``replay:PATH`` or ``auto`` → a device."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from agent.errors import UsageError
from tools.device import Device, DeviceBroken
from tools.extras import install_command
from tools.memory_needs import too_large
from tools.records import CompileResult, DeviceInfo, Record, Task, Variant
from tools.visible_gpus import visible_gpus

#: What the GPU worker imports; an extra installs them (pyproject.toml).
_GPU_MODULES = ("cuda.bindings", "cupy", "pynvml", "numpy")
_CUDA = re.compile(r"^cuda:(\d{1,2})$", re.ASCII)
#: Of these one is there where an NVIDIA driver is loaded (the last: under Windows), also without NVML's package.
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


class FoundDevice(Record):
    """One line of ``agent devices``."""

    spec: str
    label: str
    usable: bool
    detail: str = ""
    shapes: tuple[str, ...] = ()  # of a replay device: what it has records of


def open_device(spec: str, compile_really: bool = False) -> Device:
    """``compile_really``: a replay device asks this machine's nvcc and not its record. Raises UsageError for an unknown
    name or a GPU that is not there, DeviceBroken for a device that cannot answer."""
    resolved = resolve(spec)
    if match := _CUDA.match(resolved):
        check_gpu(resolved)
        from tools.cuda_device import CudaDevice

        return CudaDevice(int(match[1]))
    from tools.replay import ReplayDevice

    name = resolved.removeprefix("replay:")
    path = None if name == "h200" else Path(name)
    return ReplayDevice(path, real_compile=_compiler() if compile_really else None)


def _compiler() -> Callable[[Variant], CompileResult]:
    """Without an nvcc too: what is wrong with a source's text is said all the same."""
    from tools.build_cache import CompileCache
    from tools.compiling import compile_variant
    from tools.paths import home_dir
    from tools.toolchain import find_toolchain

    toolchain = find_toolchain()
    cache = CompileCache(home_dir() / "cubins")
    return lambda variant: compile_variant(variant, toolchain=toolchain, cache=cache)


def resolve(spec: str) -> str:
    """``auto`` becomes a GPU if there is a usable one, else the recorded H200. Raises UsageError."""
    if spec == "auto":
        usable = [gpu for gpu in visible_gpus() if gpu.usable] if not missing_gpu_modules() else []
        return f"cuda:{usable[0].ordinal}" if usable else "replay:h200"
    if _CUDA.match(spec):
        return spec
    kind, _, name = spec.partition(":")
    if kind == "replay" and name:
        # Kept as an absolute path: a session may be resumed from another folder.
        return spec if name == "h200" else f"replay:{_absolute(name)}"
    raise UsageError(f"there is no device '{spec}': give auto, cuda:0, replay:h200 or replay:PATH")


def _absolute(name: str) -> Path:
    try:
        return Path(name).expanduser().absolute()
    except (OSError, RuntimeError, ValueError) as error:  # ~nobody; the current folder is gone
        raise UsageError(f"replay:{name} leads nowhere: give the full path of a record file, or replay:h200") from error


def check_gpu(spec: str, or_replay: bool = True) -> None:
    """Raises UsageError where the GPU is not there, or, with the command that installs them, the packages of its
    worker. ``or_replay``: records would do as well, which the sentence then says."""
    gpus = visible_gpus()
    if not gpus and not any(Path(name).exists() for name in _DRIVER_FILES):
        instead = "--device replay:h200, which answers from recorded measurements, or " if or_replay else ""
        raise UsageError(
            f"{spec} needs an NVIDIA GPU and its driver, and this machine has none: use {instead}a machine with an "
            "H100 or H200"
        )
    ordinal = int(spec.removeprefix("cuda:"))
    if gpus and ordinal >= len(gpus) and "CUDA_VISIBLE_DEVICES" not in os.environ:
        raise UsageError(f"there is no {spec}: this machine has {', '.join(f'cuda:{gpu.ordinal}' for gpu in gpus)}")
    if missing := missing_gpu_modules():
        raise UsageError(f"{spec} needs {', '.join(missing)}: {install_command('cuda13')} (or cuda12, by your driver)")


def missing_gpu_modules() -> list[str]:
    missing = []
    for name in _GPU_MODULES:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # the parent package is not there
            found = False
        if not found:
            missing.append(name)
    return missing


def find_devices() -> list[FoundDevice]:
    missing = missing_gpu_modules()
    found = []
    for gpu in visible_gpus():
        why = ""
        if not gpu.usable:
            major, minor = gpu.capability
            why = f"has compute capability {major}.{minor}; the kernels here are for 9.0 (H100, H200)"
        elif missing:
            why = f"needs {', '.join(missing)}: {install_command('cuda13')} (or cuda12)"
        found.append(FoundDevice(spec=f"cuda:{gpu.ordinal}", label=gpu.name, usable=not why, detail=why))
    try:
        device = open_device("replay:h200")
        try:
            shapes = tuple(task.label for task in recorded_tasks(device))
            detail = f"{len(shapes)} recorded shapes"
            found.append(
                FoundDevice(spec="replay:h200", label=device.info.label, usable=True, detail=detail, shapes=shapes)
            )
        finally:
            device.close()
    except DeviceBroken as error:
        found.append(FoundDevice(spec="replay:h200", label="recorded H200", usable=False, detail=str(error)))
    return found


def check_fits(task: Task, info: DeviceInfo) -> None:
    """Raises UsageError if a GPU's memory cannot hold what verify needs: nothing could then be timed."""
    if (why := too_large(task, info.memory_bytes)) is not None:
        raise UsageError(f"{why} ({info.name})")


def recorded_tasks(device: Device) -> list[Task]:
    """What a replay device has records of; empty for a GPU."""
    from tools.replay import ReplayDevice

    return device.records.tasks() if isinstance(device, ReplayDevice) else []


def check_recorded(task: Task, device: Device) -> None:
    """Raises UsageError if a replay device knows nothing of the task: a search could only collect refusals."""
    known = recorded_tasks(device)
    if device.info.kind != "replay" or any(task.task_id == other.task_id for other in known):
        return
    same = [other for other in known if other.op == task.op and other.accumulate == task.accumulate]
    nearest = sorted(same, key=lambda other: (_distance(task, other), other.label))[:3]
    shapes = " or ".join(",".join(map(str, other.dims.values())) for other in nearest) or "none"
    raise UsageError(
        f"nothing was recorded at {task.label} ({device.info.label}): take a shape that was, the nearest are {shapes}, "
        "or a GPU with --device cuda:0"
    )


def _distance(task: Task, other: Task) -> float:
    return sum(abs(math.log2(task.dims[name] / other.dims.get(name, 1))) for name in task.dims)
