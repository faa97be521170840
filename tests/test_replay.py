"""The replay device: recorded values come back, nothing is invented, and bad files are one sentence."""

from __future__ import annotations

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memory.exemplars_read import recorded_at
from memory.store import Store
from tests.fakes import MEASURED_AT, ScriptedDevice, raw_variant, toy_families
from tools.device import DeviceBroken
from tools.families import accepted_plans
from tools.gate import MemoryResults, Toolbox, device_scope
from tools.hgemm import hgemm
from tools.model_quality import measured
from tools.record_writer import RecordWriter
from tools.recording import record
from tools.records import (
    MODES,
    Clocks,
    CompileResult,
    Reason,
    SanitizeResult,
    Status,
    TierResult,
    TimingResult,
    TimingRow,
    VerifyResult,
)
from tools.replay import ReplayDevice

FAMILIES = toy_families()
SHAPES = [(64, 64, 64), (512, 256, 64)]
TASK = hgemm(*SHAPES[1])
PLANS = accepted_plans(FAMILIES, TASK)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "r.sqlite"
    record(ScriptedDevice(), FAMILIES, SHAPES, path, deadline_s=60, echo=lambda _: None)
    return path


def winner() -> int:
    times = [ScriptedDevice().time_us(variant, TASK) for variant in PLANS]
    return times.index(min(times))


def test_what_was_measured_comes_back(recorded: Path) -> None:
    device, replay = ScriptedDevice(), ReplayDevice(recorded)
    best = PLANS[winner()]
    assert replay.compile(best) == device.compile(best).model_copy(update={"log": ""})
    assert replay.verify(best, TASK, "quick") == device.verify(best, TASK, "quick")
    assert replay.verify(best, TASK, "full") == device.verify(best, TASK, "full")
    assert replay.profile(best, TASK) == device.profile(best, TASK)
    dims = [hgemm(64, 64, 64), hgemm(67, 35, 33) if best.plan.family == "toy" else hgemm(67, 34, 34)]  # type: ignore[union-attr]
    assert replay.sanitize(best, dims) == device.sanitize(best, dims)
    for mode in MODES:
        assert replay.baselines(TASK, mode, "final") == device.baselines(TASK, mode, "final")
        live, again = device.time(best, TASK, mode, "final"), replay.time(best, TASK, mode, "final")
        assert again.model_copy(update={"rows": ()}) == live.model_copy(update={"rows": ()})
        assert len(again.rows) == len(live.rows) == 8
        for a, b in zip(again.rows, live.rows, strict=True):
            for name in ("ratio", "ratio_lo", "ratio_hi", "time_us", "ref_us"):
                assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-5)
                assert getattr(a, name) == float(f"{getattr(a, name):.6g}")
            kept = {"ratio", "ratio_lo", "ratio_hi", "time_us", "ref_us"}
            assert a.model_dump(exclude=kept) == b.model_dump(exclude=kept)
    replay.close()


def test_another_source_under_a_recorded_plan_has_no_numbers(recorded: Path) -> None:
    """An edit under an old revision must not inherit the old kernel's times; a comment orphans nothing."""
    replay, best = ReplayDevice(recorded), PLANS[winner()]
    commented = best.model_copy(update={"source": best.source.replace("\n", "  // more\n", 1)})
    edited = best.model_copy(update={"source": best.source.replace("{", "{ return;", 1)})
    relaunched = best.model_copy(update={"launch": best.launch.model_copy(update={"workspace_bytes": 64})})
    assert commented.source != best.source and edited.source != best.source
    assert best.key == commented.key == edited.key == relaunched.key
    assert replay.time(commented, TASK, "offline", "final").ok
    for other in (edited, relaunched):
        for result in (
            replay.compile(other),
            replay.verify(other, TASK, "full"),
            replay.sanitize(other, [TASK]),
            replay.time(other, TASK, "offline", "final"),
            replay.profile(other, TASK),
        ):
            assert result.status is Status.NOT_RECORDED
            assert "of another source: bump `revision` in kernels/" in result.detail
    replay.close()


def test_an_edited_source_is_no_prior_knowledge_either(recorded: Path) -> None:
    family = FAMILIES["toy"]
    edited = {**FAMILIES, "toy": family.model_copy(update={"source": family.source + "\n#define MORE 1\n"})}
    records = ReplayDevice(recorded).records
    assert {t.variant.plan.family for t in recorded_at(records, FAMILIES, TASK) if t.variant.plan} == {
        "toy",
        "toy_even",
    }
    assert {t.variant.plan.family for t in recorded_at(records, edited, TASK) if t.variant.plan} == {"toy_even"}
    assert len(measured(records, FAMILIES)[0]) == len(SHAPES)
    assert measured(records, edited)[0] == []


def test_what_was_not_recorded_is_said_and_never_invented(recorded: Path) -> None:
    replay = ReplayDevice(recorded)
    loser = max(PLANS, key=lambda v: ScriptedDevice().time_us(v, TASK))
    elsewhere = hgemm(128, 128, 128)
    raw = raw_variant()
    results = {
        "was not recorded on Scripted GPU": replay.compile(raw),
        "the shape 128x128x128 was not recorded": replay.verify(loser, elsewhere, "quick"),
        "no verify full of toy": replay.verify(loser, TASK, "full"),
        "no offline time at budget final": replay.time(loser, TASK, "offline", "final"),
        "source": replay.time(raw, TASK, "offline", "screen"),
        "no profile of": replay.profile(loser, TASK),
        "no sanitize at 512x256x64 of": replay.sanitize(PLANS[winner()], [TASK]),
        "no server baselines at budget certify": replay.baselines(TASK, "server", "certify"),
    }
    for sentence, result in results.items():
        assert result.status is Status.NOT_RECORDED
        assert sentence in result.detail


def test_another_revision_is_another_plan(recorded: Path) -> None:
    replay = ReplayDevice(recorded)
    plan = PLANS[0].plan
    assert plan is not None
    newer = PLANS[0].model_copy(update={"plan": plan.model_copy(update={"revision": 99})})
    assert replay.time(PLANS[0], TASK, "offline", "screen").ok
    assert replay.time(newer, TASK, "offline", "screen").status is Status.NOT_RECORDED


def test_an_edited_comment_is_the_same_plan(recorded: Path) -> None:
    edited = PLANS[0].model_copy(update={"source": PLANS[0].source + "// a comment"})
    assert ReplayDevice(recorded).time(edited, TASK, "offline", "screen").ok


def test_the_label_says_what_it_is(recorded: Path) -> None:
    info = ReplayDevice(recorded).info
    assert info.kind == "replay"
    assert info.label == f"replayed from Scripted GPU, driver 1.0, {info.recorded_on[:10]}"  # type: ignore[index]
    assert device_scope(info) != device_scope(ScriptedDevice().info)


def test_really_compiling_is_a_choice(recorded: Path) -> None:
    compiler = ScriptedDevice()
    replay = ReplayDevice(recorded, real_compile=compiler.compile)
    assert replay.compile(raw_variant()).ok
    assert compiler.count("compile") == 1
    assert Toolbox(replay, MemoryResults()).evaluate(raw_variant(), TASK).status is Status.NOT_RECORDED


def test_odd_values_survive_the_file(tmp_path: Path) -> None:
    """Everything that a timing and a verify may hold: failures, clocks, rows with their own times, infinities."""
    device = ScriptedDevice()
    task, variant, other = TASK, PLANS[0], PLANS[1]
    plain = device.time(variant, task, "server", "final")
    rows = (plain.rows[0], plain.rows[1].model_copy(update={"time_us": 3.5, "samples": 7, "ratio": 1e-7}))
    odd = plain.model_copy(
        update={
            "rows": tuple(r.model_copy(update={"measured_at": MEASURED_AT}) for r in rows),
            "clocks": Clocks(
                sm_mhz_min=1200,
                sm_mhz_median=1755,
                sm_mhz_max=1980,
                sm_mhz_limit=1980,
                power_w_max=689.5,
                temperature_c_max=61,
                throttle_reasons=("power cap",),
            ),
            "noisy": True,
            "throttled": True,
            "spread": None,
        }
    )
    slow = TimingResult(
        status=Status.FAILED,
        reason=Reason.SKIPPED_LAUNCH,
        detail="launch 3 left its output unwritten",
        variant_key=variant.key,
        task_id=task.task_id,
        mode="offline",
        budget="screen",
        elapsed_s=0.25,
    )
    wrong = VerifyResult(
        status=Status.FAILED,
        reason=Reason.WRONG_RESULT,
        detail="12 outputs differ",
        variant_key=variant.key,
        task_id=task.task_id,
        depth="quick",
        tiers=(TierResult(tier="integer", ok=False, checked=64, mismatches=12, max_abs_error=1e300, detail="at 0,0"),),
        bitwise_repeatable=False,
        max_abs_error=1e300,
    )
    bare = wrong.model_copy(update={"tiers": (), "max_abs_error": None, "bitwise_repeatable": None})
    path = tmp_path / "odd.sqlite"
    with RecordWriter(path, device.info) as writer:
        writer.put_timing(variant, task, odd)
        writer.put_timing(variant, task, slow)
        writer.put_verify(variant, task, wrong)
        writer.put_verify(other, task, bare.model_copy(update={"variant_key": other.key}))
        writer.put_verify(variant, task, device.verify(variant, task, "quick"))  # the first write wins
        writer.put_timing(other, task, slow.model_copy(update={"status": Status.UNAVAILABLE, "reason": None}))
    replay = ReplayDevice(path)
    back = replay.time(variant, task, "server", "final")
    assert back.rows[1].time_us == 3.5
    assert back.rows[1].samples == 7
    assert back.rows[1].ratio == 1e-7
    unpacked = {"rows": ()}
    assert back.model_copy(update=unpacked) == odd.model_copy(update=unpacked)
    assert replay.time(variant, task, "offline", "screen") == slow
    verified = replay.verify(variant, task, "quick")
    assert verified == wrong.model_copy(update={"max_abs_error": float("inf")})
    assert replay.verify(other, task, "quick").tiers == ()
    assert replay.time(other, task, "offline", "screen").status is Status.NOT_RECORDED


def test_what_another_run_may_answer_otherwise_is_not_recorded(tmp_path: Path) -> None:
    slow = {"status": Status.FAILED, "detail": "too slow"}
    plan = PLANS[0]
    with RecordWriter(tmp_path / "slow.sqlite", ScriptedDevice().info) as writer:
        hang = SanitizeResult(**slow, reason=Reason.HANG, variant_key=plan.key)
        writer.put_sanitize(plan, hang)
        writer.put_compile(plan, CompileResult(**slow, reason=Reason.COMPILE_MEMORY, variant_id=plan.variant_id))
        assert writer.sanitized(plan.key) is None and writer.compiled(plan.key) is None
        writer.put_sanitize(plan, hang.model_copy(update={"reason": Reason.RACE}))
        assert writer.sanitized(plan.key) is not None


def test_the_packing_knows_every_field() -> None:
    """A field added to these records must be packed too, or a replay would silently lose it."""
    fields = {model.__name__: set(model.model_fields) for model in (Clocks, TierResult, TimingRow)}
    assert fields == {
        "Clocks": {
            *("sm_mhz_min", "sm_mhz_median", "sm_mhz_max", "sm_mhz_limit", "power_w_max", "temperature_c_max"),
            "throttle_reasons",
        },
        "TierResult": {"tier", "ok", "checked", "mismatches", "max_abs_error", "detail"},
        "TimingRow": {
            *("task_id", "dims", "b_layout", "mode", "budget", "reference", "ratio", "ratio_lo", "ratio_hi"),
            *("time_us", "ref_us", "samples", "key", "device", "driver", "protocol_version", "measured_at"),
        },
    }
    outcome = {"status", "reason", "detail", "elapsed_s", "variant_key", "task_id"}
    assert set(TimingResult.model_fields) - outcome == {
        *("mode", "budget", "rows", "spread", "empty_kernel_us", "clocks", "noisy", "throttled"),
    }
    assert set(VerifyResult.model_fields) - outcome == {
        *("depth", "tiers", "bitwise_repeatable", "max_abs_error", "cublas_max_abs_error", "peak_memory_bytes"),
    }


def test_a_file_stays_small(tmp_path: Path) -> None:
    """A full recording is about 15,000 timings and quick verifies; at most 400 bytes for the two keeps it near 5 MB."""
    device = ScriptedDevice()
    path = tmp_path / "many.sqlite"
    tasks = [hgemm(64 * i, 64, 64) for i in range(1, 101)]
    with RecordWriter(path, device.info) as writer:
        for task in tasks:
            for variant in PLANS:
                writer.put_verify(variant, task, device.verify(variant, task, "quick"))
                writer.put_timing(variant, task, device.time(variant, task, "offline", "screen"))
    assert path.stat().st_size / (len(tasks) * len(PLANS)) < 400


def test_lookups_are_fast_enough(recorded: Path, tmp_path: Path) -> None:
    """Ten times slower than measured on a laptop core, so that only a change of kind fails this."""
    with Store(tmp_path / "store.sqlite") as store:
        toolbox = Toolbox(ReplayDevice(recorded), store, FAMILIES)
        started = time.process_time()
        evaluations = [toolbox.evaluate(v, hgemm(*s)) for s in SHAPES for v in accepted_plans(FAMILIES, hgemm(*s))]
        elapsed = time.process_time() - started
    assert all(e.ok for e in evaluations)
    assert elapsed / len(evaluations) < 0.01


def test_threads_share_a_reader(recorded: Path) -> None:
    replay = ReplayDevice(recorded)
    with ThreadPoolExecutor(8) as pool:
        times = list(pool.map(lambda v: replay.time(v, TASK, "offline", "screen").time_us, PLANS * 10))
    assert times == [replay.time(v, TASK, "offline", "screen").time_us for v in PLANS] * 10


# --- files that cannot be answered from ----------------------------------------------------------------------------


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    path = tmp_path / "a folder?#%" / "copy.sqlite"
    path.parent.mkdir()
    path.write_bytes(recorded.read_bytes())
    return path


def test_a_path_with_odd_characters(copy: Path) -> None:
    assert ReplayDevice(copy).time(PLANS[0], TASK, "offline", "screen").ok


def change(path: Path, sql: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(sql)
    db.close()


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DeviceBroken, match=r"there is no record file .*none.sqlite: get it again"):
        ReplayDevice(tmp_path / "none.sqlite")


@pytest.mark.parametrize("keep", [0, 50, 1000, 0.5, 0.99])
def test_a_truncated_file(copy: Path, keep: float) -> None:
    whole = copy.read_bytes()
    copy.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(DeviceBroken, match=r"is truncated|is not a record file"):
        ReplayDevice(copy)


def test_a_text_file(copy: Path) -> None:
    copy.write_text("version https://git-lfs.github.com/spec/v1\n" * 20)
    with pytest.raises(DeviceBroken, match="is not a record file"):
        ReplayDevice(copy)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DeviceBroken, match="is a folder, not a file"):
        ReplayDevice(tmp_path)


def test_the_database_of_something_else(tmp_path: Path) -> None:
    change(tmp_path / "other.sqlite", "CREATE TABLE guests (name TEXT)")
    with pytest.raises(DeviceBroken, match="is a database, but not a record file"):
        ReplayDevice(tmp_path / "other.sqlite")


def test_a_newer_file(copy: Path) -> None:
    change(copy, "UPDATE meta SET value = '7' WHERE key = 'schema_version'")
    with pytest.raises(DeviceBroken, match="schema version 7, newer than the 2 that this program reads: update"):
        ReplayDevice(copy)


def test_another_protocol(copy: Path) -> None:
    change(copy, "UPDATE meta SET value = '0' WHERE key = 'protocol_version'")
    with pytest.raises(DeviceBroken, match=r"protocol version 0.*record again"):
        ReplayDevice(copy)


def test_a_recording_under_way(copy: Path) -> None:
    copy.with_name(copy.name + "-journal").write_bytes(b"half a transaction")
    with pytest.raises(DeviceBroken, match="unfinished recording"):
        ReplayDevice(copy)


def test_damage_inside_a_row(copy: Path) -> None:
    change(copy, "UPDATE timings SET data = x'00' WHERE status = 'ok'")
    change(copy, "UPDATE compiles SET data = x'00'")
    replay = ReplayDevice(copy)
    with pytest.raises(DeviceBroken, match="damaged inside"):
        replay.time(PLANS[0], TASK, "offline", "screen")
    with pytest.raises(DeviceBroken, match="damaged inside"):
        replay.compile(PLANS[0])


def test_reading_changes_nothing(copy: Path) -> None:
    before = copy.read_bytes()
    replay = ReplayDevice(copy)
    replay.time(PLANS[0], TASK, "offline", "screen")
    replay.close()
    assert copy.read_bytes() == before
    assert [p.name for p in copy.parent.iterdir()] == ["copy.sqlite"]
