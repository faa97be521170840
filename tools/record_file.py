"""The record file: measurements of one GPU, in one SQLite file small enough to be committed (records/README.md).

Plans, tasks and texts get small integer ids; timings and quick verifies are packed (tools/record_codec.py), the rarer
results are compressed JSON. Read without locks; written by tools/record_writer.py.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from tools.device import DeviceBroken
from tools.record_codec import unpack_json, unpack_quick, unpack_timing
from tools.records import (
    BUDGETS,
    MODES,
    READABLE_PROTOCOLS,
    BaselineResult,
    Budget,
    CompileResult,
    Depth,
    DeviceInfo,
    Mode,
    Plan,
    ProfileResult,
    SanitizeResult,
    Status,
    Tally,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)
from tools.sqlite_errors import explain
from tools.text_files import irregular

#: 2: plans have ``content``; of a file without it nobody can say whether a plan's source is still the measured one.
SCHEMA_VERSION = 2
DEPTHS: tuple[Depth, ...] = ("quick", "full")
Provenance = Literal["compiler", "commit", "library", "clocks", "recorded_on"]

# mode, budget, depth: never to be reordered; the index in MODES, BUDGETS, DEPTHS. detail: a text's id.
_OUTCOME = "status TEXT NOT NULL, reason TEXT, detail INTEGER, elapsed_us INTEGER NOT NULL, data BLOB"
SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL)",
    "CREATE TABLE tasks (id INTEGER PRIMARY KEY, task_id TEXT NOT NULL UNIQUE, task TEXT NOT NULL, done TEXT, "
    "best TEXT)",
    "CREATE TABLE plans (id INTEGER PRIMARY KEY, plan_id TEXT NOT NULL UNIQUE, family TEXT, revision INTEGER, "
    "b_layout TEXT NOT NULL, knobs TEXT, content TEXT)",
    "CREATE TABLE compiles (plan INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE sanitizes (plan INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    f"CREATE TABLE verifies (task INTEGER, plan INTEGER, depth INTEGER, {_OUTCOME}, "
    "PRIMARY KEY (task, plan, depth)) WITHOUT ROWID",
    f"CREATE TABLE timings (task INTEGER, plan INTEGER, mode INTEGER, budget INTEGER, {_OUTCOME}, "
    "PRIMARY KEY (task, plan, mode, budget)) WITHOUT ROWID",
    "CREATE TABLE profiles (task INTEGER, plan INTEGER, data BLOB NOT NULL, PRIMARY KEY (task, plan)) WITHOUT ROWID",
    "CREATE TABLE baselines (task INTEGER, mode INTEGER, budget INTEGER, data BLOB NOT NULL, "
    "PRIMARY KEY (task, mode, budget)) WITHOUT ROWID",
)
#: Of raw sources; a file without any has no such table. ``data``: zlib of the variant's JSON.
SOURCES = "CREATE TABLE IF NOT EXISTS sources (plan INTEGER PRIMARY KEY, data BLOB NOT NULL)"
_TABLES = frozenset({"meta", "texts", "tasks", "plans", "compiles", "verifies", "timings"})


class Records:
    """What reader and writer share: the lookups. Each answers None where nothing was recorded. Thread-safe."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self._db = db
        self._lock = Lock()
        with self._errors():
            self._check()
            self._meta: dict[str, str] = dict(db.execute("SELECT key, value FROM meta"))
            self._tasks: dict[str, int] = dict(db.execute("SELECT task_id, id FROM tasks"))
            self._plans: dict[str, tuple[int, str]] = {
                key: (number, layout) for key, number, layout in db.execute("SELECT plan_id, id, b_layout FROM plans")
            }
            self._contents: dict[str, str] = dict(
                db.execute("SELECT plan_id, content FROM plans WHERE content IS NOT NULL")
                if int(self._meta["schema_version"]) > 1
                else ()
            )
        self._asked: dict[str, tuple[Variant, bool]] = {}
        self._texts: dict[int, str] = {}
        self._dims: dict[str, dict[str, int]] = {}
        self.protocol_version = int(self._meta["protocol_version"])
        stated = DeviceInfo.from_json(self._meta["device"])
        self.device = stated.model_copy(update={"protocol_version": self.protocol_version})

    def _check(self) -> None:
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables >= _TABLES:
            raise DeviceBroken(f"{self.path} is a database, but not a record file: give another path")
        meta = dict(self._db.execute("SELECT key, value FROM meta"))
        if int(meta.get("schema_version", 0)) > SCHEMA_VERSION:
            raise DeviceBroken(
                f"the record file {self.path} has schema version {meta['schema_version']}, newer than the "
                f"{SCHEMA_VERSION} that this program reads: update hgemm-agent"
            )
        if meta.get("protocol_version") not in [str(version) for version in READABLE_PROTOCOLS]:
            raise DeviceBroken(
                f"the record file {self.path} was measured under protocol version {meta.get('protocol_version')}, "
                f"this program reads {' and '.join(map(str, READABLE_PROTOCOLS))}: record again"
            )
        if "device" not in meta:
            raise DeviceBroken(f"the record file {self.path} does not say which device it is of: record again")

    # --- what there is -------------------------------------------------------------------------------------------

    def meta(self, key: Provenance) -> str | None:
        return self._meta.get(key)

    def tasks(self) -> list[Task]:
        """In the order of recording."""
        return [Task.from_json(text) for (text,) in self._all("SELECT task FROM tasks ORDER BY id")]

    def best_of(self, task_id: str) -> str | None:
        """Key of the best finalist where the recording of the shape was completed, but perhaps for its profile."""
        rows = self._all("SELECT best FROM tasks WHERE task_id = ? AND done IS NOT NULL", (task_id,))
        return rows[0][0] if rows else None

    def plans(self) -> list[Plan]:
        """Plans of families; raw sources, which have none, are left out."""
        rows = self._all("SELECT family, revision, b_layout, knobs FROM plans WHERE family IS NOT NULL ORDER BY id")
        return [Plan(family=f, revision=r, b_layout=b, knobs=json.loads(k)) for f, r, b, k in rows]

    def sources(self) -> dict[str, Variant]:
        """Raw sources by their key. Families have those of plans."""
        if not self._all("SELECT 1 FROM sqlite_master WHERE name = 'sources'"):
            return {}
        found = (
            Variant.from_json(unpack_json(data)) for (data,) in self._all("SELECT data FROM sources ORDER BY plan")
        )
        return {variant.key: variant for variant in found}

    def knows_plan(self, key: str) -> bool:
        return key in self._plans

    def is_of(self, variant: Variant) -> bool:
        """False if what the file holds under this variant's key was measured of another source or launch."""
        recorded = self._contents.get(variant.key)
        if recorded is None:
            return True
        asked, answer = self._asked.get(variant.key, (None, False))
        if asked is not variant:
            answer = recorded == variant.content_id
            self._asked[variant.key] = (variant, answer)
        return answer

    def knows_task(self, task_id: str) -> bool:
        return task_id in self._tasks

    def counts(self) -> dict[str, int]:
        """Rows of each table of measurements."""
        names = ("plans", "tasks", "compiles", "verifies", "timings", "sanitizes", "profiles", "baselines")
        return {name: int(self._all(f"SELECT count(*) FROM {name}")[0][0]) for name in names}

    def timed_keys(self, budget: Budget) -> list[tuple[str, str, Mode]]:
        """(task_id, key, mode) of every timing at ``budget`` that is ok, in the order of recording."""
        rows = self._all(
            "SELECT t.task_id, p.plan_id, r.mode FROM timings r JOIN tasks t ON t.id = r.task "
            "JOIN plans p ON p.id = r.plan WHERE r.budget = ? AND r.status = 'ok' ORDER BY r.task, r.plan, r.mode",
            (BUDGETS.index(budget),),
        )
        return [(task_id, key, MODES[mode]) for task_id, key, mode in rows]

    def screened(self, task_id: str) -> list[str]:
        """Keys of plans with an offline timing at screen budget, whatever came of it, in the order of the plans."""
        rows = self._all(
            "SELECT p.plan_id FROM timings r JOIN plans p ON p.id = r.plan "
            "WHERE r.task = ? AND r.mode = ? AND r.budget = ? ORDER BY p.id",
            (self._task(task_id), MODES.index("offline"), BUDGETS.index("screen")),
        )
        return [key for (key,) in rows]

    def failed_timings(self) -> set[tuple[str, str]]:
        """(task_id, key) with a timing that failed, in any mode at any budget."""
        rows = self._all(
            "SELECT DISTINCT t.task_id, p.plan_id FROM timings r JOIN tasks t ON t.id = r.task "
            "JOIN plans p ON p.id = r.plan WHERE r.status = 'failed'"
        )
        return {(task_id, key) for task_id, key in rows}

    def tallies(self) -> list[Tally]:
        """What came of every compile, verify, sanitize and time, counted by setting, status and reason."""
        verify = self._tallies("verify", "verifies", "depth", list(DEPTHS))
        settings = [f"{mode}/{budget}" for mode in MODES for budget in BUDGETS]
        time = self._tallies("time", "timings", f"mode * {len(BUDGETS)} + budget", settings)
        return self._plan_tallies("compile", "compiles") + verify + self._plan_tallies("sanitize", "sanitizes") + time

    def _plan_tallies(self, stage: Literal["compile", "sanitize"], table: str) -> list[Tally]:
        groups: dict[tuple[str, str | None], list[tuple[str, str]]] = defaultdict(list)
        for key, data in self._all(f"SELECT p.plan_id, r.data FROM {table} r JOIN plans p ON p.id = r.plan ORDER BY 1"):
            fields = json.loads(unpack_json(data))
            groups[fields["status"], fields.get("reason")].append((key, fields.get("detail", "")))
        return [
            Tally(stage=stage, status=s, reason=r, count=len(rows), variant_key=rows[0][0], detail=rows[0][1])
            for (s, r), rows in sorted(groups.items(), key=str)
        ]

    def _tallies(self, stage: Literal["verify", "time"], table: str, setting: str, settings: list[str]) -> list[Tally]:
        # In an aggregate with one min(), SQLite takes the bare columns from the row that holds the minimum.
        rows = self._all(
            f"SELECT {setting}, g.status, g.reason, g.n, g.tasks, t.task_id, p.plan_id, x.text FROM (SELECT *, "
            f"count(*) AS n, count(DISTINCT task) AS tasks, min(task) FROM {table} GROUP BY {setting}, status, reason) "
            "g JOIN tasks t ON t.id = g.task JOIN plans p ON p.id = g.plan LEFT JOIN texts x ON x.id = g.detail "
            "ORDER BY 1, 2, 3"
        )
        names = ("status", "reason", "count", "tasks", "task_id", "variant_key")
        return [
            Tally(stage=stage, setting=settings[row[0]], **dict(zip(names, row[1:7], strict=True)), detail=row[7] or "")
            for row in rows
        ]

    # --- lookups -------------------------------------------------------------------------------------------------

    def compiled(self, key: str) -> CompileResult | None:
        data = self._data("SELECT data FROM compiles WHERE plan = ?", self._plan(key))
        return None if data is None else CompileResult.from_json(data)

    def sanitized(self, key: str) -> SanitizeResult | None:
        data = self._data("SELECT data FROM sanitizes WHERE plan = ?", self._plan(key))
        return None if data is None else SanitizeResult.from_json(data)

    def profiled(self, key: str, task_id: str) -> ProfileResult | None:
        data = self._data("SELECT data FROM profiles WHERE task = ? AND plan = ?", self._task(task_id), self._plan(key))
        return None if data is None else ProfileResult.from_json(data)

    def baselines(self, task_id: str, mode: Mode, budget: Budget) -> BaselineResult | None:
        where = (self._task(task_id), MODES.index(mode), BUDGETS.index(budget))
        data = self._data("SELECT data FROM baselines WHERE task = ? AND mode = ? AND budget = ?", *where)
        return None if data is None else BaselineResult.from_json(data)

    def verified(self, key: str, task_id: str, depth: Depth) -> VerifyResult | None:
        found = self._outcome("verifies", "depth = ?", task_id, key, DEPTHS.index(depth))
        if found is None:
            return None
        fields, data = found
        if depth == "full" and data is not None:
            return VerifyResult.from_json(unpack_json(data))
        if data is not None:
            fields |= unpack_quick(data, self._text)
        return VerifyResult(**fields, variant_key=key, task_id=task_id, depth=depth)

    def timed(self, key: str, task_id: str, mode: Mode, budget: Budget) -> TimingResult | None:
        found = self._outcome(
            "timings", "mode = ? AND budget = ?", task_id, key, MODES.index(mode), BUDGETS.index(budget)
        )
        if found is None:
            return None
        fields, data = found
        if data is not None:
            same = {
                "task_id": task_id,
                "dims": self._task_dims(task_id),
                "b_layout": self._plans[key][1],
                "mode": mode,
                "budget": budget,
                "key": key,
                "device": self.device.name,
                "driver": self.device.driver,
                "protocol_version": self.protocol_version,
            }
            fields |= unpack_timing(data, same, self._text)
        return TimingResult(**fields, variant_key=key, task_id=task_id, mode=mode, budget=budget)

    def _outcome(
        self, table: str, where: str, task_id: str, key: str, *settings: int
    ) -> tuple[dict[str, Any], bytes | None] | None:
        task, plan = self._task(task_id), self._plan(key)
        if task is None or plan is None:
            return None
        rows = self._all(
            f"SELECT status, reason, detail, elapsed_us, data FROM {table} WHERE task = ? AND plan = ? AND {where}",
            (task, plan, *settings),
        )
        if not rows:
            return None
        status, reason, detail, elapsed_us, data = rows[0]
        fields = {
            "status": Status(status),
            "reason": reason,
            "detail": "" if detail is None else self._text(detail),
            "elapsed_s": elapsed_us / 1e6,
        }
        return fields, data

    def _data(self, sql: str, *parameters: int | None) -> bytes | None:
        if None in parameters:
            return None
        rows = self._all(sql, parameters)
        return unpack_json(rows[0][0]) if rows else None

    def _plan(self, key: str) -> int | None:
        found = self._plans.get(key)
        return found[0] if found else None

    def _task(self, task_id: str) -> int | None:
        return self._tasks.get(task_id)

    def _task_dims(self, task_id: str) -> dict[str, int]:
        if task_id not in self._dims:
            text = self._all("SELECT task FROM tasks WHERE task_id = ?", (task_id,))[0][0]
            self._dims[task_id] = Task.from_json(text).dims
        return self._dims[task_id]

    def _text(self, number: int) -> str:
        if number not in self._texts:
            self._texts[number] = self._all("SELECT text FROM texts WHERE id = ?", (number,))[0][0]
        return self._texts[number]

    def _all(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock, self._errors():
            return self._db.execute(sql, parameters).fetchall()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with broken(self.path):
            yield


class RecordReader(Records):
    """Read-only and lock-free. DeviceBroken, in one sentence, for a file that cannot be answered from."""

    def __init__(self, path: Path) -> None:
        _check_whole(path)
        with broken(path):
            db = sqlite3.connect(
                path.resolve().as_uri() + "?mode=ro&immutable=1",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
            )
        try:
            super().__init__(db, path)
        except BaseException:
            db.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _check_whole(path: Path) -> None:
    """Raises DeviceBroken unless the file is there, a database, as long as its header says, and not half-written."""
    restore = "get it again (git checkout, or reinstall the package)"
    if what := irregular(path):
        raise DeviceBroken(f"the record file {path} {what}: give another path")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError as error:
        raise DeviceBroken(
            f"there is no record file {path}: {restore}, or make one with `agent record` on a machine with a GPU"
        ) from error
    except OSError as error:
        raise DeviceBroken(f"the record file {path} cannot be read: {error.strerror}") from error
    if header[:16] != b"SQLite format 3\x00":
        raise DeviceBroken(f"{path} is not a record file, or its beginning is damaged: {restore}")
    page_size = int.from_bytes(header[16:18], "big")
    pages = int.from_bytes(header[28:32], "big")
    if size < pages * (65536 if page_size == 1 else page_size):
        raise DeviceBroken(f"the record file {path} is truncated ({size} bytes): {restore}")
    for suffix in ("-journal", "-wal"):
        beside = path.with_name(path.name + suffix)
        if beside.exists() and beside.stat().st_size > 0:
            raise DeviceBroken(
                f"the record file {path} has an unfinished recording in {beside.name} beside it: "
                "wait for the recording to end, or start it again (it resumes)"
            )


@contextmanager
def broken(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise DeviceBroken(explain(error, f"the record file {path}")) from error
    except OSError as error:
        raise DeviceBroken(f"the record file {path} cannot be written: {error.strerror}") from error


def changed_source(variant: Variant) -> str:
    """What to do when a plan's source is not the measured one."""
    if variant.plan is None:
        return "give it another output file"
    family = variant.plan.family
    return f"bump `revision` in kernels/{family}/family.yaml, since the source of {family} changed, and measure it anew"
