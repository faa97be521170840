"""Where the CUDA command-line tools are on this machine: values, never exceptions; None when one is missing.

Looked for in this order: an explicit setting, PATH, ``$CUDA_HOME/bin`` and ``$CUDA_PATH/bin``, ``/usr/local/cuda*/bin``
(for ncu also ``/opt/nvidia/nsight-compute``), and the PyPI wheels (``site-packages/nvidia/*/bin``).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tools.extras import install_command, install_packages
from tools.proc import run

TOOL_NAMES = ("nvcc", "cuobjdump", "nvdisasm", "compute-sanitizer", "ncu")

#: The exact command that adds each tool. `doctor` prints these, and so does the detail of an UNAVAILABLE outcome.
HOW_TO_INSTALL: Mapping[str, str] = {
    "nvcc": f"{install_command('nvcc')} (a standalone nvcc 13.0 from PyPI; it needs g++)",
    "cuobjdump": install_packages("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"),
    "nvdisasm": install_packages("nvidia-cuda-nvdisasm"),
    "compute-sanitizer": install_packages("nvidia-cuda-sanitizer-api>=13.0,<13.1"),
    "ncu": "apt-get install cuda-nsight-compute-13-0 (from NVIDIA's CUDA repository; no Python index has it)",
    "cutlass": install_packages("nvidia-cutlass==4.2.0.0"),
    "g++": "apt-get install g++",
}


@dataclass(frozen=True)
class Tool:
    """A program that exists. ``version`` asks it, once per file."""

    name: str
    path: Path

    @property
    def version(self) -> str:
        """``13.0.88`` or the like; ``unknown`` if the program does not say."""
        try:
            stat = self.path.stat()
        except OSError:
            return "unknown"
        return _version(self.path, stat.st_mtime_ns, stat.st_size)


@dataclass(frozen=True)
class Headers:
    """An include folder and what it holds, for example CUTLASS 4.2.0.0."""

    path: Path
    version: str


@dataclass(frozen=True)
class Toolchain:
    """Each tool or None. ``environment`` is what children get: enough to run, nothing that changes a build."""

    nvcc: Tool | None = None
    cuobjdump: Tool | None = None
    nvdisasm: Tool | None = None
    sanitizer: Tool | None = None
    ncu: Tool | None = None
    cutlass: Headers | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def compiler(self) -> str | None:
        """``nvcc 13.0.88``, the part of a build's identity that is not the variant."""
        return f"nvcc {self.nvcc.version}" if self.nvcc else None


def how_to_install(name: str) -> str:
    """One sentence with the command that adds ``name``."""
    return f"{name} is missing; install it with: {HOW_TO_INSTALL[name]}"


def find_toolchain(settings: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None) -> Toolchain:
    """Look for everything. ``settings`` maps a tool name (or ``cutlass``) to a path and wins over any search; a
    setting that names no file counts as missing rather than falling back to another copy unasked."""
    settings = settings or {}
    environ = os.environ if environ is None else environ

    def tool(name: str) -> Tool | None:
        candidates = iter([_expanded(settings[name])]) if name in settings else _candidates(name, environ)
        found = next((p for p in candidates if _is_file(p) and os.access(p, os.X_OK)), None)
        return Tool(name, found) if found else None

    return Toolchain(
        nvcc=tool("nvcc"),
        cuobjdump=tool("cuobjdump"),
        nvdisasm=tool("nvdisasm"),
        sanitizer=tool("compute-sanitizer"),
        ncu=tool("ncu"),
        cutlass=_cutlass(settings.get("cutlass")),
        # No CPATH, no NVCC_APPEND_FLAGS and the like: they would change what a build is without changing its name.
        environment={
            name: environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "HOME", "NVCC_CCBIN") if name in environ
        }
        | {"LC_ALL": "C"},
    )


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~nobody
        return Path(name)


def _is_file(path: Path) -> bool:
    """False, too, where we may not look, or for what cannot be a name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _candidates(name: str, environ: Mapping[str, str]) -> Iterator[Path]:
    if found := shutil.which(name, path=environ.get("PATH", "")):
        yield Path(found)
    roots = [Path(environ[v]) for v in ("CUDA_HOME", "CUDA_PATH") if environ.get(v)]
    roots += sorted(Path("/usr/local").glob("cuda*"), reverse=True)  # the plain `cuda` link last, newest number first
    for root in roots:
        yield root / "bin" / name
        if name == "compute-sanitizer":
            yield root / "compute-sanitizer" / name
    if name == "ncu":
        yield from sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    for base in dict.fromkeys((sysconfig.get_path("platlib"), sysconfig.get_path("purelib"))):
        yield from sorted(Path(base).glob(f"nvidia/*/bin/{name}"), reverse=True)


def _cutlass(setting: str | None) -> Headers | None:
    """CUTLASS headers from a setting (a checkout or its include folder) or from the nvidia-cutlass wheel."""
    if setting is not None:
        roots = [_expanded(setting) / "include", _expanded(setting)]
    else:
        spec = importlib.util.find_spec("cutlass_library")
        roots = [Path(p) / "source" / "include" for p in (spec.submodule_search_locations or ())] if spec else []
    root = next((r for r in roots if _is_file(r / "cute" / "tensor.hpp")), None)
    if root is None:
        return None
    try:
        text = (root / "cutlass" / "version.h").read_text(encoding="utf-8")
        numbers = [re.search(rf"#define CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
        version = ".".join(m.group(1) if m else "0" for m in numbers)
    except (OSError, UnicodeDecodeError):
        version = "unknown"
    return Headers(root, version)


@lru_cache(maxsize=64)
def _version(path: Path, mtime_ns: int, size: int) -> str:
    """``mtime_ns`` and ``size`` are there to key the cache on the file, not only on its name."""
    text = run([str(path), "--version"], deadline_s=30).text
    # nvcc: "release 13.0, V13.0.88"; compute-sanitizer, ncu: "Version 2025.3.1.0 (build ...)"
    match = re.search(r"\bV(\d+\.\d+\.\d+)", text) or re.search(r"\bVersion:?\s+(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else "unknown"


def package_version(name: str) -> str | None:
    """The installed version of a Python distribution, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
