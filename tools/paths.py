"""Where the packaged data lies (checkout or installed wheel) and where a user's own files go."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGED = Path(__file__).resolve().parent / "_data"


def _data(name: str) -> Path:
    packaged = _PACKAGED / name
    return packaged if packaged.is_dir() else _ROOT / name


def kernels_dir() -> Path:
    return _data("kernels")


def configs_dir() -> Path:
    return _data("configs")


def records_dir() -> Path:
    return _data("records")


def home_dir() -> Path:
    """Sessions and caches: ``$HGEMM_AGENT_HOME`` or ``~/.hgemm-agent``."""
    return Path(os.environ.get("HGEMM_AGENT_HOME") or Path.home() / ".hgemm-agent")
