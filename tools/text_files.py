"""Reading a file that somebody else wrote: regular, of bounded size, text, JSON; or one sentence that says why not."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any


class UnreadableFile(ValueError):
    """One sentence that names the file."""


def read_text(path: Path, what: str, limit_bytes: int) -> str:
    """``what`` names the file's role, as in "the kernel". Raises UnreadableFile; never blocks on a pipe or a device."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer would block
        with os.fdopen(handle, "rb") as file:
            mode = os.fstat(handle).st_mode
            if not stat.S_ISREG(mode):
                raise UnreadableFile(f"{what} {path} {_kind(mode)}")
            data = file.read(limit_bytes + 1)
    except FileNotFoundError as error:
        raise UnreadableFile(f"{what} {path} does not exist") from error
    except IsADirectoryError as error:  # os.fdopen says so before we can
        raise UnreadableFile(f"{what} {path} is a folder, not a file") from error
    except OSError as error:
        raise UnreadableFile(f"{what} {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL or a lone surrogate in the name
        if isinstance(error, UnreadableFile):
            raise
        raise UnreadableFile(f"{what} {str(path)!r} is not the name of a file") from error
    if len(data) > limit_bytes:
        raise UnreadableFile(f"{what} {path} is larger than {limit_bytes >> 10} KiB, which is not accepted")
    try:
        return data.decode().removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{what} {path} is not a text file (UTF-8)") from error


def read_json(path: Path, what: str, limit_bytes: int) -> Any:
    """The value in a JSON file. Raises UnreadableFile."""
    text = read_text(path, what, limit_bytes)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableFile(f"{what} {path} is not JSON: {error}") from error
    except RecursionError as error:
        raise UnreadableFile(f"{what} {path} is nested too deeply") from error
    except ValueError as error:
        raise UnreadableFile(f"{what} {path} holds a number of too many digits") from error


def irregular(path: Path) -> str | None:
    """ "is a folder, not a file" and the like of what is there; None of a regular file, or where nothing is to be seen.
    Opening a pipe would wait for its writer."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    return None if stat.S_ISREG(mode) else _kind(mode)


def _kind(mode: int) -> str:
    return "is a folder, not a file" if stat.S_ISDIR(mode) else "is a pipe or a device, not a regular file"
