"""What a session remembers, at the edge: earlier variants for the prompt, and twins of a new source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cached_property
from threading import Lock

from agent.calls import Prepared, Ran
from agent.deps import Deps
from memory.contrast import memory_text
from memory.duplicates import Twins
from memory.exemplars_read import (
    Selection,
    Tried,
    distance,
    keys_at,
    nearest,
    recorded_at,
    select,
    tried_at,
    tried_record,
)
from memory.shortlist import ASKED, Expected, Measured, expected, measured, shortlist
from policy.search import MODEL_FIRST, seed_plans
from tools.families import plans_taking
from tools.record_file import RecordReader, Records
from tools.records import CompileResult, Evaluation, Status, Task, Variant
from tools.replay import default_path


class Memory:
    """Reads the session's store, and the record file where the settings say so. Measures nothing."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._twins: Twins | None = None
        self._lock = Lock()

    # --- the prompt ----------------------------------------------------------------------------------------------

    def text(self, own_keys: Sequence[str], round_number: int) -> str:
        """The prompt's section; one for all rollouts of a round's group. Raises DeviceBroken for a bad record file."""
        deps = self._deps
        if deps.settings.policy.exemplars < 1:
            return ""
        return memory_text(self.selection(own_keys, round_number), deps.task, deps.settings.memory.prompt_tokens)

    def selection(self, own_keys: Sequence[str], round_number: int) -> Selection:
        deps = self._deps
        seed = [deps.settings.session.seed, round_number]
        own = self._own(own_keys)
        return select(own, self._neighbours(), deps.settings.policy.exemplars, seed, deps.settings.memory)

    def shortlist(self, own_keys: Sequence[str], is_partly_recorded: bool = False) -> list[Expected]:
        """Of the local policy's prompt. From the record file always: its adapter has learned from it.
        ``is_partly_recorded``: the device has answered that a plan is not recorded; what it is likely to hold comes
        first then."""
        deps = self._deps
        near = {}
        with closing(RecordReader(default_path())) as records:
            for task in nearest(deps.task, [task.task_id for task in records.tasks()], ASKED):
                near[task.task_id] = measured(task, recorded_at(records, deps.families, task))
        if deps.settings.memory.earlier_sessions:  # this device's own measurements replace the file's
            for task in nearest(deps.task, deps.store.task_ids(deps.toolbox.scope), ASKED):
                if times := measured(task, self._tried_at(task, ())).times_us:
                    known = near[task.task_id].times_us if task.task_id in near else {}
                    near[task.task_id] = Measured(task, {**known, **times})
        closest = sorted(near.values(), key=lambda one: (distance(deps.task, one.task), one.task.task_id))[:ASKED]
        plans = plans_taking(deps.families, deps.task, deps.toolbox.info.sm_count)
        ranked = expected(plans, deps.task, deps.toolbox.info, closest)
        if is_partly_recorded:
            likely = {plan.plan_id for plan in seed_plans(plans, deps.task, deps.toolbox.info, MODEL_FIRST)}
            ranked.sort(key=lambda one: one.plan.plan_id not in likely)
        return shortlist(ranked, own_keys)

    def _own(self, own_keys: Sequence[str]) -> list[Tried]:
        task = self._deps.task
        measured = self._tried_at(task, own_keys)
        known = {one.key for one in measured}
        records = self._records
        if records is None or self._replays(records):  # its own rows are what the replay device answers with
            return measured
        return [*(one for one in recorded_at(records, self._deps.families, task) if one.key not in known), *measured]

    def _neighbours(self) -> Iterator[list[Tried]]:
        """The nearest shapes of the store, then those of the record file."""
        deps, count = self._deps, self._deps.settings.memory.nearest
        if deps.settings.memory.earlier_sessions:
            for task in nearest(deps.task, deps.store.task_ids(deps.toolbox.scope), count):
                yield self._tried_at(task, ())
        if self._records is not None:
            for task in nearest(deps.task, [task.task_id for task in self._records.tasks()], count):
                yield recorded_at(self._records, deps.families, task)

    def _tried_at(self, task: Task, own_keys: Sequence[str]) -> list[Tried]:
        deps = self._deps
        earlier = deps.settings.memory.earlier_sessions
        return tried_at(deps.store, deps.toolbox, task, deps.find_variant, own_keys, earlier)

    @cached_property
    def _records(self) -> Records | None:
        return RecordReader(default_path()) if self._deps.settings.memory.from_records else None

    def _replays(self, records: Records) -> bool:
        info = self._deps.toolbox.info
        return info.kind == "replay" and info.recorded_on == records.meta("recorded_on")

    # --- twins ---------------------------------------------------------------------------------------------------

    def twin(self, prepared: Prepared, seen: Sequence[str]) -> str | None:
        """Key of the earlier variant that a sent source says the same as, when it is admitted."""
        if prepared.variant is None or not prepared.is_source:
            return None
        return self._known(seen).of(prepared.variant)

    def recognised(self, prepared: Prepared, admitted_key: str | None) -> Prepared:
        """The call with an earlier variant in place of a twin of it: by its text, as it was admitted, or by what the
        compiler makes of it. Compiles outside the device's lock: compilers run side by side, while the GPU does one
        thing at a time."""
        deps, variant = self._deps, prepared.variant
        if variant is None or not prepared.fresh:
            return prepared
        if admitted_key not in (None, variant.key):
            return prepared.instead(deps.variant(admitted_key or ""))
        if prepared.is_source or deps.toolbox.info.kind == "cuda":
            compiled = deps.toolbox.compile(variant)
            twin = self._cubin_twin(variant, compiled) if prepared.name == "evaluate_source" else None
            if twin is not None:
                return prepared.instead(twin, "machine code and launch")
        return prepared

    def note_failed_compile(self, variant: Variant, ran: Ran) -> None:
        """For other sessions' negative examples: a compile's result does not say for which task it was tried."""
        deps, result = self._deps, ran.result
        failed = result.compile if isinstance(result, Evaluation) else result
        if isinstance(failed, CompileResult) and failed.status is Status.FAILED:
            deps.store.put(*tried_record(deps.toolbox.scope, variant, deps.task, failed))

    def _known(self, seen: Sequence[str]) -> Twins:
        """What is known at the task: this session's variants in the order of their trial, then other sessions'."""
        deps = self._deps
        with self._lock:
            if self._twins is None:
                self._twins = Twins(deps.task, deps.toolbox.info.sm_count)
                earlier = keys_at(deps.store, deps.toolbox.scope, deps.task)
                keys = [*seen, *(earlier if deps.settings.memory.earlier_sessions else ())]
            else:
                keys = [key for key in seen if not self._twins.knows(key)]
            self._twins.learn(variant for key in keys if (variant := deps.find_variant(key)) is not None)
            return self._twins

    def _cubin_twin(self, variant: Variant, compiled: CompileResult) -> Variant | None:
        """One that was evaluated, so that this one need not run."""
        deps = self._deps

        def known(key: str) -> CompileResult | None:
            other = deps.find_variant(key)
            return deps.toolbox.stored(CompileResult, "compile", other) if other is not None else None

        key = self._known(()).of_cubin(variant, compiled, known)
        other = deps.find_variant(key) if key is not None else None
        return other if other is not None and deps.toolbox.evaluated(other, deps.task) else None
