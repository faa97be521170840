"""Which kernels are certified: winners of a database or a recording, a list of plans, an old certificate's kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from agent.certify import Candidate
from agent.certify_record import Certificate
from agent.errors import UsageError
from agent.files import read_json
from agent.sweep_rows import stored_rows
from memory.store import Store, StoreError
from tools.admission import hindrance
from tools.families import ManifestError, render, validate_plan
from tools.hgemm import ShapeError, hgemm, parse_shape
from tools.record_file import RecordReader
from tools.records import HEADLINE_REFERENCE, BLayout, Depth, Family, Plan, Status, Task, Variant
from tools.validation import first_error


class PlanLine(BaseModel):
    """One entry of a file of plans."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: str
    family: str
    b_layout: BLayout
    knobs: dict[str, int]


def of_plans(path: Path, families: Mapping[str, Family]) -> list[Candidate]:
    """A JSON list of ``{"shape": "M,N,K", "family": …, "b_layout": "nk", "knobs": {…}}``. Raises UsageError."""
    data = read_json(path, "the file of plans")
    if not isinstance(data, list) or not data:
        raise UsageError(f"{path} must be a list of plans: shape, family, b_layout and knobs of each")
    found = []
    for number, item in enumerate(data, start=1):
        try:
            line = PlanLine.model_validate(item)
            if line.family not in families:
                raise ManifestError(f"there is no family '{line.family}'; there are {', '.join(families)}")
            family = families[line.family]
            plan = validate_plan(family, line.b_layout, dict(line.knobs))
            found.append(Candidate(hgemm(*parse_shape(line.shape)), render(family, plan)))
        except ValidationError as error:
            raise UsageError(f"{path} entry {number}: {first_error(error)}") from error
        except (ManifestError, ShapeError) as error:
            raise UsageError(f"{path} entry {number}: {error}") from error
    return found


def of_database(path: Path, families: Mapping[str, Family]) -> list[Candidate]:
    """The best kernel of every shape that a sweep or session has put through the whole gate. Raises UsageError."""
    if not path.is_file():
        raise UsageError(f"there is no database {path}")
    with Store(path) as store:
        rows = [row for row in stored_rows(store) if row.variant_key is not None]
        best: dict[str, tuple[float, Task, str]] = {}
        for row in rows:
            timing = row.timing()
            ratio = timing.ratio if timing else 0.0
            if row.variant_key is not None and ratio > best.get(row.task_id, (0.0,))[0]:
                best[row.task_id] = (ratio, _task(row.task_id, row.dims), row.variant_key)
        if not rows:  # a store of sessions
            for task_id, dims in _timed_tasks(store).items():
                standing = next(iter(store.leaderboard(task_id, admitted_only=True)), None)
                if standing is not None:
                    best[task_id] = (standing.ratio, _task(task_id, dims), standing.variant_key)
        found = [Candidate(task, _stored_variant(store, key, families)) for _, task, key in best.values()]
    if not found:
        raise UsageError(f"{path} holds no kernel that passed the whole gate")
    return found


def of_recording(path: Path, families: Mapping[str, Family]) -> list[Candidate]:
    """The best kernel of every recorded shape that the leaderboard's rule admits, by its offline final timing. Raises
    DeviceBroken."""
    with ExitStack() as stack:
        records = RecordReader(path)
        stack.callback(records.close)
        plans = {plan.plan_id: plan for plan in records.plans()}
        tasks = {task.task_id: task for task in records.tasks()}
        failed = records.failed_timings()
        best: dict[str, tuple[float, str]] = {}
        for task_id, key, mode in records.timed_keys("final"):
            if mode != "offline" or key not in plans or (task_id, key) in failed or not _passed(records, task_id, key):
                continue
            timing = records.timed(key, task_id, "offline", "final")
            row = timing.row(HEADLINE_REFERENCE) if timing else None
            if row is not None and row.ratio > best.get(task_id, (0.0,))[0]:
                best[task_id] = (row.ratio, key)
        if not best:
            raise UsageError(f"{path} has no shape with a kernel that passed the whole gate")
        found = [Candidate(tasks[task_id], rendered(plans[key], families)) for task_id, (_, key) in best.items()]
        if other := next((c.variant for c in found if not records.is_of(c.variant)), None):
            raise _changed(other, path)
    return found


def _passed(records: RecordReader, task_id: str, key: str) -> bool:
    """A plan that was timed offline at final budget, and failed no timing."""
    depths: tuple[Depth, ...] = ("quick", "full")
    verified = [(depth, v.status) for depth in depths if (v := records.verified(key, task_id, depth)) is not None]
    sanitized = records.sanitized(key)
    statuses = [sanitized.status] if sanitized is not None else []
    return hindrance(verified, statuses, [("offline/final", Status.OK)]) is None


def of_certificate(certificate: Certificate, families: Mapping[str, Family]) -> list[Candidate]:
    """The kernels that an earlier run certified. Raises UsageError."""
    found = []
    for entry in certificate.entries:
        if entry.status == "certified":
            variant = entry.variant or (rendered(entry.plan, families) if entry.plan else None)
            if variant is None or variant.key != entry.variant_key:
                raise UsageError(f"the kernel of {entry.task.label} cannot be made again from the certificate")
            if not entry.is_of(variant):
                raise _changed(variant, "the certificate")
            found.append(Candidate(entry.task, variant))
    if not found:
        raise UsageError("the certificate to compare with has no certified kernel")
    return found


def at_shapes(candidates: Sequence[Candidate], wanted: Sequence[Task]) -> list[Candidate]:
    """Those at the wanted shapes, in that order; all of them without any. Raises UsageError for one that is missing."""
    if not wanted:
        return list(candidates)
    by_task: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_task.setdefault(candidate.task.task_id, []).append(candidate)
    missing = [task.label for task in wanted if task.task_id not in by_task]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UsageError(f"there is no kernel to certify at {', '.join(missing[:3])}{more}")
    return [candidate for task in wanted for candidate in by_task[task.task_id]]


def rendered(plan: Plan, families: Mapping[str, Family]) -> Variant:
    """Raises UsageError where this program's families no longer have the plan."""
    family = families.get(plan.family)
    if family is None:
        raise UsageError(f"this program has no family {plan.family}, which {plan.label} is of")
    if family.revision != plan.revision:
        raise UsageError(
            f"{plan.label} is of revision {plan.revision} of {plan.family}, this program has revision "
            f"{family.revision}: its numbers do not compare, search again"
        )
    return render(family, plan)


def _stored_variant(store: Store, key: str, families: Mapping[str, Family]) -> Variant:
    found = store.variant(key)
    if found is None:
        raise UsageError(f"{store.path} lacks the source of variant {key}")
    variant = rendered(found.plan, families) if found.plan else found
    if variant.content_id != found.content_id:
        raise _changed(variant, store.path)
    return variant


def _changed(variant: Variant, where: Path | str) -> UsageError:
    """A plan's key names the family's revision but not its source."""
    family = variant.plan.family if variant.plan else "?"
    return UsageError(
        f"the source of family {family} changed since {where} measured {variant.label}: bump `revision` in "
        f"kernels/{family}/family.yaml and search again, or undo the change"
    )


def _timed_tasks(store: Store) -> dict[str, dict[str, int]]:
    """task_id → dims of everything that was timed at final budget, offline."""
    found: dict[str, dict[str, int]] = {}
    for payload in store.payloads("time", setting="offline/final"):
        try:
            timing = json.loads(payload)
            if timing.get("rows"):
                found.setdefault(timing["task_id"], timing["rows"][0]["dims"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreError(f"the store {store.path} is damaged: a timing does not read; restore a copy") from error
    return found


def _task(task_id: str, dims: Mapping[str, int]) -> Task:
    return hgemm(dims["M"], dims["N"], dims["K"], accumulate="float16" if "-f16acc/" in task_id else "float32")
