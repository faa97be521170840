"""Files that are either whole or not there."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from agent.errors import UsageError, refusal
from tools import text_files
from tools.whole_files import replacing


def write_atomic(path: Path, text: str, chosen_with: str = "") -> None:
    """Whole or not at all (tools/whole_files.py). What is no regular file (/dev/stdout, a named pipe) is written as it
    is. ``chosen_with`` is the option that gave the path. Raises UsageError with one sentence."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = _mode(path)
        if mode is not None and stat.S_ISDIR(mode):
            raise UsageError(f"{path} is a folder: give the name of a file")
        if mode is not None and (not stat.S_ISREG(mode) or _names_a_descriptor(path)):
            path.write_text(text, encoding="utf-8", errors="replace")
        else:
            with replacing(path) as new:
                new.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {refusal(error, chosen_with)}") from error
    except ValueError as error:  # a NUL byte in the name
        raise UsageError(f"{str(path)!r} is not the name of a file") from error


def _mode(path: Path) -> int | None:
    """Of what is there; None if nothing is, or a link to nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _names_a_descriptor(path: Path) -> bool:
    """/dev/stdout and /dev/fd/N: whoever opened that file writes to it, not to one that takes its place."""
    folder = os.path.realpath(path.parent)
    return folder == "/dev" or folder.startswith("/proc/")


def read_text(path: Path, what: str, limit_bytes: int = 64 << 20) -> str:
    """The text of a user's file. Raises UsageError with one sentence."""
    try:
        return text_files.read_text(path, what, limit_bytes)
    except text_files.UnreadableFile as error:
        raise UsageError(str(error)) from error


def read_json(path: Path, what: str, limit_bytes: int = 64 << 20) -> Any:
    """The value in a user's JSON file. Raises UsageError with one sentence."""
    try:
        return text_files.read_json(path, what, limit_bytes)
    except text_files.UnreadableFile as error:
        raise UsageError(str(error)) from error
