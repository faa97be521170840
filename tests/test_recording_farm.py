"""Recording on several GPUs: real processes, scripted devices; killed, stopped and starved at moments of our choice."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fakes import toy_families
from tests.recorder_process import ROOT, ManyDevice, argv
from tools.device import DeviceBroken
from tools.families import accepted_plans
from tools.hgemm import hgemm
from tools.record_file import RecordReader
from tools.record_merge import merge_files
from tools.recorder import only
from tools.recording import gpus_of, main, record
from tools.recording_farm import FarmSummary, Gpu, record_on
from tools.recording_parts import Parts, folder_of, parts_of
from tools.recording_scope import Scope
from tools.records import MODES, Budget

FAMILIES = toy_families()
SHAPES = [(64, 64, 64), (4096, 256, 64), (96, 33, 128), (128, 128, 128), (512, 64, 32)]
TASK_IDS = [hgemm(*shape).task_id for shape in SHAPES]
BUDGETS: tuple[Budget, ...] = ("screen", "final")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "records" / "farm.sqlite"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recording in one go, in one process."""
    path = tmp_path_factory.mktemp("whole") / "whole.sqlite"
    record(ManyDevice(), FAMILIES, SHAPES, path, deadline_s=600, echo=lambda _: None)
    return path


def gpu(tmp_path: Path, number: int, *more: str) -> Gpu:
    return Gpu(f"cuda:{number}", argv(tmp_path / f"diary-{number}", *more))


def pipe(tmp_path: Path, name: str) -> Path:
    os.mkfifo(tmp_path / name)
    return tmp_path / name


def run(gpus: list[Gpu], out: Path, lines: list[str] | None = None, deadline_s: float = 600.0) -> FarmSummary:
    echo = (lambda _: None) if lines is None else lines.append
    return record_on(gpus, FAMILIES, SHAPES, out, deadline_s=deadline_s, scope=Scope(), echo=echo, processes=4)


def calls(tmp_path: Path) -> list[str]:
    return [line for path in sorted(tmp_path.glob("diary-*")) for line in path.read_text().splitlines()]


#: Calls that are made for many plans at once, whose results are kept when all are there.
BATCHED = ("profile", "compile", "sanitize")


def repeated(tmp_path: Path, but: tuple[str, ...] = ("compile", "profile_many")) -> list[str]:
    """Measurements that were begun more than once."""
    counts = Counter(line for line in calls(tmp_path) if not line.startswith(but))
    return [line for line, count in counts.items() if count > 1]


def assert_same(out: Path, whole: Path) -> None:
    """Every measurement of the one file is in the other."""
    found, wanted = RecordReader(out), RecordReader(whole)
    assert found.counts() == wanted.counts()
    for shape in SHAPES:
        task_id = hgemm(*shape).task_id
        assert found.best_of(task_id) == wanted.best_of(task_id) is not None
        for variant in accepted_plans(FAMILIES, hgemm(*shape)):
            for mode in MODES:
                for budget in BUDGETS:
                    assert found.timed(variant.key, task_id, mode, budget) == wanted.timed(
                        variant.key, task_id, mode, budget
                    )
    found.close()
    wanted.close()
    assert not folder_of(out).exists(), "nothing is left beside the file"


def test_two_gpus_measure_what_one_does_each_thing_once(tmp_path: Path, out: Path, whole: Path) -> None:
    lines: list[str] = []
    summary = run([gpu(tmp_path, 0), gpu(tmp_path, 1)], out, lines)
    assert summary.finished and not summary.lost
    assert_same(out, whole)
    assert repeated(tmp_path) == []
    compiled = [line for line in calls(tmp_path) if line.startswith("compile")]
    assert len(compiled) == len(set(compiled)), "once, and not once a GPU"
    assert {path.name for path in tmp_path.glob("diary-*")} == {"diary-0", "diary-1"}
    progress = [line for line in lines if "/5 " in line]
    assert [line.split("/")[0] for line in progress] == ["1", "2", "3", "4", "5"]
    assert all("cuda:" in line and "all in about" in line for line in progress)
    again = run([gpu(tmp_path, 7)], out, lines)
    assert (again.finished, again.measured) == (True, 0)
    assert lines[-1] == f"5 of 5 shapes are in {out} already"


#: Calls to be stopped at: the first of its kind, whoever makes it.
COMPILE, SANITIZE = "compile", "sanitize"
SCREEN = rf"time\|.*\|{TASK_IDS[2]}\|offline/screen"
FINAL = rf"time\|.*\|{TASK_IDS[3]}\|server/final"
PROFILE = "profile"


@pytest.mark.parametrize("call", [COMPILE, SCREEN, PROFILE])
def test_a_recorder_that_is_killed_is_named_and_the_other_finishes(
    tmp_path: Path, out: Path, whole: Path, call: str
) -> None:
    reached, lines = pipe(tmp_path, "reached"), list[str]()
    killer = subprocess.Popen(["/bin/sh", "-c", f'read pid < "{reached}" && kill -9 "$pid"'])
    try:
        pause = ("--pause-at", call, "--reached", str(reached))
        summary = run([gpu(tmp_path, 0, *pause), gpu(tmp_path, 1, *pause)], out, lines)
        assert killer.wait(timeout=60) == 0
    finally:
        killer.kill()
        killer.wait()
    assert summary.finished
    (sentence,) = summary.lost
    assert re.match(r"the recorder of cuda:[01] died \(SIGKILL\) ", sentence)
    assert f"lost: {sentence}; the other goes on" in lines
    assert len(repeated(tmp_path, BATCHED)) <= 1, "but for the call under which it died"
    assert_same(out, whole)


PARENT = """
import sys
from pathlib import Path
from tests.recorder_process import argv
from tests.test_recording_farm import FAMILIES, SHAPES
from tools import recording
recording.load_families = lambda: FAMILIES
tmp, out = Path(sys.argv[1]), sys.argv[2]
shapes = tmp / "shapes.csv"
shapes.write_text("".join(f"{m},{n},{k}\\n" for m, n, k in SHAPES))
def recorder(ordinal, jobs):
    return argv(tmp / f"diary-{ordinal}", *sys.argv[3:])
arguments = ["--device", "cuda:0", "--device", "cuda:1", "--out", out, "--deadline", "600", "--shapes", str(shapes)]
sys.exit(recording.main(arguments, recorder))
"""


def parent(tmp_path: Path, out: Path, call: str, *more: str) -> tuple[subprocess.Popen[str], int]:
    """A recording as a process of its own, once a recorder of it waits at ``call``; and the id of that one."""
    reached = pipe(tmp_path, "reached")
    command = [sys.executable, "-c", PARENT, str(tmp_path), str(out), "--pause-at", call, "--reached", str(reached)]
    process = subprocess.Popen(
        [*command, *more], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    with os.fdopen(os.open(reached, os.O_RDONLY | os.O_NONBLOCK)) as told, selectors.DefaultSelector() as selector:
        selector.register(told, selectors.EVENT_READ)
        output = os.dup(process.stdout.fileno())
        selector.register(output, selectors.EVENT_READ)
        said = b""
        while not any(key.fileobj is told for key, _ in selector.select()):
            more = os.read(output, 1 << 16)
            assert more, f"it ended before it came so far: {said.decode()}"
            said += more
        os.close(output)
        return process, int(told.readline())


@pytest.mark.parametrize("call", [SANITIZE, FINAL])
def test_kill_9_of_the_leader_loses_nothing(tmp_path: Path, out: Path, whole: Path, call: str) -> None:
    process, _ = parent(tmp_path, out, call)
    process.kill()
    process.communicate()
    summary = run([gpu(tmp_path, 2)], out)  # waits for the orphans to let go of their parts
    assert summary.finished
    assert len(repeated(tmp_path, BATCHED)) <= 2, "but for the two calls that ran"
    assert_same(out, whole)


def test_ctrl_c_ends_after_the_running_call_and_the_file_is_whole(tmp_path: Path, out: Path, whole: Path) -> None:
    go_on = pipe(tmp_path, "go-on")
    process, _ = parent(tmp_path, out, FINAL, "--go-on", str(go_on))
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    while "stopping after the running calls" not in lines[-1]:
        assert lines[-1]
        lines.append(process.stdout.readline())
    go_on.write_text("now")
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: what was measured is kept; the same command goes on" in rest
    assert RecordReader(out).counts()["timings"] > 0 and not folder_of(out).exists()
    assert run([gpu(tmp_path, 2)], out).finished
    assert repeated(tmp_path) == []
    assert_same(out, whole)


def test_a_disk_that_is_full_is_one_sentence_and_nothing_is_lost(tmp_path: Path, out: Path, whole: Path) -> None:
    summary = run([gpu(tmp_path, 0, "--file-bytes", str(700 << 10))], out)
    assert not summary.finished
    (sentence,) = summary.lost
    assert sentence.startswith("cuda:0 cannot go on at ") and "disk" in sentence
    kept = RecordReader(out).counts()["timings"]
    assert kept > 0
    assert run([gpu(tmp_path, 1)], out).finished
    assert len(repeated(tmp_path, BATCHED)) <= 1
    assert_same(out, whole)


def test_a_gpu_that_cannot_go_on_is_named(tmp_path: Path, out: Path, whole: Path) -> None:
    lines: list[str] = []
    summary = run([gpu(tmp_path, 0, "--broken-at", COMPILE)], out, lines)
    assert not summary.finished and not summary.late
    assert summary.lost == ("cuda:0 cannot go on when it was to compile: the worker cannot be started",)
    assert f"lost: {summary.lost[0]}" in lines
    assert run([gpu(tmp_path, 1)], out).finished
    assert_same(out, whole)


def test_none_that_can_be_opened(tmp_path: Path, out: Path) -> None:
    with pytest.raises(DeviceBroken, match=r"the recorder of cuda:0 died \(code 2: .*unrecognized arguments"):
        run([gpu(tmp_path, 0, "--no-such-option")], out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("ordinal", "visible", "found"), [(1, None, "1"), (0, "3", "3"), (1, "GPU-a, GPU-b", "GPU-b"), (1, "3", None)]
)
def test_a_recorder_sees_its_gpu_alone(ordinal: int, visible: str | None, found: str | None) -> None:
    if found is None:
        with pytest.raises(DeviceBroken, match="there is no cuda:1: CUDA_VISIBLE_DEVICES=3 shows others only"):
            only(ordinal, visible)
    else:
        assert only(ordinal, visible) == found


def test_all_gpus_share_the_cores(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "all", "--out", "x", "--deadline", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    gpus = gpus_of(["all"], 9, lambda ordinal, jobs: [str(ordinal), str(jobs)])
    assert gpus == [Gpu("cuda:0", ["0", "4"]), Gpu("cuda:1", ["1", "4"])]
    assert main([*arguments, "--device", "cuda:1"]) == 1
    assert "--device all is all there are" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(arguments) == 1
    assert "this machine shows no NVIDIA GPU" in capsys.readouterr().err


def test_without_a_gpu_it_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorder itself, on a machine that has none, or whose packages for one are not there."""
    out = tmp_path / "none.sqlite"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tools.recording", "--device", "cuda:1", "--out", str(out), "--deadline", "60"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"^error: the recorder of cuda:1 died .*there is no cuda:1", done.stderr)
    assert not out.exists() and not folder_of(out).exists()


def test_what_is_no_record_file_is_refused_before_a_gpu_is_opened(tmp_path: Path, out: Path) -> None:
    (tmp_path / "text").write_text("not a database, this is " * 100)
    for path, words in ((tmp_path, "is a folder, not a file"), (tmp_path / "text", "is not a database")):
        with pytest.raises(DeviceBroken, match=words):
            run([gpu(tmp_path, 0, "--no-such-option")], path)
    assert not (tmp_path / "diary-0").exists()


def test_gpus_that_differ_are_refused(tmp_path: Path, out: Path) -> None:
    said = "cuda:0 and cuda:1 cannot share a record file: driver 1.0 and driver 2.0; record them one by one"
    with pytest.raises(DeviceBroken, match=said):
        run([gpu(tmp_path, 0), gpu(tmp_path, 1, "--driver", "2.0")], out)
    assert not out.exists()


def test_the_deadline_ends_it_and_the_same_command_goes_on(tmp_path: Path, out: Path, whole: Path) -> None:
    lines: list[str] = []
    summary = run([gpu(tmp_path, 0)], out, lines, deadline_s=0.0)
    assert (summary.late, summary.finished, summary.measured) == (True, False, 0)
    assert lines[-1] == f"deadline: 0 of 5 shapes are complete in {out}; the same command goes on"
    assert run([gpu(tmp_path, 0)], out, lines).finished
    assert_same(out, whole)


def test_two_recordings_of_one_file_are_refused(tmp_path: Path, out: Path) -> None:
    with Parts(out).held(), pytest.raises(DeviceBroken, match=r"another process is recording to .*wait for it to end"):
        run([gpu(tmp_path, 0)], out)
    assert not folder_of(out).exists()


def test_what_a_killed_recording_left_is_taken_in_by_a_merge_too(tmp_path: Path, out: Path, whole: Path) -> None:
    process, orphan = parent(tmp_path, out, FINAL)
    os.kill(orphan, signal.SIGSTOP)  # it holds its part for ever, as a copy of the folder does not know
    process.kill()
    process.communicate()
    copied = tmp_path / "copied" / "farm.sqlite"
    copied.parent.mkdir()
    for path in (out, *folder_of(out).glob("*")):
        target = copied if path == out else folder_of(copied) / path.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    os.kill(orphan, signal.SIGKILL)
    left = len(parts_of(copied))
    before = {path: path.read_bytes() for path in [copied, *parts_of(copied)]}
    merged = tmp_path / "merged.sqlite"
    counts = merge_files([copied, whole], parts_of, merged)
    assert left == 2 and counts.again > 0
    assert {path: path.read_bytes() for path in before} == before
    assert_same(merged, whole)
