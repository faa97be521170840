"""What a record file holds of its shapes, each read once: variants, times, and what to expect of plans from other
shapes. What teaches, collects and evaluates makes its prompts here."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from memory.exemplars import MemorySettings
from memory.exemplars_read import Selection, Tried, nearest, recorded_at, select
from memory.shortlist import ASKED, Expected, Measured, expected, measured, shortlist
from policy.compact import compact_prompt
from tools.families import plans_taking, variants
from tools.launching import accepts
from tools.model import held_out
from tools.model_quality import recorded_families
from tools.record_file import Records
from tools.records import (
    BaselineResult,
    CompileResult,
    DeviceInfo,
    Family,
    Plan,
    Status,
    Step,
    Task,
    Variant,
    VerifyResult,
    content_hash,
)
from training.splits import split_of

#: Beyond the nearest shapes, how many more a varied list may be drawn from.
_FURTHER = 8
Part = Literal["exemplars", "profiles", "shortlist"]
#: What a prompt can be made without, to see what it is worth.
PARTS: tuple[Part, ...] = ("exemplars", "profiles", "shortlist")


class Told(NamedTuple):
    """A rollout's prompt, and what it shows and lists."""

    head: tuple[Step, ...]
    known: Selection
    listed: Sequence[Expected]


class Shelf:
    """Variants are shared: their sources would fill the memory. Expectations and exemplars come from training shapes
    alone, never from the shape itself, and the model's constants are those that were fitted without it."""

    def __init__(self, records: Records, families: Mapping[str, Family]) -> None:
        self.records = records
        self.device: DeviceInfo = records.device.model_copy(update={"kind": "replay"})
        self._families = recorded_families(records, families)
        self._taught = [task.task_id for task in records.tasks() if split_of(task) == "train"]
        self._variants: dict[str, Variant] = {}
        self._found: dict[str, dict[str, Tried]] = {}
        self._measured: dict[str, Measured] = {}
        self._expected: dict[str, list[Expected]] = {}
        self._plans: dict[str, list[Plan]] = {}
        self._references: dict[str, float | None] = {}
        self._complete: dict[str, bool] = {}

    def at(self, task: Task) -> Mapping[str, Tried]:
        """By key, in the record file's order."""
        if task.task_id not in self._found:
            found = recorded_at(self.records, self._families, task)
            shared = [self._variants.setdefault(one.key, one.variant) for one in found]
            self._found[task.task_id] = {
                one.key: one.model_copy(update={"variant": variant, "timings": one.timings[:1]})
                for one, variant in zip(found, shared, strict=True)
            }
        return self._found[task.task_id]

    def near(self, task: Task, count: int) -> list[Task]:
        """Training shapes, closest first."""
        return nearest(task, self._taught, count)

    def expected(self, task: Task) -> Sequence[Expected]:
        """Of every plan that the shape accepts, quickest first; where only likely plans are recorded, of these alone:
        of others nothing would be known when they are tried."""
        if task.task_id not in self._expected:
            self._expected[task.task_id] = self._expected_from(task, self.near(task, ASKED))
        return self._expected[task.task_id]

    def varied(self, task: Task, seed: object) -> Sequence[Expected]:
        """The same from other near shapes than the nearest ones, as ``seed`` has it: a model that saw a shape with one
        list only would learn its numbers by heart."""
        near = self.near(task, ASKED + _FURTHER)
        chosen = random.Random(content_hash(["near", seed])).sample(near, min(ASKED, len(near)))
        return self._expected_from(task, [other for other in near if other in chosen])

    def _expected_from(self, task: Task, near: Sequence[Task]) -> list[Expected]:
        known = [self._measured_at(other) for other in near]
        found = expected(self.plans(task), task, self.device, known, held_out(task))
        if self.is_complete(task):
            return found
        at = self.at(task)
        return [one for one in found if one.plan.plan_id in at]

    def _measured_at(self, task: Task) -> Measured:
        if task.task_id not in self._measured:
            self._measured[task.task_id] = measured(task, self.at(task).values())
        return self._measured[task.task_id]

    def plans(self, task: Task) -> Sequence[Plan]:
        if task.task_id not in self._plans:
            self._plans[task.task_id] = plans_taking(self._families, task, self.device.sm_count)
        return self._plans[task.task_id]

    def is_complete(self, task: Task) -> bool:
        """Every plan that the shape accepts is recorded, so that the optimum is known. Where many are not, one of these
        is found soon."""
        if task.task_id not in self._complete:
            self._complete[task.task_id] = self._is_complete(task)
        return self._complete[task.task_id]

    def _is_complete(self, task: Task) -> bool:
        screened = set(self.records.screened(task.task_id))
        of_op = (family for family in self._families.values() if family.op == task.op)
        others = (v for family in of_op for v in variants(family) if v.key not in screened)
        return all(
            self.rejection(one.key, task) is not None or accepts(one, task, self.device.sm_count) is not None
            for one in others
        )

    def ratios(self, task: Task) -> dict[str, float | None]:
        """Of every plan of which anything is recorded, by key; None for one that was rejected."""
        found: dict[str, float | None] = {}
        for key in (plan.plan_id for plan in self.plans(task)):
            timing = self.records.timed(key, task.task_id, "offline", "screen")
            if timing is not None:
                found[key] = row.ratio if (row := timing.row()) is not None else None
            elif self.rejection(key, task) is not None:
                found[key] = None
        return found

    def rejection(self, key: str, task: Task) -> CompileResult | VerifyResult | None:
        """Why a plan that was not timed was rejected; None if that is not recorded."""
        for result in (self.records.compiled(key), self.records.verified(key, task.task_id, "quick")):
            if result is not None and result.status is Status.FAILED:
                return result
        return None

    def reference_us(self, task: Task) -> float | None:
        """Auto-tuned cuBLASLt, offline, at the best budget that was recorded."""
        if task.task_id not in self._references:
            baseline: BaselineResult | None = self.records.baselines(task.task_id, "offline", "final")
            baseline = baseline or self.records.baselines(task.task_id, "offline", "screen")
            self._references[task.task_id] = baseline.best_us() if baseline is not None else None
        return self._references[task.task_id]

    def told(
        self,
        task: Task,
        own: Sequence[Tried],
        evaluations: int,
        seed: object,
        exemplars: int,
        memory: MemorySettings,
        without: Collection[Part] = (),
        is_varied: bool = False,
    ) -> Told:
        """What a local model is told before a rollout. ``own``: what was tried at the shape so far. ``is_varied``: for
        training, the list differs from seed to seed."""
        known = Selection()
        if "exemplars" not in without:
            near = (list(self.at(other).values()) for other in self.near(task, memory.nearest))
            known = select(own, near, exemplars, seed, memory)
        if "profiles" in without:
            bare = tuple(one.model_copy(update={"profile": None}) for one in known.exemplars)
            known = known.model_copy(update={"exemplars": bare})
        listed = []
        if "shortlist" not in without:
            ranked = self.varied(task, seed) if is_varied else self.expected(task)
            listed = shortlist(ranked, {one.key for one in own})
        head = compact_prompt(task, self.device, self.reference_us(task), known, evaluations, listed)
        return Told(head, known, listed)
