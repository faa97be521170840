"""Trajectories from a record file: what a good policy would have said, had it been asked at a recorded shape.

Prompt (shape, contrastive exemplars, a list of plans that should do well) → a short analysis → a plan, its recorded
answer, … → submit. The first rollouts of a group draw the best recorded plans, best first; the others draw with
P ∝ exp(ratio / temperature), so that a group holds better and worse ones. What is said of them is true of the recorded
numbers. Nothing in a prompt comes from held-out shapes. Everything is seeded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memory.exemplars import MemorySettings, softmax_draw
from memory.exemplars_read import Selection, Tried
from memory.shortlist import Expected
from policy.compact import PROMPT_VERSION, compact_answer, compact_tools, plan_arguments
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
from tools.records import DeviceInfo, Evaluation, Family, Status, Task, content_hash
from training.export import prompt_message, tools_json
from training.rows import Provenance, RewardParts, Row, RowCall, Turn
from training.saying import after, opening, plan_of, verdict
from training.shelf import Part, Shelf
from training.splits import is_asked, split_of


class Kind(NamedTuple):
    """Of a group's prompt. ``is_later``: as a session's later rounds have it, with some plans of the shape tried."""

    is_later: bool
    evaluations: int
    without: frozenset[Part] = frozenset()


#: One group of a shape after the other. Mostly what a session tells; each part is also missing now and then, so that a
#: model without it can be compared with one that has it.
KINDS = (
    Kind(False, LOCAL_QUOTA),
    Kind(False, 1),
    Kind(True, LOCAL_QUOTA),
    Kind(False, LOCAL_QUOTA, frozenset({"shortlist"})),
    Kind(False, 2, frozenset({"exemplars"})),
    Kind(False, 1, frozenset({"exemplars", "shortlist"})),
)
#: Of the leaders' draw: an order by ratio in which what differs by less than the measurements' noise may change places.
_LEADING_TEMPERATURE = 0.005
#: A plan that is not in the prompt's list must be so much better, as a part of the ratio, to be taught instead of one.
_OFF_LIST = 0.05


@dataclass(frozen=True)
class Recipe:
    """``leaders``: the first rollouts of a group, which are the ones to imitate; ``top``: how many of the best plans
    they may draw besides the listed ones. ``temperature``: of the others' draw, in units of the ratio. ``pruned``: also
    shapes where only likely plans are recorded, so that better ones may not be known."""

    seed: int = 0
    groups_per_shape: int = len(KINDS)
    group_size: int = 8
    leaders: int = 2
    temperature: float = 0.1
    top: int = 3
    exemplars: int = 2
    pruned: bool = False
    splits: Collection[str] = ("all",)


def synthesise(
    records: Records, families: Mapping[str, Family], recipe: Recipe, reward: RewardSettings, memory: MemorySettings
) -> Iterator[Row]:
    shelf = Shelf(records, families)
    for task in records.tasks():
        is_taught = is_asked(task, recipe.splits) and (recipe.pruned or shelf.is_complete(task))
        if is_taught and any(one.score is not None for one in shelf.at(task).values()):
            for number in range(recipe.groups_per_shape):
                yield from _group(shelf, task, number, recipe, reward, memory)


def _group(
    shelf: Shelf, task: Task, number: int, recipe: Recipe, settings: RewardSettings, memory: MemorySettings
) -> Iterator[Row]:
    kind = KINDS[number % len(KINDS)]
    rng = random.Random(content_hash(["synthesise", recipe.seed, task.task_id, number]))
    own = earlier(shelf, task, rng) if kind.is_later else []
    seed = [recipe.seed, number, rng.random()]
    head, known, listed = shelf.told(task, own, kind.evaluations, seed, recipe.exemplars, memory, kind.without, True)
    done = {one.key for one in own}
    everything = list(shelf.at(task).values())
    pool = [one for one in everything if one.key not in done] or everything
    rollouts = [
        _leading(pool, listed, kind.evaluations, rng, recipe)
        if index < recipe.leaders
        else _drawn(pool, kind.evaluations, rng, recipe)
        for index in range(recipe.group_size)
    ]
    rewards = [reward_of(tried, settings) for tried in rollouts]
    relative = smooth([r.value for r in rewards], settings)
    records = shelf.records
    prompt = tuple(prompt_message(step, Secrets()) for step in head)
    group_id = content_hash(["records", records.device.label, task.task_id, number, [m.content for m in prompt]])
    for index, (tried, mine, group) in enumerate(zip(rollouts, rewards, relative, strict=True)):
        turns = tuple(_conversation(tried, known, listed, kind.evaluations))
        yield Row(
            row_id=content_hash([group_id, index, [t.model_dump() for t in turns]]),
            group_id=group_id,
            split=split_of(task),
            task_id=task.task_id,
            dims=task.dims,
            prompt=prompt,
            tools=tools_json(compact_tools()),
            turns=turns,
            reward=mine.value,
            reward_parts=RewardParts(**mine.parts, group=group),
            status="ok" if mine.parts.get("speed") else "failed",
            provenance=_provenance(records, shelf.device, number, index, recipe),
        )


def earlier(shelf: Shelf, task: Task, rng: random.Random) -> list[Tried]:
    """What a session may have tried before: mostly plans from the head of the list."""
    at = shelf.at(task)
    likely = [one for one in shelf.expected(task) if one.plan.plan_id in at][:24]
    count = min(rng.choice((1, LOCAL_QUOTA, 2 * LOCAL_QUOTA)), len(likely))
    best_us = likely[0].time_us if likely else 1.0
    drawn = softmax_draw([best_us / one.time_us for one in likely], count, 0.05, rng)
    return [at[likely[i].plan.plan_id] for i in drawn] or rng.sample(list(at.values()), min(LOCAL_QUOTA, len(at)))


def _leading(
    pool: Sequence[Tried], listed: Sequence[Expected], count: int, rng: random.Random, recipe: Recipe
) -> list[Tried]:
    """The best of the listed and of all plans, best first but for what cannot be told apart."""
    ranked = _ranked(pool)
    on_list = {one.plan.plan_id for one in listed}
    most = ranked[0].score or 0.0
    leading = [one for i, one in enumerate(ranked) if i < max(recipe.top, count) or one.key in on_list]
    handicap = _OFF_LIST * most if listed else 0.0
    scores = [(one.score or 0.0) - (0.0 if one.key in on_list else handicap) for one in leading]
    return [leading[i] for i in softmax_draw(scores, count, _LEADING_TEMPERATURE, rng)]


def _drawn(pool: Sequence[Tried], count: int, rng: random.Random, recipe: Recipe) -> list[Tried]:
    """``count`` different plans in the order of their trial; rejected ones count as slow as there are."""
    ranked = _ranked(pool)
    picked = softmax_draw([one.score or 0.0 for one in ranked], count, recipe.temperature, rng)
    return [ranked[i] for i in picked]


def _ranked(pool: Sequence[Tried]) -> list[Tried]:
    return sorted(pool, key=lambda one: (-(one.score or 0.0), one.key))


def _conversation(
    tried: Sequence[Tried], known: Selection, listed: Sequence[Expected], evaluations: int
) -> Iterator[Turn]:
    best: Tried | None = None
    previous: Tried | None = None
    for number, one in enumerate(tried):
        plan = plan_of(one)
        arguments = json.dumps(plan_arguments(plan))
        call = RowCall(id=f"call-{number}", name="evaluate_plan", arguments=arguments)
        left = evaluations - number
        text = opening(known, listed, plan, left) if previous is None else after(previous, best, listed, plan, left)
        yield Turn(role="assistant", content=text, tool_calls=(call,), trained=True)
        yield Turn(role="tool", content=_answer(one), tool_call_id=call.id, name=call.name)
        previous = one
        if one.score is not None and (best is None or best.score is None or one.score > best.score):
            best = one
    chosen = best or tried[-1]
    call = RowCall(id=f"call-{len(tried)}", name="submit", arguments=json.dumps({"key": chosen.key}))
    yield Turn(role="assistant", content=verdict(best), tool_calls=(call,), trained=True)


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


def reward_of(tried: Sequence[Tried], settings: RewardSettings) -> Reward:
    """Of the best of what is recorded, as the loop has it (agent/nodes.py); at least one."""
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
