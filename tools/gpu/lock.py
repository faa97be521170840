"""One timing at a time per GPU, across processes and users: others may share the GPU, but not while it is timed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def gpu_lock(uuid: str, exclusive: bool) -> Iterator[None]:
    """Held exclusively by what is timed, shared by whatever else runs kernels. Waits as long as it takes.

    The path is fixed (not ``$TMPDIR``): processes with different temporary folders still meet. Raises OSError if
    the lock file can neither be made nor opened.
    """
    handle = os.open(f"/tmp/hgemm-agent-{uuid}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(PermissionError):  # another user's file, made under a umask; it is open already
            os.fchmod(handle, 0o666)
        fcntl.flock(handle, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)
