"""What a sweep's workers have measured and the database does not hold yet: append-only files beside the database.

<db>.spool/id                       one random line: two hosts that read the same one share this folder
           shared/*.jsonl           compile and sanitize results, which count for every shape; every worker follows them
           shared/lock-NN           held while one of these is measured, so that no two workers measure the same
           cells/<cell>/*.jsonl     results and policy turns of one unfinished shape
           cells/<cell>/lock        held by the worker that has the shape
           cells/<cell>/closed      the database holds the shape: nothing to do
           dask/                    scratch folders of local workers

A line is ``[key, kind, payload]``. Each file has one writer, so a line is whole or it is the last of a writer that
was killed, and readers leave it out. A written line survives kill -9 of its writer (not a power cut). On hosts that
share the folder (NFS is enough: one writer a file, no SQLite) a killed worker's shape goes on anywhere; without that,
on its host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TypeVar

from agent.errors import AgentError
from policy.base import Policy, PolicyRequest
from tools.device import Device
from tools.gate import Kind, Toolbox, is_kept
from tools.records import Family, Outcome, Step, content_hash

Entry = tuple[str, str, str]  # key, kind, payload as JSON
R = TypeVar("R", bound=Outcome)

#: Kinds of results that belong to a variant and not to a shape.
SHARED_KINDS = frozenset({"compile", "sanitize"})
#: A policy's answer: kept until its shape is done, and then found in the trajectory.
TURN = "turn"
_STRIPES = 128
_CLOSED = "closed"


class SweepError(AgentError):
    """A sweep cannot go on now; the same command goes on later. One sentence for the user."""


class Spool:
    """The folder. ``create`` is for the driver and for hosts that do not share it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shared = root / "shared"
        self.cells = root / "cells"

    def create(self) -> None:
        try:
            self.shared.mkdir(parents=True, exist_ok=True)
            self.cells.mkdir(exist_ok=True)
            if not (self.root / "id").exists():
                (self.root / "id").write_text(secrets.token_hex(8), encoding="utf-8")
        except OSError as error:
            raise SweepError(_full(self.root, error)) from error

    @property
    def identity(self) -> str | None:
        try:
            return (self.root / "id").read_text(encoding="utf-8")
        except OSError:
            return None

    def cell(self, cell_id: str) -> Path:
        return self.cells / cell_id

    def close(self, cell_id: str) -> None:
        """Once the database holds the cell: its journals go, and a mark stays for a worker that Dask has given the cell
        again, because the one that did it died in the moment after. Without the lock, a worker has the cell already
        and has read its journals: then they stay until the end of the sweep."""
        folder = self.cell(cell_id)
        if not folder.is_dir():
            return
        with contextlib.suppress(OSError), (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / _CLOSED).touch()
            for path in folder.glob("*.jsonl"):
                path.unlink()

    def reopen(self, cell_id: str) -> None:
        """The database does not hold the cell, whatever a mark says."""
        (self.cell(cell_id) / _CLOSED).unlink(missing_ok=True)

    def is_closed(self, cell_id: str) -> bool:
        """To be asked under the cell's lock."""
        return (self.cell(cell_id) / _CLOSED).exists()

    def forget(self, cell_id: str) -> None:
        """The cell's folder, while no worker can have the cell."""
        shutil.rmtree(self.cell(cell_id), ignore_errors=True)

    def leftovers(self) -> list[Entry]:
        """Results that unfinished cells had measured; and compiles and sanitizes, which may not have come back."""
        paths = [*self.shared.glob("*.jsonl"), *self.cells.glob("*/*.jsonl")]
        return [entry for path in sorted(paths) for entry in read_entries(path)[0] if entry[1] != TURN]

    def remove(self) -> None:
        """A worker that is just ending may still be clearing away its scratch folder."""
        until = time.monotonic() + 5
        while self.root.exists() and time.monotonic() < until:
            shutil.rmtree(self.root, ignore_errors=True)
            time.sleep(0.02)


def read_entries(path: Path, offset: int = 0) -> tuple[list[Entry], int]:
    """The whole lines from ``offset`` on, and where the next ones will begin. A file that is gone has none."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], offset
    except OSError as error:
        raise SweepError(f"{path} cannot be read: {error.strerror}") from error
    end = data.rfind(b"\n") + 1
    found: list[Entry] = []
    for line in data[:end].splitlines():
        with contextlib.suppress(ValueError):  # what a full disk left of a line
            key, kind, payload = json.loads(line)
            found.append((key, kind, payload))
    return found, offset + end


class Journal:
    """This process's file in one folder. An entry is in the file when ``append`` returns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None
        self._lock = Lock()
        self.path = folder / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"

    def append(self, entries: Iterable[Entry]) -> None:
        data = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
        with self._lock:
            try:
                if self._file is None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:
                self._abandon()
                raise SweepError(_full(self.path, error)) from error

    def _abandon(self) -> None:
        """After a torn line nothing may follow in this file."""
        self.close()
        self.path = self.path.with_name(f"{self.path.name.rpartition('-')[0]}-{secrets.token_hex(4)}.jsonl")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class SharedResults:
    """Compile and sanitize results of all workers that share the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._journal = Journal(folder)
        self._offsets: dict[Path, int] = {}
        self._known: dict[str, Entry] = {}
        self._guard = Lock()

    def get(self, key: str) -> Entry | None:
        """As of the last ``follow``."""
        return self._known.get(key)

    def put(self, entry: Entry) -> None:
        if entry[0] not in self._known:
            self._journal.append([entry])
            self._known.setdefault(entry[0], entry)

    def follow(self) -> None:
        """Reads what other workers have added."""
        with self._guard:
            for path in self._folder.glob("*.jsonl"):
                found, self._offsets[path] = read_entries(path, self._offsets.get(path, 0))
                for entry in found:
                    self._known.setdefault(entry[0], entry)

    @contextmanager
    def claim(self, key: str) -> Iterator[None]:
        """One worker at a time for a key (and for the few keys that share its lock)."""
        with locked(self._folder / f"lock-{int(content_hash(key), 16) % _STRIPES}"):
            self.follow()
            yield

    def close(self) -> None:
        self._journal.close()


class CellResults:
    """The results of one cell (``tools.gate.ResultStore``): what the database knew, what an earlier attempt left in the
    journal, and what is measured now."""

    def __init__(self, folder: Path, shared: SharedResults, known: Iterable[Entry] = ()) -> None:
        self._shared = shared
        self._journal = Journal(folder)
        self._lock = Lock()
        self._known = {entry[0]: entry for entry in known}
        self._new: dict[str, Entry] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for entry in read_entries(path)[0]:
                if entry[0] not in self._known:
                    self._new.setdefault(entry[0], entry)

    def get(self, key: str) -> str | None:
        found = self._known.get(key) or self._new.get(key)
        if found is None and (found := self._shared.get(key)) is not None:
            with self._lock:
                self._new[key] = found
        return found[2] if found else None

    def put(self, key: str, kind: str, payload_json: str) -> None:
        entry = (key, kind, payload_json)
        with self._lock:
            if key in self._known or key in self._new:
                return
            if kind in SHARED_KINDS:
                self._shared.put(entry)
            else:
                self._journal.append([entry])
            self._new[key] = entry

    def new(self) -> list[Entry]:
        """What the database may not hold yet: measured here, by an earlier attempt, or used of another worker's."""
        with self._lock:
            return [entry for entry in self._new.values() if entry[1] != TURN]

    def close(self) -> None:
        self._journal.close()


class SweepToolbox(Toolbox):
    """The gate, with compile and sanitize measured by one of all workers."""

    def __init__(
        self, device: Device, results: CellResults, shared: SharedResults, families: Mapping[str, Family]
    ) -> None:
        super().__init__(device, results, families)
        self._own = results
        self._shared = shared

    def _once(self, record: type[R], key: str, kind: Kind, measure: Callable[[], R]) -> R:
        if kind not in SHARED_KINDS:
            return super()._once(record, key, kind, measure)

        def measure_alone() -> R:
            with self._shared.claim(key):
                found = self._stored(record, key)
                if found is not None:
                    return found
                result = measure()
                if is_kept(result):  # before another worker may have the claim
                    self._own.put(key, kind, result.to_json())
                return result

        return super()._once(record, key, kind, measure_alone)


class RememberedPolicy:
    """A policy whose turns are kept by the content of the request, so that no turn is paid for twice. A search is asked
    again instead: the same request gives the same step, and sooner than it could be read."""

    def __init__(self, policy: Policy, results: CellResults) -> None:
        self._policy = policy
        self._results = results

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def is_search(self) -> bool:
        return self._policy.is_search

    def step(self, request: PolicyRequest) -> Step:
        if self.is_search:
            return self._policy.step(request)
        key = f"{TURN}-{content_hash([self.name, request.model_dump(mode='json')])}"
        found = self._results.get(key)
        if found is None:
            found = self._policy.step(request).to_json()
            self._results.put(key, TURN, found)
        return Step.from_json(found)

    def close(self) -> None:
        """The policy outlives the cell."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits for the lock. The kernel frees the lock of a process that dies. On a file system without locks, nothing is
    held: two workers may then measure the same once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise SweepError(_full(path, error)) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise SweepError(f"{path} cannot be locked: {error.strerror}") from error
        yield


def _full(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{path} cannot grow because the disk is full: free some space and run the command again"
    return f"{path} cannot be written: {error.strerror or error}"
