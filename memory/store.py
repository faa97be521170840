"""The persistent store: results, variants, sessions and trajectories in one SQLite file.

Durability: WAL with synchronous=NORMAL and one transaction per write. A committed write survives kill -9 of the
process; only a crash of the machine or a power cut may lose the last ones (never the file). Not for network
filesystems, where WAL does not work.

Every failure of the file is a ``StoreError`` of one sentence. A broken file is never deleted or repaired.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any, Self

from memory.store_schema import (
    BUDGET_RANK,
    BUSY_TIMEOUT_S,
    ROW_FIELDS,
    SCHEMA,
    SCHEMA_VERSION,
    TIMED,
    SessionStatus,
)
from memory.store_schema import Session as Session
from memory.store_schema import Standing as Standing
from memory.store_schema import StoreError as StoreError
from tools.admission import Verdict, hindrance
from tools.families import content_id, render
from tools.records import (
    HEADLINE_REFERENCE,
    BLayout,
    Family,
    LaunchSpec,
    Mode,
    Plan,
    Status,
    Tally,
    Trajectory,
    Variant,
)
from tools.sqlite_errors import explain
from tools.sqlite_reading import read_only_uri
from tools.text_files import irregular

#: Parameters: family, revision. A compile is kept under the variant_id, everything else under the key.
_PLAN_OF = "json_extract(plan, '$.family') = ? AND json_extract(plan, '$.revision') = ?"
_OF_FAMILY = f"SELECT key FROM variants WHERE {_PLAN_OF} UNION ALL SELECT variant_id FROM variants WHERE {_PLAN_OF}"


class Store:
    """Results (a ``tools.gate.ResultStore``), variants, sessions and trajectories. One lock around one connection:
    safe to share between threads; several processes may open the same file."""

    def __init__(self, path: Path | str, read_only: bool = False) -> None:
        """``read_only``: of a store that is there, also while others write to it; nothing of it is changed."""
        self.path = Path(path)
        self._read_only = read_only
        self._lock = RLock()
        if what := irregular(self.path):
            raise StoreError(f"the store {self.path} {what}: move it away, or give another path")
        if not read_only:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"the folder of the store {self.path} cannot be made: {error.strerror}") from error
        with self._errors():
            self._db = sqlite3.connect(
                read_only_uri(self.path) if read_only else self.path,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
                uri=read_only,
            )
        try:
            with self._errors():
                self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables and not self._read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            with self._transaction():
                if not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():  # another process may be first
                    for statement in SCHEMA.split(";\n"):
                        self._db.execute(statement)
                    self._db.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
        elif not {"meta", "results", "sessions"} <= tables:
            raise StoreError(f"{self.path} is a database of something else, not a store of hgemm-agent")
        found = self._db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        version = int(found[0]) if found and str(found[0]).isdigit() else None
        if version is None:
            raise StoreError(f"the store {self.path} does not say its schema version; it is damaged or not a store")
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"the store {self.path} has schema version {version} but this program reads up to {SCHEMA_VERSION}: "
                "use the newer hgemm-agent that wrote it, or another path"
            )
        if not self._read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- results -------------------------------------------------------------------------------------------------

    def get(self, key: str) -> str | None:
        found = self._one("SELECT payload FROM results WHERE key = ?", (key,))
        return None if found is None else str(found[0])

    def put(self, key: str, kind: str, payload_json: str) -> None:
        """Durable when it returns. A key that exists keeps its first payload."""
        fields = json.loads(payload_json)
        variant_key = fields.get("variant_key") or fields.get("variant_id")
        setting = "/".join(fields[name] for name in ("depth", "mode", "budget") if name in fields)
        self._write(
            "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                key,
                kind,
                key.partition("-")[0],
                variant_key,
                fields.get("task_id"),
                fields.get("status", ""),
                setting,
                payload_json,
                _now(),
            ),
        )

    def payloads(
        self,
        kind: str,
        *,
        task_id: str | None = None,
        variant_key: str | None = None,
        scope: str | None = None,
        setting: str | None = None,
        status: Status | None = None,
    ) -> list[str]:
        """Stored results of one kind, oldest first, as JSON of the kind's record in ``tools.records``. ``setting`` is
        verify's depth or time's ``mode/budget``."""
        rows = self._all(
            "SELECT payload FROM results WHERE kind = :kind AND (:task_id IS NULL OR task_id = :task_id) "
            "AND (:variant_key IS NULL OR variant_key = :variant_key) AND (:scope IS NULL OR scope = :scope) "
            "AND (:setting IS NULL OR setting = :setting) AND (:status IS NULL OR status = :status) "
            "ORDER BY created_at, key",
            {
                "kind": kind,
                "task_id": task_id,
                "variant_key": variant_key,
                "scope": scope,
                "setting": setting,
                "status": status,
            },
        )
        return [str(payload) for (payload,) in rows]

    def entries(self, scope: str, task_id: str | None) -> list[tuple[str, str, str]]:
        """(key, kind, payload) of what one device (``tools.gate.device_scope``) said of a task; with None, of what it
        said of variants at no task: compile and sanitize."""
        rows = self._all(
            "SELECT key, kind, payload FROM results WHERE task_id IS ? AND scope = ? ORDER BY key", (task_id, scope)
        )
        return [(str(key), str(kind), str(payload)) for key, kind, payload in rows]

    def scopes(self) -> dict[str, int]:
        """The devices (``tools.gate.device_scope``) that results came from, and how many timings each has."""
        return dict(self._all("SELECT scope, sum(kind = 'time') FROM results GROUP BY scope ORDER BY scope", ()))

    def task_ids(self, scope: str) -> list[str]:
        """Tasks with any result from this device, in the order of their first one."""
        rows = self._all(
            "SELECT task_id FROM results WHERE scope = ? AND task_id IS NOT NULL "
            "GROUP BY task_id ORDER BY min(created_at), task_id",
            (scope,),
        )
        return [task_id for (task_id,) in rows]

    def tallies(self, scope: str) -> list[Tally]:
        """What came of every compile, verify, sanitize and time, counted by setting, status and reason."""
        # In an aggregate with one min(), SQLite takes the bare columns from the row that holds the minimum.
        rows = self._all(
            "SELECT kind, setting, status, json_extract(payload, '$.reason') AS reason, count(*), "
            "count(DISTINCT task_id), task_id, variant_key, json_extract(payload, '$.detail'), min(created_at) "
            "FROM results WHERE scope = ? AND kind IN ('compile', 'verify', 'sanitize', 'time') "
            "GROUP BY kind, setting, status, reason ORDER BY kind, setting, status, reason",
            (scope,),
        )
        names = ("stage", "setting", "status", "reason", "count", "tasks", "task_id", "variant_key")
        return [Tally(**dict(zip(names, row, strict=False)), detail=row[8] or "") for row in rows]

    def leaderboard(
        self,
        task_id: str,
        *,
        scope: str | None = None,
        b_layout: BLayout | None = None,
        mode: Mode = "offline",
        reference: str = HEADLINE_REFERENCE,
        admitted_only: bool = False,
    ) -> list[Standing]:
        """Variants timed at a task, best ratio first. ``scope`` (``tools.gate.device_scope``) picks one device."""
        best: dict[tuple[str, str], Standing] = {}
        for variant_key, row_scope, payload, verify, sanitize, time in self._all(
            TIMED, {"task_id": task_id, "scope": scope, "mode": mode}
        ):
            with self._sound(f"a timing of {variant_key}"):
                timing = json.loads(payload)
                row = next((row for row in timing["rows"] if row["reference"] == reference), None)
                if row is None or b_layout not in (None, row["b_layout"]):
                    continue
                known = best.get((variant_key, row_scope))
                if known is None or BUDGET_RANK[row["budget"]] > BUDGET_RANK[known.budget]:
                    best[variant_key, row_scope] = Standing(
                        variant_key=variant_key,
                        hindrance=hindrance(
                            _verdicts(verify), (status for _, status in _verdicts(sanitize)), _verdicts(time), mode
                        ),
                        **{name: row[name] for name in ROW_FIELDS},
                    )
        ordered = sorted(best.values(), key=lambda s: (-s.ratio, s.variant_key))
        return [s for s in ordered if s.admitted or not admitted_only]

    # --- variants ------------------------------------------------------------------------------------------------

    def put_variant(self, variant: Variant) -> str:
        """Stores the variant under its key (first write wins) and returns the key."""
        rest = variant.model_dump_json(exclude={"source", "plan"})
        self._write(
            "INSERT OR IGNORE INTO variants VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                variant.key,
                variant.variant_id,
                variant.plan.to_json() if variant.plan else None,
                zlib.compress(variant.source.encode()),
                rest,
                variant.label,
                _now(),
            ),
        )
        return variant.key

    def variant(self, key: str) -> Variant | None:
        found = self._one("SELECT plan, source, rest FROM variants WHERE key = ?", (key,))
        if found is None:
            return None
        plan, source, rest = found
        with self._sound(f"variant {key}"):
            fields = json.loads(rest)
            return Variant(
                source=zlib.decompress(source).decode(),
                launch=LaunchSpec.model_validate(fields.pop("launch")),
                plan=Plan.from_json(plan) if plan else None,
                **fields,
            )

    def check_families(self, families: Mapping[str, Family]) -> None:
        """Before anything is asked of the store under plans: their keys hold the family's revision but not its source,
        so numbers of another source under the same revision would be taken for this one's. Raises StoreError then; a
        family that the store has not met is noted as it is now."""
        for family in families.values():
            name = f"family/{family.name}/{family.revision}"
            noted = self._one("SELECT value FROM meta WHERE key = ?", (name,))
            if noted is None and not self._holds_other(family):
                self._write("INSERT OR IGNORE INTO meta VALUES (?, ?)", (name, content_id(family)))
                noted = self._one("SELECT value FROM meta WHERE key = ?", (name,))  # another process may be first
            if noted is not None and noted[0] != content_id(family) and not self._took(family):
                self._forget(family)
                self._write("UPDATE meta SET value = ? WHERE key = ?", (content_id(family), name))
                continue
            if noted is None or noted[0] != content_id(family):
                raise StoreError(
                    f"the source of family {family.name} changed since {self.path} took measurements of it under "
                    f"revision {family.revision}: bump `revision` in kernels/{family.name}/family.yaml, or undo the "
                    "change, or measure into another store (HGEMM_AGENT_HOME; of a sweep --db)"
                )

    def _took(self, family: Family) -> bool:
        """Whether there is a measurement of this revision, or a shape of a sweep, which weighed all of them."""
        return (
            self._one(
                f"SELECT 1 FROM results WHERE status IN ('ok', 'failed') AND variant_key IN ({_OF_FAMILY}) "
                "UNION ALL SELECT 1 FROM results WHERE kind = 'sweep' LIMIT 1",
                (family.name, family.revision) * 2,
            )
            is not None
        )

    def _forget(self, family: Family) -> None:
        """Plans that were only looked at, and what could not be answered about them: there is no number among it, but
        the sources are not the family's any more."""
        of = (family.name, family.revision)
        self._write(f"DELETE FROM results WHERE variant_key IN ({_OF_FAMILY})", of * 2)
        self._write(f"DELETE FROM variants WHERE {_PLAN_OF}", of)

    def _holds_other(self, family: Family) -> bool:
        """Of a store that was filled before families were noted: whether a variant of this revision reads otherwise."""
        rows = self._all(
            "SELECT key FROM variants WHERE json_extract(plan, '$.family') = ? "
            "AND json_extract(plan, '$.revision') = ? LIMIT 1",
            (family.name, family.revision),
        )
        stored = self.variant(rows[0][0]) if rows else None
        if stored is None or stored.plan is None or not set(stored.plan.knobs) <= set(family.knobs):
            return False  # with other knobs its plans have other keys
        if any(name not in stored.plan.knobs and not knob.optional for name, knob in family.knobs.items()):
            return False
        return stored.content_id != render(family, stored.plan).content_id

    # --- sessions ------------------------------------------------------------------------------------------------

    def create_session(self, session_id: str, config: Mapping[str, Any]) -> Session:
        """Raises StoreError if the session exists."""
        now = _now()
        made = self._write(
            "INSERT OR IGNORE INTO sessions VALUES (?, ?, 'running', ?, ?)", (session_id, json.dumps(config), now, now)
        )
        if not made:
            raise StoreError(
                f"there is already a session {session_id} in {self.path}: resume it, or choose another name"
            )
        return Session(
            session_id=session_id,
            config=json.loads(json.dumps(config)),
            status="running",
            created_at=now,
            updated_at=now,
        )

    def session(self, session_id: str) -> Session | None:
        return next(iter(self._sessions("WHERE session_id = ?", (session_id,))), None)

    def sessions(self) -> list[Session]:
        """Newest first."""
        return self._sessions("ORDER BY created_at DESC, session_id", ())

    def set_session_status(self, session_id: str, status: SessionStatus) -> None:
        changed = self._write(
            "UPDATE sessions SET status = ?, updated_at = ? WHERE session_id = ?", (status, _now(), session_id)
        )
        if not changed:
            raise StoreError(f"there is no session {session_id} in {self.path}")

    def _sessions(self, where: str, parameters: tuple[str, ...]) -> list[Session]:
        rows = self._all(f"SELECT session_id, config, status, created_at, updated_at FROM sessions {where}", parameters)
        with self._sound("a session"):
            return [
                Session(session_id=i, config=json.loads(config), status=status, created_at=created, updated_at=updated)
                for i, config, status, created, updated in rows
            ]

    # --- trajectories --------------------------------------------------------------------------------------------

    def put_trajectory(self, trajectory: Trajectory) -> None:
        """The last write of an id wins: a resumed rollout replaces its own beginning."""
        self._write(
            "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (trajectory_id) DO UPDATE SET payload = excluded.payload",
            (
                trajectory.trajectory_id,
                trajectory.session_id,
                trajectory.task.task_id,
                zlib.compress(trajectory.to_json().encode()),
                _now(),
            ),
        )

    def trajectory(self, trajectory_id: str) -> Trajectory | None:
        found = self._one("SELECT payload FROM trajectories WHERE trajectory_id = ?", (trajectory_id,))
        if found is None:
            return None
        with self._sound(f"trajectory {trajectory_id}"):
            return Trajectory.from_json(zlib.decompress(found[0]))

    def trajectories(self, session_id: str | None = None, task_id: str | None = None) -> Iterator[Trajectory]:
        """In the order of their first write. Ids are read at once, texts one by one."""
        rows = self._all(
            "SELECT trajectory_id FROM trajectories WHERE (:session IS NULL OR session_id = :session) "
            "AND (:task IS NULL OR task_id = :task) ORDER BY created_at, trajectory_id",
            {"session": session_id, "task": task_id},
        )
        for (trajectory_id,) in rows:
            found = self.trajectory(trajectory_id)
            if found is not None:
                yield found

    # --- the file ------------------------------------------------------------------------------------------------

    @contextmanager
    def batch(self) -> Iterator[None]:
        """All writes inside become durable together, or none of them."""
        with self._lock, self._errors(), self._transaction():
            yield

    def _one(self, sql: str, parameters: tuple[Any, ...]) -> tuple[Any, ...] | None:
        with self._lock, self._errors():
            found: tuple[Any, ...] | None = self._db.execute(sql, parameters).fetchone()
            return found

    def _all(self, sql: str, parameters: tuple[Any, ...] | Mapping[str, Any]) -> list[tuple[Any, ...]]:
        with self._lock, self._errors():
            return self._db.execute(sql, parameters).fetchall()

    def _write(self, sql: str, parameters: tuple[Any, ...]) -> int:
        """One autocommitted statement: on disk when this returns. The number of rows it changed."""
        with self._lock, self._errors():
            return self._db.execute(sql, parameters).rowcount

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite itself rolls back when the disk is full
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(explain(error, f"the store {self.path}")) from error
        except (OverflowError, UnicodeEncodeError) as error:  # an integer over 64 bits, half a surrogate pair
            raise StoreError(f"the store {self.path} cannot hold such a value: {error}") from error

    @contextmanager
    def _sound(self, what: str) -> Iterator[None]:
        """Around the reading of something that SQLite has given back whole."""
        try:
            yield
        except (
            zlib.error,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # whatever bytes can decode to
            raise StoreError(
                f"the store {self.path} is damaged: {what} does not read ({type(error).__name__}); restore the file "
                "from a copy, or move it away"
            ) from error


def _verdicts(concatenated: str | None) -> list[Verdict]:
    """``full:ok,quick:failed`` → settings and statuses."""
    pairs = (entry.rpartition(":") for entry in (concatenated or "").split(",") if entry)
    return [(setting, Status(status)) for setting, _, status in pairs]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
