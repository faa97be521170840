"""scripts/try_plans.py: which plans a filter names, what is measured and kept, and the whole command over a pipe to a
worker with the simulated GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.fakes import BatchingDevice, ScriptedDevice, toy_families
from tools.cuda_device import CudaDevice
from tools.families import load_families
from tools.hgemm import hgemm
from tools.plan_filters import Filter, FilterError, parse_job
from tools.record_file import RecordReader
from tools.records import CompileResult, Depth, DeviceInfo, Reason, SanitizeResult, Task, Variant, VerifyResult

ROOT = Path(__file__).resolve().parent.parent


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("try_plans", ROOT / "scripts" / "try_plans.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["try_plans"] = module  # dataclasses look there for the annotations
    spec.loader.exec_module(module)
    return module


SCRIPT = script()
FAMILIES = toy_families()
SHAPES = ("64x64x64", "4096x256x64")


class SanitizingDevice(BatchingDevice):
    def sanitize_many(self, items: Sequence[tuple[Variant, Sequence[Task]]]) -> list[SanitizeResult]:
        return [self.sanitize(variant, tasks) for variant, tasks in items]


def job(*filters: str, shapes: Sequence[str] = SHAPES) -> list[tuple[Task, list[Variant]]]:
    return parse_job([f"{' '.join(shapes)}: {f}" for f in filters], FAMILIES)


# --- what a filter names -----------------------------------------------------------------------------------------


def test_a_filter_names_layouts_and_values_of_knobs() -> None:
    chosen = list(Filter.parse("toy/nk BM=32,64 BN=128", FAMILIES).variants(FAMILIES))
    assert [(v.b_layout, v.plan.knobs) for v in chosen if v.plan] == [
        ("nk", {"BM": 32, "BN": 128}),
        ("nk", {"BM": 64, "BN": 128}),
    ]
    assert len(list(Filter.parse("toy", FAMILIES).variants(FAMILIES))) == 18


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' begins with no family: there are toy, toy_even"),
        ("toys BM=32", "begins with no family"),
        ("toy/tn", "toy has layouts kn, nk of B, not 'tn'"),
        ("toy BK=32", "toy has no knob 'BK'; it has BM, BN"),
        ("toy BM=32,48", "toy: knob BM is one of 32, 64, 128, not '32,48'"),
        ("toy BM", "toy: knob BM is one of 32, 64, 128, not ''"),
    ],
)
def test_a_filter_of_what_there_is_not(text: str, says: str) -> None:
    with pytest.raises(FilterError) as error:
        Filter.parse(text, FAMILIES)
    assert says in str(error.value)


def test_a_job_keeps_its_order_and_joins_lines_of_a_shape() -> None:
    lines = ["# later first", "8x8x7 64x64x64: toy/nk BM=32 BN=32", "", "64x64x64 : toy_even BM=64 BN=64 # both"]
    lines.append("8x8x7: toy_even")  # which takes no odd K
    found = parse_job(lines, FAMILIES)
    assert [task.label for task, _ in found] == ["8x8x7", "64x64x64"]
    assert [v.plan.family for _, variants in found for v in variants if v.plan] == [
        "toy",
        "toy",
        "toy_even",
        "toy_even",
    ]


@pytest.mark.parametrize("line", ["64x64x64 toy", "64x64: toy", "64x64x64: toy BM=1"])
def test_a_job_line_that_says_nothing_is_refused_in_a_sentence(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jobs").write_text(line)
    assert SCRIPT.main(["--out", str(tmp_path / "x"), "--job", str(tmp_path / "jobs"), "--list"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_plans_of_a_family_are_named_by_its_knobs() -> None:
    families = load_families()
    found = parse_job(["4096x4096x4096: wgmma_persistent BM=128 BN=256 CLUSTER_M=2"], families)
    assert {v.plan.knobs["CLUSTER_M"] for _, variants in found for v in variants if v.plan} == {2}


# --- what is measured and kept -----------------------------------------------------------------------------------


def tried(
    device: ScriptedDevice, out: Path, *filters: str, deadline_s: float = 60.0, **effort: object
) -> tuple[list[object], bool, list[str]]:
    lines: list[str] = []
    reports, finished = SCRIPT.try_plans(
        device,
        FAMILIES,
        job(*filters),
        out,
        deadline_s=deadline_s,
        effort=SCRIPT.Effort(**effort),
        echo=lines.append,
        commit="abc",
    )
    return reports, finished, lines


def test_all_are_screened_the_best_two_are_timed_again_and_sanitized(tmp_path: Path) -> None:
    device = SanitizingDevice()
    reports, finished, lines = tried(device, tmp_path / "x.sqlite", "toy")
    assert finished
    settings = [(call.tool, call.setting) for call in device.calls]
    assert settings.count(("time", "offline/screen")) == settings.count(("verify", "quick")) == 36
    assert settings.count(("time", "offline/final")) == settings.count(("verify", "full")) == 4
    for report, shape in zip(reports, SHAPES, strict=True):
        m, n, k = map(int, shape.split("x"))
        order = sorted(report.tried, key=lambda r: -r.screen_ratio)  # type: ignore[attr-defined]
        assert [row.final_ratio is not None for row in order] == [True] * 2 + [False] * 16
        assert all(row.sanitize == "ok" for row in order[:2])
        assert order[0].screen_us == pytest.approx(
            min(device.time_us(v, hgemm(m, n, k)) for v in job("toy", shapes=[shape])[0][1])
        )
    assert any("== 2/2" in line for line in lines)


def test_the_same_command_measures_nothing_again_and_says_the_same(tmp_path: Path) -> None:
    out = tmp_path / "x.sqlite"
    first = tried(SanitizingDevice(), out, "toy BM=32")
    again = SanitizingDevice()
    second = tried(again, out, "toy BM=32")
    assert [call for call in again.calls if call.tool != "compile"] == []
    for one, other in zip(first[0], second[0], strict=True):
        for row, same in zip(one.tried, other.tried, strict=True):  # type: ignore[attr-defined]
            assert (row.key, row.status, row.sanitize) == (same.key, same.status, same.sanitize)
            assert same.screen_ratio == pytest.approx(row.screen_ratio, rel=1e-4)  # the file holds fewer digits
            assert same.final_us == (row.final_us and pytest.approx(row.final_us, rel=1e-4))
    assert RecordReader(out).meta("commit") == "abc"


def test_the_deadline_ends_it_and_the_rest_is_measured_by_the_next_call(tmp_path: Path) -> None:
    out = tmp_path / "x.sqlite"
    device = SanitizingDevice()
    assert tried(device, out, "toy", deadline_s=-1.0)[1] is False
    assert not [call for call in device.calls if call.tool in ("verify", "time")]
    assert tried(device, out, "toy")[1] is True


def test_a_source_that_hangs_is_not_tried_again_nor_a_family_with_two_of_them(tmp_path: Path) -> None:
    def hangs(tool: str, variant: Variant, task: Task | None) -> Reason | None:
        bad = variant.plan is not None and variant.plan.family == "toy_even"
        return Reason.HANG if tool == "verify" and bad else None

    device = SanitizingDevice(hangs)
    reports, finished, lines = tried(device, tmp_path / "x.sqlite", "toy_even", "toy BM=32 BN=32")
    assert finished
    hung = [call for call in device.calls if call.tool == "verify" and call.setting == "quick"]
    assert len(hung) == 2 + 4  # two sources, and the two plans of the other family at both shapes
    text = "\n".join(lines)
    assert "skipped: its source hung" in text and "skipped: 2 sources of toy_even hung or crashed" in text
    assert [row.final_ratio is not None for row in reports[0].tried if "toy/" in row.label] == [True, True]  # type: ignore[attr-defined]


def test_a_finding_of_sanitize_is_said_and_kept(tmp_path: Path) -> None:
    def racy(tool: str, variant: Variant, task: Task | None) -> Reason | None:
        return Reason.RACE if tool == "sanitize" else None

    reports, _, lines = tried(SanitizingDevice(racy), tmp_path / "x.sqlite", "toy/nk BM=32", finals=1)
    assert "sanitized 1 plans, 1 with findings" in lines[-1] or "sanitized 2 plans, 2 with findings" in lines[-1]
    said = [row.sanitize for report in reports for row in report.tried if row.final_ratio]  # type: ignore[attr-defined]
    assert said and all(text.startswith("race: ") for text in said)


def test_the_best_that_was_recorded_stands_beside(tmp_path: Path) -> None:
    tried(SanitizingDevice(), tmp_path / "x.sqlite", "toy BM=32")
    found = SCRIPT.best_recorded(RecordReader(tmp_path / "x.sqlite"), FAMILIES)
    assert set(found) == {task.task_id for task, _ in job("toy")}
    ratio, label = found[hgemm(64, 64, 64).task_id]
    assert 0.5 < ratio < 1.3 and label.startswith("toy/")


# --- the whole command -------------------------------------------------------------------------------------------

#: The worker's own protocol around the simulated GPU; every cubin is the same honest kernel.
WORKER = """
import argparse, json
from tests.fakes import ScriptedDevice
from tests.simulated_gpu import honest, simulated_worker
from tools.frames import read_frame, write_frame
parser = argparse.ArgumentParser()
parser.add_argument("--in-fd", type=int)
parser.add_argument("--out-fd", type=int)
args = parser.parse_args()
def say(value):
    write_frame(args.out_fd, json.dumps(value).encode())
say({"ready": True})
while (frame := read_frame(args.in_fd)) is not None:
    request = json.loads(frame)
    say({"started": True})
    dims = request["task"]["dims"]
    with simulated_worker(honest, 2.0, dims, {"first": 3.0, "second": 2.5, "gemmex": 2.7}) as gpu:
        say(gpu.ask(request))
"""


class SimulatedDevice(CudaDevice):
    """Real requests over a real pipe to a real process, but for the compiler, the sanitizer, the GPU and those tiers of
    verify that the simulated GPU has not."""

    @property
    def info(self) -> DeviceInfo:
        return ScriptedDevice(name="simulated").info

    def _worker(self) -> list[str]:
        return [sys.executable, "-c", WORKER]

    def compile(self, variant: Variant) -> CompileResult:
        return ScriptedDevice().compile(variant)

    def compile_many(self, variants: Sequence[Variant], jobs: int | None = None) -> list[CompileResult]:
        return [self.compile(variant) for variant in variants]

    def sanitize_many(self, items: Sequence[tuple[Variant, Sequence[Task]]]) -> list[SanitizeResult]:
        return [ScriptedDevice().sanitize(variant, tasks) for variant, tasks in items]

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult:
        return (
            super().verify(variant, task, depth) if depth == "quick" else ScriptedDevice().verify(variant, task, depth)
        )

    def _cubin_path(self, compiled: CompileResult) -> Path:
        return Path("simulated.cubin")


def test_the_command_from_filter_to_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, said = tmp_path / "x.sqlite", tmp_path / "x.json"
    arguments = [
        "--out",
        str(out),
        "--json",
        str(said),
        "--shapes",
        "64x64x64",
        "--plans",
        "mma_ldg/nk BN=8 CLUSTER_K=1",
    ]
    with SimulatedDevice(cache_dir=tmp_path) as device:
        assert SCRIPT.main([*arguments, "--finals", "1", "--all-modes"], device=device) == 0
        assert SCRIPT.main([*arguments[:2], *arguments[4:], "--deadline", "-5"], device=device) == SCRIPT.OUT_OF_TIME
    printed = capsys.readouterr()
    assert "64x64x64 | 1.250 | " in printed.out and not printed.err
    counts = RecordReader(out).counts()
    assert (counts["timings"], counts["verifies"], counts["sanitizes"]) == (2 + 3, 2 + 1, 1)
    (report,) = json.loads(said.read_text())
    (best,) = [row for row in report["tried"] if row["final_ratio"]]
    assert best["final_ratio"] == pytest.approx(1.25, rel=0.01)  # 2.5 us against 2.0
    assert set(best["other_modes"]) == {"rotating", "server"} and best["sanitize"] == "ok"
