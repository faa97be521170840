"""A file that is either whole or not there: written beside its place, then moved into it."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside the one that ``path`` leads to; it takes that one's place and mode when the block ends well,
    and is gone if it does not. Raises OSError."""
    target = Path(os.path.realpath(path))
    new = target.parent / f".new-{secrets.token_hex(8)}"  # not of its name, which may be the longest there is
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))  # less the umask
    try:
        yield new
        with contextlib.suppress(FileNotFoundError):
            new.chmod(stat.S_IMODE(target.stat().st_mode))
        with new.open("rb") as written:
            os.fsync(written.fileno())
        new.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
