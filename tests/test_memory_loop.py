"""The memory in the loop: what a policy is shown and answered, what is not measured twice, and what ends a rollout."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedDevice, toy_families, toy_launch
from loop_kit import ScriptedPolicy, call, make_deps, plan_call, run, settings, tool_texts, turn

from agent.accounting import failures_in_a_row, near_floor
from agent.recalling import Memory
from agent.state import Answer
from policy.base import PolicyRequest
from tools.families import validate_plan
from tools.records import CompileResult, Reason, Status, Step, Task, ToolCall, Variant

TOY = toy_families()["toy"]
LAUNCH = toy_launch().model_copy(update={"constants": {"BM": 64, "BN": 64}}).model_dump(mode="json")
KERNEL = 'extern "C" __global__ void gemm() { int a = 1; }\n'
REFORMATTED = 'extern "C"\n__global__ void gemm()\n{\n  int a=0x1; // the same\n}\n'
ONE = {"session__rounds": 1, "session__group_size": 1}


def source_call(source: str, call_id: str = "", tool: str = "evaluate_source") -> ToolCall:
    return call(tool, call_id, source=source, launch=LAUNCH, b_layout="nk")


def answers(deps: Any, rollout: int = 0) -> list[dict[str, Any]]:
    return [json.loads(text) for text in tool_texts(deps.trajectory(rollout).steps)]


def submit_last(request: PolicyRequest) -> Step:
    return turn(call("submit", key=request.trials[-1].key))


def plan_key(bm: int, bn: int) -> str:
    return validate_plan(TOY, "nk", {"BM": bm, "BN": bn}).plan_id


def failing(*markers: str, tool: str = "verify", reason: Reason = Reason.WRONG_RESULT) -> ScriptedDevice:
    def script(name: str, variant: Variant, task: Task | None) -> Reason | None:
        return reason if name == tool and any(marker in variant.source for marker in markers) else None

    return ScriptedDevice(script)


# --- near-duplicates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_turn", [True, False])
def test_a_reformatted_source_gets_the_earlier_result(tmp_path: Path, same_turn: bool) -> None:
    device = ScriptedDevice()
    first, second = source_call(KERNEL, "a"), source_call(REFORMATTED, "b")
    turns = [turn(first, second)] if same_turn else [turn(first), turn(second)]
    deps = make_deps(tmp_path, ScriptedPolicy(*turns, submit_last), device, **ONE, session__top_k=1)
    _, summary = run(deps)
    one, again, _ = answers(deps)
    assert "remark" not in one and "nothing was measured again" in again["remark"] and one["key"] in again["remark"]
    assert {k: v for k, v in again.items() if k != "remark"} == one
    assert summary.evaluations == 1 and device.count("compile") == 1
    assert sum(c.tool == "time" and c.setting == "offline/screen" for c in device.calls) == 1


def test_other_code_is_measured(tmp_path: Path) -> None:
    policy = ScriptedPolicy(turn(source_call(KERNEL, "a"), source_call(KERNEL.replace("1;", "2;"), "b")), submit_last)
    deps = make_deps(tmp_path, policy, **ONE)
    _, summary = run(deps)
    assert summary.evaluations == 2 and all("remark" not in answer for answer in answers(deps))


def test_a_plan_sent_back_as_source_is_that_plan(tmp_path: Path) -> None:
    def copy(request: PolicyRequest) -> Step:
        text = next(s.text for s in reversed(request.steps) if s.tool == "read_source")
        source, _, launch = text.partition("\n\nlaunch spec, b_layout nk:\n")
        return turn(call("evaluate_source", source=f"// copied\n{source}", launch=json.loads(launch), b_layout="nk"))

    read = turn(call("read_source", key=plan_key(64, 64)))
    deps = make_deps(tmp_path, ScriptedPolicy(turn(plan_call(64, 64)), read, copy, submit_last), **ONE)
    _, summary = run(deps)
    copied = json.loads(tool_texts(deps.trajectory(0).steps)[2])
    assert copied["key"] == plan_key(64, 64) and copied["remark"] and summary.evaluations == 1


def test_a_twin_of_an_earlier_session_costs_an_evaluation_and_no_measurement(tmp_path: Path) -> None:
    run(make_deps(tmp_path, ScriptedPolicy(turn(source_call(KERNEL)), submit_last), session_id="old", **ONE))
    device = ScriptedDevice()
    policy = ScriptedPolicy(turn(source_call(REFORMATTED)), submit_last)
    deps = make_deps(tmp_path, policy, device, session_id="new", **ONE)
    state, summary = run(deps)
    assert device.calls == [] and summary.evaluations == 1 and summary.best is not None
    assert "remark" in answers(deps)[0] and state["trials"][0]["key"] == answers(deps)[0]["key"]
    apart = make_deps(
        tmp_path, ScriptedPolicy(turn(source_call(REFORMATTED)), submit_last), device, session_id="x", **ONE,
        memory__earlier_sessions=False,
    )  # fmt: skip
    run(apart)
    assert device.count("verify") > 0 and "remark" not in answers(apart)[0]


class OneCubin(ScriptedDevice):
    """Every source compiles to the same machine code."""

    def compile(self, variant: Variant) -> CompileResult:
        done = super().compile(variant)
        return done.model_copy(update={"cubin_sha256": hashlib.sha256(b"").hexdigest()}) if done.ok else done


def test_the_same_machine_code_is_not_measured_again(tmp_path: Path) -> None:
    device = OneCubin()
    renamed = KERNEL.replace("int a", "int b")
    policy = ScriptedPolicy(turn(source_call(KERNEL)), turn(source_call(renamed)), submit_last)
    deps = make_deps(tmp_path, policy, device, **ONE)
    state, summary = run(deps)
    first, second, submitted = answers(deps)
    assert "machine code and launch" in second["remark"] and second["key"] == first["key"] == submitted["submitted"]
    assert device.count("compile") == 2 and summary.evaluations == 2, "it had to be compiled to be recognised"
    assert sum(c.tool == "time" and c.setting == "offline/screen" for c in device.calls) == 1
    assert {row["key"] for row in state["trials"]} == {first["key"]}


# --- repairs ----------------------------------------------------------------------------------------------------------


def broken(n: int) -> Step:
    return turn(source_call(KERNEL.replace("1;", f"1; bad({n});")))


def test_three_failed_repairs_end_the_rollout(tmp_path: Path) -> None:
    policy = ScriptedPolicy(*(broken(n) for n in range(9)))
    deps = make_deps(tmp_path, policy, failing("bad", tool="compile", reason=Reason.COMPILE_ERROR), **ONE)
    _, summary = run(deps)
    trajectory = deps.trajectory(0)
    assert trajectory.ended_by == "repairs" and len(policy.requests) == 4 and summary.evaluations == 4
    notes = [step.text for step in trajectory.steps[2:] if step.role == "user"]
    assert ["After 3 more" in notes[0], "After 2 more" in notes[1], "After 1 more" in notes[2]] == [True] * 3
    assert len(notes) == 3 and trajectory.reward == -1.0


def test_a_candidate_that_works_begins_the_count_anew(tmp_path: Path) -> None:
    turns = [broken(1), broken(2), broken(3), turn(source_call(KERNEL)), broken(4), broken(5), submit_last]
    deps = make_deps(tmp_path, ScriptedPolicy(*turns), failing("bad"), **ONE)
    run(deps)
    assert deps.trajectory(0).ended_by == "submit"


def test_the_limit_is_a_setting_and_one_good_candidate_in_a_turn_suffices(tmp_path: Path) -> None:
    mixed = turn(source_call(KERNEL, "a"), source_call(KERNEL + "int bad;", "b"))
    deps = make_deps(
        tmp_path, ScriptedPolicy(broken(1), mixed, broken(2), broken(3)), failing("bad"), **ONE,
        policy__max_failed_repairs=1,
    )  # fmt: skip
    run(deps)
    assert deps.trajectory(0).ended_by == "repairs" and len(deps.trajectory(0).steps) > 8
    free = make_deps(
        tmp_path / "b", ScriptedPolicy(*(broken(n) for n in range(6)), turn(), turn()), failing("bad"), **ONE,
        policy__max_failed_repairs=None,
    )  # fmt: skip
    run(free)
    assert free.trajectory(0).ended_by == "policy"


def answer(tool: str, status: Status, reason: Reason | None = None, time_us: float | None = None) -> Answer:
    return Answer(
        rollout=0,
        index=0,
        key="k",
        tool=tool,
        status=status,
        reason=reason and reason.value,
        ratio=None,
        time_us=time_us,
    )


def test_what_counts_as_a_failed_repair() -> None:
    wrong = answer("verify", Status.FAILED, Reason.WRONG_RESULT)
    assert failures_in_a_row(1, [answer("compile_source", Status.OK), wrong]) == 2, "that it compiles proves nothing"
    assert failures_in_a_row(2, [answer("list_families", Status.OK)]) == 2
    bad = answer("evaluate_plan", Status.FAILED)
    assert failures_in_a_row(2, [bad]) == 3, "a turn of nothing but calls that cannot be run is a failed repair"
    assert failures_in_a_row(2, [bad, answer("list_families", Status.OK)]) == 2
    assert failures_in_a_row(2, [answer("evaluate_plan", Status.NOT_RECORDED)]) == 2
    assert failures_in_a_row(2, [wrong, answer("time", Status.OK)]) == 0


def test_compile_errors_reach_the_policy_trimmed(tmp_path: Path) -> None:
    class Logging(ScriptedDevice):
        def compile(self, variant: Variant) -> CompileResult:
            log = "k.cu(1): warning: w\n\n" * 400 + 'k.cu(3): error: identifier "foo" is undefined\n  foo();\n  ^\n\n'
            return CompileResult(
                status=Status.FAILED, reason=Reason.COMPILE_ERROR, detail="foo", variant_id=variant.variant_id, log=log
            )

    deps = make_deps(tmp_path, ScriptedPolicy(turn(source_call(KERNEL)), turn(), turn()), Logging(), **ONE)
    run(deps)
    found = answers(deps)[0]
    assert found["errors"] == 'k.cu(3): error: identifier "foo" is undefined\n  foo();\n  ^' and "log" not in found


# --- the floor --------------------------------------------------------------------------------------------------------


def test_near_the_floor_the_search_stops(tmp_path: Path) -> None:
    """64x64x64 has a floor of 1.4 us; the best toy plan of the scripted device takes less."""
    device = ScriptedDevice(name="NVIDIA H200")
    policy = ScriptedPolicy(turn(plan_call(64, 64)), submit_last)
    deps = make_deps(tmp_path, policy, device, session__floor_pct=2.0, session__rounds=3, session__group_size=2)
    state, summary = run(deps)
    assert state["stopped_by"] == "floor" and state["round"] == 1 and summary.best is not None
    assert [deps.trajectory(i).ended_by for i in range(2)] == ["floor", "floor"]


@pytest.mark.parametrize(("name", "pct"), [("Scripted GPU", 2.0), ("NVIDIA H200", None)])
def test_without_a_floor_or_the_wish_it_goes_on(tmp_path: Path, name: str, pct: float | None) -> None:
    policy = ScriptedPolicy(turn(plan_call(64, 64)), submit_last)
    deps = make_deps(tmp_path, policy, ScriptedDevice(name=name), **ONE, session__floor_pct=pct)
    assert run(deps)[0]["stopped_by"] == ""


def test_floor_settings() -> None:
    assert settings().floor_pct is None and settings(policy__name="anthropic").floor_pct == 2.0
    assert settings(policy__name="local").floor_pct is None, (
        "an evaluation costs it nothing, and the floor is an estimate"
    )
    assert settings(session__floor_pct=5).floor_pct == 5.0
    done = [answer("evaluate_plan", Status.OK, time_us=10.2)]
    assert near_floor(done, 10.0, 2.0) and not near_floor(done, 10.0, 1.9)
    assert not near_floor(done, None, 2.0) and not near_floor(done, 10.0, None) and not near_floor([], 10.0, 2.0)


# --- the prompt -------------------------------------------------------------------------------------------------------


def three_plans(request: PolicyRequest) -> Step:
    return turn(plan_call(32, 32, call_id="a"), plan_call(64, 32, call_id="b"), plan_call(128, 128, call_id="c"))


def test_the_next_round_contrasts_what_was_tried(tmp_path: Path) -> None:
    deps = make_deps(tmp_path, ScriptedPolicy(three_plans, submit_last), session__rounds=2, session__group_size=1)
    run(deps)
    first, second = (deps.trajectory(i).steps[1].text for i in range(2))
    assert "None yet." in first and "3 variants measured" in second
    assert "% faster than B" in second and "Both are plans of toy." in second and "Source of A:" in second


def test_earlier_sessions_are_remembered_unless_told_otherwise(tmp_path: Path) -> None:
    run(make_deps(tmp_path, ScriptedPolicy(three_plans, submit_last), session_id="old", **ONE))

    def read(request: PolicyRequest) -> Step:
        return turn(call("read_source", key=plan_key(32, 32)), call("verify", "v", key=plan_key(32, 32)))

    deps = make_deps(tmp_path, ScriptedPolicy(read, turn(), turn()), session_id="new", **ONE)
    run(deps)
    assert "3 variants measured" in deps.trajectory(0).steps[1].text
    shown, refused = tool_texts(deps.trajectory(0).steps)
    assert "#define BM 32" in shown and "evaluate it first" in json.loads(refused)["error"]
    alone = make_deps(
        tmp_path, ScriptedPolicy(turn(), turn()), session_id="alone", **ONE, memory__earlier_sessions=False
    )
    run(alone)
    assert "None yet." in alone.trajectory(0).steps[1].text


def test_failed_compiles_of_earlier_sessions_are_negative_examples(tmp_path: Path) -> None:
    device = failing("bad", tool="compile", reason=Reason.COMPILE_ERROR)
    run(make_deps(tmp_path, ScriptedPolicy(broken(1), turn(), turn()), device, session_id="old", **ONE))
    deps = make_deps(tmp_path, ScriptedPolicy(turn(), turn()), device, session_id="new", **ONE)
    run(deps)
    text = deps.trajectory(0).steps[1].text
    assert "1 rejected" in text and "compile_error" in text and "scripted: compile found" in text


def test_a_shape_without_variants_borrows_from_the_nearest(tmp_path: Path) -> None:
    run(make_deps(tmp_path, ScriptedPolicy(three_plans, submit_last), session_id="old", **ONE))
    deps = make_deps(tmp_path, ScriptedPolicy(turn(), turn()), session_id="n", **ONE, session__shape="64,128,64")
    run(deps)
    assert "at 64x64x64, not at this shape" in deps.trajectory(0).steps[1].text


def test_a_group_that_was_begun_keeps_its_prompt(tmp_path: Path) -> None:
    """Killed between two writes of one group, while another session fills the memory."""
    deps = make_deps(tmp_path, ScriptedPolicy(turn(), turn()), **ONE)
    from agent.nodes import SearchNodes
    from agent.state import initial_state

    SearchNodes(deps).start_group(initial_state())
    run(make_deps(tmp_path, ScriptedPolicy(three_plans, submit_last), session_id="other", **ONE))
    again = make_deps(tmp_path, ScriptedPolicy(turn(), turn()), session__rounds=1, session__group_size=2)
    SearchNodes(again).start_group(initial_state())
    assert again.trajectory(1).steps == again.trajectory(0).steps == deps.trajectory(0).steps


def test_same_seed_same_exemplars(tmp_path: Path) -> None:
    run(make_deps(tmp_path, ScriptedPolicy(three_plans, submit_last), session_id="old", **ONE))

    def text(seed: int, round_number: int = 0) -> str:
        return Memory(make_deps(tmp_path, session_id="m", session__seed=seed)).text((), round_number)

    assert text(1) == text(1) and len({text(seed) for seed in range(12)}) > 1
    assert len({text(1, number) for number in range(12)}) > 1, "each round draws anew"


def test_the_list_of_the_local_policys_prompt_turns_to_what_a_partial_record_is_likely_to_hold(tmp_path: Path) -> None:
    """A plan without record costs an evaluation, and a list of such plans a whole round."""
    from policy.search import MODEL_FIRST, seed_plans
    from tools.families import load_families, plans_taking
    from tools.replay import ReplayDevice

    families, device = load_families(), ReplayDevice()
    deps = make_deps(tmp_path, device=device, families=families, session__shape="4096,8192,64")
    memory = Memory(deps)
    likely = seed_plans(plans_taking(families, deps.task, 132), deps.task, device.info, MODEL_FIRST)
    of_record = {plan.plan_id for plan in likely}
    first = [one.plan.plan_id for one in memory.shortlist(())]
    assert not set(first) <= of_record
    later = [one.plan.plan_id for one in memory.shortlist(first, is_partly_recorded=True)]
    assert set(later) <= of_record - set(first) and len(later) == len(first)
    everything = memory.shortlist(list(of_record), is_partly_recorded=True)
    assert everything == memory.shortlist(list(of_record))
    device.close()


@pytest.mark.parametrize("strategy", ["contrastive", "islands", "best-k", "random"])
def test_every_strategy_makes_a_prompt_within_the_budget(tmp_path: Path, strategy: str) -> None:
    from memory.contrast_budget import estimate_tokens

    run(make_deps(tmp_path, ScriptedPolicy(three_plans, submit_last), session_id="old", **ONE))
    deps = make_deps(tmp_path, session_id="m", memory__strategy=strategy, memory__prompt_tokens=400)
    text = Memory(deps).text((), 0)
    assert "3 variants measured" in text and estimate_tokens(text) <= 400
    assert Memory(make_deps(tmp_path, session_id="m", policy__exemplars=0)).text((), 0) == ""


def test_the_record_file_is_prior_knowledge_but_never_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from records_kit import make_record

    from tools.families import load_families
    from tools.replay import ReplayDevice

    path = make_record(tmp_path / "r.sqlite", (64, 64, 64), (128, 64, 64))
    monkeypatch.setattr("agent.recalling.default_path", lambda: path)
    kit: dict[str, Any] = {"families": load_families(), "memory__from_records": True}
    live = Memory(make_deps(tmp_path / "live", **kit)).text((), 0)
    assert "measured on" in live and "Scripted GPU" in live and "at 128x64x64" not in live
    replay = ReplayDevice(path)
    replayed = Memory(make_deps(tmp_path / "replay", device=replay, **kit)).text((), 0)
    assert "at 128x64x64, not at this shape" in replayed, "its own rows are what it will answer"
    replay.close()
