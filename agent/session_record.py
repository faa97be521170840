"""What a session measured, as a record file: `--device replay:FILE` then answers the same session anywhere.

A plan is known there by its plan_id, a raw source by its variant_id, and the source itself is kept. Adding the same
session again changes nothing; sessions of one device and library may share a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from agent.errors import UsageError
from agent.inspecting import load, opened
from agent.session import SessionConfig
from memory.store import Store, StoreError
from tools.gate import device_scope
from tools.record_writer import RecordWriter
from tools.records import (
    BaselineResult,
    CompileResult,
    Outcome,
    ProfileResult,
    Record,
    SanitizeResult,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)
from tools.text_files import irregular

_KINDS: dict[str, type[Outcome]] = {
    "baselines": BaselineResult,
    "compile": CompileResult,
    "verify": VerifyResult,
    "sanitize": SanitizeResult,
    "time": TimingResult,
    "profile": ProfileResult,
}


class Exported(Record):
    """``results`` of the session are in the file now, ``added`` of them since this call."""

    session_id: str
    file: str
    task: str
    variants: int
    raw_sources: int
    results: int
    added: int


def export_record(home: Path, session_id: str, out: Path, commit: str = "") -> Exported:
    """Adds to ``out``, or begins it. ``commit`` is for a session of a program that was no checkout. Raises UsageError,
    StoreError or DeviceBroken, each with one sentence."""
    config = load(home, session_id)
    if config.device_info.kind == "replay":
        raise UsageError(
            f"session {session_id} measured nothing: it was {config.device_info.label}, and `--device` of another "
            "session takes that same record file"
        )
    if what := irregular(out):
        raise UsageError(f"{out} {what}: give the path of a record file, or of one to be begun")
    with opened(home, session_id) as reader:
        store = reader.store
        variants = _variants(store, reader.trace().keys) if store is not None else {}
        found = list(_results(store, config, variants)) if store is not None else []
    if not any(variant is not None for variant, _ in found):
        raise UsageError(f"session {session_id} has not measured anything yet: `agent resume {session_id}` goes on")
    task = config.settings.session.task
    with RecordWriter(out, config.device_info, _measured_on(config, [result for _, result in found])) as writer:
        writer.check_contents(variants.values())
        added = sum(_add(writer, variant, task, result) for variant, result in found)
        if added:
            clocks = _clocks(writer, [result for _, result in found])
            writer.put_meta({"commit": config.commit or commit, "clocks": clocks})
            writer.compact()
    return Exported(
        session_id=session_id,
        file=str(out),
        task=task.label,
        variants=len(variants),
        raw_sources=sum(variant.plan is None for variant in variants.values()),
        results=len(found),
        added=added,
    )


def _variants(store: Store, keys: list[str]) -> dict[str, Variant]:
    return {key: variant for key in keys if (variant := store.variant(key)) is not None}


def _results(
    store: Store, config: SessionConfig, variants: dict[str, Variant]
) -> Iterator[tuple[Variant | None, Outcome]]:
    """Of the session's variants on its device, at its task; and the baselines, which are of no variant."""
    # A compile is kept under the variant_id, everything else under the key.
    named = {**{variant.variant_id: variant for variant in variants.values()}, **variants}
    scope, task_id = device_scope(config.device_info), config.settings.session.task.task_id
    for key, kind, payload in (*store.entries(scope, None), *store.entries(scope, task_id)):
        if kind not in _KINDS:
            continue
        try:
            result = _KINDS[kind].from_json(payload)
        except ValidationError as error:
            raise StoreError(f"the store {store.path} is damaged: result {key} does not read") from error
        of = getattr(result, "variant_key", None) or getattr(result, "variant_id", None)
        if result.lasting and (of is None or of in named):
            yield (named[of] if of is not None else None), result


def _add(writer: RecordWriter, variant: Variant | None, task: Task, result: Outcome) -> bool:
    """False if the file has it: the first write wins, and a file to which nothing is added stays as it is."""
    match result:
        case BaselineResult():
            if writer.baselines(result.task_id, result.mode, result.budget) is not None:
                return False
            writer.put_baselines(task, result)
            writer.put_meta({"library": result.library})
            return True
    if variant is None:  # pragma: no cover - every other result is of one
        return False
    key = variant.key
    match result:
        case CompileResult() if writer.compiled(key) is None:
            writer.put_compile(variant, result)
            writer.put_meta({"compiler": result.compiler or ""})
        case VerifyResult() if writer.verified(key, task.task_id, result.depth) is None:
            writer.put_verify(variant, task, result)
        case SanitizeResult():
            before = writer.sanitized(key)
            if before is not None and (not before.ok or (result.ok and all(c in before.checks for c in result.checks))):
                return False
            writer.put_sanitize(variant, result)
        case TimingResult() if writer.timed(key, task.task_id, result.mode, result.budget) is None:
            writer.put_timing(variant, task, result)
        case ProfileResult() if writer.profiled(key, task.task_id) is None:
            writer.put_profile(variant, task, result)
        case _:
            return False
    return True


def _measured_on(config: SessionConfig, results: list[Outcome]) -> str:
    """When the last timing was taken; results that are no timings do not say."""
    stamps = [row.measured_at for result in results if isinstance(result, TimingResult) for row in result.rows]
    return max([*stamps, config.created_at])


def _clocks(writer: RecordWriter, results: list[Outcome]) -> str:
    """The range of median SM clocks over the session's timings and what the file says already; empty if unknown."""
    known = json.loads(writer.meta("clocks") or "{}").get("sm_mhz_median_range", [])
    timings = (result for result in results if isinstance(result, TimingResult))
    mhz = [*known, *(timing.clocks.sm_mhz_median for timing in timings if timing.clocks is not None)]
    return json.dumps({"sm_mhz_median_range": [min(mhz), max(mhz)]}) if mhz else ""
