"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from agent.errors import UsageError


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


def read_text(path: Path, what: str) -> str:
    """The text of a user's file. Raises UsageError with one sentence."""
    try:
        return path.read_text()
    except FileNotFoundError as error:
        raise UsageError(f"{what} {path} does not exist") from error
    except IsADirectoryError as error:
        raise UsageError(f"{what} {path} is a folder, not a file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is not a text file") from error
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from error
