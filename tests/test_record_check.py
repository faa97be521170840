"""Recorded winners timed again: which shapes, what is compared, and what is said of what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.fakes import ScriptedDevice, toy_families
from tests.recorder_process import argv
from tools import recording
from tools.hgemm import hgemm
from tools.record_file import RecordReader
from tools.recording import DISAGREES, main, record
from tools.records import Reason, Task, Variant

FAMILIES = toy_families()
SHAPES = [(64, 64, 64), (4096, 256, 64), (96, 33, 128), (128, 128, 128), (512, 64, 32)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "load_families", lambda: FAMILIES)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "recorded.sqlite"
    record(ScriptedDevice(), FAMILIES, SHAPES, path, deadline_s=60, echo=lambda _: None)
    return path


def check(recorded: Path, out: Path, *more: str, seed: int = 0, drawn: int = 3) -> int:
    def recorder(ordinal: int, jobs: int) -> Sequence[str]:
        return argv(out.with_name(f"diary-{ordinal}"), *more)

    arguments = ["--check", str(recorded), "--out", str(out), "--deadline", "600", "--json"]
    return main([*arguments, "--random", str(drawn), "--seed", str(seed)], recorder)


def test_the_winners_come_out_again(tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "again.sqlite"
    assert check(recorded, out, "--factor", "0.97") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["share"], report["seed"], len(report["shapes"])) == (1.0, 0, 3)
    assert report["median_off"] == pytest.approx(-0.03, abs=1e-4)
    reader, again = RecordReader(recorded), RecordReader(out)
    for shape in report["shapes"]:
        assert shape["key"] == reader.best_of(shape["task_id"])
        first, second = (r.timed(shape["key"], shape["task_id"], "offline", "final") for r in (reader, again))
        assert first is not None and second is not None
        assert shape["ratio"] == first.row().ratio and shape["ratio_again"] == second.row().ratio  # type: ignore[union-attr]
    assert again.counts() | {"plans": 0, "compiles": 0} == {
        "plans": 0, "compiles": 0, "tasks": 3, "verifies": 6, "timings": 6, "baselines": 6,
        "sanitizes": 0, "profiles": 0,
    }  # fmt: skip


def test_what_is_there_is_compared_without_a_gpu(
    tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again.sqlite"
    assert check(recorded, out) == 0
    first = capsys.readouterr().out
    assert check(recorded, out, "--no-such-option") == 0
    assert capsys.readouterr().out == first
    arguments = ["--check", str(recorded), "--out", str(out), "--deadline", "9", "--random", "3"]
    assert main(arguments) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 3 + 2 and "recorded" in table[0] and "again" in table[0]
    assert table[-1].startswith("3 of 3 shapes (100 %) agree within 5 %, 90 % should; the median of")


def test_the_shapes_that_out_holds_are_compared_whatever_was_recorded_since(
    tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again.sqlite"
    assert check(recorded, out, drawn=2) == 0
    first = {shape["label"] for shape in json.loads(capsys.readouterr().out)["shapes"]}
    assert check(recorded, out, "--no-such-option", drawn=0) == 0
    assert {shape["label"] for shape in json.loads(capsys.readouterr().out)["shapes"]} == first
    assert check(recorded, tmp_path / "none.sqlite", drawn=0) == 1
    assert "none.sqlite" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        check(recorded, out, drawn=-1)


def test_other_ratios_are_exit_code_2(tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(recorded, tmp_path / "again.sqlite", "--factor", "0.94") == DISAGREES
    assert json.loads(capsys.readouterr().out)["share"] == 0.0


def test_the_seed_says_which_shapes(tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = []
    for seed in (1, 1, 2):
        check(recorded, tmp_path / "again.sqlite", seed=seed, drawn=2)
        drawn.append([shape["label"] for shape in json.loads(capsys.readouterr().out)["shapes"]])
    assert drawn[0] == drawn[1] != drawn[2]


Script = Callable[[str, Variant, Task | None], Reason | None]


def test_only_what_passed_the_whole_gate_is_a_winner(
    tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = {shape["key"] for shape in shapes_of(recorded, tmp_path / "first.sqlite", capsys)}

    def racy(tool: str, variant: Variant, task: Task | None) -> Reason | None:
        return Reason.RACE if tool == "sanitize" and variant.key in best else None

    other = tmp_path / "racy.sqlite"
    record(ScriptedDevice(racy), FAMILIES, SHAPES, other, deadline_s=60, echo=lambda _: None)
    assert not best & {shape["key"] for shape in shapes_of(other, tmp_path / "second.sqlite", capsys)}


def shapes_of(recorded: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    check(recorded, out, drawn=9)
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)["shapes"]
    assert len(found) == len(SHAPES)
    return found


def test_a_source_that_changed_cannot_be_timed_again(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family = FAMILIES["toy"]
    edited = {**FAMILIES, "toy": family.model_copy(update={"revision": 9})}
    monkeypatch.setattr(recording, "load_families", lambda: edited)
    assert check(recorded, tmp_path / "again.sqlite", drawn=9) == DISAGREES
    shapes = json.loads(capsys.readouterr().out)["shapes"]
    gone = [shape for shape in shapes if shape["plan"].startswith("toy/")]
    assert gone and all(shape["why"] == "its source is not the recorded one any more" for shape in gone)


def test_what_fails_now_is_said(tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(recorded, tmp_path / "again.sqlite", "--wrong", "full") == DISAGREES
    (why,) = {shape["why"] for shape in json.loads(capsys.readouterr().out)["shapes"]}
    assert why == "wrong_result: scripted: verify found wrong_result"


@pytest.mark.parametrize(
    ("recorded_name", "out_name", "words"),
    [("none.sqlite", "again.sqlite", "there is no record file"), ("empty.sqlite", "again.sqlite", "no shape with a")],
)
def test_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded_name: str, out_name: str, words: str
) -> None:
    record(ScriptedDevice(), FAMILIES, [], tmp_path / "empty.sqlite", deadline_s=9, echo=lambda _: None)
    assert check(tmp_path / recorded_name, tmp_path / out_name) == 1
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_the_checked_file_is_not_written_to(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(recorded, recorded) == 1
    assert "is the file that is checked" in capsys.readouterr().err
    assert hgemm(*SHAPES[0]).task_id in {task.task_id for task in RecordReader(recorded).tasks()}
