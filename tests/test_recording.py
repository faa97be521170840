"""Recording: what is taken, in which order, resumed without repeats, and stopped by a deadline or a broken device."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes import BatchingDevice, ScriptedDevice, toy_families
from tools.device import DeviceBroken
from tools.families import accepted_plans
from tools.hgemm import hgemm
from tools.model_quality import measured
from tools.record_writer import RecordWriter
from tools.recording import Scope, main, record
from tools.records import MODES, Budget, Mode, Reason, SanitizeResult, Status, Task, TimingResult, Variant
from tools.replay import ReplayDevice
from tools.sanitize_shapes import sanitize_tasks

FAMILIES = toy_families()
SHAPES = [(64, 64, 64), (4096, 256, 64), (96, 33, 128)]
PLANS_OF = {shape: len(accepted_plans(FAMILIES, hgemm(*shape))) for shape in SHAPES}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "records" / "test.sqlite"


def run(device: ScriptedDevice, out: Path, **options: object) -> list[str]:
    lines: list[str] = []
    record(device, FAMILIES, SHAPES, out, echo=lines.append, **{"deadline_s": 60.0, **options})  # type: ignore[arg-type]
    return lines


def finalists(shape: tuple[int, int, int], top: int = 3) -> set[str]:
    """The best ``top``, and the best of a layout of B that none of them has."""
    task = hgemm(*shape)
    ranked = sorted(accepted_plans(FAMILIES, task), key=lambda v: ScriptedDevice().time_us(v, task))
    best = ranked[:top]
    missing = {v.b_layout for v in ranked} - {v.b_layout for v in best}
    return {v.key for v in [*best, *(next(v for v in ranked if v.b_layout == layout) for layout in missing)]}


def best_variant(shape: tuple[int, int, int]) -> Variant:
    task = hgemm(*shape)
    return min(accepted_plans(FAMILIES, task), key=lambda v: ScriptedDevice().time_us(v, task))


def best_of(shape: tuple[int, int, int]) -> str:
    return best_variant(shape).key


def finals(top: int = 3) -> int:
    return sum(len(finalists(shape, top)) for shape in SHAPES)


@pytest.mark.parametrize("make", [ScriptedDevice, BatchingDevice])
def test_everything_is_taken_once(out: Path, make: type[ScriptedDevice]) -> None:
    device = make()
    lines = run(device, out, commit="abc123")
    plans = sum(PLANS_OF.values())
    settings = Counter((call.tool, call.setting) for call in device.calls if call.tool != "sanitize")
    assert settings["verify", "quick"] == settings["time", "offline/screen"] == plans
    assert settings["verify", "full"] == finals()
    assert all(settings["time", f"{mode}/final"] == finals() for mode in MODES)
    assert settings["baselines", "offline/screen"] == len(SHAPES)
    assert all(settings["baselines", f"{mode}/final"] == len(SHAPES) for mode in MODES)
    assert device.count("profile") == len(SHAPES)
    assert device.count("compile") == len({p.key for s in SHAPES for p in accepted_plans(FAMILIES, hgemm(*s))})
    sanitized = [call.key for call in device.calls if call.tool == "sanitize"]
    assert len(sanitized) == len(set(sanitized))
    assert device.count("profile_many") == (1 if make is BatchingDevice else 0)
    assert [line.split(":")[0] for line in lines if "/3 " in line] == [
        "1/3 64x64x64 tiny",
        "2/3 4096x256x64 launch-bound",
        "3/3 96x33x128 tiny",
    ]
    replay = ReplayDevice(out)
    assert replay.records.counts() | {"plans": 0} == {
        "plans": 0,
        "tasks": 3,
        "compiles": device.count("compile"),
        "verifies": plans + finals(),
        "timings": plans + 3 * finals(),
        "sanitizes": len(sanitized),
        "profiles": 3,
        "baselines": 12,
    }
    assert replay.records.meta("commit") == "abc123"
    assert replay.records.meta("compiler") == "scripted 1.0"
    assert replay.records.meta("library") == "scripted BLAS 1"
    replay.close()


def test_the_finalists_are_the_best(out: Path) -> None:
    device = ScriptedDevice()
    run(device, out)
    for shape in SHAPES:
        task_id = hgemm(*shape).task_id
        taken = {c.key for c in device.calls if c[0] == "time" and c[2:] == (task_id, "server/final")}
        assert taken == finalists(shape)
        assert [c.key for c in device.calls if c.tool == "profile" and c.task_id == task_id] == [best_of(shape)]


def test_the_profile_is_of_the_best_at_the_final_budget(out: Path) -> None:
    """A screening chooses who is timed again, not who wins."""
    task = hgemm(*SHAPES[0])

    class Fickle(ScriptedDevice):
        def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
            found = super().time(variant, task, mode, budget)
            if budget == "screen" or variant.key != best_of(SHAPES[0]):
                return found
            return found.model_copy(update={"rows": tuple(r.model_copy(update={"ratio": 0.1}) for r in found.rows)})

    device = Fickle()
    run(device, out)
    profiled = {c.key for c in device.calls if c.tool == "profile" and c.task_id == task.task_id}
    assert len(profiled) == 1 and profiled < finalists(SHAPES[0]) - {best_of(SHAPES[0])}
    assert {ReplayDevice(out).records.best_of(task.task_id)} == profiled


def test_a_finalist_that_falls_gives_its_place_to_the_next(out: Path) -> None:
    task = hgemm(*SHAPES[0])
    best = min(accepted_plans(FAMILIES, task), key=lambda v: ScriptedDevice().time_us(v, task))
    device = ScriptedDevice(lambda tool, v, t: Reason.RACE if tool == "sanitize" and v.key == best.key else None)
    run(device, out)
    finals = {c.key for c in device.calls if c.tool == "time" and c[2:] == (task.task_id, "offline/final")}
    assert best.key not in finals
    assert len(finals) == 3
    assert ReplayDevice(out).sanitize(best, [task]).reason is Reason.RACE


def test_a_finished_recording_measures_nothing_again(out: Path) -> None:
    run(ScriptedDevice(), out)
    before = out.read_bytes()
    again = ScriptedDevice()
    lines = run(again, out)
    assert again.calls == []
    assert out.read_bytes() == before
    assert lines == [f"3 of 3 shapes are in {out} already"]


def test_more_finalists_or_plans_are_added_to_a_finished_recording(out: Path) -> None:
    run(ScriptedDevice(), out)
    more = ScriptedDevice()
    run(more, out, scope=Scope(5))
    assert {call.setting for call in more.calls if call.tool == "time"} == {f"{mode}/final" for mode in MODES}
    assert more.count("verify") == finals(5) - finals()
    assert more.count("profile") == 0


def test_only_what_the_model_ranks_first_and_the_leaders_of_families(out: Path) -> None:
    run(ScriptedDevice(), out, scope=Scope(plans=4))
    replay = ReplayDevice(out)
    for shape in SHAPES:
        task = hgemm(*shape)
        timed = {v.key for v in accepted_plans(FAMILIES, task) if replay.time(v, task, "offline", "screen").ok}
        assert 4 <= len(timed) <= 4 + len(FAMILIES) < PLANS_OF[shape]
    assert measured(replay.records, FAMILIES) == ([], 3)
    rest = ScriptedDevice()
    run(rest, out)
    assert len(measured(ReplayDevice(out).records, FAMILIES)[0]) == 3
    again = ScriptedDevice()
    run(again, out, scope=Scope(plans=4))
    assert not again.calls


def test_the_server_mode_of_the_first_finalists_only(out: Path) -> None:
    device = ScriptedDevice()
    run(device, out, scope=Scope(top=3, server_top=1))
    of_mode = Counter(call.setting for call in device.calls if call.tool == "time")
    assert of_mode["offline/final"] == of_mode["rotating/final"] == finals(3)
    assert len(SHAPES) <= of_mode["server/final"] < finals(3)


class Overtaken(ScriptedDevice):
    """The final offline timing turns the order of the screening around."""

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
        result = super().time(variant, task, mode, budget)
        if mode != "offline" or budget != "final" or not result.rows:
            return result
        turned = [row.model_copy(update={"ratio": 1 / row.ratio}) for row in result.rows]
        return result.model_copy(update={"rows": tuple(turned)})


def test_the_winner_of_each_layout_is_timed_in_server_mode_whatever_its_screening(out: Path) -> None:
    run(Overtaken(), out, scope=Scope(top=3, server_top=1, together=False))
    records = ReplayDevice(out).records
    for shape in SHAPES:
        task = hgemm(*shape)
        ratios: dict[str, dict[str, float]] = {}
        for variant in accepted_plans(FAMILIES, task):
            timing = records.timed(variant.key, task.task_id, "offline", "final")
            if timing is not None and (row := timing.row()) is not None:
                ratios.setdefault(variant.b_layout, {})[variant.key] = row.ratio
        assert max(map(len, ratios.values())) > 1
        for of_layout in ratios.values():
            best = max(of_layout, key=lambda key: of_layout[key])
            assert records.timed(best, task.task_id, "server", "final") is not None


def test_profiles_can_be_left_for_later(out: Path) -> None:
    device = ScriptedDevice()
    run(device, out, scope=Scope(profiles=False))
    assert device.count("profile") == 0
    silent = ScriptedDevice()
    run(silent, out, scope=Scope(profiles=False))
    assert not silent.calls
    later = ScriptedDevice()
    run(later, out)
    assert Counter(call.tool for call in later.calls) == {"profile": len(SHAPES)}


def test_the_sanitizer_can_be_left_for_later(out: Path) -> None:
    device = ScriptedDevice()
    run(device, out, scope=Scope(sanitize=False))
    assert device.count("sanitize") == 0 and device.count("profile") == len(SHAPES)
    later = ScriptedDevice()
    run(later, out)
    assert Counter(call.tool for call in later.calls) == {"sanitize": len(set().union(*map(finalists, SHAPES)))}


def test_a_profile_that_was_not_to_be_had_is_taken_later(out: Path) -> None:
    run(ScriptedDevice(lambda tool, v, t: Status.UNAVAILABLE if tool == "profile" else None), out)
    later = ScriptedDevice()
    run(later, out)
    assert [call.tool for call in later.calls] == ["profile"] * 3


class StopsAfter(BatchingDevice):
    """Breaks after so many calls, as a worker that cannot be restarted does."""

    def __init__(self, calls: int) -> None:
        def script(tool: str, variant: Variant, task: Task | None) -> None:
            if len(self.calls) > calls:
                raise DeviceBroken("the worker cannot be started")

        super().__init__(script)


@pytest.mark.parametrize("calls", [1, 10, 40, 77, 100, 130])
def test_resume_after_a_break_repeats_no_measurement(out: Path, calls: int) -> None:
    first = StopsAfter(calls)
    with pytest.raises(DeviceBroken):
        run(first, out)
    second = BatchingDevice()
    run(second, out)
    measured = [c for c in (*first.calls[:calls], *second.calls) if c.tool not in ("compile", "profile_many")]
    assert len(measured) == len(set(measured))
    whole = out.with_name("whole.sqlite")
    run(ScriptedDevice(), whole)
    assert ReplayDevice(out).records.counts() == ReplayDevice(whole).records.counts()


def test_the_deadline_ends_it_and_the_file_is_whole(out: Path) -> None:
    slow = ScriptedDevice(sleep_s=0.01)
    started = time.monotonic()
    lines: list[str] = []
    summary = record(slow, FAMILIES, SHAPES, out, deadline_s=0.3, echo=lines.append)
    assert time.monotonic() - started < 8
    assert not summary.finished
    assert summary.shapes_done < 3
    assert "deadline" in lines[-1]
    assert ReplayDevice(out).records.counts()["timings"] > 0
    with sqlite3.connect(out) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    rest = ScriptedDevice()
    assert record(rest, FAMILIES, SHAPES, out, deadline_s=60, echo=lines.append).finished
    assert not set(rest.calls) & set(slow.calls)


def test_at_the_deadline_complete_shapes_get_the_profile_they_wait_for(out: Path) -> None:
    second = hgemm(*SHAPES[1])

    def late(tool: str, variant: Variant | None, task: Task | None) -> None:
        if tool == "verify" and task == second:
            time.sleep(1.0)

    summary = record(BatchingDevice(late), FAMILIES, SHAPES, out, deadline_s=1.0, echo=lambda _: None)
    assert (summary.shapes_done, summary.finished) == (1, False)
    assert ReplayDevice(out).profile(best_variant(SHAPES[0]), hgemm(*SHAPES[0])).ok


def test_no_sanitizer_and_no_profiler_is_no_failure(out: Path) -> None:
    device = BatchingDevice(lambda tool, v, t: Status.UNAVAILABLE if tool in ("sanitize", "profile") else None)
    run(device, out)
    counts = ReplayDevice(out).records.counts()
    assert (counts["sanitizes"], counts["profiles"]) == (0, 0)
    assert sum(call.setting == "server/final" for call in device.calls if call.tool == "time") == finals()
    assert device.count("profile") == 3
    equipped = BatchingDevice()
    run(equipped, out)
    assert {call.tool for call in equipped.calls} <= {"sanitize", "profile", "profile_many"}
    assert equipped.count("sanitize") > 0


def test_failures_are_recorded_and_block_what_follows(out: Path) -> None:
    def script(tool: str, variant: Variant, task: Task | None) -> Reason | None:
        assert variant.plan is not None
        rows = variant.plan.knobs["BM"]
        if tool == "compile" and rows == 32:
            return Reason.REGISTER_SPILL
        return Reason.WRONG_RESULT if tool == "verify" and rows == 64 else None

    device = ScriptedDevice(script)
    run(device, out)
    replay = ReplayDevice(out)
    task = hgemm(*SHAPES[0])
    for variant in accepted_plans(FAMILIES, task):
        assert variant.plan is not None
        rows = variant.plan.knobs["BM"]
        assert replay.compile(variant).reason == (Reason.REGISTER_SPILL if rows == 32 else None)
        verified = replay.verify(variant, task, "quick")
        assert verified.status is {32: Status.NOT_RECORDED, 64: Status.FAILED, 128: Status.OK}[rows]
        assert replay.time(variant, task, "offline", "screen").ok == (rows == 128)


def test_a_file_of_another_device_is_refused(out: Path) -> None:
    run(ScriptedDevice(), out)
    with pytest.raises(DeviceBroken, match=r"driver 1\.0, this is Scripted GPU with driver 2\.0: give another output"):
        run(ScriptedDevice(driver="2.0"), out)


def test_a_file_of_another_source_is_refused_before_anything_is_measured(out: Path) -> None:
    run(ScriptedDevice(), out)
    family = FAMILIES["toy"]
    edited = {**FAMILIES, "toy": family.model_copy(update={"source": family.source + "\n#define MORE 1\n"})}
    commented = {**FAMILIES, "toy": family.model_copy(update={"source": family.source + "\n// more\n"})}
    device = ScriptedDevice()
    with pytest.raises(DeviceBroken, match=r"another source under toy/.*: bump `revision` in kernels/toy/family.yaml"):
        record(device, edited, SHAPES, out, deadline_s=60, echo=lambda _: None)
    record(device, commented, SHAPES, out, deadline_s=60, echo=lambda _: None)
    assert not device.calls


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("not a database, this is " * 100)
    with pytest.raises(DeviceBroken, match="is not a database"):
        RecordWriter(tmp_path / "text.sqlite", ScriptedDevice().info)
    with pytest.raises(DeviceBroken, match="cannot be"):
        RecordWriter(tmp_path / "text.sqlite" / "below.sqlite", ScriptedDevice().info)


def test_an_empty_file_left_by_a_kill_is_begun_anew(out: Path) -> None:
    out.parent.mkdir()
    out.touch()
    run(ScriptedDevice(), out)
    assert ReplayDevice(out).records.counts()["tasks"] == 3


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--out", "x", "--deadline", "1", "--device", "tpu:0"], 2),
        (["--deadline", "1"], 2),
        (["--out", "x", "--deadline", "soon"], 2),
    ],
)
def test_command_line_mistakes(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == code
    assert "error:" in capsys.readouterr().err


def test_a_bad_shapes_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.csv").write_text("64,64\n")
    arguments = ["--out", str(tmp_path / "o"), "--deadline", "1", "--shapes", str(tmp_path / "s.csv")]
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_kill_9_leaves_a_file_that_goes_on(out: Path) -> None:
    """Killed at four moments of one recording, committing all the while; then finished, as if never interrupted."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "import tools.recording, tools.recording_device\n"
        "from tests.fakes import ScriptedDevice, toy_families\n"
        "from tests.test_recording import SHAPES\n"
        "tools.recording_device.COMMIT_EVERY_S = 0.0\n"
        "print('ready', flush=True)\n"
        "device = ScriptedDevice(sleep_s=0.002)\n"
        "tools.recording.record(device, toy_families(), SHAPES, Path(sys.argv[1]), deadline_s=60)\n"
    )
    root = Path(__file__).parent.parent
    for delay_s in (0.02, 0.05, 0.1, 0.15):
        environment = {**os.environ, "PYTHONPATH": str(root)}
        argv = [sys.executable, "-c", script, str(out)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=root, env=environment) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(delay_s)
            child.kill()
    run(ScriptedDevice(), out)
    whole = out.with_name("whole.sqlite")
    run(ScriptedDevice(), whole)
    resumed, straight = ReplayDevice(out), ReplayDevice(whole)
    assert resumed.records.counts() == straight.records.counts()
    for shape in SHAPES:
        task = hgemm(*shape)
        for variant in accepted_plans(FAMILIES, task):
            assert resumed.time(variant, task, "offline", "screen") == straight.time(variant, task, "offline", "screen")


class SanitizesMany(BatchingDevice):
    def sanitize_many(self, items: Sequence[tuple[Variant, Sequence[Task]]]) -> list[SanitizeResult]:
        return [self.sanitize(variant, tasks) for variant, tasks in items]


@pytest.mark.parametrize("make", [ScriptedDevice, SanitizesMany])
def test_sanitize_shapes_that_were_added_are_run_once_and_kept(out: Path, make: type[ScriptedDevice]) -> None:
    run(make(), out)
    added = {"M": 96, "N": 96, "K": 96}
    more = {n: f.model_copy(update={"sanitize_dims": (*f.sanitize_dims, added)}) for n, f in FAMILIES.items()}
    shapes = [*SHAPES, (128, 128, 128)]
    for expected in (True, False):
        device = make()
        record(device, more, shapes, out, deadline_s=60.0, echo=lambda _: None)
        assert (device.count("sanitize") > 0) is expected, "what was run is found again"
    replay = ReplayDevice(out)
    plan = next(v for v in accepted_plans(more, hgemm(128, 128, 128)) if v.key == best_of((128, 128, 128)))
    tasks = sanitize_tasks(plan, hgemm(128, 128, 128), more)
    assert len(tasks) == 3 and replay.sanitize(plan, tasks).ok


def test_a_pass_is_widened_and_a_failure_stays(tmp_path: Path) -> None:
    device, plan = ScriptedDevice(), accepted_plans(FAMILIES, hgemm(64, 64, 64))[0]
    small, tail = hgemm(64, 64, 64), hgemm(67, 35, 33)
    with RecordWriter(tmp_path / "s.sqlite", device.info) as writer:

        def dims() -> list[int]:
            found = writer.sanitized(plan.key)
            return sorted({check.dims["M"] for check in found.checks}) if found is not None else []

        for tasks, expected in (([small], [64]), ([tail], [64, 67]), ([small], [64, 67])):
            writer.put_sanitize(plan, device.sanitize(plan, tasks))
            assert dims() == expected
        assert len(writer.sanitized(plan.key).checks) == 8  # type: ignore[union-attr]
        bad = SanitizeResult(status=Status.FAILED, reason=Reason.RACE, detail="races", variant_key=plan.key)
        for result in (bad, device.sanitize(plan, [small])):
            writer.put_sanitize(plan, result)
            assert writer.sanitized(plan.key) == bad
