"""Merging record files: every measurement once, the first kept, and nothing put together that does not belong so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes import ScriptedDevice, raw_variant, toy_families
from tools.device import DeviceBroken
from tools.families import accepted_plans
from tools.hgemm import hgemm
from tools.record_file import RecordReader
from tools.record_merge import Merged, MergingWriter, difference, merge_files
from tools.record_writer import RecordWriter
from tools.recording import main, record
from tools.recording_scope import Scope
from tools.records import MODES, Clocks, Family, Mode, Reason, SanitizeResult, Status, TimingResult, Variant
from tools.shapes import Shape

FAMILIES = toy_families()
A: list[Shape] = [(64, 64, 64), (96, 33, 128)]
B: list[Shape] = [(96, 33, 128), (4096, 256, 64)]


def made(
    path: Path, shapes: Sequence[Shape], device: ScriptedDevice | None = None, families: dict[str, Family] = FAMILIES
) -> Path:
    record(device or ScriptedDevice(), families, shapes, path, deadline_s=60, commit=path.stem, echo=lambda _: None)
    return path


def merged(out: Path, *sources: Path) -> Merged:
    return merge_files(sources, lambda _: [], out)


def test_the_merged_file_is_what_one_recording_would_have_made(tmp_path: Path) -> None:
    a, b, whole = (made(tmp_path / n, shapes) for n, shapes in (("a", A), ("b", B), ("whole", [*A, B[1]])))
    counts = merged(tmp_path / "out", a, b)
    found, wanted = RecordReader(tmp_path / "out"), RecordReader(whole)
    rows = sum(n for table, n in wanted.counts().items() if table not in ("plans", "tasks"))
    assert found.counts() == wanted.counts()
    assert counts.added == rows and counts.again > 0
    for task in wanted.tasks():
        assert found.best_of(task.task_id) == wanted.best_of(task.task_id)
        for variant in accepted_plans(FAMILIES, task):
            key, task_id = variant.key, task.task_id
            assert found.verified(key, task_id, "quick") == wanted.verified(key, task_id, "quick")
            assert found.verified(key, task_id, "full") == wanted.verified(key, task_id, "full")
            for mode in MODES:
                assert found.timed(key, task_id, mode, "screen") == wanted.timed(key, task_id, mode, "screen")
                assert found.timed(key, task_id, mode, "final") == wanted.timed(key, task_id, mode, "final")
                assert found.baselines(task_id, mode, "final") == wanted.baselines(task_id, mode, "final")
    assert found.meta("commit") == "a"
    assert record_again(tmp_path / "out", [*A, B[1]]) == 0


def record_again(out: Path, shapes: Sequence[Shape]) -> int:
    """Tool calls that are still needed."""
    device = ScriptedDevice()
    record(device, FAMILIES, shapes, out, deadline_s=60, commit="a", echo=lambda _: None)
    return len(device.calls)


class Slower(ScriptedDevice):
    def time_us(self, variant: Variant, task: object, mode: Mode = "offline") -> float:
        return 2 * super().time_us(variant, task, mode)  # type: ignore[arg-type]


def test_what_both_measured_stays_as_the_first_has_it(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", A), made(tmp_path / "b", A, Slower())
    counts = merged(tmp_path / "out", a, b)
    assert counts.added == counts.again > 0
    first, found = RecordReader(a), RecordReader(tmp_path / "out")
    variant = accepted_plans(FAMILIES, hgemm(*A[0]))[0]
    task_id = hgemm(*A[0]).task_id
    assert found.timed(variant.key, task_id, "offline", "screen") == first.timed(
        variant.key, task_id, "offline", "screen"
    )
    assert merged(tmp_path / "twice", tmp_path / "out", a).again == counts.added


def test_texts_that_are_numbered_otherwise_are_found_again(tmp_path: Path) -> None:
    """Details, tiers, reasons of throttling: each file numbers its own as they come."""
    task, plan = hgemm(64, 64, 64), accepted_plans(FAMILIES, hgemm(64, 64, 64))[0]
    device = ScriptedDevice()
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, reasons in zip(paths, (("sw_power_cap",), ("hw_thermal", "sw_power_cap")), strict=True):
        with RecordWriter(path, device.info) as writer:
            clocks = Clocks(
                sm_mhz_min=1,
                sm_mhz_median=2,
                sm_mhz_max=3,
                power_w_max=4,
                temperature_c_max=5,
                throttle_reasons=reasons,
            )
            timed = device.time(plan, hgemm(64, 64, 65 + len(reasons)), "offline", "screen")
            writer.put_timing(
                plan, hgemm(64, 64, 65 + len(reasons)), timed.model_copy(update={"clocks": clocks, "throttled": True})
            )
            failed = TimingResult(
                status=Status.FAILED, reason=Reason.HANG, detail=f"hung, {reasons[0]}", variant_key=plan.key,
                task_id=task.task_id, mode="server" if len(reasons) > 1 else "rotating", budget="final",
            )  # fmt: skip
            writer.put_timing(plan, task, failed)
            writer.put_verify(plan, task, device.verify(plan, task, "quick"))
            writer.put_meta({"clocks": f'{{"sm_mhz_median_range": [{1000 * len(reasons)}, {1500 * len(reasons)}]}}'})
    merged(tmp_path / "out", *paths)
    found = RecordReader(tmp_path / "out")
    for path in paths:
        reader = RecordReader(path)
        for other in reader.tasks():
            for mode in MODES:
                for budget in ("screen", "final"):
                    wanted = reader.timed(plan.key, other.task_id, mode, budget)  # type: ignore[arg-type]
                    if wanted is not None:
                        assert found.timed(plan.key, other.task_id, mode, budget) == wanted  # type: ignore[arg-type]
    assert found.verified(plan.key, task.task_id, "quick") == RecordReader(paths[0]).verified(
        plan.key, task.task_id, "quick"
    )
    assert found.meta("clocks") == '{"sm_mhz_median_range": [1000, 3000]}'


def test_sanitizer_runs_are_put_together_and_a_failure_stays(tmp_path: Path) -> None:
    plan, device = accepted_plans(FAMILIES, hgemm(64, 64, 64))[0], ScriptedDevice()
    tail = hgemm(67, 35, 33)
    passes = [device.sanitize(plan, [task]) for task in (hgemm(64, 64, 64), tail)]
    race = SanitizeResult(status=Status.FAILED, reason=Reason.RACE, detail="races", variant_key=plan.key)
    paths = []
    for number, result in enumerate([*passes, race]):
        paths.append(tmp_path / f"{number}")
        with RecordWriter(paths[-1], device.info) as writer:
            writer.put_sanitize(plan, result)
    merged(tmp_path / "both", *paths[:2])
    both = RecordReader(tmp_path / "both").sanitized(plan.key)
    assert both is not None and {check.dims["M"] for check in both.checks} == {64, 67}
    merged(tmp_path / "all", *paths)
    assert RecordReader(tmp_path / "all").sanitized(plan.key) == race


def test_a_raw_source_comes_with_its_text(tmp_path: Path) -> None:
    variant, device, task = raw_variant("mine"), ScriptedDevice(), hgemm(64, 64, 64)
    with RecordWriter(tmp_path / "a", device.info) as writer:
        writer.put_timing(variant, task, device.time(variant, task, "offline", "final"))
    merged(tmp_path / "out", made(tmp_path / "b", A), tmp_path / "a")
    reader = RecordReader(tmp_path / "out")
    assert reader.sources() == {variant.key: variant}
    assert reader.timed(variant.key, task.task_id, "offline", "final") is not None


# --- what does not belong together ------------------------------------------------------------------------------------


def test_files_of_different_gpus_are_refused(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", A), made(tmp_path / "b", B, ScriptedDevice(driver="2.0"))
    with pytest.raises(DeviceBroken, match=r"/a and .*/b cannot become one .*: driver 1\.0 and driver 2\.0$"):
        merged(tmp_path / "out", a, b)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".new*"))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("name", "H100", "Scripted GPU and H100"),
        ("sm_count", 114, "SMs: 132 and SMs: 114"),
        ("cuda_runtime", "12.9", "CUDA 13.0 and CUDA 12.9"),
        ("library", "cuBLASLt 13.2", "unknown libraries and cuBLASLt 13.2"),
        ("protocol_version", 1, "protocol 2 and protocol 1"),
        ("recorded_on", "2026", None),
    ],
)
def test_the_difference_is_named(field: str, value: object, words: str | None) -> None:
    info = ScriptedDevice().info
    assert difference(info, info.model_copy(update={field: value})) == words


def test_another_compiler_is_refused(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", A), made(tmp_path / "b", B)
    with RecordWriter(b, ScriptedDevice().info) as writer:
        writer.put_meta({"compiler": "scripted 2.0"})
    with pytest.raises(DeviceBroken, match=r"scripted 1\.0 and scripted 2\.0"):
        merged(tmp_path / "out", a, b)


def test_another_source_of_a_plan_is_refused(tmp_path: Path) -> None:
    family = FAMILIES["toy"]
    edited = {**FAMILIES, "toy": family.model_copy(update={"source": family.source + "\n#define MORE 1\n"})}
    a, b = made(tmp_path / "a", A), made(tmp_path / "b", B, families=edited)
    with pytest.raises(DeviceBroken, match=r"/a and .*/b hold measurements of different sources under toy/"):
        merged(tmp_path / "out", a, b)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = made(tmp_path / "a", A), made(tmp_path / "b", B)
    out = str(tmp_path / "out.sqlite")
    assert main(["--merge", str(a), str(b), "--out", out]) == 0
    said = capsys.readouterr().out
    assert "measurements of 2 files → " in said and "were measured twice, of which the first is kept" in said
    assert main(["--merge", str(a), "--out", out]) == 1
    assert capsys.readouterr().err == f"error: {out} is there already: give the merged file a name of its own\n"
    assert main(["--merge", str(tmp_path / "none"), "--out", f"{out}2"]) == 1
    assert capsys.readouterr().err.startswith("error: there is no record file ")


def test_completeness_is_told_last_and_by_the_newest_part(tmp_path: Path) -> None:
    """A part is newer than the file that it is of: with more finalists the shape is complete in another way."""
    a = made(tmp_path / "a", A[:1])
    b = tmp_path / "b"
    record(ScriptedDevice(), FAMILIES, A[:1], b, deadline_s=60, scope=Scope(5), echo=lambda _: None)
    task = hgemm(*A[0])
    for latest_wins, of in ((False, 3), (True, 5)):
        with MergingWriter(a, ScriptedDevice().info) as writer:
            writer.add(RecordReader(b), latest_wins)
            digest = Scope(of).digest(accepted_plans(FAMILIES, task))
            assert writer.is_done(task, digest)


def test_two_files_are_compared(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", A), made(tmp_path / "b", B, Slower())
    script = Path(__file__).parent.parent / "scripts" / "compare_records.py"
    done = subprocess.run(
        [sys.executable, str(script), str(a), str(b), "--json"],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(script.parent.parent)},
    )  # fmt: skip
    found = json.loads(done.stdout)
    plans = len(accepted_plans(FAMILIES, hgemm(*B[0])))
    assert found["offline/screen"]["common"] == plans and found["server/final"]["common"] > 0
    assert found["offline/screen"]["median"] == pytest.approx(-0.5, abs=1e-3)
    assert found["offline/cuBLASLt us"]["within_1"] == 1.0
