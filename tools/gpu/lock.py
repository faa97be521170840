"""One timing at a time per GPU, across processes and users: others may share the GPU, but not while it is timed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


class GpuLock:
    """Held exclusively by what is timed, shared by whatever else runs kernels. Waits as long as it takes.

    The path is fixed (not ``$TMPDIR``): processes with different temporary folders still meet. The file stays open
    between uses, since opening one can cost a millisecond; one that was removed meanwhile is made again. Raises OSError
    if the lock file can neither be made nor opened.
    """

    def __init__(self, uuid: str) -> None:
        self._path = f"/tmp/hgemm-agent-{uuid}.lock"
        self._handle = -1

    @contextlib.contextmanager
    def held(self, exclusive: bool) -> Iterator[None]:
        while True:
            if self._handle < 0:
                self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                with contextlib.suppress(
                    PermissionError
                ):  # another user's file, made under a umask; it is open already
                    os.fchmod(self._handle, 0o666)
            fcntl.flock(self._handle, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            if os.fstat(self._handle).st_nlink > 0:
                break
            os.close(self._handle)
            self._handle = -1
        try:
            yield
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)
