"""What a recording takes of which shapes, and what of that a record file lacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event

import numpy as np

from tools.families import accepted_plans, plans, render
from tools.launching import accepts
from tools.model import estimates_us
from tools.record_writer import RecordWriter
from tools.records import MODES, DeviceInfo, Family, Mode, Status, Task, Variant, content_hash
from tools.replay import covers
from tools.sanitize_shapes import sanitize_tasks

Echo = Callable[[str], None]


@dataclass(frozen=True)
class Scope:
    """How much is recorded of a shape. Regret can be computed only where ``plans`` is None."""

    #: Finalists: verify full, sanitize, final timings.
    top: int = 3
    #: Of the finalists, so many are timed in server mode too, whose rounds are mostly waiting; None: all.
    server_top: int | None = None
    #: The plans that the analytical model ranks first, and its first of each family; None: every plan.
    plans: int | None = None
    profiles: bool = True
    modes: tuple[Mode, ...] = MODES
    sanitize: bool = True
    #: Several candidates in one run with the references, where the device can. The numbers mean the same.
    together: bool = True

    def digest(self, variants: Iterable[Variant]) -> str:
        """Of all that makes the recording of a shape complete but its profile."""
        settings: list[int | str] = [self.top]
        if self.server_top is not None:
            settings += [self.server_top, "by final"]
        if self.modes != MODES or not self.sanitize:
            settings += [*self.modes, f"sanitize {self.sanitize}"]
        return content_hash([*settings, *(variant.key for variant in variants)])


class OutOfTimeError(Exception):
    """The deadline has passed, or somebody wants an end of it."""


class Deadline:
    """Looked at between tool calls."""

    def __init__(self, seconds: float, stop: Event | None = None) -> None:
        self._end = time.monotonic() + seconds
        self._stop = stop

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def check(self) -> None:
        if self.left_s <= 0 or (self._stop is not None and self._stop.is_set()):
            raise OutOfTimeError


@dataclass(frozen=True)
class Job:
    """A shape and the plans to be recorded there; what the file holds of others competes for the final timings."""

    task: Task
    variants: tuple[Variant, ...]
    digest: str
    missing: tuple[Variant, ...]  # of them: neither rejected nor screened yet


def jobs(
    writer: RecordWriter,
    families: Mapping[str, Family],
    tasks: Sequence[Task],
    scope: Scope,
    info: DeviceInfo,
    given: Mapping[str, Sequence[Variant]] | None = None,
) -> list[Job]:
    """What is not complete in the file yet, in the order of ``tasks``. ``given``: plans by task_id, instead of those
    of ``families`` that ``scope`` names.

    Raises DeviceBroken if the file holds measurements of another source of one of the plans.
    """
    timed = {(task_id, key) for task_id, key, mode in writer.timed_keys("screen") if mode == "offline"}
    timed |= writer.failed_timings()
    if given is None:
        promising = None if scope.plans is None else _Promising(families, scope.plans, info, timed)
        given = {
            task.task_id: promising.at(task) if promising else accepted_plans(families, task, info.sm_count)
            for task in tasks
        }
    wanted = {task.task_id: tuple(given[task.task_id]) for task in tasks}
    plans = {variant.key: variant for variants in wanted.values() for variant in variants}
    writer.check_contents(plans.values())
    rejected = {key for key in plans if (found := writer.compiled(key)) is not None and not found.ok}
    lacking = []
    for task in tasks:
        variants = wanted[task.task_id]
        digest = scope.digest(variants)
        if not writer.is_done(task, digest, scope.profiles):
            unknown = (v for v in variants if v.key not in rejected and (task.task_id, v.key) not in timed)
            missing = tuple(v for v in unknown if not _failed(writer, v, task))
            lacking.append(Job(task, variants, digest, missing))
    return lacking


def unmeasured(todo: Iterable[Job]) -> list[Variant]:
    """Variants with a screen timing still to be taken, in the order in which they will be needed."""
    return list({variant.key: variant for job in todo for variant in job.missing}.values())


def unsanitized(
    writer: RecordWriter, families: Mapping[str, Family], todo: Iterable[Job]
) -> list[tuple[Variant, tuple[Task, ...]]]:
    """Plans that compile, each with the shapes that it is to be sanitized at, where that was not done."""
    items: dict[str, tuple[Variant, tuple[Task, ...]] | None] = {}
    for job in todo:
        for variant in job.variants:
            if variant.key not in items:
                tasks = sanitize_tasks(variant, job.task, families)
                compiled, known = writer.compiled(variant.key), writer.sanitized(variant.key)
                settled = known is not None and (known.status is Status.FAILED or covers(known, tasks))
                wanted = compiled is not None and compiled.ok and not settled
                items[variant.key] = (variant, tasks) if wanted else None
    return [item for item in items.values() if item is not None]


class _Promising:
    """The plans that the model ranks first among those that take a shape, its first of each family, and what was timed
    there. Whether a plan takes a shape is asked in the order of the ranking: of all plans it takes ten times as long as
    the ranking, which for the grid is a quarter of a minute."""

    def __init__(
        self, families: Mapping[str, Family], count: int, info: DeviceInfo, timed: set[tuple[str, str]]
    ) -> None:
        self._count, self._info, self._timed = count, info, timed
        rendered = [render(family, plan) for family in families.values() for plan in plans(family)]
        self._variants = [(variant.key, variant, variant.plan) for variant in rendered if variant.plan is not None]
        self._ops = {family.name: family.op for family in families.values()}

    def at(self, task: Task) -> list[Variant]:
        of_op = [entry for entry in self._variants if self._ops[entry[2].family] == task.op]
        ranking = np.argsort(estimates_us([plan for _, _, plan in of_op], task, self._info), kind="stable")
        chosen: set[str] = set()
        places, led = self._count, set[str]()
        for index in ranking:
            key, variant, plan = of_op[index]
            wanted = places or plan.family not in led or (task.task_id, key) in self._timed
            if wanted and accepts(variant, task, self._info.sm_count) is None:
                chosen.add(key)
                led.add(plan.family)
                places = max(0, places - 1)
        return [variant for key, variant, _ in of_op if key in chosen]


def _failed(writer: RecordWriter, variant: Variant, task: Task) -> bool:
    verified = writer.verified(variant.key, task.task_id, "quick")
    return verified is not None and not verified.ok
