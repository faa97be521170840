"""How near policies come to the recorded optimum within a few evaluations, each played as the loop plays it.

A cell is one policy at one shape with one seed. A language model gets rollouts of at most ``LOCAL_QUOTA`` evaluations,
one after the other, each with the memory's exemplars of what its cell has tried so far and of training shapes; a search
gets the whole budget at once. What was not recorded costs an evaluation and is counted apart. Answers come from the
record file alone, and the model's constants for a shape are those that were fitted without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from memory.exemplars import MemorySettings
from memory.shortlist import shortlist
from policy.base import Policy, PolicyRequest, Trial
from policy.compact import plan_arguments
from policy.settings import LOCAL_QUOTA
from tools.model import held_out, rank
from tools.records import Family, Plan, Step, ToolCall, content_hash
from training.replaying import Rollout, Shape, Turns, side_by_side
from training.shelf import Part, Shelf


class Cell(BaseModel):
    """What one policy did at one shape with one seed; a line of the cache. ``ratios`` in the order of evaluation: None
    for what was rejected or is not recorded. ``budget``: how many it was granted, fewer than which it may have used;
    lines of before it was told are played again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    policy: str
    task_id: str
    seed: int
    quota: int
    budget: int
    ratios: tuple[float | None, ...]
    not_recorded: int = 0
    calls: int = 0
    invalid: int = 0
    empty: bool = False  # nothing could be proposed


@dataclass(frozen=True)
class Player:
    """A row of the table. ``identity`` is all that its play depends on, apart from shape, seed and prompt; ``without``
    are parts that its prompts leave out."""

    name: str
    policy: Policy
    identity: str
    without: frozenset[Part] = frozenset()

    def quota(self, budget: int) -> int:
        """0 for a search, which is told no quota."""
        return 0 if self.policy.is_search else min(budget, LOCAL_QUOTA)


@dataclass(frozen=True)
class Plays:
    """What all cells share."""

    shelf: Shelf
    families: Mapping[str, Family]
    shapes: Sequence[Shape]
    budgets: Sequence[int]
    seeds: Sequence[int]
    memory: MemorySettings
    exemplars: int


class ModelPolicy:
    """The analytical model's ranking alone."""

    name = "model"
    is_search = True

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def close(self) -> None:
        return

    def step(self, request: PolicyRequest) -> Step:
        ranked = rank(self._shelf.plans(request.task), request.task, request.device, held_out(request.task))
        return _in_order([one.plan for one in ranked], request)


class ShortlistPolicy:
    """What the prompts list, in its order: what a language model is worth beyond what it is told."""

    name = "shortlist"
    is_search = True

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def close(self) -> None:
        return

    def step(self, request: PolicyRequest) -> Step:
        listed = shortlist(self._shelf.expected(request.task), (), request.evaluations_left + len(request.trials))
        return _in_order([one.plan for one in listed], request)


def _in_order(plans: Sequence[Plan], request: PolicyRequest) -> Step:
    tried = {trial.key for trial in request.trials}
    left = [plan for plan in plans if plan.plan_id not in tried][: request.evaluations_left]
    calls = [ToolCall(call_id=p.plan_id, name="evaluate_plan", arguments=plan_arguments(p)) for p in left]
    return Step(role="assistant", tool_calls=tuple(calls), stop="tool_calls" if calls else "end")


def play(
    player: Player, plays: Plays, known: Mapping[str, Cell], batch: int, tell: Callable[[Cell, bool], None]
) -> Iterator[Cell]:
    """Every cell of a player, those of ``known`` without playing them; ``tell`` hears of each, and whether it is new.
    Up to ``batch`` cells of a language model take their turns side by side."""
    waiting: list[_Game] = []
    for shape in plays.shapes:
        for seed in plays.seeds:
            for quota, budget in sorted(_runs(player, plays.budgets).items()):
                game = _Game(player, shape, seed, quota, budget, plays)
                if (cell := known.get(game.key)) is not None:
                    tell(cell, False)
                    yield cell
                else:
                    waiting.append(game)
    # The longest games first: towards the end batches get smaller.
    waiting.sort(key=lambda game: -game.budget)
    for game in side_by_side(player.policy, [(game, game.turns()) for game in waiting], batch):
        tell(game.cell(), True)
        yield game.cell()


def _runs(player: Player, budgets: Sequence[int]) -> dict[int, int]:
    """Quota → the largest budget that is played with it: a smaller one is the beginning of it."""
    found: dict[int, int] = {}
    for budget in sorted(budgets):
        found[player.quota(budget)] = budget
    return found


class _Game:
    """One cell being played."""

    def __init__(self, player: Player, shape: Shape, seed: int, quota: int, budget: int, plays: Plays) -> None:
        self._player, self._shape, self._seed, self._plays = player, shape, seed, plays
        self._quota, self.budget = quota, budget
        device = plays.shelf.device
        told: list[object] = [device.label, device.recorded_on, sorted(player.without), plays.exemplars]
        told += [plays.memory.model_dump(mode="json")]
        of_prompt = [] if player.policy.is_search else told
        self.key = content_hash(
            [player.identity, of_prompt, shape.task.task_id, dict(shape.ratios), seed, quota, budget]
        )
        self._trials: list[Trial] = []
        self._rollouts: list[Rollout] = []

    def cell(self) -> Cell:
        return Cell(
            key=self.key,
            policy=self._player.name,
            task_id=self._shape.task.task_id,
            seed=self._seed,
            quota=self._quota,
            budget=self.budget,
            ratios=tuple(trial.ratio for trial in self._trials),
            not_recorded=sum(one.not_recorded for one in self._rollouts),
            calls=sum(one.calls for one in self._rollouts),
            invalid=sum(one.invalid for one in self._rollouts),
            empty=not self._trials,
        )

    def turns(self) -> Turns:
        """Rollouts until the budget is spent, or two in a row evaluated nothing. No submit is asked for: what was best
        is known."""
        idle = 0
        while len(self._trials) < self.budget and idle < 2:
            before = len(self._trials)
            quota = min(self._quota or self.budget, self.budget - before)
            rollout = self._rollout(quota)
            self._rollouts.append(rollout)
            yield from rollout.turns()
            idle = 0 if len(self._trials) > before else idle + 1

    def _rollout(self, quota: int) -> Rollout:
        plays, task, number = self._plays, self._shape.task, len(self._rollouts)
        steps: tuple[Step, ...] = ()
        if not self._player.policy.is_search:
            at = plays.shelf.at(task)
            own = [at[trial.key] for trial in self._trials if trial.key in at]
            seed, without = [self._seed, number], self._player.without
            steps = plays.shelf.told(task, own, self._quota, seed, plays.exemplars, plays.memory, without).head
        return Rollout(plays.shelf, plays.families, self._shape, steps, self._trials, quota, self._seed, number)
