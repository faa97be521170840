"""The store: durability, threads and processes, and a sentence for every way the file can be unusable."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memory.store import Store, StoreError
from tests.fakes import ScriptedDevice, raw_variant, toy_families
from tools.admission import Hindrance
from tools.families import accepted_plans
from tools.gate import Toolbox, device_scope
from tools.hgemm import hgemm
from tools.records import Reason, Step, Trajectory

TASK = hgemm(256, 256, 256)
FAMILIES = toy_families()
PLANS = accepted_plans(FAMILIES, TASK)
ROOT = Path(__file__).parent.parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "store.sqlite"


def payload(n: int = 1) -> str:
    return json.dumps({"status": "ok", "variant_key": f"v{n}", "task_id": "t"})


def test_the_first_write_wins_and_survives_a_reopen(path: Path) -> None:
    with Store(path) as store:
        assert store.get("s-k") is None
        store.put("s-k", "verify", payload(1))
        store.put("s-k", "verify", payload(2))
    with Store(path) as store:
        assert store.get("s-k") == payload(1)
        assert store.payloads("verify", task_id="t") == [payload(1)]
        assert store.payloads("verify", variant_key="v2") == []
        assert store.payloads("time") == []
        assert store.payloads("verify", scope="other") == []


def test_a_toolbox_measures_nothing_again_after_a_restart(path: Path) -> None:
    device = ScriptedDevice()
    with Store(path) as store:
        first = [Toolbox(device, store).evaluate(plan, TASK) for plan in PLANS[:5]]
    calls = list(device.calls)
    with Store(path) as store:
        assert [Toolbox(device, store).evaluate(plan, TASK) for plan in PLANS[:5]] == first
    assert device.calls == calls


def test_committed_results_survive_kill_9(path: Path) -> None:
    """A child writes results and says so after each; it is killed while writing; all that it said are there."""
    script = (
        "import sys, json\n"
        "from memory.store import Store\n"
        "store = Store(sys.argv[1])\n"
        "for n in range(100000):\n"
        "    store.put(f's-{n}', 'verify', json.dumps({'status': 'ok', 'n': n}))\n"
        "    print(n, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
    ) as child:
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(200)]
        child.send_signal(signal.SIGKILL)
        said += [int(line) for line in child.stdout if line.endswith("\n")]
    with Store(path) as store:
        assert all(store.get(f"s-{n}") is not None for n in said)
        store.put("s-after", "verify", payload())


def test_threads_share_a_store(path: Path) -> None:
    with Store(path) as store, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.put(f"s-{n % 50}", "verify", payload(n % 50)), range(400)))
        assert len(store.payloads("verify")) == 50


def test_processes_share_a_store(path: Path) -> None:
    """Four begin the same new file at once."""
    script = (
        "import sys, json\n"
        "from memory.store import Store\n"
        "with Store(sys.argv[1]) as store:\n"
        "    for n in range(50):\n"
        "        store.put(f's-{n}', 'verify', json.dumps({'status': 'ok', 'by': sys.argv[2]}))\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(path), str(i)], cwd=ROOT, env=environment())
        for i in range(4)
    ]
    assert [child.wait(60) for child in children] == [0, 0, 0, 0]
    with Store(path) as store:
        assert len(store.payloads("verify")) == 50


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


# --- leaderboard ---------------------------------------------------------------------------------------------------


def test_the_leaderboard_agrees_with_the_gate(path: Path) -> None:
    device = ScriptedDevice()
    with Store(path) as store:
        toolbox = Toolbox(device, store, FAMILIES)
        for plan in PLANS:
            assert toolbox.evaluate(plan, TASK).ok
        for plan in PLANS[:4]:
            toolbox.verify(plan, TASK, "full")
        for plan in PLANS[:3]:
            toolbox.sanitize(plan, TASK)
        for plan in (*PLANS[:2], PLANS[3]):
            toolbox.time(plan, TASK, "offline", "final")

        board = store.leaderboard(TASK.task_id, scope=toolbox.scope)
        assert len(board) == len(PLANS)
        assert [s.ratio for s in board] == sorted((s.ratio for s in board), reverse=True)
        for plan in PLANS:
            standing = next(s for s in board if s.variant_key == plan.key)
            assert standing.admitted == bool(toolbox.on_leaderboard(plan, TASK))
        admitted = store.leaderboard(TASK.task_id, scope=toolbox.scope, admitted_only=True)
        assert {s.variant_key for s in admitted} == {plan.key for plan in PLANS[:2]}
        assert {s.budget for s in admitted} == {"final"}
        assert {s.b_layout for s in store.leaderboard(TASK.task_id, b_layout="kn")} == {"kn"}
        assert store.leaderboard(TASK.task_id, mode="server") == []
        assert store.leaderboard(hgemm(1, 1, 1).task_id) == []
        torch = store.leaderboard(TASK.task_id, reference="torch")
        assert torch[0].ratio == pytest.approx(board[0].ratio * 1.10)


def test_the_leaderboard_keeps_devices_and_failures_apart(path: Path) -> None:
    other = ScriptedDevice(name="Other GPU")
    device = ScriptedDevice(lambda tool, variant, task: Reason.RACE if tool == "sanitize" else None)
    with Store(path) as store:
        for each in (device, other):
            toolbox = Toolbox(each, store, FAMILIES)
            toolbox.evaluate(PLANS[0], TASK)
            toolbox.verify(PLANS[0], TASK, "full")
            toolbox.sanitize(PLANS[0], TASK)
            toolbox.time(PLANS[0], TASK, "offline", "final")
        (mine,) = store.leaderboard(TASK.task_id, scope=device_scope(device.info))
        (theirs,) = store.leaderboard(TASK.task_id, scope=device_scope(other.info))
        assert (mine.device, mine.hindrance, mine.admitted) == ("Scripted GPU", Hindrance.SANITIZE_FAILED, False)
        assert (theirs.device, theirs.hindrance, theirs.admitted) == ("Other GPU", None, True)
        assert len(store.leaderboard(TASK.task_id)) == 2


# --- variants, sessions, trajectories ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [PLANS[0], PLANS[-1], raw_variant("é", accepts=("M > 3",))], ids=lambda v: v.label)
def test_variants_come_back_equal(path: Path, variant: object) -> None:
    with Store(path) as store:
        key = store.put_variant(variant)  # type: ignore[arg-type]
        store.put_variant(variant)  # type: ignore[arg-type]
        assert store.variant(key) == variant
        assert store.variant("none") is None


def test_sessions(path: Path) -> None:
    with Store(path) as store:
        made = store.create_session("s1", {"seed": 1, "budget": {"evaluations": 5}})
        assert store.session("s1") == made
        with pytest.raises(StoreError, match="already a session s1"):
            store.create_session("s1", {})
        store.create_session("s2", {})
        store.set_session_status("s1", "finished")
        changed = store.session("s1")
        assert changed is not None
        assert (changed.status, changed.config["seed"], changed.created_at) == ("finished", 1, made.created_at)
        assert changed.updated_at > made.updated_at
        assert [s.session_id for s in store.sessions()] == ["s2", "s1"]
        assert store.session("s3") is None
        with pytest.raises(StoreError, match="no session s3"):
            store.set_session_status("s3", "stopped")


def trajectory(number: int, text: str = "hello") -> Trajectory:
    return Trajectory(
        trajectory_id=f"t{number}",
        session_id="s1",
        task=TASK,
        policy="search",
        device="Scripted GPU",
        round=0,
        index_in_group=number,
        steps=(Step(role="user", text=text),),
        reward=0.5,
    )


def test_trajectories_in_order_and_the_last_write_wins(path: Path) -> None:
    with Store(path) as store:
        for number in (2, 0, 1):
            store.put_trajectory(trajectory(number))
        store.put_trajectory(trajectory(2, "more"))
        assert list(store.trajectories("s1")) == [trajectory(2, "more"), trajectory(0), trajectory(1)]
        assert list(store.trajectories(task_id=TASK.task_id)) == list(store.trajectories())
        assert list(store.trajectories("s2")) == []
        assert store.trajectory("none") is None


# --- files that cannot be used -------------------------------------------------------------------------------------


def filled(path: Path) -> Path:
    with Store(path) as store:
        for n in range(2000):
            store.put(f"s-{n}", "verify", payload(n))
    return path


def test_not_a_database(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("this is a text file, and not a short one: " * 50)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="is not a database"):
        Store(path)
    assert path.read_bytes() == before


def test_a_truncated_store_is_reported_and_kept(path: Path) -> None:
    filled(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(StoreError, match="damaged"), Store(path) as store:
        store.payloads("verify")
    assert path.stat().st_size == len(whole) // 3


def test_a_newer_store(path: Path) -> None:
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    db.close()
    with pytest.raises(StoreError, match="schema version 99 but this program reads up to 1"):
        Store(path)


def test_the_database_of_something_else(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE guests (name TEXT)")
    db.close()
    with pytest.raises(StoreError, match="database of something else"):
        Store(path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        Store(tmp_path / "file" / "store.sqlite")


def test_a_path_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a folder, not a file"):
        Store(tmp_path)


def test_a_full_disk(path: Path) -> None:
    with Store(path) as store:
        # SQLite's own limit on the file's size: the same SQLITE_FULL that a full disk gives.
        store._db.execute("PRAGMA max_page_count = 40")
        with pytest.raises(StoreError, match="the disk is full: free some space"):
            for n in range(1000):
                store.put(f"s-{n}", "verify", json.dumps({"status": "ok", "text": "x" * 1000}))
        store._db.execute("PRAGMA max_page_count = 4000")
        store.put("s-again", "verify", payload())
        assert store.get("s-again") == payload()
        assert store.get("s-0") is not None


def test_locked_by_another_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memory.store.BUSY_TIMEOUT_S", 0.05)
    with Store(path) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked by another process"):
            store.put("s-k", "verify", payload())
        other.execute("ROLLBACK")
        other.close()
        store.put("s-k", "verify", payload())


def test_a_lock_is_waited_for(path: Path) -> None:
    with Store(path) as store:
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.2, lambda: other.execute("COMMIT"))
        timer.start()
        store.put("s-k", "verify", payload())
        timer.join()
        other.close()
        assert store.get("s-k") == payload()
