"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from agent.errors import UsageError
from tools import text_files


def write_atomic(path: Path, text: str) -> None:
    """tmp + fsync + rename. Raises UsageError if the folder cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)  # noqa: PTH105
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)  # noqa: PTH108
            raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


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
