"""Killed, interrupted, locked: a session goes on, and what was measured is not measured again."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedDevice
from langgraph.checkpoint.sqlite import SqliteSaver
from loop_kit import make_deps, run
from records_kit import DIARY_AGENT, ROOT, Nursery, agent, environment, make_record

from agent.graph import build_graph, run_graph

SHAPE = "64,64,64"
SESSIONS, KILLS_EACH = 4, 5


@pytest.fixture(scope="module")
def record_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("record") / "h.sqlite", (64, 64, 64))


def optimize(record_path: Path, session: str = "s", evaluations: int = 96) -> list[str]:
    device = f"replay:{record_path}"
    flags = ["--shape", SHAPE, "--device", device, "--session", session, "--evaluations", str(evaluations)]
    return ["optimize", *flags, "--seed", "7"]


def diary_agent(home: Path, diary: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", DIARY_AGENT + "main()", *arguments, "-q", "--json"],
        cwd=ROOT,
        env=environment(home, DIARY=str(diary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def committed(home: Path) -> set[tuple[str, str, str, str]]:
    """What the store holds of measurements, in the diary's words."""
    path = home / "store.sqlite"
    if not path.exists():
        return set()
    with sqlite3.connect(path) as db:
        rows = db.execute(
            "SELECT kind, coalesce(variant_key, ''), coalesce(task_id, ''), setting FROM results "
            "WHERE kind IN ('verify', 'time', 'profile', 'baselines')"
        ).fetchall()
    return {(str(a), str(b), str(c), str(d)) for a, b, c, d in rows}


def noted(diary: Path) -> list[tuple[str, ...]]:
    return [tuple(line.split("|")) for line in diary.read_text().splitlines()] if diary.exists() else []


def result(summary: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on interruptions."""
    names = ("best", "best_per_layout", "leaderboard", "evaluations", "passed", "rejected", "best_curve", "references")
    return {name: summary.get(name) for name in names}


def test_twenty_kills_change_nothing(tmp_path: Path, record_path: Path) -> None:
    """kill -9 at random moments of the work, five times in the life of each of four sessions. The diary's length tells
    the moments, so that they do not all fall into the imports."""
    straight = agent(tmp_path / "straight", *optimize(record_path), "--json", "-q")
    assert straight.returncode == 0, straight.stderr
    expected = result(json.loads(straight.stdout))
    generator = random.Random(11)
    with Nursery(tmp_path) as nursery:
        for life in range(SESSIONS):
            home, diary, out = (tmp_path / f"{name}-{life}" for name in ("home", "diary", "out"))
            arguments = optimize(record_path)
            for kill in range(KILLS_EACH):
                before, known = len(noted(diary)), committed(home)
                target = before + generator.randint(0, 40)
                process = nursery.begin(home, diary, out, *arguments, "-q")
                deadline = time.monotonic() + 60
                while len(noted(diary)) < target:
                    assert time.monotonic() < deadline, out.read_text()
                    time.sleep(0.002)
                time.sleep(generator.uniform(0, 0.02))
                os.kill(process, signal.SIGKILL)
                assert nursery.end() == -signal.SIGKILL, out.read_text()
                again = set(noted(diary)[before:]) & known
                assert not again, f"measured again after kill {kill + 1} of session {life}: {again}"
                if (home / "sessions" / "s" / "config.json").exists():
                    arguments = ["resume", "s"]
            nursery.begin(home, diary, out, *arguments, "--json", "-q")
            assert nursery.end() == 0, out.read_text()
            assert result(json.loads(out.read_text())) == expected
            # At most the one call that was running when the process died is in the diary twice.
            counts = Counter(entry for entry in noted(diary) if entry[0] != "baselines")
            assert sum(count - 1 for count in counts.values()) <= KILLS_EACH


class DyingSaver(SqliteSaver):
    """Dies before its n-th write, or right after it, as a kill would."""

    writes_left = 0
    after = False

    def _maybe_die(self, write: Callable[[], Any]) -> Any:
        self.writes_left -= 1
        if self.writes_left < 0 or (self.writes_left == 0 and not self.after):
            raise RuntimeError("killed")
        done = write()
        if self.writes_left == 0:
            raise RuntimeError("killed")
        return done

    def put(self, *arguments: Any, **more: Any) -> Any:
        return self._maybe_die(lambda: super(DyingSaver, self).put(*arguments, **more))

    def put_writes(self, *arguments: Any, **more: Any) -> None:
        self._maybe_die(lambda: super(DyingSaver, self).put_writes(*arguments, **more))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_death_at_every_write_of_a_checkpoint(tmp_path: Path, after: bool) -> None:
    """The kills above fall where they fall; here every single one is tried, on a small session."""
    small = {"budget__evaluations": 4, "policy__batch": 2, "session__top_k": 1, "session__modes": ["offline"]}
    expected = run(make_deps(tmp_path / "straight", **small))
    for fatal in range(1, 200):
        device = ScriptedDevice()
        deps = make_deps(tmp_path / str(fatal), None, device, **small)
        deps.folder.mkdir(parents=True)
        with sqlite3.connect(deps.folder / "checkpoints.sqlite", check_same_thread=False) as db:
            saver = DyingSaver(db)
            saver.writes_left, saver.after = fatal, after
            try:
                run_graph(build_graph(deps, saver), "s", 1)
            except RuntimeError as error:
                assert str(error) == "killed"
            else:
                break  # more writes than the session has
        deps.store.close()
        again = make_deps(tmp_path / str(fatal), None, device, **small)
        state, summary = run(again)
        again.store.close()
        assert state["trials"] == expected[0]["trials"], f"death at write {fatal}"
        assert summary.leaderboard == expected[1].leaderboard and summary.evaluations == 4
        assert max(Counter(device.calls).values()) == 1, f"measured twice after death at write {fatal}"
    assert fatal > 20, "the session wrote less than it should"


def test_resume_of_a_finished_session_measures_nothing(tmp_path: Path, record_path: Path) -> None:
    first = agent(tmp_path, *optimize(record_path, evaluations=12), "--json", "-q")
    diary = tmp_path / "diary"
    child = diary_agent(tmp_path, diary, "resume", "s")
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and noted(diary) == []
    assert result(json.loads(out)) == result(json.loads(first.stdout))


def test_two_runs_on_one_session(tmp_path: Path, record_path: Path) -> None:
    assert agent(tmp_path, *optimize(record_path, evaluations=4), "-q").returncode == 0
    again = agent(tmp_path, *optimize(record_path, evaluations=4))
    assert again.returncode == 1 and "already a session s: `agent resume s`" in again.stderr
    with (tmp_path / "sessions" / "s" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = agent(tmp_path, "resume", "s")
    assert held.returncode == 1 and "session s is already being run by process" in held.stderr
    assert "Traceback" not in held.stderr
    assert agent(tmp_path, "resume", "s", "-q").returncode == 0, "the next command works"


def test_interrupt_stops_cleanly_and_names_the_way_back(tmp_path: Path, record_path: Path) -> None:
    diary = tmp_path / "diary"
    child = subprocess.Popen(
        [sys.executable, "-c", DIARY_AGENT + "main()", *optimize(record_path)],
        cwd=ROOT,
        env=environment(tmp_path, DIARY=str(diary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while child.poll() is None and len(noted(diary)) < 20:
        time.sleep(0.002)
    child.send_signal(signal.SIGINT)
    _, words = child.communicate(timeout=60)
    assert child.returncode == 130, words
    assert "agent resume s" in words and "Traceback" not in words
    shown = agent(tmp_path, "show", "s")
    assert shown.returncode == 0 and "unfinished: go on with `agent resume s`" in shown.stdout
    known, before = committed(tmp_path), len(noted(diary))
    resumed = diary_agent(tmp_path, diary, "resume", "s")
    out, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 0 and not set(noted(diary)[before:]) & known
    straight = agent(tmp_path / "straight", *optimize(record_path), "--json", "-q")
    assert result(json.loads(out)) == result(json.loads(straight.stdout))


def test_name_of_a_deleted_session_is_not_taken_again(tmp_path: Path, record_path: Path) -> None:
    assert agent(tmp_path, *optimize(record_path, evaluations=4), "-q").returncode == 0
    shutil.rmtree(tmp_path / "sessions" / "s")
    again = agent(tmp_path, *optimize(record_path, evaluations=4), "-q")
    assert again.returncode == 1 and "still remembers a session s" in again.stderr
    assert agent(tmp_path, *optimize(record_path, session="t", evaluations=4), "-q").returncode == 0


def damage(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 500)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sessions/s/checkpoints.sqlite", "checkpoints.sqlite"),
        ("store.sqlite", "store.sqlite"),
        ("sessions/s/config.json", "config.json is damaged"),
    ],
)
def test_damaged_files_are_one_sentence(tmp_path: Path, record_path: Path, what: str, words: str) -> None:
    assert agent(tmp_path, *optimize(record_path, evaluations=4), "-q").returncode == 0
    for extra in ("-wal", "-shm"):
        (tmp_path / f"{what}{extra}").unlink(missing_ok=True)
    damage(tmp_path / what)
    broken = agent(tmp_path, "resume", "s")
    assert broken.returncode == 1 and words in broken.stderr and "Traceback" not in broken.stderr


def test_session_of_another_recording_is_not_mixed(tmp_path: Path, record_path: Path) -> None:
    path = tmp_path / "h.sqlite"
    path.write_bytes(record_path.read_bytes())
    assert agent(tmp_path, *optimize(path, evaluations=4), "-q").returncode == 0
    path.unlink()
    gone = agent(tmp_path, "resume", "s")
    assert gone.returncode == 1 and "no record file" in gone.stderr
    with sqlite3.connect(path) as db:
        db.executescript(";".join(sqlite3.connect(record_path).iterdump()))
        db.execute("UPDATE meta SET value = '2020-01-01T00:00:00+00:00' WHERE key = 'recorded_on'")
    other = agent(tmp_path, "resume", "s")
    assert other.returncode == 1 and "do not mix" in other.stderr, other.stderr
