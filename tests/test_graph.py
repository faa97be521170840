"""The loop as a whole: a policy's calls through the gate, budgets, rounds and groups, and the finish."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedDevice, toy_families, toy_launch
from loop_kit import ScriptedPolicy, call, make_deps, plan_call, run, tool_texts, turn

from agent.errors import SessionError
from agent.progress import Event
from policy.base import PolicyError, PolicyRequest
from policy.search import SearchPolicy
from policy.settings import LOCAL_QUOTA, PolicySettings
from tools.families import validate_plan
from tools.records import Reason, Status, Step, Task, ToolCall, Variant

TOY = toy_families()["toy"]


def plan_key(bm: int, bn: int, layout: str = "nk") -> str:
    return validate_plan(TOY, layout, {"BM": bm, "BN": bn}).plan_id


def answers(deps: Any, rollout: int = 0) -> list[dict[str, Any]]:
    return [json.loads(text) for text in tool_texts(deps.trajectory(rollout).steps)]


# --- a policy's calls -------------------------------------------------------------------------------------------------


def test_plan_evaluated_submitted_and_finished(tmp_path: Path) -> None:
    key = plan_key(64, 64)
    policy = ScriptedPolicy(turn(plan_call(64, 64)), turn(call("submit", key=key)))
    deps = make_deps(tmp_path, policy, session__rounds=1, session__group_size=1)
    state, summary = run(deps)
    assert summary.best is not None and summary.best.key == key
    assert {m.mode for m in summary.best.modes} == {"offline", "rotating", "server"}
    assert summary.best.admitted and summary.evaluations == 1 and state["searched"]
    assert (tmp_path / "s" / "best" / "kernel.cu").read_text() == deps.variant(key).source
    assert json.loads((tmp_path / "s" / "best" / "launch.json").read_text())["launches"][0]["entry"] == "gemm"
    trajectory = deps.trajectory(0)
    assert trajectory.ended_by == "submit" and trajectory.submitted_key == key
    assert [s.role for s in trajectory.steps] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert trajectory.reward == pytest.approx(summary.best.screen_ratio - 0.5 * 0.0078125 - 1e-6 * 51, abs=1e-4)


def test_wrong_order_is_refused_with_what_to_call_first(tmp_path: Path) -> None:
    key = plan_key(32, 32)
    compile_plan = call("compile_plan", family="toy", b_layout="nk", knobs={"BM": 32, "BN": 32})
    policy = ScriptedPolicy(
        turn(compile_plan),
        turn(call("time", key=key)),
        turn(call("verify", key=key), call("profile", key=key)),
        turn(call("time", key=key), call("time", "final", key=key, budget="final")),
        turn(call("submit", key=key)),
    )
    deps = make_deps(tmp_path, policy, session__rounds=1, session__group_size=1)
    _, summary = run(deps)
    compiled, early, verified, profiled, timed, final, _ = answers(deps)
    assert compiled["status"] == "ok" and compiled["registers"] == 64
    assert early["status"] == "refused" and "verify" in early["detail"]
    assert verified["status"] == "ok" and profiled["status"] == "ok" and len(profiled["limits"]) == 3
    assert timed["status"] == "ok" and timed["ratio"] > 0
    assert final["status"] == "refused" and "full" in final["detail"]
    # Only evaluate tells the search of a variant, so there is no finalist.
    assert summary.evaluations == 1 and summary.best is None


def test_raw_source_is_evaluated_like_a_plan(tmp_path: Path) -> None:
    launch = toy_launch().model_copy(update={"constants": {"BM": 64, "BN": 64}}).model_dump(mode="json")
    source = 'extern "C" __global__ void gemm() {}\n'

    def submit(request: PolicyRequest) -> Step:
        return turn(call("submit", key=request.trials[0].key))

    as_object = call("evaluate_source", "a", source=source, launch=launch, b_layout="kn")
    as_text = call("evaluate_source", "b", source=source, launch=json.dumps(launch), b_layout="kn")
    policy = ScriptedPolicy(turn(as_object, as_text), submit)
    deps = make_deps(tmp_path, policy, session__rounds=1, session__group_size=1)
    _, summary = run(deps)
    assert summary.best is not None and summary.best.plan is None and summary.best.b_layout == "kn"
    assert summary.evaluations == 1, "the same source twice costs one evaluation"
    assert (tmp_path / "s" / "best" / "kernel.cu").read_text() == source


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (ToolCall(call_id="x", name="time", arguments={}, malformed="the arguments are not JSON"), "not JSON"),
        (call("fly", key="1"), "no tool 'fly'"),
        (call("verify", key="feedfacefeedface"), "no variant with key"),
        (call("evaluate_plan", family="nope", b_layout="nk", knobs={}), "no family 'nope'"),
        (call("evaluate_plan", family="toy", b_layout="nk", knobs={"BM": 7, "BN": 32}), "BM is one of"),
        (call("evaluate_plan", family="toy", b_layout="nk", knobs={"BM": 32}), "lacks BN"),
        (call("evaluate_source", source="x", launch="{", b_layout="nk"), "launch is not JSON"),
        (call("evaluate_source", source="x", launch={"launches": []}), "launches"),
        (call("evaluate_source", source="x", launch={}, main=1), "launches"),
        (call("time", key="k", mode="warp"), "mode"),
        (call("submit"), "key"),
        (call("read_source"), "needs a key or a family"),
    ],
)
def test_bad_calls_are_answered_and_cost_nothing(tmp_path: Path, bad: ToolCall, words: str) -> None:
    key = plan_key(64, 64)
    policy = ScriptedPolicy(turn(bad, plan_call(64, 64, call_id="good")), turn(call("submit", key=key)))
    deps = make_deps(tmp_path, policy, session__rounds=1, session__group_size=1)
    _, summary = run(deps)
    refused, good, _ = answers(deps)
    assert words in refused["error"] and good["status"] == "ok"
    assert summary.evaluations == 1 and summary.best is not None


def test_reading_tools(tmp_path: Path) -> None:
    key = plan_key(64, 64)
    policy = ScriptedPolicy(
        turn(call("list_families"), plan_call(64, 64)),
        turn(call("read_source", "a", key=key), call("read_source", "b", family="toy_even")),
        turn(call("submit", key=key)),
    )
    deps = make_deps(tmp_path, policy, session__rounds=1, session__group_size=1)
    run(deps)
    texts = tool_texts(deps.trajectory(0).steps)
    families = {f["family"]: f for f in json.loads(texts[0])}
    assert families["toy"]["plans_that_accept_this_shape"] == 18
    assert "#define BM 64" in texts[2] and '"entry": "gemm"' in texts[2]
    assert "/* even */" in texts[3]


def test_answers_stand_in_proposal_order(tmp_path: Path) -> None:
    sizes = [(bm, bn) for bm in (32, 64, 128) for bn in (32, 64, 128)]
    policy = ScriptedPolicy(
        turn(*(plan_call(bm, bn, call_id=f"c{i}") for i, (bm, bn) in enumerate(sizes))),
        lambda request: turn(call("submit", key=request.trials[-1].key)),
    )
    deps = make_deps(tmp_path, policy, session__rounds=1, session__group_size=1)
    state, _ = run(deps, concurrency=4)
    assert [row["key"] for row in state["trials"]] == [plan_key(*size) for size in sizes]
    told = [s.call_id for s in deps.trajectory(0).steps if s.role == "tool"]
    assert told == [*(f"c{i}" for i in range(9)), "submit"]


# --- turns without a call ---------------------------------------------------------------------------------------------


def test_plain_answer_is_nudged_once(tmp_path: Path) -> None:
    policy = ScriptedPolicy(turn(text="Hm."), turn(text="Let me think."))
    deps = make_deps(tmp_path, policy, session__rounds=1, session__group_size=1)
    _, summary = run(deps)
    trajectory = deps.trajectory(0)
    assert trajectory.ended_by == "policy" and len(policy.requests) == 2
    assert sum("no tool call" in s.text for s in trajectory.steps if s.role == "user") == 1
    assert summary.best is None and summary.evaluations == 0 and trajectory.reward is None


def test_refusal_ends_the_rollout(tmp_path: Path) -> None:
    policy = ScriptedPolicy(turn(text="I will not.", stop="refusal"))
    deps = make_deps(tmp_path, policy, session__rounds=1, session__group_size=1)
    run(deps)
    assert deps.trajectory(0).ended_by == "policy" and len(policy.requests) == 1


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_evaluations_are_a_hard_limit(tmp_path: Path) -> None:
    five = [plan_call(32, 32, call_id="a"), plan_call(64, 64, call_id="b"), plan_call(32, 32, call_id="again")]
    five += [plan_call(128, 128, call_id="c"), plan_call(64, 32, call_id="d")]
    device = ScriptedDevice()
    policy = ScriptedPolicy(turn(*five), turn(call("submit", key=plan_key(64, 64))))
    deps = make_deps(tmp_path, policy, device, session__rounds=1, session__group_size=1, budget__evaluations=3)
    _, summary = run(deps)
    found = answers(deps)
    assert [("error" in answer) for answer in found[:5]] == [False, False, False, False, True]
    assert "no evaluations are left" in found[4]["error"]
    assert summary.evaluations == 3 and device.count("compile") == 3


def test_not_recorded_costs_an_evaluation(tmp_path: Path) -> None:
    device = ScriptedDevice(lambda tool, variant, task: Status.NOT_RECORDED if tool == "compile" else None)
    deps = make_deps(tmp_path, None, device, budget__evaluations=7)
    _, summary = run(deps)
    assert summary.evaluations == 7 and summary.not_recorded == 7 and summary.passed == 0
    assert summary.best is None and summary.provisional is None and deps.trajectory(0).reward is None


@pytest.mark.parametrize(("budget", "value"), [("tokens", 250), ("usd", 0.25)])
def test_tokens_and_money_end_the_search(tmp_path: Path, budget: str, value: float) -> None:
    turns = [turn(plan_call(bm, bn), tokens=100, usd=0.1) for bm, bn in ((32, 32), (64, 64), (128, 128), (32, 64))]
    deps = make_deps(tmp_path, ScriptedPolicy(*turns), session__group_size=1, **{f"budget__{budget}": value})
    state, summary = run(deps)
    assert summary.stopped_by == budget
    # The third turn passes the limit; it is counted at the turn's end, so the fourth never comes.
    assert state["spent"]["input_tokens"] == 300 and deps.trajectory(0).ended_by == "budget"
    assert summary.best is not None, "what was found still goes through the finish"


def test_wall_time_ends_the_search(tmp_path: Path) -> None:
    device = ScriptedDevice(sleep_s=0.02)
    deps = make_deps(tmp_path, None, device, budget__wall_s=0.05, policy__batch=2)
    _, summary = run(deps)
    assert summary.stopped_by == "wall_s" and 0 < summary.evaluations <= 4 and summary.best is not None


def test_turns_are_limited(tmp_path: Path) -> None:
    policy = ScriptedPolicy(*(turn(call("list_families")) for _ in range(9)))
    deps = make_deps(tmp_path, policy, session__rounds=1, session__group_size=1, policy__max_turns=3)
    run(deps)
    assert len(policy.requests) == 3 and deps.trajectory(0).ended_by == "budget"
    assert [r.turns_left for r in policy.requests] == [3, 2, 1]


# --- rounds and groups ------------------------------------------------------------------------------------------------


def test_groups_share_a_prompt_and_rounds_show_exemplars(tmp_path: Path) -> None:
    def first(request: PolicyRequest) -> Step:
        bm = (32, 64, 128)[request.rollout % 3]
        return turn(plan_call(bm, 64))

    policy = ScriptedPolicy(first, lambda request: turn(call("submit", key=request.trials[-1].key)))
    deps = make_deps(tmp_path, policy, session__rounds=2, session__group_size=2, budget__evaluations=8)
    state, summary = run(deps, concurrency=2)
    prompts = [deps.trajectory(i).steps[1].text for i in range(4)]
    assert prompts[0] == prompts[1] and prompts[2] == prompts[3] and "None yet." in prompts[0]
    assert plan_key(32, 64) in prompts[2] and "#define BM" in prompts[2]
    assert "2 evaluations" in prompts[0] and "3 evaluations" in prompts[2], "what was not spent is shared out again"
    groups = [deps.trajectory(i) for i in range(4)]
    assert [(t.round, t.index_in_group) for t in groups] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first_of_second = next(r for r in policy.requests if r.rollout == 2)
    assert [t.key for t in first_of_second.trials] == [plan_key(32, 64), plan_key(64, 64)]
    # Group-normalised: two different rewards are one standard deviation from their mean each.
    assert sorted(t.reward_parts["group"] for t in groups[:2]) == pytest.approx([-1.0, 1.0])
    assert summary.evaluations == 3, "rollout 3 tries the plan of rollout 0 again, for nothing"
    assert state["round"] == 2


def test_rollouts_of_a_group_do_not_see_each_other(tmp_path: Path) -> None:
    policy = ScriptedPolicy(turn(plan_call(32, 32)), lambda r: turn(call("submit", key=r.trials[0].key)))
    deps = make_deps(tmp_path, policy, session__rounds=1, session__group_size=3)
    _, summary = run(deps)
    assert all(len(r.trials) <= 1 for r in policy.requests)
    assert summary.evaluations == 1 and [deps.trajectory(i).ended_by for i in range(3)] == ["submit"] * 3


@pytest.mark.parametrize(("evaluations", "rounds", "spent"), [(24, 5, 4), (3, 3, 3)])
def test_a_local_model_that_repeats_itself_gets_rounds_until_the_budget_is_spent_or_nothing_is_new(
    evaluations: int, rounds: int, spent: int, tmp_path: Path
) -> None:
    """Both rollouts of a round propose the same plan, from the fifth round on an old one."""
    plans = [(32, 32), (32, 64), (64, 64), (64, 128), (32, 32), (32, 32), (32, 32)]
    policy = ScriptedPolicy(
        lambda request: turn(plan_call(*plans[request.rollout // 2])),
        lambda request: turn(call("submit", key=request.trials[-1].key)),
    )
    deps = make_deps(tmp_path, policy, policy__name="local", budget__evaluations=evaluations)
    assert deps.settings.rounds == (3 if evaluations == 24 else 1), "as many as would do if nothing came twice"
    state, summary = run(deps)
    assert (state["round"], summary.evaluations) == (rounds, spent)
    assert all(deps.trajectory(number).quota <= LOCAL_QUOTA for number in range(2 * rounds))


def test_rounds_that_are_asked_for_are_as_many(tmp_path: Path) -> None:
    policy = ScriptedPolicy(turn(plan_call(32, 32)), lambda r: turn(call("submit", key=r.trials[0].key)))
    deps = make_deps(tmp_path, policy, policy__name="local", session__rounds=1)
    state, _ = run(deps)
    assert state["round"] == 1


# --- the finish -------------------------------------------------------------------------------------------------------


def fails_for(tool: str, keys: set[str], what: Reason | Status) -> ScriptedDevice:
    def script(name: str, variant: Variant, task: Task | None) -> Reason | Status | None:
        return what if name == tool and variant.key in keys else None

    return ScriptedDevice(script)


def ranking(tmp_path: Path) -> list[str]:
    """Keys of all toy plans of layout nk, best first, as an undisturbed session ranks them."""
    _, summary = run(make_deps(tmp_path / "ranking", session__top_k=26))
    return [entry.key for entry in summary.leaderboard if entry.b_layout == "nk"]


@pytest.mark.parametrize("tool", ["sanitize", "time"])
def test_rejected_finalist_gives_its_place_to_the_next(tmp_path: Path, tool: str) -> None:
    best = ranking(tmp_path)
    if tool == "time":

        def final_fails(name: str, variant: Variant, task: Task | None) -> Reason | None:
            return Reason.SKIPPED_LAUNCH if name == "time" and final.get(variant.key) else None

        # A screen that passes and a final timing that does not: the second call of `time` for that key.
        final: Counter[str] = Counter()

        class Device(ScriptedDevice):
            def time(self, variant: Variant, task: Task, mode: Any, budget: Any) -> Any:
                if variant.key == best[0] and budget == "final":
                    final[variant.key] += 1
                return super().time(variant, task, mode, budget)

        device: ScriptedDevice = Device(final_fails)
    else:
        device = fails_for("sanitize", {best[0]}, Reason.RACE)
    deps = make_deps(tmp_path, None, device, session__top_k=2)
    _, summary = run(deps)
    assert summary.best is not None and summary.best.key == best[1]
    out = next(e for e in summary.leaderboard if e.key == best[0])
    assert not out.admitted and ("race" if tool == "sanitize" else "skipped_launch") in out.why
    nk = [e for e in summary.leaderboard if e.b_layout == "nk" and e.admitted]
    assert [e.key for e in nk] == best[1:3]
    assert summary.leaderboard[0].key == best[1], "the rejected one does not lead, whatever its screen ratio"


def test_without_a_record_of_the_gate_there_is_no_winner(tmp_path: Path) -> None:
    device = ScriptedDevice(lambda tool, variant, task: Status.NOT_RECORDED if tool == "sanitize" else None)
    deps = make_deps(tmp_path, None, device, budget__evaluations=12)
    _, summary = run(deps)
    assert summary.best is None and summary.provisional is not None
    assert summary.unrecorded_finalists == 12 and not (tmp_path / "s" / "best").exists()


def test_missing_sanitizer_is_asked_for_top_k_only(tmp_path: Path) -> None:
    device = ScriptedDevice(lambda tool, variant, task: Status.UNAVAILABLE if tool == "sanitize" else None)
    deps = make_deps(tmp_path, None, device, session__top_k=1)
    _, summary = run(deps)
    assert summary.best is None and device.count("sanitize") == 2, "one for each layout"
    assert summary.provisional is not None and summary.provisional.final_ratio is not None
    assert "sanitize" in summary.provisional.why


def test_profile_never_decides(tmp_path: Path) -> None:
    device = ScriptedDevice(lambda tool, variant, task: Status.UNAVAILABLE if tool == "profile" else None)
    _, summary = run(make_deps(tmp_path, None, device, budget__evaluations=4))
    assert summary.best is not None and summary.best.profile is not None
    assert summary.best.profile.status is Status.UNAVAILABLE


def test_winner_is_the_best_final_ratio_and_kept_per_layout(tmp_path: Path) -> None:
    _, summary = run(make_deps(tmp_path))
    admitted = [e for e in summary.leaderboard if e.admitted]
    assert summary.best == admitted[0]
    assert [e.final_ratio for e in admitted] == sorted((e.final_ratio for e in admitted), reverse=True)
    for layout in ("kn", "nk"):
        assert summary.best_per_layout[layout] == next(e.key for e in admitted if e.b_layout == layout)


# --- determinism and broken machinery ---------------------------------------------------------------------------------


def test_same_seed_same_session_and_a_shared_store_changes_nothing(tmp_path: Path) -> None:
    first = run(make_deps(tmp_path / "a", budget__evaluations=20, session__seed=3))
    again = run(make_deps(tmp_path / "b", budget__evaluations=20, session__seed=3))
    device = ScriptedDevice()
    shared = run(make_deps(tmp_path / "a", None, device, session_id="t", budget__evaluations=20, session__seed=3))
    assert first[0]["trials"] == again[0]["trials"] == shared[0]["trials"]
    assert first[1].leaderboard == again[1].leaderboard == shared[1].leaderboard
    assert device.calls == [], "the second session of a home measures nothing again"


def test_another_seed_is_another_session(tmp_path: Path) -> None:
    """Of the random policy: the search begins with what the model ranks first, whatever the seed."""
    random = SearchPolicy(PolicySettings(), toy_families(), "random")
    deps = [make_deps(tmp_path / str(seed), random, budget__evaluations=20, session__seed=seed) for seed in (3, 4)]
    first, other = (run(d)[0]["trials"] for d in deps)
    assert first != other


def test_every_measurement_is_taken_once(tmp_path: Path) -> None:
    device = ScriptedDevice()
    run(make_deps(tmp_path, None, device), concurrency=4)
    assert max(Counter(device.calls).values()) == 1


class Overlapping(ScriptedDevice):
    """Looks like a GPU and notes how many calls of each kind ran at once."""

    def __init__(self) -> None:
        super().__init__(sleep_s=0.01)
        self.info = self.info.model_copy(update={"kind": "cuda"})
        self.most: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._counting = threading.Lock()

    def _called(self, tool: str, *arguments: Any) -> Any:
        kind = "compile" if tool == "compile" else "gpu"
        with self._counting:
            self._running[kind] += 1
            self.most[kind] = max(self.most[kind], self._running[kind])
        try:
            return super()._called(tool, *arguments)
        finally:
            with self._counting:
                self._running[kind] -= 1


def test_compilers_run_side_by_side_and_the_gpu_does_one_thing_at_a_time(tmp_path: Path) -> None:
    device = Overlapping()
    state, _ = run(make_deps(tmp_path / "a", None, device), concurrency=4)
    assert device.most["compile"] > 1 and device.most["gpu"] == 1
    alone, _ = run(make_deps(tmp_path / "b", None, Overlapping()), concurrency=1)
    assert state["trials"] == alone["trials"], "in the same order, whoever was first"


def test_search_ends_when_the_plans_are_used_up(tmp_path: Path) -> None:
    for method in ("tpe", "random"):
        known = toy_families()
        deps = make_deps(tmp_path / method, families=known, budget__evaluations=500)
        deps.policy = SearchPolicy(deps.settings.policy, known, method)
        _, summary = run(deps)
        assert summary.evaluations == 26 == summary.passed


def test_policy_error_leaves_the_session_resumable(tmp_path: Path) -> None:
    device = ScriptedDevice()
    broken = ScriptedPolicy(turn(plan_call(64, 64)), PolicyError("the provider is down"))
    with pytest.raises(PolicyError, match="provider is down"):
        run(make_deps(tmp_path, broken, device, session__rounds=1, session__group_size=1))
    healthy = ScriptedPolicy(lambda request: turn(call("submit", key=request.trials[0].key)))
    deps = make_deps(tmp_path, healthy, device, session__rounds=1, session__group_size=1)
    _, summary = run(deps)
    assert summary.best is not None and device.count("compile") == 1
    assert len(healthy.requests[0].steps) == 4, "the conversation goes on where it was"


def test_missing_compiler_stops_at_once_and_costs_nothing_later(tmp_path: Path) -> None:
    blind = ScriptedDevice(lambda tool, variant, task: Status.UNAVAILABLE if tool == "compile" else None)
    with pytest.raises(SessionError, match="agent doctor"):
        run(make_deps(tmp_path, None, blind, budget__evaluations=6))
    assert blind.count("compile") == 1
    _, summary = run(make_deps(tmp_path, None, ScriptedDevice(), budget__evaluations=6))
    assert summary.best is not None and summary.evaluations == 6


def test_events_tell_the_story(tmp_path: Path) -> None:
    events: list[Event] = []
    run(make_deps(tmp_path, budget__evaluations=5, events=events))
    kinds = [event.kind for event in events]
    assert kinds[:2] == ["opened", "round"] and kinds[-1] == "concluded"
    assert kinds.count("tried") == 5 and "measured" in kinds
    json.dumps([event.fields for event in events])
