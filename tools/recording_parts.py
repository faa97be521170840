"""The folder beside a record file in which the processes of a recording each keep a file, until these are merged.

Only one process may write a SQLite file that is also compacted, and the processes of a recording may be killed at any
moment. So each measures into a part of its own, and whoever has the lock of the folder merges the parts and removes
them: at the ends of a recording's rounds, and at the beginning of the next one what a killed one has left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from tools.device import DeviceBroken
from tools.record_file import broken
from tools.record_merge import Merged, MergingWriter, part_opened
from tools.record_writer import RecordWriter
from tools.records import DeviceInfo

_LOCK = "lock"
_SUFFIX = ".sqlite"
#: What SQLite keeps beside a file.
_BESIDE = ("-wal", "-shm", "-journal", "")


class PartWriter(RecordWriter):
    """A record file that only this process may open until it closes it, and in which a commit costs some 50 us: what is
    committed survives kill -9 of the process at once, and a power cut after some seconds."""

    def __init__(self, path: Path, device: DeviceInfo) -> None:
        super().__init__(path, device)
        try:
            with self._errors():
                # In this order: a log of one process alone needs no shared memory, which not every file system has.
                for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
                    self._db.execute(f"PRAGMA {pragma}").fetchall()
                self._db.execute("BEGIN EXCLUSIVE")
                self._db.execute("COMMIT")
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self.commit()
        self._db.close()


def folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.parts")


def parts_of(out: Path) -> list[Path]:
    """What was measured for ``out`` and is not in it yet, oldest first."""
    found = folder_of(out).glob(f"*{_SUFFIX}")
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


class Parts:
    """The parts of the recording of ``out``; one process at a time holds them."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._folder = folder_of(out)

    def new(self) -> Path:
        """Where a process may keep what it measures next."""
        return self._folder / f"{secrets.token_hex(8)}{_SUFFIX}"

    def merge(self) -> Merged:
        """All parts into the record file, which is begun if it is not there. Raises DeviceBroken; parts that are not
        merged then stay for the next time."""
        total = Merged(0, 0)
        for path in parts_of(self.out):
            with part_opened(path) as part:
                if part is not None:
                    with MergingWriter(self.out, part.device) as writer:
                        total += writer.add(part, latest_wins=True)
            self._remove(path)
        return total

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Raises DeviceBroken if another process is recording to this file."""
        with broken(self._folder):
            handle = self._lock()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if not parts_of(self.out):
                    (self._folder / _LOCK).unlink()
                    self._folder.rmdir()
            os.close(handle)

    def _lock(self) -> int:
        while True:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # the recording that was here removed the folder meanwhile
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(handle)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise DeviceBroken(
                    f"another process is recording to {self.out}: wait for it to end, or give another output file"
                ) from error
            if os.fstat(handle).st_nlink > 0:
                return handle
            os.close(handle)

    def _remove(self, path: Path) -> None:
        with broken(path):
            for suffix in _BESIDE:  # the file itself last: without it nobody would look for the others
                path.with_name(path.name + suffix).unlink(missing_ok=True)
