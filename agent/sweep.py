"""``agent sweep``: many shapes over many devices into one database, resumable after any kill.

The driver is the only writer of the database. A cell (one shape) is committed in one transaction: its row, its results,
its variants, its trajectories. Until then its measurements are in the workers' journals (agent/sweep_journal.py), which
the same command finds again, whoever was killed.
"""

from __future__ import annotations

import fcntl
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agent.config import Settings
from agent.errors import UsageError
from agent.sweep_cell import Cell, CellResult
from agent.sweep_journal import Entry, Spool, SweepError
from agent.sweep_progress import Progress
from agent.sweep_rows import SweepRow, cell_id, config_id, in_order, stored_rows
from memory.store import Store
from tools.gate import device_scope
from tools.records import DeviceInfo, Family, Task, Trajectory, Variant, content_hash

if TYPE_CHECKING:
    from agent.sweep_farm import Farm, Finished, Place
    from agent.sweep_worker import Hello, Tools

#: A shape is tried this often before the sweep leaves it and says so.
TRIES = 3
#: Cells a worker holds beyond the running one, so that it never waits for the driver.
AHEAD = 2
POLL_S = 0.5


@dataclass(frozen=True)
class Sweep:
    """What is swept. ``db`` is made if it does not exist; ``spool`` is where its spool lies, if not beside it."""

    tasks: Sequence[Task]
    settings: Settings
    db: Path
    place: Place
    tools: Tools
    jobs: int = 1
    spool: Path | None = None

    @property
    def spool_path(self) -> Path:
        """A folder of our own, since it is removed at the end."""
        name = self.db.name + ".spool"
        if self.spool is None:
            return self.db.with_name(name)
        return self.spool / f"{content_hash(str(self.db.absolute()))}-{name}"


@dataclass
class Outcome:
    """``rows`` are those of this sweep's shapes, in order. ``unfinished``: label → why; the next run tries again."""

    config_id: str
    info: DeviceInfo
    rows: list[SweepRow] = field(default_factory=list)
    unfinished: dict[str, str] = field(default_factory=dict)
    resumed: int = 0
    results: int = 0  # that this run added to the database
    busy_s: float = 0.0  # of the driver, between two waits


def run(sweep: Sweep, progress: Progress) -> Outcome:
    """To the end, or SweepError, UsageError or StoreError with one sentence; nothing that was measured is lost."""
    from agent.sweep_farm import open_farm

    if not sweep.tasks:
        raise UsageError("the set of shapes is empty: there is nothing to sweep")
    spool = Spool(sweep.spool_path)
    name = f"sweep-{content_hash(str(sweep.db.absolute()))}"
    with ExitStack() as stack:
        stack.enter_context(_only_one(sweep.db))
        store = stack.enter_context(Store(sweep.db))
        store.check_families(sweep.tools.load_families())
        keep(store, spool.leftovers())
        spool.create()
        progress.note(f"starting {_workers(sweep.place)}")
        farm = stack.enter_context(open_farm(sweep.place, spool, sweep.tools, name))
        hellos = farm.hellos()
        info = same_device(hellos)
        progress.note(f"{len(hellos)} workers on {info.label}; the database is {sweep.db}")
        own_folder = [address for address, found in hellos.items() if not found.shares_spool]
        keep(store, farm.leftovers(own_folder))
        outcome = Driver(sweep, store, spool, farm, info, progress).run(own_folder)
    if not outcome.unfinished:
        spool.remove()
    return outcome


class Driver:
    def __init__(
        self, sweep: Sweep, store: Store, spool: Spool, farm: Farm, info: DeviceInfo, progress: Progress
    ) -> None:
        self._sweep = sweep
        self._store = store
        self._spool = spool
        self._farm = farm
        self._progress = progress
        self._scope = device_scope(info)
        self._families: Mapping[str, Family] = sweep.tools.load_families()
        self._config = config_id(sweep.settings, self._families)
        self._stored: set[str] = set()  # keys of results and variants that many cells bring along
        self._tries: Counter[str] = Counter()
        self._broken: Counter[str] = Counter()  # cells in a row, by worker
        self._unavailable = 0  # cells in a row
        self._outcome = Outcome(self._config, info)

    def run(self, own_folder: Sequence[str]) -> Outcome:
        tasks = {cell_id(self._scope, self._config, task): task for task in self._sweep.tasks}
        rows = {row.cell_id: row for row in stored_rows(self._store, self._config) if row.cell_id in tasks}
        for known in rows:
            self._spool.close(known)  # a driver that was killed between commit and here
        self._farm.forget(own_folder, list(rows))
        self._share_known(own_folder)
        self._outcome.resumed = len(rows)
        self._progress.begin(len(tasks), list(rows.values()))
        waiting = [identity for identity in tasks if identity not in rows]
        running: set[str] = set()
        while waiting or running:
            started = time.perf_counter()
            room = AHEAD * max(1, len(self._farm.workers())) if waiting else 0
            while waiting and len(running) < room:
                identity = waiting.pop(0)
                self._farm.submit(self._cell(identity, tasks[identity]))
                running.add(identity)
            self._outcome.busy_s += time.perf_counter() - started
            finished = self._farm.next(POLL_S)
            if finished is None:
                self._progress.tick(len(self._farm.workers()))
                continue
            started = time.perf_counter()
            running.discard(finished.cell_id)
            row = self._take(finished.cell_id, tasks[finished.cell_id], finished)
            if row is not None:
                rows[row.cell_id] = row
                self._progress.done(row)
            elif tasks[finished.cell_id].label not in self._outcome.unfinished:
                waiting.append(finished.cell_id)
            self._outcome.busy_s += time.perf_counter() - started
        self._farm.forget(own_folder, list(rows))
        self._outcome.rows = in_order(rows.values())
        return self._outcome

    def _cell(self, identity: str, task: Task) -> Cell:
        self._spool.reopen(identity)
        known = tuple(entry for entry in self._store.entries(self._scope, task.task_id))
        return Cell(identity, self._config, task, self._sweep.settings, self._scope, known, self._sweep.jobs)

    def _share_known(self, own_folder: Sequence[str]) -> None:
        """Compiles and sanitizes that the database has from earlier, where the workers look for them."""
        from agent.sweep_journal import SHARED_KINDS, Journal

        entries = [entry for entry in self._store.entries(self._scope, None) if entry[1] in SHARED_KINDS]
        if entries:
            journal = Journal(self._spool.shared)
            journal.append(entries)
            journal.close()
            self._farm.seed(own_folder, entries)

    # --- what comes back -------------------------------------------------------------------------------------------

    def _take(self, identity: str, task: Task, finished: Finished) -> SweepRow | None:
        """Commits a finished cell. None if it has to be tried again, or is given up (``unfinished``)."""
        if finished.error:
            raise SweepError(f"{task.label} could not be swept: {finished.error}")
        result, worker = finished.result, finished.worker
        if result is None:
            self._again(identity, task, finished.died)
            return None
        self._commit(result)
        if result.outcome == "done" and result.row is not None:
            self._broken[worker] = self._unavailable = 0
            self._spool.close(identity)
            return result.row
        if result.outcome == "gone":
            self._again(identity, task, result.detail)
            return None
        if result.outcome == "stop":
            raise SweepError(f"{result.detail}; nothing is lost: the same command goes on")
        if result.outcome == "unavailable":
            self._unavailable += 1
            if self._unavailable >= TRIES:
                raise SweepError(result.detail)
            self._outcome.unfinished[task.label] = result.detail
            return None
        self._again(identity, task, result.detail)
        self._broken[worker] += 1
        if self._broken[worker] >= TRIES:
            if len(self._farm.workers()) <= 1:
                raise SweepError(f"{result.detail}; no device is left, nothing is lost: the same command goes on")
            self._progress.note(f"worker {worker} is retired: {result.detail}")
            self._farm.retire(worker)
        return None

    def _again(self, identity: str, task: Task, why: str) -> None:
        self._tries[identity] += 1
        if self._tries[identity] >= TRIES:
            self._outcome.unfinished[task.label] = why
            self._progress.note(f"{task.label} is left out after {TRIES} tries: {why}")

    def _commit(self, result: CellResult) -> None:
        """All of a cell, or nothing. A key that exists keeps its first payload."""
        new = [entry for entry in result.entries if entry[0] not in self._stored]
        variants = [variant for text in result.variants if (variant := Variant.from_json(text)).key not in self._stored]
        with self._store.batch():
            for key, kind, payload in new:
                self._store.put(key, kind, payload)
            for variant in variants:
                self._store.put_variant(variant)
            for text in result.trajectories:
                self._store.put_trajectory(Trajectory.from_json(text))
            if result.row is not None:
                self._store.put(result.row.key, "sweep", result.row.to_json())
        self._outcome.results += len(new)
        self._stored |= {entry[0] for entry in new} | {variant.key for variant in variants}


def keep(store: Store, entries: Sequence[Entry]) -> None:
    with store.batch():
        for key, kind, payload in entries:
            store.put(key, kind, payload)


def same_device(hellos: Mapping[str, Hello]) -> DeviceInfo:
    """Raises SweepError unless every worker has the same device (model, driver, recording)."""
    for address, hello in hellos.items():
        if hello.error:
            raise SweepError(f"the worker at {address} ({hello.host}) has no device: {hello.error}")
    infos: list[DeviceInfo] = [hello.info for hello in hellos.values()]
    first = infos[0]
    other = next((info for info in infos if device_scope(info) != device_scope(first)), None)
    if other is not None:
        raise SweepError(
            f"the workers have different devices ({first.label}; {other.label}), whose numbers do not mix: sweep each "
            "into a database of its own"
        )
    return first


def _workers(place: Place) -> str:
    if place.specs:
        return f"{len(place.specs)} local workers"
    return f"with the workers of {place.scheduler_file or place.scheduler}"


@contextmanager
def _only_one(db: Path) -> Iterator[None]:
    """One sweep at a time writes a database. The kernel frees the lock of a driver that dies."""
    path = db.with_name(db.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SweepError(f"another sweep is writing {db}: wait for it or end it") from error
        yield
