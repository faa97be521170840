"""scripts/check_winners.py: it searches as `agent optimize` does, counts what misses, and says so by its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import ScriptedDevice
from records_kit import ROOT, agent, environment, make_record

from scripts import check_winners
from scripts.check_winners import Found, lines, recorded, rows
from tools.hgemm import hgemm

SHAPES = [(64, 64, 64), (128, 64, 64), (100, 64, 64)]  # the last one is not in the grid


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("records") / "toy.sqlite", *SHAPES, device=ScriptedDevice())


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["check_winners.py", *words])
    with pytest.raises(SystemExit) as caught:
        check_winners.main()
    assert isinstance(caught.value.code, int), caught.value.code
    return caught.value.code


def test_it_ends_where_the_command_ends(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(monkeypatch, "--records", str(path), "--evaluations", "4", "--json", "--jobs", "2")
    told = json.loads(capsys.readouterr().out)
    assert [one["shape"] for one in told["shapes"]] == ["64x64x64", "128x64x64"]
    missed = 0
    for one in told["shapes"]:
        done = agent(
            tmp_path, "optimize", "--shape", one["shape"], "--device", f"replay:{path}", "--evaluations", "4", "--json"
        )
        best = json.loads(done.stdout)["best"]
        assert one["kernel"] == best["label"] and one["evaluations"] == 4 and one["is_complete"]
        missed += one["loss"] > 0.02
    assert code == (1 if missed else 0)
    assert told["rows"]["all"]["within"] == 2 - missed and told["rows"]["likely plans recorded"]["shapes"] == 0


def test_with_every_plan_it_ends_at_the_winner_and_with_one_it_may_miss(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--records", str(path), "--shape", "100,64,64")
    assert run(monkeypatch, *words, "--evaluations", "1000", "--set", "policy.prior=model") == 0
    assert "every plan recorded         1       1        1  0.000 %" in capsys.readouterr().out
    assert run(monkeypatch, *words, "--evaluations", "1", "--policy", "random") == 1
    assert "misses 100x64x64" in capsys.readouterr().out


def test_what_is_not_recorded_is_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for words, why in (
        (("--records", str(path), "--shape", "64,64,128"), "has no record of 64x64x128"),
        (("--records", str(tmp_path / "none")), "there is no database"),
        (("--records", str(path), "--set", "policy.prior=luck"), "policy.prior"),
        (("--records", str(path), "--shape", "64"), "64"),
    ):
        monkeypatch.setattr(sys, "argv", ["check_winners.py", *words])
        with pytest.raises(SystemExit, match=why):
            check_winners.main()


def test_ctrl_c_is_one_sentence_and_ends_the_workers(tmp_path: Path) -> None:
    """A terminal sends it to the whole group; `kill -INT` to the parent alone ends the same way."""
    command = [sys.executable, "scripts/check_winners.py", "--evaluations", "400", "--jobs", "2"]
    for size in ("64", "128", "256", "512", "1024", "2048"):
        command += ["--shape", f"{size},{size},64"]
    for send in (os.killpg, os.kill):
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(tmp_path), process_group=0
        )
        until = time.monotonic() + 60
        while len(begun := workers_of(process.pid)) < 2 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        send(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        assert len(begun) == 2 and process.returncode == 130 and "Traceback" not in said, said
        assert said.splitlines()[-1].startswith("interrupted: ")
        assert not any(Path(f"/proc/{pid}").exists() for pid in begun)


def test_ctrl_c_while_workers_start_waits_until_all_are_known() -> None:
    is_over, started = threading.Event(), []
    other = threading.Thread(target=is_over.wait)  # which may take the signal as well
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt), check_winners._ctrl_c_waits():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            started.append(1)
    finally:
        is_over.set()
        other.join()
    assert started


def workers_of(parent: int) -> list[int]:
    """Its processes that ignore ctrl-C by now."""
    found = []
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            status = dict(line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line)
            if status["PPid"] == str(parent) and int(status["SigIgn"], 16) & 1 << (signal.SIGINT - 1):
                found.append(int(path.parent.name))
    return found


def test_counts_and_misses() -> None:
    good = Found("a", True, "k", 1.0, 1.0, True, 0.0, 24, 0)
    near = replace(good, shape="b", is_winner=False, loss=0.015)
    lost = replace(good, shape="c", kernel="", ratio=None, is_winner=False, is_complete=False, loss=1.0)
    unknown = replace(good, shape="d", recorded_ratio=None, is_winner=False, is_complete=False, loss=None)
    found = [good, near, lost, unknown]
    told = rows(found, 2.0)
    assert [told["all"][name] for name in ("shapes", "at_the_winner", "within", "worst_at")] == [3, 1, 2, "c"]
    assert told["every plan recorded"]["within"] == 2 and told["likely plans recorded"]["shapes"] == 1
    assert rows(found, 1.0)["all"]["within"] == 1 and not unknown.misses(0.0)
    text = "\n".join(lines(found, 2.0))
    assert "misses c: 1.0000 recorded, found no kernel that passed the gate" in text
    assert "d has no recorded winner" in text and "misses b" not in text


def test_winners_are_those_of_the_report(path: Path) -> None:
    known = recorded(path, None)
    assert [one.task for one in known] == [hgemm(*dims) for dims in SHAPES[:2]]
    assert all(one.is_complete and one.winner and one.ratio for one in known)
