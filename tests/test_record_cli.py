"""The command ``agent record``: what it hands to the recorder of tools, and what it refuses in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import ScriptedDevice, toy_families
from typer.testing import CliRunner, Result

from agent import devices
from agent.cli import app
from tools import recording
from tools.record_file import RecordReader
from tools.recording import OUT_OF_TIME, record
from tools.replay import default_path
from tools.visible_gpus import VisibleGpu

RECORD = default_path()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["record", *arguments])


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the recorder is called with, on a machine with two GPUs."""
    found: list[list[str]] = []
    monkeypatch.setattr(recording, "main", lambda arguments: found.append(arguments) or 0)
    monkeypatch.setattr(devices, "missing_gpu_modules", list)
    monkeypatch.setattr(devices, "visible_gpus", lambda: [VisibleGpu(n, "H200", (9, 0)) for n in range(2)])
    return found


@pytest.fixture
def made(tmp_path: Path) -> list[str]:
    paths = []
    for name, shape in (("a", (64, 64, 64)), ("b", (96, 33, 128))):
        paths.append(str(tmp_path / name))
        record(ScriptedDevice(), toy_families(), [shape], tmp_path / name, deadline_s=60, echo=lambda _: None)
    return paths


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("", "--device=cuda:0 --top=3"),
        ("--device cuda:0 --device cuda:1", "--device=cuda:0 --device=cuda:1 --top=3"),
        (
            "--device all --grid paper --plans 24 --no-profiles",
            "--device=all --grid=paper --top=3 --plans=24 --no-profiles",
        ),
        ("--one-by-one --limit 5 --jobs 4", "--device=cuda:0 --limit=5 --top=3 --jobs=4 --one-by-one"),
        ("--no-sanitize", "--device=cuda:0 --top=3 --no-sanitize"),
        (
            f"--check {RECORD} --seed 7 --json",
            f"--device=cuda:0 --top=3 --check={RECORD} --random=60 --seed=7 --json",
        ),
        (f"--check {RECORD} --random 0", f"--device=cuda:0 --top=3 --check={RECORD} --random=0 --seed=0"),
    ],
)
def test_what_the_recorder_is_given(given: list[list[str]], arguments: str, wanted: str) -> None:
    assert invoke("--out", "x", "--deadline", "9", *arguments.split()).exit_code == 0
    (found,) = given
    assert sorted(found) == sorted(["--out=x", "--deadline=9.0", *wanted.split()])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--deadline 9 --grid paper --shapes s.csv", "--shapes and --grid are two things: give one of them"),
        ("--deadline 9 --check r --merge a", "--merge and --check are two things: give one of them"),
        ("--grid paper", "how long may it take? Give --deadline SECONDS, for example --deadline 3600"),
        ("--deadline 9 --device cuda:2", "there is no cuda:2: this machine has cuda:0, cuda:1"),
        ("--deadline 9 --device replay:h200", "records are made on a GPU: --device cuda:0, not 'replay:h200'"),
        ("--deadline 9 --device gpu", "there is no device 'gpu'"),
    ],
)
def test_one_sentence(given: list[list[str]], arguments: str, words: str) -> None:
    done = invoke("--out", "x", *arguments.split())
    assert done.exit_code == 1 and not given
    assert done.stderr.startswith("error: ") and words in done.stderr and done.stderr.count("\n") == 1


def test_out_of_time_is_no_rejection(given: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for code, wanted in ((OUT_OF_TIME, 1), (recording.DISAGREES, 2), (130, 130)):
        monkeypatch.setattr(recording, "main", lambda _, code=code: code)
        assert invoke("--out", "x", "--deadline", "9").exit_code == wanted


def test_a_merge_needs_no_gpu_and_no_deadline(tmp_path: Path, made: list[str]) -> None:
    done = invoke("--merge", made[0], "--merge", made[1], "--out", str(tmp_path / "both"))
    assert done.exit_code == 0
    assert len(RecordReader(tmp_path / "both").tasks()) == 2


def test_help_has_examples() -> None:
    said = " ".join(invoke("--help").stdout.split())
    for words in ("--device all --grid paper", "--merge a.sqlite --merge b.sqlite", "--check h200.sqlite"):
        assert words in said


def test_a_mistaken_file_is_told_of_before_a_missing_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", list)
    monkeypatch.setattr(devices, "_DRIVER_FILES", ())
    (tmp_path / "notes.md").write_text("# mine, long enough to be looked at\n" * 9)
    missing = invoke("--out", str(tmp_path / "x"), "--deadline", "9", "--check", str(tmp_path / "none.sqlite"))
    assert missing.exit_code == 1 and "there is no record file" in missing.stderr
    notes = invoke("--out", str(tmp_path / "notes.md"), "--deadline", "9")
    assert notes.exit_code == 1 and "notes.md" in notes.stderr and "GPU" not in notes.stderr
    none = invoke("--out", str(tmp_path / "x"), "--deadline", "9")
    assert none.exit_code == 1 and "this machine has none" in none.stderr and "replay" not in none.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]
