"""The leaderboard's rule, and that the gate, the store, a report and the finish of a session all keep it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_kit import ScriptedPolicy, call, make_deps, plan_call, run, turn

from agent import certify_inputs
from agent.errors import UsageError
from agent.reporting.source import load
from agent.reporting.winners import choose, hindrance
from memory.store import Store
from tests.fakes import ScriptedDevice, raw_variant, toy_families
from tools import admission
from tools.admission import Hindrance, Verdict
from tools.families import accepted_plans
from tools.gate import Toolbox
from tools.hgemm import hgemm
from tools.record_writer import RecordWriter
from tools.records import Budget, Mode, Reason, Status, Task, TimingResult, Variant

FAMILIES = toy_families()
TASK, OTHER = hgemm(1024, 1024, 1024), hgemm(2048, 1024, 1024)
PLAN = accepted_plans(FAMILIES, TASK)[0]
RAW = raw_variant()

OK, FAILED, ABSENT = Status.OK, Status.FAILED, Status.NOT_RECORDED
FULL: list[Verdict] = [("quick", OK), ("full", OK)]
TIMED: list[Verdict] = [("offline/screen", OK), ("offline/final", OK)]


@pytest.mark.parametrize(
    ("verify", "sanitize", "time", "expected"),
    [
        (FULL, [OK], TIMED, None),
        ([("full", OK)], [OK], [("offline/certify", OK)], None),
        (FULL, [OK], [*TIMED, ("server/final", ABSENT)], None),
        ([("quick", OK)], [OK], TIMED, Hindrance.NOT_VERIFIED),
        ([("quick", OK), ("full", ABSENT)], [OK], TIMED, Hindrance.NOT_VERIFIED),
        ([("quick", FAILED), ("full", OK)], [OK], TIMED, Hindrance.VERIFY_FAILED),
        (FULL, [], TIMED, Hindrance.NOT_SANITIZED),
        (FULL, [ABSENT], TIMED, Hindrance.NOT_SANITIZED),
        (FULL, [OK, FAILED], TIMED, Hindrance.SANITIZE_FAILED),
        (FULL, [OK], [*TIMED, ("rotating/screen", FAILED)], Hindrance.TIMING_FAILED),
        (FULL, [OK], [*TIMED, ("offline/screen", FAILED)], Hindrance.TIMING_FAILED),
        (FULL, [OK], [("offline/screen", OK), ("server/final", OK)], Hindrance.NOT_TIMED),
        ([], [], [], Hindrance.NOT_VERIFIED),
    ],
)
def test_the_rule(
    verify: list[Verdict], sanitize: list[Status], time: list[Verdict], expected: Hindrance | None
) -> None:
    assert admission.hindrance(verify, sanitize, time) is expected


def test_the_rule_for_another_mode() -> None:
    assert admission.hindrance(FULL, [OK], TIMED, "server") is Hindrance.NOT_TIMED
    assert admission.hindrance(FULL, [OK], [*TIMED, ("server/final", OK)], "server") is None


# --- everybody keeps it -----------------------------------------------------------------------------------------------


class Skips(ScriptedDevice):
    """A device that finds skipped launches in one mode at one budget."""

    def __init__(self, mode: Mode, budget: Budget) -> None:
        super().__init__()
        self.bad = (mode, budget)

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
        if (mode, budget) != self.bad:
            return super().time(variant, task, mode, budget)
        same: dict[str, Any] = {"variant_key": variant.key, "task_id": task.task_id, "mode": mode, "budget": budget}
        return TimingResult(status=FAILED, reason=Reason.SKIPPED_LAUNCH, detail="launch 3 was skipped", **same)


def whole_gate(toolbox: Toolbox, variant: Variant, task: Task = TASK) -> None:
    toolbox.evaluate(variant, task)
    toolbox.verify(variant, task, "full")
    toolbox.sanitize(variant, task)
    toolbox.time(variant, task, "offline", "final")


def verdicts(store: Store, toolbox: Toolbox, variant: Variant, task: Task = TASK) -> set[bool]:
    """What gate, store and report say; one element if they agree."""
    board = store.leaderboard(task.task_id, scope=toolbox.scope)
    measured = load(store.path)
    at = (task.task_id, variant.key)
    reported = choose(measured)[task.task_id].best == variant.key
    assert (hindrance(measured, at) == "") is reported
    return {
        bool(toolbox.on_leaderboard(variant, task)),
        next(s.admitted for s in board if s.variant_key == variant.key),
        reported,
    }


@pytest.mark.parametrize("variant", [PLAN, RAW], ids=["plan", "source"])
@pytest.mark.parametrize(("mode", "budget"), [("rotating", "screen"), ("server", "final"), ("offline", "certify")])
def test_a_failed_timing_in_any_mode_at_any_budget_bars(
    variant: Variant, mode: Mode, budget: Budget, tmp_path: Path
) -> None:
    with Store(tmp_path / "store.sqlite") as store:
        toolbox = Toolbox(Skips(mode, budget), store, FAMILIES)
        store.put_variant(variant)
        whole_gate(toolbox, variant)
        assert verdicts(store, toolbox, variant) == {True}
        assert toolbox.time(variant, TASK, mode, budget).reason is Reason.SKIPPED_LAUNCH
        assert verdicts(store, toolbox, variant) == {False}
        why = toolbox.on_leaderboard(variant, TASK).why
        assert f"a timing ({mode}/{budget}) failed" in why and "launch 3 was skipped" in why


@pytest.mark.parametrize(("variant", "counts"), [(PLAN, True), (RAW, False)], ids=["plan", "source"])
def test_a_sanitize_elsewhere_counts_for_a_plan_and_not_for_a_source(
    variant: Variant, counts: bool, tmp_path: Path
) -> None:
    with Store(tmp_path / "store.sqlite") as store:
        toolbox = Toolbox(ScriptedDevice(), store, FAMILIES)
        store.put_variant(variant)
        whole_gate(toolbox, variant, OTHER)
        toolbox.evaluate(variant, TASK)
        toolbox.verify(variant, TASK, "full")
        toolbox.time(variant, TASK, "offline", "final")
        assert verdicts(store, toolbox, variant, OTHER) == {True}
        assert verdicts(store, toolbox, variant) == {counts}
        toolbox.sanitize(variant, TASK)
        assert verdicts(store, toolbox, variant) == {True}


def test_a_source_that_fails_the_sanitizer_at_one_shape_is_judged_by_shape(tmp_path: Path) -> None:
    racing: list[Task] = [OTHER]

    def script(tool: str, variant: Variant, task: Task | None) -> Reason | None:
        return Reason.RACE if tool == "sanitize" and racing else None

    with Store(tmp_path / "store.sqlite") as store:
        toolbox = Toolbox(ScriptedDevice(script), store, FAMILIES)
        store.put_variant(RAW)
        whole_gate(toolbox, RAW, OTHER)
        racing.clear()
        whole_gate(toolbox, RAW)
        assert verdicts(store, toolbox, RAW, OTHER) == {False}
        assert verdicts(store, toolbox, RAW) == {True}


def test_a_report_of_a_recording_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    device = Skips("rotating", "screen")
    with RecordWriter(path, device.info) as writer:
        writer.put_verify(PLAN, TASK, device.verify(PLAN, TASK, "full"))
        writer.put_sanitize(PLAN, device.sanitize(PLAN, [hgemm(64, 64, 64)]))
        writer.put_timing(PLAN, TASK, device.time(PLAN, TASK, "offline", "final"))
    assert choose(load(path))[TASK.task_id].best == PLAN.key
    assert [candidate.variant.key for candidate in certify_inputs.of_recording(path, FAMILIES)] == [PLAN.key]
    with RecordWriter(path, device.info) as writer:
        writer.put_timing(PLAN, TASK, device.time(PLAN, TASK, "rotating", "screen"))
    found = choose(load(path))[TASK.task_id]
    assert (found.best, found.why_none) == (None, "1 candidates failed a timing")
    with pytest.raises(UsageError, match="no shape with a kernel that passed the whole gate"):
        certify_inputs.of_recording(path, FAMILIES)


def last_key(request: Any) -> str:
    return str(request.trials[-1].key)


@pytest.mark.parametrize("skips", [False, True])
def test_the_finish_keeps_it(tmp_path: Path, skips: bool) -> None:
    """The policy's own timing in another mode failed; the finish alone would never see it."""
    timing: Callable[[Any], Any] = lambda r: turn(call("time", key=last_key(r), mode="rotating", budget="screen"))  # noqa: E731
    policy = ScriptedPolicy(turn(plan_call(64, 64)), timing, lambda r: turn(call("submit", key=last_key(r))))
    device = Skips("rotating", "screen") if skips else ScriptedDevice()
    deps = make_deps(tmp_path, policy, device, session__rounds=1, session__group_size=1)
    _, summary = run(deps)
    (entry,) = summary.leaderboard
    assert entry.admitted is not skips and (summary.best is None) is skips
    assert ("launch 3 was skipped" in entry.why) is skips
