"""Adds measurements to a record file: one process at a time, in transactions, so that it is whole after kill -9."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools.device import DeviceBroken
from tools.record_codec import pack_json, pack_quick, pack_timing
from tools.record_file import DEPTHS, SCHEMA, SCHEMA_VERSION, SOURCES, Provenance, Records, broken, changed_source
from tools.records import (
    BUDGETS,
    MODES,
    PROTOCOL_VERSION,
    REFERENCES,
    BaselineResult,
    CompileResult,
    DeviceInfo,
    Outcome,
    ProfileResult,
    SanitizeResult,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)


class RecordWriter(Records):
    """Adds to a record file, or begins one for ``device``. What is there already stays: the first write wins.

    Writes become durable at ``commit``; leaving the context commits, also on an error, since every row is whole by
    itself. Only lasting results are kept: the others say nothing about the candidate. DeviceBroken if the file is of
    another device, driver, library or protocol.
    """

    def __init__(self, path: Path, device: DeviceInfo, measured_on: str | None = None) -> None:
        """``measured_on`` (UTC, ISO 8601): where that was earlier than now; the file keeps the latest it is told."""
        self._measured_on = measured_on
        with broken(path):
            if not path.exists() or path.stat().st_size == 0:
                _create(path, device, measured_on or _now())
            db = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
        try:
            super().__init__(db, path)
            if (self.device.name, self.device.driver) != (device.name, device.driver):
                raise DeviceBroken(
                    f"{path} holds records of {self.device.name} with driver {self.device.driver}, this is "
                    f"{device.name} with driver {device.driver}: give another output file"
                )
            if self.device.library != device.library:
                raise DeviceBroken(
                    f"{path} holds records against {self.device.library or 'unknown libraries'}, here are "
                    f"{device.library or 'unknown ones'}: give another output file"
                )
            if int(self._meta["schema_version"]) != SCHEMA_VERSION:
                raise DeviceBroken(
                    f"{path} has schema version {self._meta['schema_version']}, which can be read but not added to: "
                    "begin a new file"
                )
            if self.protocol_version != PROTOCOL_VERSION:
                raise DeviceBroken(
                    f"{path} was recorded under protocol version {self.protocol_version}, this program measures under "
                    f"{PROTOCOL_VERSION}, and a file holds one: begin a new file"
                )
            with self._errors():
                db.execute("PRAGMA synchronous = FULL")
                self._numbers: dict[str, int] = {text: n for n, text in db.execute("SELECT id, text FROM texts")}
        except BaseException:
            db.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.commit()
        self._db.close()

    def check_contents(self, variants: Iterable[Variant]) -> None:
        """Raises DeviceBroken if one of them is not what the file holds under its key."""
        for variant in variants:
            if not self.is_of(variant):
                raise DeviceBroken(
                    f"{self.path} holds measurements of another source under {variant.label}: {changed_source(variant)}"
                )

    def commit(self) -> None:
        with self._lock, self._errors():
            if self._db.in_transaction:
                when = max(self._measured_on, self._meta["recorded_on"]) if self._measured_on else _now()
                self._db.execute("INSERT OR REPLACE INTO meta VALUES ('recorded_on', ?)", (when,))
                self._db.execute("COMMIT")

    def compact(self) -> None:
        """Commits, and packs the pages: rows came in plan order within a task, which leaves them two thirds full."""
        self.commit()
        with self._lock, self._errors():
            self._db.execute("VACUUM")

    def put_meta(self, facts: Mapping[Provenance, str]) -> None:
        for key, value in facts.items():
            if value and self._meta.get(key) != value:
                self._meta[key] = value
                self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def mark_done(self, task: Task, digest: str, best: Variant | None) -> None:
        """Says that all of ``digest`` (plans and settings) was measured at ``task`` but for the profile of ``best``."""
        self._add_task(task)
        self._write(
            "UPDATE tasks SET done = ?, best = ? WHERE task_id = ?", digest, best.key if best else None, task.task_id
        )

    def is_done(self, task: Task, digest: str, with_profile: bool = True) -> bool:
        """Whether exactly this was measured at ``task``, the profile of its best included where that is wanted."""
        rows = self._all("SELECT done, best FROM tasks WHERE task_id = ?", (task.task_id,))
        if not rows or rows[0][0] != digest:
            return False
        best = rows[0][1]
        return not with_profile or best is None or self.profiled(best, task.task_id) is not None

    def put_compile(self, variant: Variant, result: CompileResult) -> None:
        """Without its log, which is long and says nothing that the other fields do not; but of a raw source that failed
        it says what to repair."""
        if result.lasting:
            kept = result if variant.plan is None and not result.ok else result.model_copy(update={"log": ""})
            self._write("INSERT OR IGNORE INTO compiles VALUES (?, ?)", self._add_plan(variant), pack_json(kept))

    def put_sanitize(self, variant: Variant, result: SanitizeResult) -> None:
        """A plan has one result: runs at further shapes are added to those of a pass, and a failure replaces it."""
        if result.lasting:
            merged = merged_sanitize(self.sanitized(variant.key), result)
            self._write("INSERT OR REPLACE INTO sanitizes VALUES (?, ?)", self._add_plan(variant), pack_json(merged))

    def put_profile(self, variant: Variant, task: Task, result: ProfileResult) -> None:
        if result.lasting:
            where = (self._add_task(task), self._add_plan(variant))
            self._write("INSERT OR IGNORE INTO profiles VALUES (?, ?, ?)", *where, pack_json(result))

    def put_baselines(self, task: Task, result: BaselineResult) -> None:
        if result.lasting:
            where = (self._add_task(task), MODES.index(result.mode), BUDGETS.index(result.budget))
            self._write("INSERT OR IGNORE INTO baselines VALUES (?, ?, ?, ?)", *where, pack_json(result))

    def put_verify(self, variant: Variant, task: Task, result: VerifyResult) -> None:
        if result.lasting:
            where = (self._add_task(task), self._add_plan(variant), DEPTHS.index(result.depth))
            data = pack_json(result) if result.depth == "full" else pack_quick(result, self._intern)
            self._put_outcome("verifies", where, result, data)

    def put_timing(self, variant: Variant, task: Task, result: TimingResult) -> None:
        if result.lasting:
            settings = (MODES.index(result.mode), BUDGETS.index(result.budget))
            where = (self._add_task(task), self._add_plan(variant), *settings)
            data = pack_timing(result, self._intern) if result.ok else None
            self._put_outcome("timings", where, result, data)

    def _put_outcome(self, table: str, where: tuple[int, ...], result: Outcome, data: bytes | None) -> None:
        detail = self._intern(result.detail) if result.detail else None
        values = (*where, result.status.value, result.reason, detail, round(result.elapsed_s * 1e6), data)
        self._write(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(values))})", *values)

    def _add_plan(self, variant: Variant) -> int:
        known = self._plan(variant.key)
        if known is not None:
            return known
        plan = variant.plan
        family = (plan.family, plan.revision) if plan else (None, None)
        knobs = json.dumps(plan.knobs, separators=(",", ":")) if plan else None
        number = self._write(
            "INSERT INTO plans (plan_id, family, revision, b_layout, knobs, content) VALUES (?, ?, ?, ?, ?, ?)",
            *(variant.key, *family, variant.b_layout, knobs, variant.content_id),
        )
        if plan is None:
            self._write(SOURCES)
            self._write("INSERT OR IGNORE INTO sources VALUES (?, ?)", number, pack_json(variant))
        self._contents[variant.key] = variant.content_id
        self._plans[variant.key] = (number, variant.b_layout)
        return number

    def _add_task(self, task: Task) -> int:
        known = self._task(task.task_id)
        if known is None:
            known = self._write("INSERT INTO tasks (task_id, task) VALUES (?, ?)", task.task_id, task.to_json())
            self._tasks[task.task_id] = known
        return known

    def _intern(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = self._write("INSERT INTO texts (text) VALUES (?)", text)
        return self._numbers[text]

    def _write(self, sql: str, *values: Any) -> int:
        with self._lock, self._errors():
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
            return int(self._db.execute(sql, values).lastrowid or 0)


def merged_sanitize(known: SanitizeResult | None, new: SanitizeResult) -> SanitizeResult:
    """A plan has one result: a failure stays, and the runs of passes are put together."""
    if known is None or (known.ok and not new.ok):
        return new
    if not known.ok:
        return known
    ran = [(check.tool, check.dims) for check in known.checks]
    more = tuple(check for check in new.checks if (check.tool, check.dims) not in ran)
    return known.model_copy(update={"checks": (*known.checks, *more)})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _create(path: Path, device: DeviceInfo, recorded_on: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            db.execute(statement)
        facts = {
            "schema_version": str(SCHEMA_VERSION),
            "protocol_version": str(PROTOCOL_VERSION),
            "device": device.to_json(),
            "recorded_on": recorded_on,
        }
        db.executemany("INSERT INTO meta VALUES (?, ?)", facts.items())
        db.executemany("INSERT INTO texts (text) VALUES (?)", [(reference,) for reference in REFERENCES])
        db.execute("COMMIT")
    finally:
        db.close()
