"""Trajectories from a record file: what a good policy would have said, had it been asked at a recorded shape.

Prompt (shape + contrastive exemplars) → a short analysis → a plan, its recorded answer, … → submit. The plans of the
rollouts of one group are drawn with P ∝ exp(ratio / temperature), so that a group holds better and worse ones; what is
said of them is true of the recorded numbers. Exemplars never come from held-out shapes. Everything is seeded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memory.exemplars import MemorySettings, softmax_draw
from memory.exemplars_read import Selection, Tried, nearest, recorded_at, select
from policy.compact import PROMPT_VERSION, compact_answer, compact_prompt, compact_tools, plan_arguments
from policy.redacting import Secrets
from policy.rendering import result_text
from policy.reward import (
    NOT_EXECUTABLE,
    Reward,
    RewardSettings,
    compile_failure_reward,
    correct_reward,
    smooth,
    wrong_reward,
)
from policy.settings import LOCAL_QUOTA
from tools.record_file import Records
from tools.records import DeviceInfo, Evaluation, Family, Plan, Status, Task, Variant, content_hash
from training.export import prompt_message, tools_json
from training.rows import Provenance, RewardParts, Row, RowCall, Turn
from training.splits import split_of


@dataclass(frozen=True)
class Recipe:
    """``evaluations``: budgets of the rollouts, one after the other. ``temperature``: of the draw, in units of the
    ratio; small is greedy. ``top``: only so many of the best plans are drawn in the first rollout of a group, which is
    the one to imitate."""

    seed: int = 0
    groups_per_shape: int = 4
    group_size: int = 8
    evaluations: tuple[int, ...] = (1, 2, LOCAL_QUOTA)
    temperature: float = 0.1
    top: int = 3
    exemplars: int = 2


def synthesise(
    records: Records, families: Mapping[str, Family], recipe: Recipe, reward: RewardSettings, memory: MemorySettings
) -> Iterator[Row]:
    tasks = records.tasks()
    taught = [task.task_id for task in tasks if split_of(task) == "train"]
    shelf = Shelf(records, families)
    for task in tasks:
        pool = shelf.at(task)
        if not [one for one in pool if one.score is not None]:
            continue
        near = [shelf.at(other) for other in nearest(task, taught, memory.nearest)]
        for number in range(recipe.groups_per_shape):
            yield from _group(records, task, pool, near, number, recipe, reward, memory)


class Shelf:
    """What was recorded at each shape, read once. Variants are shared: their sources would fill the memory."""

    def __init__(self, records: Records, families: Mapping[str, Family]) -> None:
        self._records = records
        self._families = families
        self._variants: dict[str, Variant] = {}
        self._found: dict[str, list[Tried]] = {}

    def at(self, task: Task) -> list[Tried]:
        if task.task_id not in self._found:
            found = recorded_at(self._records, self._families, task)
            shared = [self._variants.setdefault(one.key, one.variant) for one in found]
            self._found[task.task_id] = [
                one.model_copy(update={"variant": variant, "timings": one.timings[:1]})
                for one, variant in zip(found, shared, strict=True)
            ]
        return self._found[task.task_id]


def _group(
    records: Records,
    task: Task,
    pool: Sequence[Tried],
    near: Sequence[Sequence[Tried]],
    number: int,
    recipe: Recipe,
    settings: RewardSettings,
    memory: MemorySettings,
) -> Iterator[Row]:
    evaluations = recipe.evaluations[number % len(recipe.evaluations)]
    rng = random.Random(content_hash(["synthesise", recipe.seed, task.task_id, number]))
    known = _known(pool, near, number, rng, recipe, memory)
    device = records.device.model_copy(update={"kind": "replay"})
    baseline = records.baselines(task.task_id, "offline", "final") or records.baselines(
        task.task_id, "offline", "screen"
    )
    head = compact_prompt(task, device, baseline.best_us() if baseline else None, known, evaluations)
    shown = {one.key for one in (*known.exemplars, *known.own, *known.failures)}
    unshown = [one for one in pool if one.key not in shown] or list(pool)
    rollouts = [_drawn(unshown, evaluations, rng, recipe, first=index == 0) for index in range(recipe.group_size)]
    rewards = [_reward(tried, settings) for tried in rollouts]
    relative = smooth([r.value for r in rewards], settings)
    prompt = tuple(prompt_message(step, Secrets()) for step in head)
    group_id = content_hash(["records", records.device.label, task.task_id, number, [m.content for m in prompt]])
    for index, (tried, own, group) in enumerate(zip(rollouts, rewards, relative, strict=True)):
        turns = tuple(_conversation(tried, known))
        yield Row(
            row_id=content_hash([group_id, index, [t.model_dump() for t in turns]]),
            group_id=group_id,
            split=split_of(task),
            task_id=task.task_id,
            dims=task.dims,
            prompt=prompt,
            tools=tools_json(compact_tools()),
            turns=turns,
            reward=own.value,
            reward_parts=RewardParts(**own.parts, group=group),
            status="ok" if own.parts.get("speed") else "failed",
            provenance=_provenance(records, device, number, index, recipe),
        )


def _known(
    pool: Sequence[Tried],
    near: Sequence[Sequence[Tried]],
    number: int,
    rng: random.Random,
    recipe: Recipe,
    memory: MemorySettings,
) -> Selection:
    """In turn: nothing of this shape (neighbours are shown), a few plans of it, nothing at all."""
    seed = [recipe.seed, number, rng.random()]
    match number % 4:
        case 0 | 2:
            own: list[Tried] = []
        case 1:
            own = rng.sample(list(pool), min(8, len(pool)))
        case _:
            return Selection()
    return select(own, near, recipe.exemplars, seed, memory)


def _drawn(pool: Sequence[Tried], count: int, rng: random.Random, recipe: Recipe, first: bool) -> list[Tried]:
    """``count`` different plans in the order of their trial; rejected ones count as slow as there are."""
    ranked = sorted(pool, key=lambda one: (-(one.score or 0.0), one.key))
    if first:
        ranked = ranked[: max(recipe.top, count)]
    picked = softmax_draw([one.score or 0.0 for one in ranked], count, recipe.temperature, rng)
    return [ranked[i] for i in picked]


# --- what is said -----------------------------------------------------------------------------------------------------


def _conversation(tried: Sequence[Tried], known: Selection) -> Iterator[Turn]:
    best: Tried | None = None
    previous: Tried | None = None
    for number, one in enumerate(tried):
        plan = _plan(one)
        arguments = json.dumps(plan_arguments(plan))
        call = RowCall(id=f"call-{number}", name="evaluate_plan", arguments=arguments)
        text = _opening(known, plan) if previous is None else _after(previous, best, plan)
        yield Turn(role="assistant", content=text, tool_calls=(call,), trained=True)
        yield Turn(role="tool", content=_answer(one), tool_call_id=call.id, name=call.name)
        previous = one
        if one.score is not None and (best is None or best.score is None or one.score > best.score):
            best = one
    chosen = best or tried[-1]
    call = RowCall(id=f"call-{len(tried)}", name="submit", arguments=json.dumps({"key": chosen.key}))
    verdict = f"Best ratio {chosen.score:.3f}." if chosen.score is not None else "No plan passed."
    yield Turn(role="assistant", content=verdict, tool_calls=(call,), trained=True)


def _opening(known: Selection, plan: Plan) -> str:
    shown = known.own or known.exemplars
    if not shown:
        return f"Nothing is measured; {_named(plan)} suits the shape."
    best = shown[0]
    text = f"Best so far {best.score or 0.0:.3f}."
    if len(shown) > 1 and best.score and shown[-1].score:
        apart = _difference(_plan(shown[-1]), _plan(best))
        text = f"{best.score / shown[-1].score:.2f}x by {apart}."
    return f"{text} {_change(_plan(best), plan)}"


def _after(previous: Tried, best: Tried | None, plan: Plan) -> str:
    if previous.score is None:
        return f"Rejected. {_change(_plan(best or previous), plan)}"
    led = best is not None and best.key == previous.key
    return f"{previous.score:.3f} {'leads' if led else 'is slower'}. {_change(_plan(best or previous), plan)}"


def _change(before: Plan, after: Plan) -> str:
    return f"Next: {_difference(before, after)}."


def _difference(before: Plan, after: Plan) -> str:
    """What one changes to get from one plan to the other."""
    if before.family != after.family:
        return _named(after)
    changed = [f"{k}={v}" for k, v in after.knobs.items() if before.knobs.get(k) != v]
    if before.b_layout != after.b_layout:
        changed.insert(0, after.b_layout)
    return " ".join(changed) or "the same plan"


def _named(plan: Plan) -> str:
    return f"{plan.family}/{plan.b_layout}"


def _plan(one: Tried) -> Plan:
    if one.variant.plan is None:  # pragma: no cover - a record file's variants are plans
        raise ValueError(f"{one.key} is no plan of a family")
    return one.variant.plan


def _answer(one: Tried) -> str:
    return compact_answer(result_text(evaluation_of(one), one.key, one.variant.label))


def evaluation_of(one: Tried) -> Evaluation:
    """As the gate would answer: it stops at the first verdict against the candidate."""
    failure = one.failure
    status = Status.OK if failure is None else failure.status
    return Evaluation(
        status=status,
        reason=failure.reason if failure is not None else None,
        detail=failure.detail if failure is not None else "",
        variant_key=one.key,
        task_id=one.task.task_id,
        compile=one.compiled,
        verify=one.verified,
        timing=one.timing(),
    )


def _reward(tried: Sequence[Tried], settings: RewardSettings) -> Reward:
    """Of the best that was tried, as the loop has it (agent/nodes.py)."""
    best = max(tried, key=lambda one: one.score if one.score is not None else float("-inf"))
    length = len(best.variant.source)
    if best.score is not None:
        error = best.verified.max_abs_error if best.verified is not None else None
        return correct_reward([best.score], [error], length, settings)
    failure = tried[-1].failure
    if failure is not None and failure.reason in NOT_EXECUTABLE:
        return compile_failure_reward(settings)
    return wrong_reward(len(tried[-1].variant.source), settings)


def _provenance(records: Records, device: DeviceInfo, number: int, index: int, recipe: Recipe) -> Provenance:
    return Provenance(
        source="records",
        session=f"records-seed{recipe.seed}",
        policy="synthesised",
        device=records.device.label,
        protocol=device.protocol_version,
        commit=records.meta("commit") or "",
        recorded_on=records.meta("recorded_on") or "",
        prompt_version=PROMPT_VERSION,
        round=number,
        index=index,
        ended_by="submit",
    )
