"""Search policies: random; the analytical model, then TPE; or other shapes' records, then the shape's own trials.

What a language model must beat. Records correct the model's estimates (memory/shortlist.py), and trials correct both
(policy/surrogate.py).

All speak the protocol of a language model (tool calls in, a submit at the end) and keep no state between turns: all is
rebuilt from the told trials, so a resumed session goes on exactly as one that was never interrupted.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from memory.shortlist import Measured, expected
from policy.base import PolicyError, PolicyRequest, Trial
from policy.partial_record import likely_recorded
from policy.settings import PolicySettings
from policy.surrogate import choose
from tools.device import DeviceBroken
from tools.families import plans_taking
from tools.model import Ranked, rank
from tools.model_terms import Constants, Gpu
from tools.records import DeviceInfo, Family, Plan, Status, Step, Task, ToolCall, content_hash

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

Arm = tuple[str, str]

#: Plans taken for one ask of TPE: the nearest open ones to the point it names. An ask costs 5 ms, a replayed
#: evaluation 4, and a plan's neighbour says much about it.
PLANS_PER_ASK = 2

#: The first evaluations follow the analytical model; after them TPE, which needs some trials anyway, takes over. At
#: most shapes about as many plans are recorded: those that the model ranks first (tools/recording_scope.py).
MODEL_FIRST = 24

#: With a prior from records, plans proposed in one turn among the first ``MODEL_FIRST``: the next turn knows more.
FIRST_TURNS = 8

#: By how many standard deviations an uncertain plan is taken for quicker, while the whole budget is left. Then in
#: proportion to what is left: what is learned late is of little use.
DARING = 0.5

#: The first turn begins with the best plan of every family whose estimate is within this factor of the best estimate:
#: the model's scale of one family against another is what it knows least.
LEADER_FACTOR = 1.5


class Recorded(Protocol):
    """memory/recorded_times.py: what ``gpu`` timed at the shapes near a task, closest first. Raises DeviceBroken."""

    @property
    def gpu(self) -> Gpu: ...

    def near(self, task: Task) -> Sequence[Measured]: ...

    def close(self) -> None: ...


class SearchPolicy:
    """``method``: ``tpe`` (the model's first choices, then TPE) or ``random``. ``recorded``, where given, replaces
    ``tpe``. Proposes only plans that its families have and the shape's demands admit, each at most once, so a rollout
    ends when the budget or the plans are used up. ``constants_of`` replaces the model's constants, for evaluating it
    with constants that never saw the shape."""

    is_search = True

    def __init__(
        self,
        settings: PolicySettings,
        families: Mapping[str, Family],
        method: str = "tpe",
        constants_of: Callable[[Task], Constants] | None = None,
        recorded: Recorded | None = None,
    ) -> None:
        self._settings = settings
        self._families = dict(families)
        self._method = method
        self._constants_of = constants_of
        self._recorded = recorded
        self._plans: dict[str, tuple[Plan, ...]] = {}
        self._rankings: dict[str, list[Ranked]] = {}

    @property
    def name(self) -> str:
        return "search" if self._method == "tpe" else self._method

    def close(self) -> None:
        if self._recorded is not None:
            self._recorded.close()

    def step(self, request: PolicyRequest) -> Step:
        plans = self._accepted(request.task, request.device.sm_count)
        seen = {trial.key for trial in request.trials}
        unseen = [plan for plan in plans if plan.plan_id not in seen]
        wanted = min(self._settings.batch, request.evaluations_left, len(unseen))
        if wanted < 1 or request.turns_left <= 1:
            return _submit(request.trials, bool(plans), request.task)
        seed = sampling_seed(request)
        if self._method == "random":
            chosen = random.Random(seed).sample(unseen, wanted)
        elif self._recorded is not None:
            chosen = self._from_records(request, plans, unseen, wanted, self._recorded)
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
        seeds = seed_plans(plans, request.task, request.device, MODEL_FIRST, self._constants(request.task))
        open_ids = {plan.plan_id for plan in unseen}
        chosen = [plan for plan in seeds if plan.plan_id in open_ids][:wanted]
        if len(chosen) < wanted:
            taken = {plan.plan_id for plan in chosen}
            rest = [plan for plan in unseen if plan.plan_id not in taken]
            chosen += propose(plans, request.trials, rest, wanted - len(chosen), seed, self._settings.startup_trials)
        return chosen

    def _from_records(
        self, request: PolicyRequest, plans: Sequence[Plan], unseen: list[Plan], wanted: int, recorded: Recorded
    ) -> list[Plan]:
        task, trials = request.task, request.trials
        ranking = self._ranking(request, plans, recorded)
        if len(trials) < MODEL_FIRST:
            wanted = min(wanted, FIRST_TURNS)
        first = [] if trials else leaders(ranking)
        open_ids = {plan.plan_id for plan in unseen}
        if any(trial.status is Status.NOT_RECORDED for trial in trials):
            seeds = seed_plans(plans, task, request.device, MODEL_FIRST, self._constants(task))
            held = likely_recorded(plans, seeds, trials, _near(recorded, task), self._families)
            likely = [plan for plan in held if plan.plan_id in open_ids]
            if len(likely) >= wanted:
                open_ids = {plan.plan_id for plan in likely}
            else:
                first = likely
        daring = DARING * request.evaluations_left / (request.evaluations_left + len(trials))
        return choose(ranking, trials, open_ids, first, wanted, daring)

    def _ranking(self, request: PolicyRequest, plans: Sequence[Plan], recorded: Recorded) -> list[Ranked]:
        """Of all plans, before any was tried here: the same in every turn."""
        task = request.task
        if task.task_id not in self._rankings:
            near, constants = _near(recorded, task), self._constants(task)
            found = expected(plans, task, request.device, near, constants, measured_on=recorded.gpu)
            known = {one.plan.plan_id for one in found}
            unknown = [Ranked(plan, None) for plan in plans if plan.plan_id not in known]
            self._rankings[task.task_id] = [*(Ranked(one.plan, one.time_us) for one in found), *unknown]
        return self._rankings[task.task_id]

    def _constants(self, task: Task) -> Constants | None:
        return self._constants_of(task) if self._constants_of else None


def _near(recorded: Recorded, task: Task) -> Sequence[Measured]:
    try:
        return recorded.near(task)
    except DeviceBroken as error:
        raise PolicyError(f"{error}; --set policy.prior=model searches without records") from error


def sampling_seed(request: PolicyRequest) -> int:
    """Other numbers at every shape, rollout and turn: else the shapes of an evaluation would be one sample."""
    asked = [request.task.task_id, request.seed, request.rollout, len(request.trials)]
    return int(content_hash(asked), 16) % 2**32


def seed_plans(
    plans: Sequence[Plan], task: Task, device: DeviceInfo, count: int, constants: Constants | None = None
) -> list[Plan]:
    """The ``count`` plans that the model would try first: the leaders of the families, then in its order."""
    ranking = rank(plans, task, device, constants)
    first = leaders(ranking)
    chosen = dict.fromkeys(plan.plan_id for plan in first)
    rest = [r.plan for r in ranking if r.plan.plan_id not in chosen]
    return [*first, *rest][:count]


def leaders(ranking: Sequence[Ranked]) -> list[Plan]:
    """The first plan of every family that may win."""
    found: dict[str, Ranked] = {}
    for one in ranking:
        found.setdefault(one.plan.family, one)
    best_us = ranking[0].time_us if ranking else None
    return [one.plan for one in found.values() if _may_lead(one.time_us, best_us)]


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
            names = dict.fromkeys(name for plan in members for name in plan.knobs)
            columns = {k: sorted({plan.knob(k) for plan in members}) for k in names}
            self.values[arm] = {k: values for k, values in columns.items() if len(values) > 1}

    def point(self, plan: Plan) -> dict[str, int]:
        return {k: values.index(plan.knob(k)) for k, values in self.values[_arm(plan)].items()}

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
