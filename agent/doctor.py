"""``agent doctor``: what this machine has, what it lacks, and the exact command that adds it.

Looking changes nothing: no kernel runs, no model is called, no key is shown, and CUDA packages are not imported.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.device import DeviceBroken
from tools.extras import install_command, install_packages, restore_command
from tools.paths import home_dir
from tools.record_file import RecordReader
from tools.replay import default_path
from tools.toolchain import HOW_TO_INSTALL, Headers, Tool, Toolchain, find_toolchain, package_version

SUPPORTED_PYTHON = ((3, 11), (3, 12))
MIN_FREE_BYTES = 1 << 30
NVIDIA_PARAMS = Path("/proc/driver/nvidia/params")
COUNTER_FIX = (
    "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf, "
    "then reboot (or run the agent as root)"
)


@dataclass(frozen=True)
class Check:
    """One thing looked at. ``needed`` is False for what only some uses need: ``detail`` says which. ``fix`` is the
    command that mends it, empty when all is well."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Gpus:
    """What the driver says. ``driver`` is None without one; ``cuda`` is the CUDA version that it supports."""

    driver: str | None = None
    cuda: tuple[int, int] | None = None
    names: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()
    why: str = ""


def diagnose(
    *,
    toolchain: Toolchain | None = None,
    gpus: Gpus | None = None,
    environ: Mapping[str, str] | None = None,
    home: Path | None = None,
    records: Path | None = None,
) -> list[Check]:
    """Every check, in the order to mend things. The arguments replace what would be looked up."""
    toolchain = toolchain or find_toolchain()
    environ = os.environ if environ is None else environ
    gpus = gpus or look_for_gpus()
    return [
        _python(),
        _home(home or home_dir()),
        _records(records or default_path()),
        *_compilers(toolchain, environ),
        _tool("compute-sanitizer", toolchain.sanitizer, "sanitize"),
        _tool("ncu", toolchain.ncu, "profile"),
        *_counters(gpus),
        *_gpu(gpus),
        *_packages(gpus),
        _model("anthropic", "ANTHROPIC_API_KEY", environ),
        _model("openai", "OPENAI_API_KEY", environ),
    ]


def _python() -> Check:
    version = sys.version_info[:2]
    detail = f"{sys.version.split()[0]} at {sys.executable}"
    if version in SUPPORTED_PYTHON:
        return Check("python", True, detail, needed=True)
    return Check("python", False, f"{detail}; 3.11 and 3.12 are supported", "python3.12 -m venv .venv", needed=True)


def _home(home: Path) -> Check:
    """Whether sessions and caches can be written there, or the folder be made."""
    try:
        existing = next(p for p in (home, *home.absolute().parents) if p.exists())
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"x")
        free = shutil.disk_usage(existing).free
    except OSError as error:
        detail = f"{home} cannot be written: {error.strerror or error}"
        return Check("home", False, detail, "export HGEMM_AGENT_HOME=/a/folder/you/can/write", needed=True)
    detail = f"{home} can be written, {free / 2**30:.1f} GiB free"
    if free < MIN_FREE_BYTES:
        fix = "free some disk space, or export HGEMM_AGENT_HOME=/a/folder/on/another/disk"
        return Check("home", False, f"{detail}; less than 1 GiB", fix, needed=True)
    return Check("home", True, detail, needed=True)


def _records(path: Path) -> Check:
    try:
        reader = RecordReader(path)
    except DeviceBroken as error:
        return Check("records", False, str(error), restore_command(), needed=True)
    try:
        counts = reader.counts()
        what = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
        detail = f"{reader.device.name}, driver {reader.device.driver}: {what or 'empty'}"
    except DeviceBroken as error:
        return Check("records", False, str(error), restore_command(), needed=True)
    finally:
        reader.close()
    return Check("records", True, detail, needed=True)


def _compilers(toolchain: Toolchain, environ: Mapping[str, str]) -> list[Check]:
    checks = [_tool("nvcc", toolchain.nvcc, "compile sources that were never recorded")]
    host = shutil.which(environ.get("NVCC_CCBIN", "g++"), path=environ.get("PATH", ""))
    if host:
        checks.append(Check("g++", True, host))
    else:
        checks.append(Check("g++", False, "nvcc needs a host C++ compiler", HOW_TO_INSTALL["g++"]))
    checks.append(_tool("cuobjdump", toolchain.cuobjdump, "read machine code by hand"))
    checks.append(_tool("cutlass", toolchain.cutlass, "compile sources that include CuTe or CUTLASS"))
    return checks


def _tool(name: str, found: Tool | Headers | None, purpose: str) -> Check:
    if found is None:
        return Check(name, False, f"not found; needed to {purpose}", HOW_TO_INSTALL[name])
    if isinstance(found, Tool) and found.version == "unknown":
        detail = f"{found.path} does not answer `--version`: it is broken, or something else; needed to {purpose}"
        return Check(name, False, detail, HOW_TO_INSTALL[name])
    return Check(name, True, f"{found.version} at {found.path}")


def _counters(gpus: Gpus) -> list[Check]:
    """Whether ncu may read the GPU's counters; the driver says so in a file of its own. Nothing without a driver."""
    if gpus.driver is None:
        return []
    name = "profiling permission"
    try:
        restricted = "RmProfilingAdminOnly: 1" in NVIDIA_PARAMS.read_text(encoding="utf-8")
    except OSError:
        return [Check(name, True, f"not known ({NVIDIA_PARAMS} cannot be read); ncu will say")]
    if restricted and os.geteuid() != 0:
        return [Check(name, False, "the driver lets only root read performance counters", COUNTER_FIX)]
    return [Check(name, True, "performance counters can be read")]


def look_for_gpus() -> Gpus:
    """What NVML says; the package is imported here and only here."""
    try:
        import pynvml
    except ImportError:
        return Gpus(why="nvidia-ml-py is not installed, so the driver cannot be asked")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(why=f"no NVIDIA driver answers ({error})")
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return Gpus(
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            names=tuple(_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles),
            capabilities=tuple(tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles),
        )
    except pynvml.NVMLError as error:
        return Gpus(why=f"the NVIDIA driver answers with an error ({error})")
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _gpu(gpus: Gpus) -> list[Check]:
    replay = "; --device replay:h200 works without"
    if gpus.driver is None:
        fix = (
            install_packages("nvidia-ml-py")
            if "nvidia-ml-py" in gpus.why
            else "apt-get install nvidia-driver-580 (on a machine with an NVIDIA GPU)"
        )
        return [
            Check("NVIDIA driver", False, gpus.why + replay, fix),
            Check("GPU", False, "none without a driver" + replay, fix),
        ]
    version = f"{gpus.driver} (CUDA {gpus.cuda[0]}.{gpus.cuda[1]})" if gpus.cuda else gpus.driver
    driver = Check("NVIDIA driver", True, version)
    if not gpus.names:
        detail = "the driver is there but shows no GPU (none in this machine, or none passed into this container)"
        return [driver, Check("GPU", False, detail + replay, "docker run --gpus all … (in a container); nvidia-smi -L")]
    names = ", ".join(
        f"{name} (sm_{major}{minor})" for name, (major, minor) in zip(gpus.names, gpus.capabilities, strict=True)
    )
    if (9, 0) not in gpus.capabilities:
        detail = f"{names}: the kernels here need compute capability 9.0 (H100, H200)" + replay
        return [driver, Check("GPU", False, detail, "use a machine with an H100 or H200")]
    return [driver, Check("GPU", True, names)]


def _packages(gpus: Gpus) -> list[Check]:
    """What the GPU worker imports. Which extra adds them depends on the driver."""
    extra = "cuda12" if gpus.cuda is not None and gpus.cuda[0] < 13 else "cuda13"
    wanted = {
        "cupy": ("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy")),
        "cuda-bindings": ("cuda.bindings", ("cuda-bindings",)),
        "torch": ("torch", ("torch",)),
        "nvidia-ml-py": ("pynvml", ("nvidia-ml-py",)),
    }
    checks = []
    for name, (module, distributions) in wanted.items():
        if _importable(module):
            version = next((v for d in distributions if (v := package_version(d)) is not None), "installed")
            checks.append(Check(name, True, version))
        else:
            fix = install_command(extra)
            checks.append(Check(name, False, "not installed; needed to measure on a GPU", fix))
    return checks


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # the parent package is missing, or is not a package
        return False


def _model(package: str, variable: str, environ: Mapping[str, str]) -> Check:
    """A policy's client and whether its key is set; the key itself is never read further than that."""
    name = f"policy {package}"
    if not _importable(package):
        return Check(name, False, f"the {package} package is not installed", install_packages(package))
    if not environ.get(variable):
        return Check(name, False, f"{variable} is not set; --policy search works without", f"export {variable}=…")
    return Check(name, True, f"{package} {package_version(package)}, {variable} is set")
