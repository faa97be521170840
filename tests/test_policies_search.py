"""The search policies: determinism, diversity, repair of proposals, and that the model beats chance where it can."""

from __future__ import annotations

import statistics

import pytest
from fakes import ScriptedDevice, ideal_us, toy_families

from policy.base import PolicyRequest, Trial
from policy.search import LEADER_FACTOR, MODEL_FIRST, SearchPolicy, best_trial, propose, sampling_seed, seed_plans
from policy.settings import PolicySettings
from tools.families import accepted_plans, load_families, render, validate_plan
from tools.hgemm import hgemm
from tools.model import rank
from tools.records import Family, Plan, Reason, Status, Step, Task

DEVICE = ScriptedDevice()
TASK = hgemm(512, 512, 512)


def ratio(families: dict[str, Family], plan: Plan, task: Task) -> float:
    return ideal_us(task) / DEVICE.time_us(render(families[plan.family], plan), task)


def drive(policy: SearchPolicy, families: dict[str, Family], budget: int, seed: int, task: Task = TASK) -> list[Trial]:
    """Turn by turn, as the loop does, until it submits."""
    trials: list[Trial] = []
    for _ in range(200):
        step = policy.step(request(trials, budget - len(trials), seed, task))
        if not step.tool_calls or step.tool_calls[0].name == "submit":
            assert not step.tool_calls or step.tool_calls[0].arguments["key"] == best_trial(trials).key  # type: ignore[union-attr]
            return trials
        for call in step.tool_calls:
            family = families[call.arguments["family"]]
            plan = validate_plan(family, call.arguments["b_layout"], call.arguments["knobs"])
            trials.append(passed(plan, ratio(families, plan, task)))
    raise AssertionError("the search never ended")


def request(trials: list[Trial], left: int, seed: int, task: Task = TASK, rollout: int = 0) -> PolicyRequest:
    return PolicyRequest(
        task=task,
        device=DEVICE.info,
        trials=tuple(trials),
        evaluations_left=left,
        turns_left=10**9,
        seed=seed,
        rollout=rollout,
    )


def passed(plan: Plan, value: float) -> Trial:
    return Trial(key=plan.plan_id, label=plan.label, plan=plan, status=Status.OK, ratio=value)


def plans_of(families: dict[str, Family], task: Task) -> list[Plan]:
    return [variant.plan for variant in accepted_plans(families, task) if variant.plan is not None]


@pytest.mark.parametrize("method", ["tpe", "random"])
def test_same_request_same_step(method: str) -> None:
    families = load_families()
    first, second = (SearchPolicy(PolicySettings(), families, method) for _ in range(2))
    told = drive(first, families, 48, seed=5)
    assert told == drive(second, families, 48, seed=5)
    # Nothing is kept between turns: a fresh policy in the middle proposes what the old one did.
    fresh = SearchPolicy(PolicySettings(), families, method)
    middle = request(told[:32], 16, seed=5)
    assert fresh.step(middle) == first.step(middle)
    assert told != drive(first, families, 48, seed=6)


def test_the_same_seed_draws_other_numbers_at_every_shape_rollout_and_turn() -> None:
    families = load_families()
    first = request([], 16, seed=1)
    others = [
        request([], 16, seed=2),
        request([], 16, seed=1, rollout=1),
        request([], 16, seed=1, task=hgemm(512, 512, 1024)),  # else all shapes would be one sample
        request([passed(plans_of(families, TASK)[0], 1.0)], 16, seed=1),
    ]
    assert len({sampling_seed(one) for one in (first, *others)}) == 5
    assert sampling_seed(first) == sampling_seed(request([], 16, seed=1))
    tasks = hgemm(256, 256, 4096), hgemm(256, 512, 4096)
    drawn = [SearchPolicy(PolicySettings(), families, "random").step(request([], 16, 0, task)) for task in tasks]
    calls = [[call.arguments for call in step.tool_calls] for step in drawn]
    assert plans_of(families, tasks[0]) == plans_of(families, tasks[1]) and calls[0] != calls[1]


@pytest.mark.parametrize("method", ["tpe", "random"])
def test_every_plan_at_most_once_until_all_are_tried(method: str) -> None:
    families = toy_families()
    trials = drive(SearchPolicy(PolicySettings(), families, method), families, 500, seed=0)
    assert sorted(t.key for t in trials) == sorted(p.plan_id for p in plans_of(families, TASK))


def test_only_plans_that_take_the_shape() -> None:
    families = toy_families()
    odd = hgemm(33, 35, 37)
    trials = drive(SearchPolicy(PolicySettings(), families), families, 500, seed=0, task=odd)
    assert {t.plan.family for t in trials if t.plan} == {"toy"} and len(trials) == 18


def test_no_family_for_the_shape_is_said() -> None:
    families = {"toy_even": toy_families()["toy_even"]}
    step = SearchPolicy(PolicySettings(), families).step(request([], 10, 0, hgemm(33, 35, 37)))
    assert step.tool_calls == () and step.stop == "end" and "no family accepts 33x35x37" in step.text


def test_search_begins_with_the_families_that_may_win() -> None:
    families = load_families()
    for shape in ((64, 64, 64), (512, 512, 512), (4096, 4096, 4096), (64, 64, 16384)):
        task = hgemm(*shape)
        ranking = rank(plans_of(families, task), task, DEVICE.info)
        near = {r.plan.family for r in ranking if (r.time_us or 0.0) <= LEADER_FACTOR * (ranking[0].time_us or 0.0)}
        step = SearchPolicy(PolicySettings(), families).step(request([], 96, 0, task))
        proposed = [c.arguments["family"] for c in step.tool_calls]
        assert step.tool_calls[0].arguments["knobs"] == ranking[0].plan.knobs, shape
        assert len(near) > 1 or shape == (4096, 4096, 4096)
        assert set(proposed[: len(near)]) == near, shape


def test_batch_and_budget_bound_a_turn() -> None:
    families = toy_families()
    policy = SearchPolicy(PolicySettings(batch=5), families)
    assert len(policy.step(request([], 96, 0)).tool_calls) == 5
    assert len(policy.step(request([], 3, 0)).tool_calls) == 3
    done = policy.step(request([passed(plans_of(families, TASK)[0], 1.0)], 0, 0))
    assert [c.name for c in done.tool_calls] == ["submit"]


def test_failures_and_gaps_in_the_record_are_no_obstacle() -> None:
    families = toy_families()
    plans = plans_of(families, TASK)
    trials = [
        Trial(key=p.plan_id, label=p.label, plan=p, status=Status.FAILED, reason=Reason.WRONG_RESULT) for p in plans[:6]
    ]
    trials += [Trial(key=p.plan_id, label=p.label, plan=p, status=Status.NOT_RECORDED) for p in plans[6:12]]
    seen = {t.key for t in trials}
    step = SearchPolicy(PolicySettings(), families).step(request(trials, 8, 0))
    keys = {
        validate_plan(families[c.arguments["family"]], c.arguments["b_layout"], c.arguments["knobs"]).plan_id
        for c in step.tool_calls
    }
    assert len(keys) == 8 and not keys & seen
    ended = SearchPolicy(PolicySettings(), families).step(request(trials, 0, 0))
    assert ended.tool_calls == () and "no plan passed" in ended.text


def test_trials_of_an_older_manifest_are_ignored() -> None:
    families = toy_families()
    plan = plans_of(families, TASK)[0]
    old = plan.model_copy(update={"revision": 0, "knobs": {"BM": 7, "BN": 7}})
    step = SearchPolicy(PolicySettings(), families).step(request([passed(old, 9.0)] * 12, 16, 0))
    assert len(step.tool_calls) == 16


def test_proposals_are_open_plans_even_when_an_arm_is_used_up() -> None:
    families = toy_families()
    plans = plans_of(families, TASK)
    best_arm = [p for p in plans if p.b_layout == "nk" and p.family == "toy"]
    rest = [p for p in plans if p not in best_arm]
    trials = [passed(p, 2.0) for p in best_arm]
    chosen = propose(plans, trials, rest, 10, seed=1, startup_trials=5)
    assert len({p.plan_id for p in chosen}) == 10 and all(p in rest for p in chosen)


def test_model_beats_chance_on_a_smooth_landscape() -> None:
    """Over many seeds, at a third of the plans: the mean rank of what was found."""
    families = load_families()
    ranks: dict[str, list[int]] = {"tpe": [], "random": []}
    ordered = sorted(plans_of(families, TASK), key=lambda p: -ratio(families, p, TASK))
    position = {p.plan_id: i for i, p in enumerate(ordered)}
    budget = len(ordered) // 3
    for method, found in ranks.items():
        policy = SearchPolicy(PolicySettings(), families, method)
        for seed in range(8):
            best = best_trial(drive(policy, families, budget, seed))
            assert best is not None
            found.append(position[best.key])
    assert statistics.mean(ranks["tpe"]) < statistics.mean(ranks["random"])


def test_seeds_are_the_leaders_then_the_models_order() -> None:
    families = load_families()
    task = hgemm(256, 256, 256)
    plans = plans_of(families, task)
    ranking = [r.plan for r in rank(plans, task, DEVICE.info)]
    seeds = seed_plans(plans, task, DEVICE.info, 20)
    leaders = len({p.family for p in seeds})
    assert len({p.plan_id for p in seeds}) == 20
    assert [p.family for p in seeds[:leaders]] == list(dict.fromkeys(p.family for p in seeds[:leaders]))
    rest = [p for p in ranking if p not in seeds[:leaders]]
    assert seeds[leaders:] == rest[: 20 - leaders]


def test_a_family_that_the_model_does_not_know_is_tried_at_once() -> None:
    known = plans_of(load_families(), TASK)
    strange = [Plan(family="x", revision=1, b_layout="nk", knobs={"TILE": i}) for i in range(30)]
    seeds = seed_plans([*known, *strange], TASK, DEVICE.info, 24)
    assert strange[0] in seeds[:5] and strange[1] not in seeds
    assert seed_plans(strange, TASK, DEVICE.info, 4) == strange[:4]


def test_search_goes_on_with_tpe_after_the_models_choices() -> None:
    families = load_families()
    told = drive(SearchPolicy(PolicySettings(), families), families, MODEL_FIRST + 16, seed=3)
    first = {p.plan_id for p in seed_plans(plans_of(families, TASK), TASK, DEVICE.info, MODEL_FIRST)}
    assert {t.key for t in told[:MODEL_FIRST]} == first
    other = drive(SearchPolicy(PolicySettings(), families), families, MODEL_FIRST + 16, seed=4)
    assert told[:MODEL_FIRST] == other[:MODEL_FIRST] and told[MODEL_FIRST:] != other[MODEL_FIRST:]


def test_steps_are_tool_calls_like_a_models() -> None:
    step = SearchPolicy(PolicySettings(), toy_families()).step(request([], 4, 0))
    assert isinstance(step, Step) and step.stop == "tool_calls"
    assert len({c.call_id for c in step.tool_calls}) == 4


@pytest.mark.parametrize("method", ["tpe", "random"])
def test_what_a_smaller_gpu_cannot_hold_is_not_proposed(method: str) -> None:
    """`wgmma_splitk` takes two tiles for each SM at most: on fewer SMs, fewer shapes."""
    families, task = load_families(), hgemm(4096, 128, 2048)
    of_family = {"wgmma_splitk": families["wgmma_splitk"]}
    proposed = {}
    for sm_count in (132, 80):
        info = DEVICE.info.model_copy(update={"sm_count": sm_count})
        asked = request([], 10**6, 0, task).model_copy(update={"device": info})
        step = SearchPolicy(PolicySettings(batch=256), of_family, method).step(asked)
        proposed[sm_count] = {str(call.arguments) for call in step.tool_calls}
    assert proposed[80] < proposed[132] and len(proposed[80]) >= 1
