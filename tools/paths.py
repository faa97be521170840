"""Where the packaged data lies (checkout or installed wheel) and where a user's own files go."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGED = Path(__file__).resolve().parent / "_data"


class HomeError(RuntimeError):
    """There is no place for the user's files; one sentence."""


def _data(name: str) -> Path:
    packaged = _PACKAGED / name
    return packaged if packaged.is_dir() else _ROOT / name


def kernels_dir() -> Path:
    return _data("kernels")


def configs_dir() -> Path:
    return _data("configs")


def records_dir() -> Path:
    return _data("records")


def adapters_dir() -> Path:
    return _data("adapters")


def home_dir() -> Path:
    """Sessions and caches: ``$HGEMM_AGENT_HOME`` or ``~/.hgemm-agent``. Absolute, so that a file in it has the same
    name for every process. Raises HomeError."""
    given = os.environ.get("HGEMM_AGENT_HOME")
    if not given:
        try:
            return Path.home() / ".hgemm-agent"
        except RuntimeError as error:
            raise HomeError("you have no home folder: set HGEMM_AGENT_HOME to a folder for sessions") from error
    try:
        return Path(given).expanduser().absolute()
    except (OSError, RuntimeError) as error:  # the current folder is gone; ~nobody
        raise HomeError(f"HGEMM_AGENT_HOME={given} leads nowhere: give the full path of a folder") from error
