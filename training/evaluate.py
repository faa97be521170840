"""How near policies come to the recorded optimum within a few evaluations, each played as the loop plays it.

A cell is one policy at one shape with one seed. A language model gets rollouts of at most ``LOCAL_QUOTA`` evaluations,
one after the other, each with the memory's exemplars of what its cell has tried so far and of training shapes; a search
gets the whole budget at once. What was not recorded costs an evaluation and is counted apart. Answers come from the
record file alone, and the model's constants for a shape are those that were fitted without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from memory.exemplars import MemorySettings
from memory.exemplars_read import Selection, Tried, nearest, select
from policy.base import Policy, PolicyRequest, Trial
from policy.compact import compact_prompt, plan_arguments
from policy.rendering import result_text
from policy.settings import LOCAL_QUOTA
from policy.tool_schemas import CallError, KeyArguments, PlanArguments, parse_arguments
from tools.families import ManifestError, accepted_plans, validate_plan
from tools.model import held_out, rank
from tools.record_file import Records
from tools.records import (
    CompileResult,
    DeviceInfo,
    Evaluation,
    Family,
    Plan,
    Status,
    Step,
    Task,
    ToolCall,
    VerifyResult,
    content_hash,
)
from training.splits import split_of
from training.synthesise import Shelf, evaluation_of

Part = Literal["profiles", "exemplars"]


class Shape(NamedTuple):
    """``ratios``: of every plan of which anything is recorded; None for one that was rejected."""

    task: Task
    ratios: Mapping[str, float | None]
    is_complete: bool  # every accepted plan is recorded, so that the optimum is known

    @property
    def best(self) -> float:
        return max((ratio for ratio in self.ratios.values() if ratio is not None), default=0.0)


class Cell(BaseModel):
    """What one policy did at one shape with one seed; a line of the cache. ``ratios`` in the order of evaluation: None
    for what was rejected or is not recorded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    policy: str
    task_id: str
    seed: int
    quota: int
    ratios: tuple[float | None, ...]
    not_recorded: int = 0
    calls: int = 0
    invalid: int = 0
    empty: bool = False  # nothing could be proposed


@dataclass(frozen=True)
class Player:
    """A row of the table. ``identity`` is all that its play depends on, apart from shape and seed."""

    name: str
    policy: Policy
    identity: str

    def quota(self, budget: int) -> int:
        """0 for a search, which is told no quota."""
        return 0 if self.policy.is_search else min(budget, LOCAL_QUOTA)


@dataclass(frozen=True)
class Plays:
    """What all cells share."""

    records: Records
    families: Mapping[str, Family]
    shapes: Sequence[Shape]
    budgets: Sequence[int]
    seeds: Sequence[int]
    memory: MemorySettings
    exemplars: int
    without: Collection[Part] = ()


class ModelPolicy:
    """The analytical model's ranking alone."""

    name = "model"
    is_search = True

    def __init__(self, families: Mapping[str, Family]) -> None:
        self._families = dict(families)

    def close(self) -> None:
        return

    def step(self, request: PolicyRequest) -> Step:
        plans = [v.plan for v in accepted_plans(self._families, request.task) if v.plan is not None]
        ranked = rank(plans, request.task, request.device, held_out(request.task))
        tried = {trial.key for trial in request.trials}
        left = [r.plan for r in ranked if r.plan.plan_id not in tried][: request.evaluations_left]
        calls = [ToolCall(call_id=p.plan_id, name="evaluate_plan", arguments=plan_arguments(p)) for p in left]
        return Step(role="assistant", tool_calls=tuple(calls), stop="tool_calls" if calls else "end")


def shapes_of(records: Records, families: Mapping[str, Family]) -> list[Shape]:
    found = []
    for task in records.tasks():
        ratios: dict[str, float | None] = {}
        plans = _plans(families, task)
        for plan in plans:
            timing = records.timed(plan.plan_id, task.task_id, "offline", "screen")
            row = timing.row() if timing is not None else None
            if row is not None:
                ratios[plan.plan_id] = row.ratio
            elif timing is not None or _rejection(records, plan.plan_id, task.task_id) is not None:
                ratios[plan.plan_id] = None
        if ratios:
            found.append(Shape(task, ratios, len(ratios) == len(plans)))
    return found


def _rejection(records: Records, key: str, task_id: str) -> CompileResult | VerifyResult | None:
    """Why a plan that was not timed was rejected; None if that is not recorded."""
    for result in (records.compiled(key), records.verified(key, task_id, "quick")):
        if result is not None and result.status is Status.FAILED:
            return result
    return None


def _plans(families: Mapping[str, Family], task: Task) -> list[Plan]:
    return [v.plan for v in accepted_plans(dict(families), task) if v.plan is not None]


# --- playing ----------------------------------------------------------------------------------------------------------


def play(
    players: Sequence[Player],
    plays: Plays,
    known: Mapping[str, Cell],
    batch: int,
    tell: Callable[[Cell, bool], None],
) -> Iterator[Cell]:
    """Every cell of every player, those of ``known`` without playing them; ``tell`` hears of each, and whether it is
    new. Up to ``batch`` cells of a language model take their turns side by side."""
    table = _Table(plays)
    for player in players:
        waiting: list[_Game] = []
        for shape in plays.shapes:
            for seed in plays.seeds:
                for quota, budget in sorted(_runs(player, plays.budgets).items()):
                    game = _Game(player, shape, seed, quota, budget, table)
                    if (cell := known.get(game.key)) is not None:
                        tell(cell, False)
                        yield cell
                    else:
                        waiting.append(game)
        side_by_side = 1 if player.policy.is_search else batch
        for begin in range(0, len(waiting), side_by_side):
            for cell in _together(player.policy, waiting[begin : begin + side_by_side]):
                tell(cell, True)
                yield cell


def _runs(player: Player, budgets: Sequence[int]) -> dict[int, int]:
    """Quota → the largest budget that is played with it: a smaller one is the beginning of it."""
    found: dict[int, int] = {}
    for budget in sorted(budgets):
        found[player.quota(budget)] = budget
    return found


def _together(policy: Policy, games: Sequence[_Game]) -> list[Cell]:
    running = [(game, game.turns()) for game in games]
    asked: list[tuple[_Game, Generator[PolicyRequest, Step, None], PolicyRequest]] = []
    for game, turns in running:
        if (request := next(turns, None)) is not None:
            asked.append((game, turns, request))
    with ThreadPoolExecutor(max(1, len(games))) as pool:
        while asked:
            requests = [request.model_copy(update={"beside": len(asked)}) for _, _, request in asked]
            steps = [policy.step(requests[0])] if len(requests) == 1 else list(pool.map(policy.step, requests))
            on = []
            for (game, turns, _), step in zip(asked, steps, strict=True):
                try:
                    on.append((game, turns, turns.send(step)))
                except StopIteration:
                    continue
            asked = on
    return [game.cell() for game in games]


class _Table:
    """What is recorded, as a game needs it."""

    def __init__(self, plays: Plays) -> None:
        self.plays = plays
        self.device: DeviceInfo = plays.records.device.model_copy(update={"kind": "replay"})
        self._shelf = Shelf(plays.records, plays.families)
        self._taught = [task.task_id for task in plays.records.tasks() if split_of(task) == "train"]

    def tried(self, task: Task) -> dict[str, Tried]:
        return {one.key: one for one in self._shelf.at(task)}

    def prompt(self, task: Task, own: Sequence[Tried], seed: object, quota: int) -> tuple[Step, ...]:
        plays = self.plays
        known = Selection()
        if "exemplars" not in plays.without:
            near = (self._shelf.at(other) for other in nearest(task, self._taught, plays.memory.nearest))
            known = select(own, near, plays.exemplars, seed, plays.memory)
        if "profiles" in plays.without:
            bare = tuple(one.model_copy(update={"profile": None}) for one in known.exemplars)
            known = known.model_copy(update={"exemplars": bare})
        records = plays.records
        baseline = records.baselines(task.task_id, "offline", "final")
        baseline = baseline or records.baselines(task.task_id, "offline", "screen")
        return compact_prompt(task, self.device, baseline.best_us() if baseline else None, known, quota)


class _Game:
    """One cell being played."""

    def __init__(self, player: Player, shape: Shape, seed: int, quota: int, budget: int, table: _Table) -> None:
        self._player, self._shape, self._seed, self._table = player, shape, seed, table
        self._quota, self._budget = quota, budget
        told: list[object] = [
            table.device.label,
            table.device.recorded_on,
            sorted(table.plays.without),
            table.plays.exemplars,
        ]
        told += [table.plays.memory.model_dump(mode="json")]
        of_table = [] if player.policy.is_search else told
        self.key = content_hash(
            [player.identity, of_table, shape.task.task_id, dict(shape.ratios), seed, quota, budget]
        )
        self._trials: list[Trial] = []
        self._not_recorded = self._calls = self._invalid = 0
        self._rollout = 0

    def cell(self) -> Cell:
        return Cell(
            key=self.key,
            policy=self._player.name,
            task_id=self._shape.task.task_id,
            seed=self._seed,
            quota=self._quota,
            ratios=tuple(trial.ratio for trial in self._trials),
            not_recorded=self._not_recorded,
            calls=self._calls,
            invalid=self._invalid,
            empty=not self._trials,
        )

    def turns(self) -> Generator[PolicyRequest, Step, None]:
        """Rollouts until the budget is spent, or two in a row evaluated nothing."""
        idle = 0
        while len(self._trials) < self._budget and idle < 2:
            before = len(self._trials)
            yield from self._one_rollout(min(self._quota or self._budget, self._budget - before))
            self._rollout += 1
            idle = 0 if len(self._trials) > before else idle + 1

    def _one_rollout(self, quota: int) -> Generator[PolicyRequest, Step, None]:
        task, begun = self._shape.task, len(self._trials)
        steps: tuple[Step, ...] = ()
        if not self._player.policy.is_search:
            pool = self._table.tried(task)
            own = [pool[trial.key] for trial in self._trials if trial.key in pool]
            steps = self._table.prompt(task, own, [self._seed, self._rollout], self._quota)
        turns = 3 * quota + 2
        while turns and (left := quota - (len(self._trials) - begun)) > 0:
            step = yield PolicyRequest(
                task=task,
                device=self._table.device,
                steps=steps,
                trials=tuple(self._trials),
                evaluations_left=left,
                turns_left=turns + 1,  # the submit, which is not asked for: what was best is known
                seed=self._seed,
                rollout=self._rollout,
            )
            turns -= 1
            answers = [self._answer(call, left) for call in step.tool_calls]
            if not answers or None in answers:
                return
            steps = (*steps, step, *(answer for answer in answers if answer is not None))

    def _answer(self, call: ToolCall, left: int) -> Step | None:
        """None ends the rollout."""
        self._calls += 1
        try:
            arguments = parse_arguments(call)
            if isinstance(arguments, KeyArguments) and call.name == "submit":
                return None
            if not isinstance(arguments, PlanArguments) or arguments.family not in self._table.plays.families:
                raise CallError(f"{call.name} cannot be answered from records")
            family = self._table.plays.families[arguments.family]
            plan = validate_plan(family, arguments.b_layout, arguments.knobs)
        except (CallError, ManifestError) as error:
            self._invalid += 1
            return Step(role="tool", text=json.dumps({"error": str(error)}), call_id=call.call_id, tool=call.name)
        if left > 0 and plan.plan_id not in {trial.key for trial in self._trials}:
            self._evaluate(plan)
        return Step(role="tool", text=self._told(plan), call_id=call.call_id, tool=call.name)

    def _evaluate(self, plan: Plan) -> None:
        known = plan.plan_id in self._shape.ratios
        ratio = self._shape.ratios.get(plan.plan_id)
        status = Status.NOT_RECORDED if not known else Status.OK if ratio is not None else Status.FAILED
        self._not_recorded += not known
        self._trials.append(Trial(key=plan.plan_id, label=plan.label, plan=plan, status=status, ratio=ratio))

    def _told(self, plan: Plan) -> str:
        if self._player.policy.is_search:
            return ""
        task_id = self._shape.task.task_id
        one = self._table.tried(self._shape.task).get(plan.plan_id)
        if one is not None:
            return result_text(evaluation_of(one), plan.plan_id, plan.label)
        verdict: dict[str, Any] = {"status": Status.NOT_RECORDED, "detail": "not recorded"}
        if (rejected := _rejection(self._table.plays.records, plan.plan_id, task_id)) is not None:
            verdict = {"status": rejected.status, "reason": rejected.reason, "detail": rejected.detail}
        answer = Evaluation(**verdict, variant_key=plan.plan_id, task_id=task_id)
        return result_text(answer, plan.plan_id, plan.label)
