"""What was tried at a shape, gathered from the store, or from a record file as prior knowledge; and who may be shown.

Reading only: nothing here measures. The choice among scored variants is in memory/exemplars.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from memory.exemplars import MemorySettings, Scored, choose
from tools.families import variants
from tools.gate import Toolbox
from tools.record_file import Records
from tools.records import (
    MODES,
    Budget,
    CompileResult,
    Depth,
    Family,
    Outcome,
    ProfileResult,
    Record,
    SanitizeResult,
    Status,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
    content_hash,
)

#: Results of this kind say that a variant was tried at a task and did not compile: a compile itself has no task.
TRIED = "tried"
_BUDGETS: tuple[Budget, ...] = ("screen", "final", "certify")


class Tried(Record):
    """A variant at a task with everything that is known of it. ``origin`` names another device, and is empty for the
    session's own."""

    variant: Variant
    task: Task
    origin: str = ""
    compiled: CompileResult | None = None
    verified: VerifyResult | None = None
    sanitized: SanitizeResult | None = None
    timings: tuple[TimingResult, ...] = ()
    profile: ProfileResult | None = None

    @property
    def key(self) -> str:
        return self.variant.key

    @property
    def failure(self) -> Outcome | None:
        """The first verdict against it, in the gate's order."""
        verdicts = (self.compiled, self.verified, self.sanitized, *self.timings)
        return next((v for v in verdicts if v is not None and v.status is Status.FAILED), None)

    def timing(self, mode: str = "offline", budgets: Sequence[Budget] = _BUDGETS) -> TimingResult | None:
        """At the first of ``budgets`` that was measured."""
        ok = [t for t in self.timings if t.ok and t.mode == mode]
        return next((t for budget in budgets for t in ok if t.budget == budget), None)

    @property
    def score(self) -> float | None:
        """The offline ratio at screen budget, which every variant has, else at a longer one; None if rejected."""
        timing = self.timing()
        row = timing.row() if timing is not None else None
        return row.ratio if row is not None and self.failure is None else None


class Selection(Record):
    """What a prompt is to show, best first. ``exemplars`` are of one task, so that their scores compare; where that is
    a neighbour, ``own`` holds the few scored variants of the prompt's own task."""

    exemplars: tuple[Tried, ...] = ()
    own: tuple[Tried, ...] = ()
    failures: tuple[Tried, ...] = ()
    scored: int = 0  # scored variants of the prompt's own task
    rejected: int = 0


class Shelf(Protocol):
    """The part of memory.store.Store that is read here."""

    def entries(self, scope: str, task_id: str | None) -> list[tuple[str, str, str]]: ...

    def task_ids(self, scope: str) -> list[str]: ...


# --- reading ---------------------------------------------------------------------------------------------------------


def tried(toolbox: Toolbox, variant: Variant, task: Task) -> Tried:
    """From stored results; nothing is measured."""
    depths: tuple[Depth, ...] = ("full", "quick")
    verifies = [toolbox.stored(VerifyResult, "verify", variant, task, depth) for depth in depths]
    known = [v for v in verifies if v is not None and v.status in (Status.OK, Status.FAILED)]
    timings = [
        toolbox.stored(TimingResult, "time", variant, task, mode, budget) for mode in MODES for budget in _BUDGETS
    ]
    return Tried(
        variant=variant,
        task=task,
        compiled=toolbox.stored(CompileResult, "compile", variant),
        verified=next((v for v in known if v.status is Status.FAILED), known[0] if known else None),
        sanitized=toolbox.stored_sanitize(variant, task),
        timings=tuple(t for t in timings if t is not None and t.status in (Status.OK, Status.FAILED)),
        profile=_useful(toolbox.stored(ProfileResult, "profile", variant, task)),
    )


def keys_at(store: Shelf, scope: str, task: Task) -> list[str]:
    """Keys of all variants of which the store knows a verdict at this task, whoever tried them, sorted."""
    found = set()
    for _, kind, payload in store.entries(scope, task.task_id):
        if kind in ("verify", "time", TRIED):
            found.add(_variant_key(payload))
    return sorted(found - {""})


def tried_at(
    store: Shelf,
    toolbox: Toolbox,
    task: Task,
    variant_of: Callable[[str], Variant | None],
    own_keys: Iterable[str],
    earlier_sessions: bool,
) -> list[Tried]:
    """All variants tried at a task: other sessions' first, then ``own_keys`` in their order."""
    own = list(dict.fromkeys(own_keys))
    earlier = [key for key in keys_at(store, toolbox.scope, task) if key not in own] if earlier_sessions else []
    found = []
    for key in (*earlier, *own):
        variant = variant_of(key)
        if variant is not None:
            found.append(tried(toolbox, variant, task))
    return found


def tried_record(scope: str, variant: Variant, task: Task, result: Outcome) -> tuple[str, str, str]:
    """Key, kind and payload by which a store remembers that a variant did not compile *at this task's search*."""
    what = result.model_dump(mode="json", include={"status", "reason", "detail"})
    payload = json.dumps({**what, "variant_key": variant.key, "task_id": task.task_id})
    return f"{scope}-{content_hash([TRIED, variant.key, task.task_id])}", TRIED, payload


def recorded_at(records: Records, families: Mapping[str, Family], task: Task) -> list[Tried]:
    """Plans of the packaged families that a record file has times of at a task, some hundred lookups of 30 us each.
    Plans of another revision of a family, or of a source edited since, are left out: what was timed is gone."""
    found = []
    origin = f"{records.device.name}, driver {records.device.driver}"
    of_families = {variant.key: variant for family in families.values() for variant in variants(family)}
    for key in records.screened(task.task_id):
        variant = of_families.get(key)
        screen = records.timed(key, task.task_id, "offline", "screen")
        if variant is None or screen is None or not records.is_of(variant):
            continue
        finals = [records.timed(key, task.task_id, mode, "final") for mode in MODES]
        found.append(
            Tried(
                variant=variant,
                task=task,
                origin=origin,
                compiled=records.compiled(key),
                verified=records.verified(key, task.task_id, "full") or records.verified(key, task.task_id, "quick"),
                sanitized=records.sanitized(key),
                timings=tuple(t for t in (screen, *finals) if t is not None),
                profile=_useful(records.profiled(key, task.task_id)),
            )
        )
    return found


# --- neighbours ------------------------------------------------------------------------------------------------------


def sibling(task: Task, task_id: str) -> Task | None:
    """The task of that id, if it is this operation at another shape; None if not."""
    try:
        pairs = [part.split("=") for part in task_id.partition("/")[2].split(",")]
        dims = {name: int(value) for name, value in pairs}
        other = task.model_copy(update={"dims": dims})
    except ValueError:
        return None
    known = dims.keys() == task.dims.keys() and min(dims.values()) >= 1
    return other if known and other.task_id == task_id != task.task_id else None


def distance(task: Task, other: Task) -> float:
    """Sum of the dims' factors, in powers of two."""
    return sum(abs(math.log2(task.dims[name] / other.dims[name])) for name in task.dims)


def nearest(task: Task, task_ids: Iterable[str], count: int) -> list[Task]:
    """The closest shapes of the same operation, closest first, this one left out."""
    siblings = [other for task_id in task_ids if (other := sibling(task, task_id)) is not None]
    return sorted(siblings, key=lambda other: (distance(task, other), other.task_id))[:count]


# --- choice ----------------------------------------------------------------------------------------------------------


def select(
    own: Sequence[Tried],
    neighbours: Iterable[Sequence[Tried]],
    count: int,
    seed: object,
    settings: MemorySettings,
) -> Selection:
    """Exemplars of the task itself, or of the first neighbour that has enough, where the task has too few.

    ``neighbours`` is only asked for as many as are needed, so it may be a generator that reads.
    """
    scored, rejected = _scored(own), [one for one in own if one.failure is not None]
    pool = own
    if len(scored) < settings.min_variants:
        pool = next((n for n in neighbours if len(_scored(n)) >= max(settings.min_variants, len(scored) + 1)), own)
    by_key = {one.key: one for one in pool}
    exemplars = tuple(by_key[key] for key in choose(_scored(pool), count, seed, settings))
    mine = sorted((one for one in own if one.score is not None), key=lambda one: (-(one.score or 0.0), one.key))
    return Selection(
        exemplars=exemplars,
        own=() if pool is own else tuple(mine[:count]),
        failures=tuple(negative_examples(rejected, settings.failures)),
        scored=len(scored),
        rejected=len(rejected),
    )


def negative_examples(rejected: Sequence[Tried], count: int) -> list[Tried]:
    """The latest of every reason first, then further ones, latest first: one lesson is not told three times."""
    latest = list(reversed(rejected))
    first_of: dict[str, Tried] = {}
    for one in latest:
        first_of.setdefault(_reason(one), one)
    firsts = list(first_of.values())
    kept = {one.key for one in firsts}
    return [*firsts, *(one for one in latest if one.key not in kept)][:count]


def _reason(one: Tried) -> str:
    failure = one.failure
    return failure.reason.value if failure is not None and failure.reason is not None else ""


def _scored(pool: Sequence[Tried]) -> list[Scored]:
    return [Scored(one.key, one.score) for one in pool if one.score is not None]


def _useful(profile: ProfileResult | None) -> ProfileResult | None:
    return profile if profile is not None and profile.ok and profile.metrics else None


def _variant_key(payload: str) -> str:
    return str(json.loads(payload).get("variant_key") or "")
