"""Puts the measurements of one record file into another: parts of a recording, or recordings made on several hosts.

What both hold stays as the first has it. Merging the same file again changes nothing, so a merge that was interrupted
is repeated.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.device import DeviceBroken
from tools.record_codec import pack_json, renumbered_quick, renumbered_timing, unpack_json
from tools.record_file import DEPTHS, SCHEMA_VERSION, SOURCES, RecordReader, Records, broken
from tools.record_writer import RecordWriter, merged_sanitize
from tools.records import DeviceInfo, SanitizeResult
from tools.whole_files import replacing

#: How long another process may take to let go of a part: it ends when the recording that started it has ended.
PART_TIMEOUT_S = 30.0

Number = Callable[[int], int]


@dataclass(frozen=True)
class Merged:
    """Rows of measurements: ``added``, and ``again``, which were there already and stayed as they were."""

    added: int
    again: int

    def __add__(self, other: Merged) -> Merged:
        return Merged(self.added + other.added, self.again + other.again)


def difference(one: DeviceInfo, other: DeviceInfo) -> str | None:
    """What keeps measurements of two GPUs out of one file, as "driver 1.0 and driver 2.0"; None if nothing does."""
    facts: tuple[tuple[str, object, object], ...] = (
        ("", one.name, other.name),
        ("SMs: ", one.sm_count, other.sm_count),
        ("driver ", one.driver, other.driver),
        ("CUDA ", one.cuda_runtime, other.cuda_runtime),
        ("", one.library or "unknown libraries", other.library or "unknown libraries"),
        ("protocol ", one.protocol_version, other.protocol_version),
    )
    return next((f"{what}{mine} and {what}{theirs}" for what, mine, theirs in facts if mine != theirs), None)


class MergingWriter(RecordWriter):
    """A record file that takes in others."""

    #: What messages call it, where its path means nothing to the user.
    called: Path | None = None

    def add(self, source: Records, latest_wins: bool = False) -> Merged:
        """``latest_wins``: ``source`` is newer, so what it says of a shape's completeness and of the file as a whole
        replaces what is here; measurements never are.

        Raises DeviceBroken, with nothing changed, if the two are of different GPUs, libraries or compilers, or hold
        measurements of different sources under one plan.
        """
        self._refuse(source)
        texts = self._text_numbers(source)
        plans = self._plan_numbers(source)
        tasks = self._task_numbers(source)
        counts: Counter[bool] = Counter()

        def put(table: str, rows: Iterator[tuple[Any, ...]]) -> None:
            for row in rows:
                counts[self._insert(table, row)] += 1

        put("compiles", ((plans[p], data) for p, data in source._all("SELECT plan, data FROM compiles")))
        for plan, data in source._all("SELECT plan, data FROM sanitizes"):
            counts[self._add_sanitize(plans[plan], data)] += 1
        put("verifies", self._verifies(source, tasks, plans, texts))
        put("timings", self._timings(source, tasks, plans, texts))
        put("profiles", ((tasks[t], plans[p], d) for t, p, d in source._all("SELECT task, plan, data FROM profiles")))
        baselines = source._all("SELECT task, mode, budget, data FROM baselines")
        put("baselines", ((tasks[task], mode, budget, data) for task, mode, budget, data in baselines))
        # Last: a shape is complete when all that it consists of is here.
        kept = "" if latest_wins else " AND done IS NULL"
        for task, done, best in source._all("SELECT id, done, best FROM tasks WHERE done IS NOT NULL"):
            self._write(f"UPDATE tasks SET done = ?, best = ? WHERE id = ?{kept}", done, best, tasks[task])
        self._add_meta(source, latest_wins)
        return Merged(counts[True], counts[False])

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _refuse(self, source: Records) -> None:
        both = f"{self.called or self.path} and {source.path}"
        what = difference(self.device, source.device)
        compilers = (self.meta("compiler"), source.meta("compiler"))
        if what is None and None not in compilers and compilers[0] != compilers[1]:
            what = f"{compilers[0]} and {compilers[1]}"
        if what is not None:
            raise DeviceBroken(
                f"{both} cannot become one record file, which is of one kind of GPU and one set of libraries: {what}"
            )
        if int(source._meta["schema_version"]) != SCHEMA_VERSION:
            raise DeviceBroken(
                f"{source.path} has schema version {source._meta['schema_version']}, which can be read but not merged: "
                "record again"
            )
        for key, content in source._contents.items():
            if self._contents.get(key, content) != content:
                label = next((plan.label for plan in source.plans() if plan.plan_id == key), f"source {key}")
                raise DeviceBroken(
                    f"{both} hold measurements of different sources under {label}: record one of them again, with the "
                    "same kernels (a changed source needs a new `revision`)"
                )

    def _text_numbers(self, source: Records) -> Number:
        known: dict[int, int] = {}

        def number(theirs: int) -> int:
            if theirs not in known:
                known[theirs] = self._intern(source._text(theirs))
            return known[theirs]

        return number

    def _plan_numbers(self, source: Records) -> dict[int, int]:
        numbers = {}
        columns = "plan_id, family, revision, b_layout, knobs, content"
        for theirs, *values in source._all(f"SELECT id, {columns} FROM plans ORDER BY id"):
            key, layout, content = values[0], values[3], values[5]
            if key not in self._plans:
                mine = self._write(f"INSERT INTO plans ({columns}) VALUES (?, ?, ?, ?, ?, ?)", *values)
                self._plans[key] = (mine, layout)
                if content is not None:
                    self._contents[key] = content
            numbers[theirs] = self._plans[key][0]
        for key, variant in source.sources().items():
            self._write(SOURCES)
            self._write("INSERT OR IGNORE INTO sources VALUES (?, ?)", self._plans[key][0], pack_json(variant))
        return numbers

    def _task_numbers(self, source: Records) -> dict[int, int]:
        numbers = {}
        for theirs, task_id, text in source._all("SELECT id, task_id, task FROM tasks ORDER BY id"):
            if task_id not in self._tasks:
                self._tasks[task_id] = self._write("INSERT INTO tasks (task_id, task) VALUES (?, ?)", task_id, text)
            numbers[theirs] = self._tasks[task_id]
        return numbers

    def _verifies(
        self, source: Records, tasks: dict[int, int], plans: dict[int, int], text: Number
    ) -> Iterator[tuple[Any, ...]]:
        sql = "SELECT task, plan, depth, status, reason, detail, elapsed_us, data FROM verifies"
        for task, plan, depth, status, reason, detail, elapsed_us, data in source._all(sql):
            if data is not None and DEPTHS[depth] == "quick":
                data = renumbered_quick(data, text)
            said = None if detail is None else text(detail)
            yield tasks[task], plans[plan], depth, status, reason, said, elapsed_us, data

    def _timings(
        self, source: Records, tasks: dict[int, int], plans: dict[int, int], text: Number
    ) -> Iterator[tuple[Any, ...]]:
        sql = "SELECT task, plan, mode, budget, status, reason, detail, elapsed_us, data FROM timings"
        for task, plan, mode, budget, status, reason, detail, elapsed_us, data in source._all(sql):
            said = None if detail is None else text(detail)
            data = None if data is None else renumbered_timing(data, text)
            yield tasks[task], plans[plan], mode, budget, status, reason, said, elapsed_us, data

    def _insert(self, table: str, values: tuple[Any, ...]) -> bool:
        """Whether it was not there yet."""
        before = self._db.total_changes
        self._write(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(values))})", *values)
        return self._db.total_changes > before

    def _add_sanitize(self, plan: int, data: bytes) -> bool:
        rows = self._all("SELECT data FROM sanitizes WHERE plan = ?", (plan,))
        theirs = SanitizeResult.from_json(unpack_json(data))
        mine = SanitizeResult.from_json(unpack_json(rows[0][0])) if rows else None
        merged = merged_sanitize(mine, theirs)
        if merged == mine:
            return False
        self._write("INSERT OR REPLACE INTO sanitizes VALUES (?, ?)", plan, pack_json(merged))
        return True

    def _add_meta(self, source: Records, latest_wins: bool) -> None:
        clocks = [json.loads(text)["sm_mhz_median_range"] for r in (self, source) if (text := r.meta("clocks"))]
        if clocks:
            spread = [min(low for low, _ in clocks), max(high for _, high in clocks)]
            self.put_meta({"clocks": json.dumps({"sm_mhz_median_range": spread})})
        for key in ("compiler", "library", "commit"):
            theirs = source.meta(key)
            if theirs and (latest_wins or not self.meta(key)):
                self.put_meta({key: theirs})


@contextmanager
def part_opened(path: Path) -> Iterator[Records | None]:
    """A part, with whatever a killed process left beside it; None if nothing was ever written to it.

    Waits ``PART_TIMEOUT_S`` for a process that still has it open, then raises DeviceBroken.
    """
    with broken(path):
        db = sqlite3.connect(path, isolation_level=None, timeout=PART_TIMEOUT_S)
        try:
            begun = bool(db.execute("SELECT 1 FROM sqlite_master").fetchall())
            yield Records(db, path) if begun else None
        finally:
            db.close()


def merge_files(sources: Sequence[Path], parts: Callable[[Path], Sequence[Path]], out: Path) -> Merged:
    """``sources`` and what ``parts`` names beside each, as a new file ``out``, which appears when it is whole.

    The sources are not touched. Raises DeviceBroken where one cannot be read, where they cannot become one file, and
    where ``out`` is there already.
    """
    if out.exists():
        raise DeviceBroken(f"{out} is there already: give the merged file a name of its own")
    total = Merged(0, 0)
    with broken(out), tempfile.TemporaryDirectory(prefix="hgemm-agent-") as scratch:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as new:
            readers = [RecordReader(path) for path in sources]
            try:
                measured_on = max(reader.meta("recorded_on") or "" for reader in readers)
                with MergingWriter(new, readers[0].device, measured_on) as writer:
                    writer.called = sources[0]
                    for path, reader in zip(sources, readers, strict=True):
                        total += writer.add(reader)
                        for part in parts(path):
                            with part_opened(_copied(part, Path(scratch))) as records:
                                total += writer.add(records, latest_wins=True) if records else Merged(0, 0)
                    writer.compact()
            finally:
                for reader in readers:
                    reader.close()
    return total


def _copied(part: Path, folder: Path) -> Path:
    """Opening a part writes to it."""
    for beside in part.parent.glob(f"{part.name}*"):
        shutil.copyfile(beside, folder / beside.name)
    return folder / part.name
