"""A rollout of a policy on what was recorded, played as the loop plays it, without a session: a generator that asks for
turns and answers calls. Many are played side by side, so that a model on a GPU has a full batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from policy.base import Policy, PolicyRequest, Trial
from policy.rendering import result_text
from policy.tool_schemas import CallError, KeyArguments, PlanArguments, parse_arguments
from tools.families import ManifestError, validate_plan
from tools.records import (
    Evaluation,
    Family,
    Plan,
    Status,
    Step,
    Task,
    ToolCall,
)
from training.errors import TrainingError
from training.shelf import Shelf
from training.splits import asked_splits, is_asked
from training.synthesise import evaluation_of

#: Asks for turns, and is sent their steps.
Turns = Generator[PolicyRequest, Step, None]
_T = TypeVar("_T")


class Shape(NamedTuple):
    """``ratios``: of every plan of which anything is recorded; None for one that was rejected."""

    task: Task
    ratios: Mapping[str, float | None]
    is_complete: bool  # every accepted plan is recorded, so that the optimum is known

    @property
    def best(self) -> float:
        return max((ratio for ratio in self.ratios.values() if ratio is not None), default=0.0)


def shapes_of(shelf: Shelf, tasks: Iterable[Task] | None = None) -> list[Shape]:
    """Those of which something is recorded, of these or of all."""
    recorded = ((task, shelf.ratios(task)) for task in (shelf.records.tasks() if tasks is None else tasks))
    return [Shape(task, ratios, len(ratios) == len(shelf.plans(task))) for task, ratios in recorded if ratios]


def in_split(shelf: Shelf, split: str, with_pruned: bool = False) -> list[Shape]:
    """Of one split, or of several with commas between; ``with_pruned``: also shapes whose optimum is not known, because
    only likely plans were recorded there. Raises TrainingError for a split that there is not, or if the records have no
    shape of any."""
    asked = asked_splits(split)
    tasks = [task for task in shelf.records.tasks() if is_asked(task, asked)]
    found = shapes_of(shelf, tasks if with_pruned else filter(shelf.is_complete, tasks))
    if not found:
        raise TrainingError(
            f"at no {split} shape every plan is recorded; --pruned takes what there is"
            if tasks and not with_pruned
            else f"the records have no {split} shape: take another --split, or record some with `agent record`"
        )
    return found


class Rollout:
    """One conversation. ``trials`` is what was tried at the shape before, and grows by what this rollout evaluates.
    ``steps`` is empty for a search, which reads no answers."""

    def __init__(
        self,
        shelf: Shelf,
        families: Mapping[str, Family],
        shape: Shape,
        steps: Sequence[Step],
        trials: list[Trial],
        quota: int,
        seed: int,
        number: int,
        asks_submit: bool = False,
    ) -> None:
        self._shelf, self._families, self._shape = shelf, families, shape
        self._quota, self._seed, self._number, self._asks_submit = quota, seed, number, asks_submit
        self.steps: tuple[Step, ...] = tuple(steps)
        self.trials = trials
        self._begun = len(trials)
        self.submitted: str | None = None
        self.not_recorded = self.calls = self.invalid = 0

    @property
    def own(self) -> Sequence[Trial]:
        return self.trials[self._begun :]

    def turns(self) -> Turns:
        """Ends when the quota is spent (after a submit, where that is asked for), or when the policy ends it."""
        turns = 3 * self._quota + 2
        while turns and ((left := self._quota - len(self.own)) > 0 or self._asks_submit):
            step = yield PolicyRequest(
                task=self._shape.task,
                device=self._shelf.device,
                steps=self.steps,
                trials=tuple(self.trials),
                evaluations_left=left,
                turns_left=turns + 1,  # without one more, a policy would submit instead of evaluating
                seed=self._seed,
                rollout=self._number,
            )
            turns -= 1
            self.steps = (*self.steps, step)
            answers = [self._answer(call, left) for call in step.tool_calls]
            self.steps = (*self.steps, *(answer for answer in answers if answer is not None))
            if not answers or None in answers:
                return

    def _answer(self, call: ToolCall, left: int) -> Step | None:
        """None ends the rollout."""
        self.calls += 1
        try:
            arguments = parse_arguments(call)
            if isinstance(arguments, KeyArguments) and call.name == "submit":
                self.submitted = arguments.key
                return None
            if not isinstance(arguments, PlanArguments) or arguments.family not in self._families:
                raise CallError(f"{call.name} cannot be answered from records")
            plan = validate_plan(self._families[arguments.family], arguments.b_layout, arguments.knobs)
        except (CallError, ManifestError) as error:
            self.invalid += 1
            return Step(role="tool", text=json.dumps({"error": str(error)}), call_id=call.call_id, tool=call.name)
        if left > 0 and plan.plan_id not in {trial.key for trial in self.trials}:
            self._evaluate(plan)
        return Step(role="tool", text=self._told(plan), call_id=call.call_id, tool=call.name)

    def _evaluate(self, plan: Plan) -> None:
        known = plan.plan_id in self._shape.ratios
        ratio = self._shape.ratios.get(plan.plan_id)
        status = Status.NOT_RECORDED if not known else Status.OK if ratio is not None else Status.FAILED
        self.not_recorded += not known
        self.trials.append(Trial(key=plan.plan_id, label=plan.label, plan=plan, status=status, ratio=ratio))

    def _told(self, plan: Plan) -> str:
        if not self.steps or self.steps[0].role == "assistant":
            return ""
        return result_text(self.evaluation(plan), plan.plan_id, plan.label)

    def evaluation(self, plan: Plan) -> Evaluation:
        """What is recorded of a plan at this shape."""
        task = self._shape.task
        one = self._shelf.at(task).get(plan.plan_id)
        if one is not None:
            return evaluation_of(one)
        verdict: dict[str, Any] = {"status": Status.NOT_RECORDED, "detail": "not recorded"}
        if (rejected := self._shelf.rejection(plan.plan_id, task)) is not None:
            verdict = {"status": rejected.status, "reason": rejected.reason, "detail": rejected.detail}
        return Evaluation(**verdict, variant_key=plan.plan_id, task_id=task.task_id)


# --- side by side -----------------------------------------------------------------------------------------------------


def side_by_side(policy: Policy, waiting: Sequence[tuple[_T, Turns]], width: int) -> Iterator[_T]:
    """Plays all, up to ``width`` at a time, and yields each one that is over. One that ends makes room for the next, so
    that batches stay full."""
    left = iter(waiting)
    asked: list[tuple[_T, Turns, PolicyRequest]] = []
    while True:
        while len(asked) < width and (new := next(left, None)) is not None:
            one, turns = new
            request = next(turns, None)
            if request is None:
                yield one
            else:
                asked.append((one, turns, request))
        if not asked:
            return
        steps = _steps(policy, [request for _, _, request in asked])
        on = []
        for (one, turns, request), step in zip(asked, steps, strict=True):
            if step is None:
                on.append((one, turns, request))
                continue
            try:
                on.append((one, turns, turns.send(step)))
            except StopIteration:
                yield one
        asked = on


def _steps(policy: Policy, requests: Sequence[PolicyRequest]) -> list[Step | None]:
    """All at once, if the policy can, which may leave some for the next time; a search takes one after the other, and
    its order decides nothing."""
    at_once: Callable[[Sequence[PolicyRequest]], list[Step | None]] | None = getattr(policy, "steps", None)
    if at_once is not None:
        return at_once(requests)
    if policy.is_search or len(requests) == 1:
        return [policy.step(request) for request in requests]
    beside = [request.model_copy(update={"beside": len(requests)}) for request in requests]
    with ThreadPoolExecutor(len(beside)) as pool:
        return list(pool.map(policy.step, beside))
