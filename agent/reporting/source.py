"""Reads what a report is made of: a record file (tools/record_file.py) or a store (memory/store.py). Read-only."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from agent.errors import UsageError
from agent.reporting.measured import At, Measured, by_budget, is_reported
from memory.store import Store
from tools.gate import device_scope
from tools.record_file import Provenance, RecordReader, Records
from tools.records import (
    MODES,
    PROTOCOL_VERSION,
    Budget,
    CompileResult,
    DeviceInfo,
    Mode,
    ProfileResult,
    SanitizeResult,
    Status,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)
from tools.replay import covers
from tools.sqlite_errors import explain
from tools.text_files import irregular

_BUDGETS: tuple[Budget, ...] = ("final", "certify")
_META: tuple[tuple[str, Provenance], ...] = (
    ("recorded on", "recorded_on"),
    ("source commit of the recording", "commit"),
    ("compiler", "compiler"),
    ("libraries", "library"),
)


def load(path: Path, device: str | None = None) -> Measured:
    """All that the file holds of one device; ``device`` picks one where a store has several (part of its label).
    Raises UsageError, DeviceBroken or StoreError with one sentence."""
    kind = _kind(path)
    with _sound(path):
        found = _from_records(path) if kind == "record file" else _from_store(path, device)
    if not found.tasks:
        raise UsageError(f"{path} holds no measurements of {_what()}: nothing to report yet")
    if not found.timings:
        raise UsageError(
            f"{path} holds no timing at the final budget of any of its {len(found.tasks)} shapes: "
            "nothing to report until a session or recording has finished one"
        )
    return found


def _what() -> str:
    return "HGEMM with FP32 accumulation"


def _kind(path: Path) -> Literal["record file", "store"]:
    if not path.is_dir() and (what := irregular(path)):
        raise UsageError(f"{path} {what}: give a record file, or the store of `agent optimize`")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(16)
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no database {path}: give a record file, or the store of `agent optimize`"
        ) from error
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a folder: give the database in it, for example {path / 'store.sqlite'}") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if size == 0:
        raise UsageError(f"{path} is empty: nothing to report")
    if header != b"SQLite format 3\x00":
        raise UsageError(f"{path} is not a database of measurements (not SQLite), or its beginning is damaged")
    try:
        with closing(sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        raise UsageError(explain(error, f"the database {path}")) from error
    if "results" in tables and "sessions" in tables:
        return "store"
    if "plans" in tables and "timings" in tables:
        return "record file"
    raise UsageError(f"{path} is a database, but neither a record file nor a store of hgemm-agent")


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    try:
        yield
    except (zlib.error, struct.error, ValidationError, UnicodeDecodeError, LookupError, ValueError) as error:
        raise UsageError(
            f"the database {path} is damaged inside, or of another version ({type(error).__name__}): get it again"
        ) from error


# --- record file -----------------------------------------------------------------------------------------------------


def _from_records(path: Path) -> Measured:
    reader = RecordReader(path)
    try:
        return _read_records(reader)
    finally:
        reader.close()


def _read_records(records: Records) -> Measured:
    tasks = records.tasks()
    found: dict[tuple[str, str, Mode, Budget], TimingResult] = {}
    for budget in _BUDGETS:
        for task_id, key, mode in records.timed_keys(budget):
            timing = records.timed(key, task_id, mode, budget) if is_reported(task_id) else None
            if timing is not None:
                found[task_id, key, mode, budget] = timing
    timings, certified = by_budget(found)
    keys = {key for _, key in timings}
    quick = {at: records.verified(at[1], at[0], "quick") for at in timings}
    return Measured(
        device=records.device,
        tasks={task.task_id: task.dims for task in tasks if is_reported(task.task_id)},
        timings=timings,
        certified=certified,
        verified=_known({at: records.verified(at[1], at[0], "full") for at in timings}),
        quick_failed=frozenset(at for at, result in quick.items() if result and result.status is Status.FAILED),
        sanitized=_recorded_sanitizes(records, tasks, timings),
        timing_failed=frozenset(records.failed_timings()),
        compiled=_known({key: records.compiled(key) for key in keys}),
        profiles=_known({at: records.profiled(at[1], at[0]) for at in timings}),
        plans={plan.plan_id: plan for plan in records.plans()},
        variants={key: variant for key, variant in records.sources().items() if key in keys},
        tallies=tuple(records.tallies()),
        facts=(
            *_file_facts(records.path, "record file"),
            *((name, records.meta(key) or "not recorded") for name, key in _META),
        ),
        left_out=_others(task.task_id for task in tasks),
    )


def _recorded_sanitizes(records: Records, tasks: Sequence[Task], wanted: Iterable[At]) -> dict[At, SanitizeResult]:
    """A family's plan was sanitized for all shapes, a raw source only for those among its runs."""
    plans = {plan.plan_id for plan in records.plans()}
    by_id = {task.task_id: task for task in tasks}
    found = {at: records.sanitized(at[1]) for at in wanted}
    return {
        at: result
        for at, result in found.items()
        if result is not None and (at[1] in plans or covers(result, [by_id[at[0]]]))
    }


def _known(found: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in found.items() if value is not None}


def _others(task_ids: Iterator[str] | list[str]) -> tuple[str, ...]:
    return tuple(task_id for task_id in task_ids if not is_reported(task_id))


def _file_facts(path: Path, kind: str) -> tuple[tuple[str, str], ...]:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return (("measurements from", f"{kind} {path.name}"), ("SHA-256 of the file", digest))


# --- store -----------------------------------------------------------------------------------------------------------


def _from_store(path: Path, wanted: str | None) -> Measured:
    with Store(path) as store:
        scope, info = _choose_device(store, path, wanted)
        return _read_store(store, scope, info)


def _choose_device(store: Store, path: Path, wanted: str | None) -> tuple[str, DeviceInfo]:
    """A store keeps results of every device apart; a report is of one."""
    known = {row["scope"]: _device_of_sweep(row) for row in _json(store, "sweep")}
    for session in store.sessions():
        if "device_info" in session.config:
            info = DeviceInfo.model_validate(session.config["device_info"])
            known[device_scope(info)] = info
    timed = {scope: count for scope, count in store.scopes().items() if count}
    if not timed:
        raise UsageError(f"the store {path} holds no timings: nothing to report until a session has measured something")
    devices = {scope: known.get(scope) or _device_of(store, scope) for scope in timed}
    fitting = [s for s, info in devices.items() if wanted is None or wanted.lower() in info.label.lower()]
    if len(fitting) != 1:
        labels = "; ".join(sorted(info.label for info in devices.values()))
        why = f"no device '{wanted}'" if not fitting else f"measurements of {len(fitting)} devices"
        raise UsageError(f"{path} holds {why}: name one with --device, of: {labels}")
    return fitting[0], devices[fitting[0]]


def _device_of_sweep(row: dict[str, Any]) -> DeviceInfo:
    protocol = row.get("protocol_version", PROTOCOL_VERSION)
    return _bare_device(row["device"], row["driver"], row["device_label"], protocol)


def _device_of(store: Store, scope: str) -> DeviceInfo:
    """Of results whose session or sweep is not in the store: what the rows themselves say."""
    for payload in store.payloads("time", scope=scope):
        timing = TimingResult.from_json(payload)
        if timing.rows:
            name, driver, protocol = timing.rows[0].device, timing.rows[0].driver, timing.rows[0].protocol_version
            break
    else:
        name, driver, protocol = "unknown device", "unknown", PROTOCOL_VERSION
    return _bare_device(name, driver, f"{name}, driver {driver}, scope {scope}", protocol)


def _bare_device(name: str, driver: str, label: str, protocol: int) -> DeviceInfo:
    """Of which no more is known."""
    return DeviceInfo(
        name=name,
        label=label,
        kind="cuda",
        driver=driver,
        cuda_runtime="unknown",
        compute_capability="unknown",
        sm_count=0,
        memory_bytes=0,
        l2_bytes=0,
        smem_per_block_bytes=0,
        protocol_version=protocol,
    )


def _read_store(store: Store, scope: str, info: DeviceInfo) -> Measured:
    found: dict[tuple[str, str, Mode, Budget], TimingResult] = {}
    for budget in _BUDGETS:
        for mode in MODES:
            for payload in store.payloads("time", scope=scope, setting=f"{mode}/{budget}"):
                timing = TimingResult.from_json(payload)
                if timing.ok and is_reported(timing.task_id):
                    found[timing.task_id, timing.variant_key, timing.mode, timing.budget] = timing
    timings, certified = by_budget(found)
    keys = {key for _, key in timings}
    failed = [TimingResult.from_json(p) for p in store.payloads("time", scope=scope, status=Status.FAILED)]
    verified = [VerifyResult.from_json(p) for p in store.payloads("verify", scope=scope, setting="full")]
    quick = [VerifyResult.from_json(p) for p in store.payloads("verify", scope=scope, setting="quick")]
    variants = _known({key: store.variant(key) for key in keys})
    sweeps = [row for row in _json(store, "sweep") if row["scope"] == scope]
    task_ids = list(dict.fromkeys([*store.task_ids(scope), *(row["task_id"] for row in sweeps)]))
    return Measured(
        device=info,
        tasks={task_id: _dims(task_id) for task_id in task_ids if is_reported(task_id)},
        timings=timings,
        certified=certified,
        verified={(v.task_id, v.variant_key): v for v in verified},
        quick_failed=frozenset((v.task_id, v.variant_key) for v in quick if v.status is Status.FAILED),
        sanitized=_sanitized(store, scope, timings),
        timing_failed=frozenset((t.task_id, t.variant_key) for t in failed),
        compiled=_compiled(store, scope, variants),
        profiles={
            (p.task_id, p.variant_key): p
            for p in map(ProfileResult.from_json, store.payloads("profile", scope=scope))
            if p.status is not Status.NOT_RECORDED
        },
        plans={key: v.plan for key, v in variants.items() if v.plan is not None},
        variants=variants,
        tallies=tuple(store.tallies(scope)),
        facts=(("measurements from", f"store {store.path.name}"), *_session_facts(store, info)),
        left_out=_others(task_ids),
        remarks={row["task_id"]: row["detail"] for row in sweeps if row["status"] != "won" and row.get("detail")},
    )


def _sanitized(store: Store, scope: str, wanted: Iterable[At]) -> dict[At, SanitizeResult]:
    """One result a kernel and task, of those that count there; a failure outweighs the rest."""
    by_key: dict[str, list[SanitizeResult]] = {}
    for payload in store.payloads("sanitize", scope=scope):
        result = SanitizeResult.from_json(payload)
        by_key.setdefault(result.variant_key, []).append(result)
    weights = (Status.FAILED, Status.OK)
    found: dict[At, SanitizeResult] = {}
    for task_id, key in wanted:
        here = [r for r in by_key.get(key, ()) if r.task_id in (None, task_id) and r.status in weights]
        if here:
            found[task_id, key] = min(here, key=lambda r: weights.index(r.status))
    return found


def _compiled(store: Store, scope: str, variants: dict[str, Variant]) -> dict[str, CompileResult]:
    """A compile is kept under its variant_id; the rest of the report speaks of keys."""
    keys = {variant.variant_id: key for key, variant in variants.items()}
    found = map(CompileResult.from_json, store.payloads("compile", scope=scope))
    return {keys[c.variant_id]: c for c in found if c.variant_id in keys}


def _session_facts(store: Store, info: DeviceInfo) -> tuple[tuple[str, str], ...]:
    sessions = [s for s in store.sessions() if s.config.get("device_info", {}).get("label") == info.label]
    libraries = sorted({str(p["library"]) for p in _json(store, "baselines") if p.get("library")})
    return (
        ("recorded on", info.recorded_on or "not recorded"),
        ("sessions", f"{len(sessions)}" if sessions else "not recorded"),
        ("begun", f"{min(s.created_at for s in sessions)[:19]} UTC" if sessions else "not recorded"),
        ("libraries", "; ".join(libraries) or "not recorded"),
    )


def _json(store: Store, kind: str) -> Iterator[dict[str, Any]]:
    for payload in store.payloads(kind):
        yield json.loads(payload)


def _dims(task_id: str) -> dict[str, int]:
    """``hgemm-f32acc/M=64,N=64,K=64`` → M, N, K."""
    pairs = (part.split("=") for part in task_id.partition("/")[2].split(","))
    return {name: int(value) for name, value in pairs}
