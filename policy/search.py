"""Search policies: random, and the analytical model followed by Optuna's TPE. What a language model must beat.

Both speak the protocol of a language model (tool calls in, a submit at the end) and keep no state between turns: the
study is rebuilt from the told trials, so a resumed session goes on exactly as one that was never interrupted.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from policy.base import PolicyRequest, Trial
from policy.settings import PolicySettings
from tools.families import plans_taking
from tools.model import Ranked, rank
from tools.model_terms import Constants
from tools.records import DeviceInfo, Family, Plan, Status, Step, Task, ToolCall, content_hash

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

Arm = tuple[str, str]

#: Plans taken for one ask of TPE: the nearest open ones to the point it names. An ask costs 5 ms, a replayed
#: evaluation 4, and a plan's neighbour says much about it.
PLANS_PER_ASK = 2

#: The first evaluations follow the analytical model; after them TPE, which needs some trials anyway, takes over.
MODEL_FIRST = 24

#: The first turn begins with the best plan of every family whose estimate is within this factor of the best estimate:
#: the model's scale of one family against another is what it knows least.
LEADER_FACTOR = 1.5


class SearchPolicy:
    """``method``: ``tpe`` (the model's first choices, then TPE) or ``random``. Proposes only plans that its families
    have and the shape's demands admit, each at most once, so a rollout ends when the budget or the plans are used up.
    ``constants_of`` replaces the model's constants, for evaluating it with constants that never saw the shape."""

    is_search = True

    def __init__(
        self,
        settings: PolicySettings,
        families: Mapping[str, Family],
        method: str = "tpe",
        constants_of: Callable[[Task], Constants] | None = None,
    ) -> None:
        self._settings = settings
        self._families = dict(families)
        self._method = method
        self._constants_of = constants_of
        self._plans: dict[str, tuple[Plan, ...]] = {}

    @property
    def name(self) -> str:
        return "search" if self._method == "tpe" else self._method

    def close(self) -> None:
        return

    def step(self, request: PolicyRequest) -> Step:
        plans = self._accepted(request.task, request.device.sm_count)
        seen = {trial.key for trial in request.trials}
        unseen = [plan for plan in plans if plan.plan_id not in seen]
        wanted = min(self._settings.batch, request.evaluations_left, len(unseen))
        if wanted < 1 or request.turns_left <= 1:
            return _submit(request.trials, bool(plans), request.task)
        seed = int(content_hash([request.seed, request.rollout, len(request.trials)]), 16) % 2**32
        if self._method == "random":
            chosen = random.Random(seed).sample(unseen, wanted)
        else:
            chosen = self._model_based(request, plans, unseen, wanted, seed)
        calls = tuple(_evaluate(plan, len(request.trials) + i) for i, plan in enumerate(chosen))
        return Step(role="assistant", text=f"{self.name}: {len(calls)} plans", tool_calls=calls, stop="tool_calls")

    def _accepted(self, task: Task, sm_count: int) -> tuple[Plan, ...]:
        if task.task_id not in self._plans:
            self._plans[task.task_id] = tuple(plans_taking(self._families, task, sm_count))
        return self._plans[task.task_id]

    def _model_based(
        self, request: PolicyRequest, plans: Sequence[Plan], unseen: list[Plan], wanted: int, seed: int
    ) -> list[Plan]:
        constants = self._constants_of(request.task) if self._constants_of else None
        seeds = seed_plans(plans, request.task, request.device, MODEL_FIRST, constants)
        open_ids = {plan.plan_id for plan in unseen}
        chosen = [plan for plan in seeds if plan.plan_id in open_ids][:wanted]
        if len(chosen) < wanted:
            taken = {plan.plan_id for plan in chosen}
            rest = [plan for plan in unseen if plan.plan_id not in taken]
            chosen += propose(plans, request.trials, rest, wanted - len(chosen), seed, self._settings.startup_trials)
        return chosen


def seed_plans(
    plans: Sequence[Plan], task: Task, device: DeviceInfo, count: int, constants: Constants | None = None
) -> list[Plan]:
    """The ``count`` plans that the model would try first: the leaders of the families, then in its order."""
    ranking = rank(plans, task, device, constants)
    leaders: dict[str, Ranked] = {}
    for found in ranking:
        leaders.setdefault(found.plan.family, found)
    best_us = ranking[0].time_us if ranking else None
    first = [r.plan for r in leaders.values() if _may_lead(r.time_us, best_us)]
    chosen = dict.fromkeys(plan.plan_id for plan in first)
    rest = [r.plan for r in ranking if r.plan.plan_id not in chosen]
    return [*first, *rest][:count]


def _may_lead(time_us: float | None, best_us: float | None) -> bool:
    """A family that the model does not know may always."""
    return time_us is None or best_us is None or time_us <= LEADER_FACTOR * best_us


def propose(
    plans: Sequence[Plan], trials: Sequence[Trial], unseen: list[Plan], wanted: int, seed: int, startup_trials: int
) -> list[Plan]:
    """``wanted`` plans out of ``unseen`` by TPE. Knobs are conditional on the arm (family and layout) and ordinal, by
    index into the values that occur; an ask that is no open plan is replaced by the nearest open one of its arm."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = _Space(plans)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup_trials, constant_liar=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    known = {plan.plan_id for plan in plans}
    study.add_trials([space.told(trial) for trial in trials if trial.key in known and _value(trial) is not None])
    open_plans = list(unseen)
    chosen: list[Plan] = []
    while len(chosen) < wanted and open_plans:
        arm, point = space.ask(study.ask())
        taken = space.nearest(arm, point, open_plans, min(PLANS_PER_ASK, wanted - len(chosen)))
        open_plans = [plan for plan in open_plans if plan not in taken]
        chosen += taken
    return chosen


class _Space:
    """The plans as TPE sees them: an arm, and for each arm its knobs that take more than one value."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.arms = list(dict.fromkeys(_arm(plan) for plan in plans))
        self.values: dict[Arm, dict[str, list[int]]] = {}
        for arm in self.arms:
            members = [plan for plan in plans if _arm(plan) == arm]
            columns = {k: sorted({plan.knobs[k] for plan in members}) for k in members[0].knobs}
            self.values[arm] = {k: values for k, values in columns.items() if len(values) > 1}

    def point(self, plan: Plan) -> dict[str, int]:
        return {k: values.index(plan.knobs[k]) for k, values in self.values[_arm(plan)].items()}

    def told(self, trial: Trial) -> FrozenTrial:
        import optuna

        assert trial.plan is not None
        arm = _arm(trial.plan)
        params: dict[str, object] = {"arm": "/".join(arm)}
        distributions: dict[str, BaseDistribution] = {"arm": self._arm_distribution()}
        for name, index in self.point(trial.plan).items():
            params[f"{params['arm']}.{name}"] = index
            distributions[f"{params['arm']}.{name}"] = optuna.distributions.IntDistribution(
                0, len(self.values[arm][name]) - 1
            )
        return optuna.trial.create_trial(params=params, distributions=distributions, value=_value(trial))

    def ask(self, trial: OptunaTrial) -> tuple[Arm, dict[str, int]]:
        name = trial.suggest_categorical("arm", ["/".join(arm) for arm in self.arms])
        arm = next(a for a in self.arms if "/".join(a) == name)
        point = {
            knob: trial.suggest_int(f"{name}.{knob}", 0, len(values) - 1) for knob, values in self.values[arm].items()
        }
        return arm, point

    def nearest(self, arm: Arm, point: Mapping[str, int], candidates: Sequence[Plan], count: int) -> list[Plan]:
        """Fewest changed knobs first, then the smallest steps, then the manifest's order; any arm's if this one is used
        up."""

        def distance(plan: Plan) -> tuple[int, int]:
            steps = [abs(index - point[name]) for name, index in self.point(plan).items()]
            return sum(step > 0 for step in steps), sum(steps)

        same = [plan for plan in candidates if _arm(plan) == arm]
        return heapq.nsmallest(count, same, key=distance) if same else list(candidates[:count])

    def _arm_distribution(self) -> BaseDistribution:
        import optuna

        return optuna.distributions.CategoricalDistribution(["/".join(arm) for arm in self.arms])


def _arm(plan: Plan) -> Arm:
    return plan.family, plan.b_layout


def _value(trial: Trial) -> float | None:
    """What TPE maximises: the ratio, 0 for a rejected candidate, nothing for what is not known."""
    if trial.status is Status.FAILED:
        return 0.0
    return trial.ratio if trial.status is Status.OK else None


def _evaluate(plan: Plan, number: int) -> ToolCall:
    arguments = {"family": plan.family, "b_layout": plan.b_layout, "knobs": dict(plan.knobs)}
    return ToolCall(call_id=f"call-{number}", name="evaluate_plan", arguments=arguments)


def _submit(trials: Sequence[Trial], any_plan: bool, task: Task) -> Step:
    best = best_trial(trials)
    if best is None:
        why = "no plan passed" if any_plan else f"no family accepts {task.label}"
        return Step(role="assistant", text=f"nothing to submit: {why}", stop="end")
    call = ToolCall(call_id=f"call-{len(trials)}", name="submit", arguments={"key": best.key})
    return Step(role="assistant", text=f"best: {best.label}", tool_calls=(call,), stop="tool_calls")


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The highest ratio; the earlier one of equals."""
    passed = [trial for trial in trials if trial.ratio is not None]
    return max(passed, key=lambda trial: trial.ratio or 0.0, default=None)
