"""The gate: order, caching, what counts as lasting, and which shapes are sanitized."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes import Call, ScriptedDevice, raw_variant, toy_families
from tools.device import DeviceBroken
from tools.families import accepted_plans
from tools.gate import MemoryResults, Toolbox, device_scope
from tools.hgemm import hgemm
from tools.launching import accepts
from tools.records import Reason, Status, Task, Variant
from tools.sanitize_shapes import launchable, sanitize_tasks

TASK = hgemm(256, 128, 512)
FAMILIES = toy_families()
PLAN = accepted_plans(FAMILIES, TASK)[0]
EVEN_PLAN = next(v for v in accepted_plans(FAMILIES, TASK) if v.plan and v.plan.family == "toy_even")


@pytest.fixture
def device() -> ScriptedDevice:
    return ScriptedDevice()


@pytest.fixture
def toolbox(device: ScriptedDevice) -> Toolbox:
    return Toolbox(device, MemoryResults(), FAMILIES)


def test_every_tool_names_what_to_call_first(toolbox: Toolbox, device: ScriptedDevice) -> None:
    def refusals() -> list[tuple[Status, str]]:
        results = [
            toolbox.verify(PLAN, TASK),
            toolbox.sanitize(PLAN, TASK),
            toolbox.time(PLAN, TASK),
            toolbox.profile(PLAN, TASK),
        ]
        return [(r.status, r.detail) for r in results]

    for status, detail in refusals():
        assert status is Status.REFUSED
        assert "call compile first" in detail
    assert device.calls == []

    toolbox.compile(PLAN)
    assert toolbox.time(PLAN, TASK).status is Status.REFUSED
    assert "call verify with depth quick first" in toolbox.time(PLAN, TASK).detail
    assert "call verify with depth quick first" in toolbox.profile(PLAN, TASK).detail

    toolbox.verify(PLAN, TASK, "quick")
    assert toolbox.time(PLAN, TASK, "server", "screen").ok
    assert toolbox.profile(PLAN, TASK).ok
    assert "call verify with depth full first" in toolbox.time(PLAN, TASK, "offline", "final").detail

    toolbox.verify(PLAN, TASK, "full")
    assert toolbox.time(PLAN, TASK, "offline", "final").ok
    assert "call sanitize first" in toolbox.time(PLAN, TASK, "offline", "certify").detail
    toolbox.sanitize(PLAN, TASK)
    assert toolbox.time(PLAN, TASK, "offline", "certify").ok


def test_a_verify_counts_for_its_own_shape_only(toolbox: Toolbox) -> None:
    toolbox.evaluate(PLAN, TASK)
    other = hgemm(512, 128, 512)
    assert toolbox.time(PLAN, other).status is Status.REFUSED
    assert toolbox.profile(PLAN, other).status is Status.REFUSED


def test_verify_full_stands_for_quick(toolbox: Toolbox, device: ScriptedDevice) -> None:
    toolbox.compile(PLAN)
    full = toolbox.verify(PLAN, TASK, "full")
    assert toolbox.verify(PLAN, TASK, "quick") == full
    assert toolbox.time(PLAN, TASK).ok
    assert device.count("verify") == 1


@pytest.mark.parametrize("bad", ["quick", "full"])
def test_a_failure_at_one_depth_is_not_outlived_at_the_other(bad: str) -> None:
    device = ScriptedDevice()
    toolbox = Toolbox(device, MemoryResults(), FAMILIES)
    toolbox.evaluate(PLAN, TASK) if bad == "full" else toolbox.compile(PLAN)
    device._script = lambda tool, variant, task: Reason.WRONG_RESULT if tool == "verify" else None
    assert toolbox.verify(PLAN, TASK, bad).reason is Reason.WRONG_RESULT  # type: ignore[arg-type]
    device._script = None
    for depth in ("quick", "full"):
        assert toolbox.verify(PLAN, TASK, depth).reason is Reason.WRONG_RESULT  # type: ignore[arg-type]
    refused = toolbox.time(PLAN, TASK, "rotating", "screen")
    assert refused.status is Status.REFUSED
    assert "wrong_result" in refused.detail


def test_a_failed_compile_stays_and_blocks(device: ScriptedDevice) -> None:
    device = ScriptedDevice(lambda tool, variant, task: Reason.REGISTER_SPILL if tool == "compile" else None)
    toolbox = Toolbox(device, MemoryResults())
    for _ in range(2):
        evaluation = toolbox.evaluate(PLAN, TASK)
        assert (evaluation.status, evaluation.reason) == (Status.FAILED, Reason.REGISTER_SPILL)
        assert evaluation.verify is None
    assert toolbox.verify(PLAN, TASK).status is Status.REFUSED
    assert "register_spill" in toolbox.verify(PLAN, TASK).detail
    assert [call.tool for call in device.calls] == ["compile"]


@pytest.mark.parametrize("stage", ["verify", "time"])
def test_evaluate_stops_at_the_first_stage_that_fails(stage: str) -> None:
    device = ScriptedDevice(lambda tool, variant, task: Reason.HANG if tool == stage else None)
    evaluation = Toolbox(device, MemoryResults()).evaluate(PLAN, TASK)
    assert (evaluation.status, evaluation.reason) == (Status.FAILED, Reason.HANG)
    assert evaluation.detail == f"scripted: {stage} found hang"
    assert [call.tool for call in device.calls] == (["compile", "verify", "time"][: 2 if stage == "verify" else 3])
    assert (evaluation.timing is None) == (stage == "verify")


def test_nothing_is_measured_twice(toolbox: Toolbox, device: ScriptedDevice) -> None:
    def everything() -> list[object]:
        return [
            toolbox.evaluate(PLAN, TASK),
            toolbox.verify(PLAN, TASK, "full"),
            toolbox.sanitize(PLAN, TASK),
            toolbox.time(PLAN, TASK, "server", "final"),
            toolbox.profile(PLAN, TASK),
            toolbox.baselines(TASK, "server", "final"),
        ]

    first = everything()
    calls = list(device.calls)
    assert everything() == first
    assert device.calls == calls
    assert len(set(calls)) == len(calls) == 8


def test_one_sanitize_of_a_plan_serves_all_shapes(toolbox: Toolbox, device: ScriptedDevice) -> None:
    toolbox.compile(PLAN)
    for task in (TASK, hgemm(4096, 4096, 64)):
        assert toolbox.sanitize(PLAN, task).ok
    assert device.count("sanitize") == 1
    assert device.calls[-1].setting == "hgemm-f32acc/M=64,N=64,K=64/hgemm-f32acc/M=67,N=35,K=33"


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.REFUSED])
def test_what_says_nothing_of_the_candidate_is_asked_again(status: Status) -> None:
    device = ScriptedDevice(lambda tool, variant, task: status if tool == "sanitize" else None)
    toolbox = Toolbox(device, MemoryResults())
    toolbox.compile(PLAN)
    assert toolbox.sanitize(PLAN, TASK).status is status
    device._script = None
    assert toolbox.sanitize(PLAN, TASK).ok


@pytest.mark.parametrize(
    ("tool", "reason"),
    [("compile", Reason.COMPILE_TIMEOUT), ("compile", Reason.COMPILE_MEMORY), ("sanitize", Reason.HANG)],
)
def test_what_a_slow_machine_can_cause_is_asked_again(tool: str, reason: Reason) -> None:
    device = ScriptedDevice(lambda called, variant, task: reason if called == tool else None)
    toolbox = Toolbox(device, MemoryResults())

    def ask() -> Reason | None:
        compiled = toolbox.compile(PLAN)
        return compiled.reason if tool == "compile" else toolbox.sanitize(PLAN, TASK).reason

    assert ask() is reason
    device._script = None
    assert ask() is None
    assert device.count(tool) == 2


def test_a_hang_at_verify_is_kept() -> None:
    device = ScriptedDevice(lambda tool, variant, task: Reason.HANG if tool == "verify" else None)
    toolbox = Toolbox(device, MemoryResults())
    for _ in range(2):
        assert toolbox.evaluate(PLAN, TASK).reason is Reason.HANG
    assert device.count("verify") == 1


def test_not_recorded_is_kept() -> None:
    device = ScriptedDevice(lambda tool, variant, task: Status.NOT_RECORDED if tool == "verify" else None)
    toolbox = Toolbox(device, MemoryResults())
    toolbox.compile(PLAN)
    for depth in ("full", "quick", "full", "quick"):
        result = toolbox.verify(PLAN, TASK, depth)  # type: ignore[arg-type]
        assert (result.status, result.depth) == (Status.NOT_RECORDED, depth)
    assert device.count("verify") == 2
    assert toolbox.evaluate(PLAN, TASK).status is Status.NOT_RECORDED


def test_full_not_recorded_leaves_quick_standing() -> None:
    def script(tool: str, variant: Variant, task: Task | None) -> Status | None:
        return Status.NOT_RECORDED if device.calls[-1].setting == "full" else None

    device = ScriptedDevice(script)
    toolbox = Toolbox(device, MemoryResults())
    assert toolbox.evaluate(PLAN, TASK).ok
    assert toolbox.verify(PLAN, TASK, "full").status is Status.NOT_RECORDED
    assert toolbox.time(PLAN, TASK, "server", "screen").ok
    refused = toolbox.time(PLAN, TASK, "offline", "final")
    assert refused.status is Status.REFUSED
    assert "not_recorded" in refused.detail


def test_broken_machinery_is_raised_and_not_kept(device: ScriptedDevice) -> None:
    def script(tool: str, variant: Variant, task: Task | None) -> None:
        raise DeviceBroken("the worker cannot be started")

    results = MemoryResults()
    toolbox = Toolbox(ScriptedDevice(script), results)
    with pytest.raises(DeviceBroken):
        toolbox.compile(PLAN)
    assert len(results) == 0


def test_a_shape_that_is_not_accepted_never_reaches_the_device(toolbox: Toolbox, device: ScriptedDevice) -> None:
    odd = hgemm(256, 127, 512)
    for result in (
        toolbox.verify(EVEN_PLAN, odd),
        toolbox.sanitize(EVEN_PLAN, odd),
        toolbox.time(EVEN_PLAN, odd),
        toolbox.profile(EVEN_PLAN, odd),
        toolbox.evaluate(EVEN_PLAN, odd),
    ):
        assert (result.status, result.reason) == (Status.FAILED, Reason.NOT_ACCEPTED)
        assert "N % 2 == 0" in result.detail
    assert not toolbox.on_leaderboard(EVEN_PLAN, odd)
    assert device.calls == []


@pytest.mark.parametrize(
    "other", [ScriptedDevice(name="Other GPU"), ScriptedDevice(driver="2.0")], ids=["name", "driver"]
)
def test_results_do_not_answer_for_another_device(other: ScriptedDevice, device: ScriptedDevice) -> None:
    results = MemoryResults()
    Toolbox(device, results).evaluate(PLAN, TASK)
    assert device_scope(device.info) != device_scope(other.info)
    assert Toolbox(other, results).time(PLAN, TASK).status is Status.REFUSED
    assert Toolbox(other, results).evaluate(PLAN, TASK).ok
    assert other.count("time") == 1


def test_on_leaderboard_says_what_is_missing(toolbox: Toolbox) -> None:
    steps = [
        (lambda: None, "call compile first"),
        (lambda: toolbox.evaluate(PLAN, TASK), "call verify with depth full first"),
        (lambda: toolbox.verify(PLAN, TASK, "full"), "call sanitize first"),
        (lambda: toolbox.sanitize(PLAN, TASK), "call time with budget final first"),
    ]
    for step, missing in steps:
        step()
        admission = toolbox.on_leaderboard(PLAN, TASK)
        assert not admission
        assert missing in admission.why
    toolbox.time(PLAN, TASK, "offline", "final")
    assert toolbox.on_leaderboard(PLAN, TASK)
    assert toolbox.on_leaderboard(PLAN, TASK).why == ""
    assert not toolbox.on_leaderboard(PLAN, TASK, "server")


def test_threads_share_one_measurement() -> None:
    device = ScriptedDevice(sleep_s=0.02)
    toolbox = Toolbox(device, MemoryResults(), FAMILIES)
    with ThreadPoolExecutor(8) as pool:
        ratios = {e.ratio for e in pool.map(lambda _: toolbox.evaluate(PLAN, TASK), range(16))}
    assert len(ratios) == 1
    assert [call.tool for call in device.calls] == ["compile", "verify", "time"]
    assert toolbox._claims == {}


def test_the_first_write_wins_between_processes(device: ScriptedDevice) -> None:
    class Contended(MemoryResults):
        """Another process always stores its own result just before us."""

        def put(self, key: str, kind: str, payload_json: str) -> None:
            super().put(key, kind, payload_json.replace('"registers":64', '"registers":65'))

    assert Toolbox(device, Contended()).compile(PLAN).registers == 65


class TestSanitizeShapes:
    def test_a_plan_runs_where_its_family_says(self) -> None:
        dims = [t.dims for t in sanitize_tasks(EVEN_PLAN, TASK, FAMILIES)]
        assert dims == [{"M": 64, "N": 64, "K": 64}, {"M": 67, "N": 34, "K": 34}]

    def test_a_large_shape_is_reduced_and_given_tails(self) -> None:
        small, tail, own = sanitize_tasks(raw_variant(), hgemm(16384, 12288, 4097))
        assert small.dims == {"M": 256, "N": 256, "K": 257}
        assert tail.dims == {"M": 257, "N": 257, "K": 258}
        assert own == hgemm(16384, 12288, 4097), "a source may cheat at this shape alone"

    def test_a_small_shape_is_its_own(self) -> None:
        own, tail = sanitize_tasks(raw_variant(), hgemm(64, 64, 300))
        assert own.dims == {"M": 64, "N": 64, "K": 300}
        assert tail.dims == {"M": 65, "N": 65, "K": 301}

    def test_a_plan_of_no_known_family_is_run_at_its_own_shape_too(self) -> None:
        task = hgemm(4096, 4096, 4096)
        assert task in sanitize_tasks(PLAN, task, {})
        assert task not in sanitize_tasks(PLAN, task, FAMILIES)

    def test_demands_are_kept(self) -> None:
        demanding = raw_variant(accepts=("M % 128 == 0", "N % 8 == 0", "K >= 2048"))
        small, tail, _ = sanitize_tasks(demanding, hgemm(4096, 4096, 4096))
        assert small.dims == {"M": 256, "N": 256, "K": 4096}
        assert tail.dims == {"M": 256, "N": 264, "K": 4097}
        assert all(accepts(demanding, t) is None for t in (small, tail))

    def test_a_variant_for_one_shape_runs_only_there(self) -> None:
        task = hgemm(4096, 4096, 4096)
        raw = raw_variant()
        launch = raw.launch.launches[0].model_copy(
            update={"grid": (64, 64, 1), "args": raw.launch.launches[0].args[:3]}
        )
        fixed = raw.model_copy(update={"launch": raw.launch.model_copy(update={"launches": (launch,)})})
        assert sanitize_tasks(fixed, task) == (task,)

    def test_a_tma_stride_limits_the_tails(self) -> None:
        raw = raw_variant()
        tma = (
            raw.launch.launches[0]
            .args[0]
            .model_validate({"tensor_map": {"tensor": "A", "dims": ["K", "M"], "box": [64, 64]}})
        )
        launch = raw.launch.launches[0].model_copy(update={"args": (tma, *raw.launch.launches[0].args[1:])})
        variant = raw.model_copy(update={"launch": raw.launch.model_copy(update={"launches": (launch,)})})
        _, tail, _ = sanitize_tasks(variant, hgemm(1024, 1024, 1024))
        assert tail.dims == {"M": 257, "N": 257, "K": 264}
        assert launchable(variant, tail)

    def test_a_broken_expression_is_left_to_the_launch(self) -> None:
        raw = raw_variant()
        launch = raw.launch.launches[0].model_copy(update={"smem_bytes": "exit()"})
        broken = raw.model_copy(update={"launch": raw.launch.model_copy(update={"launches": (launch,)})})
        assert sanitize_tasks(broken, TASK) == (TASK,)


def test_the_fake_notes_every_call(device: ScriptedDevice) -> None:
    device.time(PLAN, TASK, "server", "final")
    assert device.calls == [Call("time", PLAN.key, TASK.task_id, "server/final")]
