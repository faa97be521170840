"""The standard streams of the command: progress that nothing can end, and a result that is written or said to be lost.

A search of hours must not end because the terminal went away, a pipe was closed or the disk of a log file is full: what
cannot be written to stderr is dropped. What cannot be written to stdout is the result, so that one is said.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputLost(Exception):
    """stdout takes no more. ``reader_left``: the reader of a pipe has closed it, as ``head`` does."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.reader_left = error.errno == errno.EPIPE


class _Raw(io.FileIO):
    """A descriptor that outlives us. After its first failure it takes everything and keeps nothing, so that the
    interpreter can flush it at its end."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lost = False

    def write(self, data: ReadableBuffer, /) -> int:
        size = memoryview(data).nbytes
        if self._lost:
            return size
        try:
            written: int | None = super().write(data)
            while written is None:  # somebody made the descriptor non-blocking
                select.select([], [self.fileno()], [])
                written = super().write(data)
            return written
        except OSError as error:
            self._lost = True
            self._failed(error)
            return size

    def _failed(self, error: OSError) -> None:
        """stderr: from here on nothing is shown, and processes that are started later inherit a working one."""
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
        except OSError:
            return  # no descriptor is free; ``_lost`` is enough for ourselves


class _RawOutput(_Raw):
    def _failed(self, error: OSError) -> None:
        # No OSError: whoever catches those of a file or a socket must not take this for one of them.
        raise OutputLost(error)


def prepare() -> None:
    """Wraps this process's streams. Characters that their encoding lacks become question marks, not tracebacks."""
    _open_closed()
    sys.stdout = _text(_RawOutput(1), sys.stdout, "replace")
    sys.stderr = _text(_Raw(2), sys.stderr, "backslashreplace")


def _open_closed() -> None:
    """A closed 0, 1 or 2 would be the number of the next file that is opened, which the next message then damages.
    What takes the place of stdout is read-only: a result that nobody can get is an error."""
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, flags)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)


def _text(raw: _Raw, old: TextIO | None, errors: str) -> TextIO:
    encoding: Any = getattr(old, "encoding", None) or "utf-8"
    try:
        lines = raw.isatty() or errors == "backslashreplace"
    except OSError:
        lines = False
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=lines)


@contextmanager
def result(elsewhere: str) -> Iterator[None]:
    """Around the printing of a result that also lies elsewhere. Raises AgentError that says where, if it is lost."""
    from agent.errors import AgentError

    try:
        yield
        sys.stdout.flush()
    except OutputLost as error:
        raise AgentError(f"the result could not be written to stdout ({error}): {elsewhere}") from error
