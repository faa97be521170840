"""Kill a sweep's driver and its workers at random: the table is the same, and nothing was measured twice."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("distributed")

from sweep_kit import Options, calls_of, shapes, tools_of

from agent.config import load_settings
from agent.sweep_cell import Cell
from agent.sweep_farm import Place, open_farm
from agent.sweep_journal import Spool
from agent.sweep_rows import stored_rows
from memory.store import Store
from tools.gate import device_scope
from tools.hgemm import hgemm

KIT = Path(__file__).with_name("sweep_kit.py")
KILLS = 10


def start(options: Options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(KIT), options.to_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def contents(db: Path) -> dict[str, Any]:
    with sqlite3.connect(db) as connection:
        results = connection.execute("SELECT key, kind, payload FROM results WHERE kind <> 'sweep' ORDER BY key")
        variants = connection.execute("SELECT key FROM variants ORDER BY key")
        found = {"results": results.fetchall(), "variants": variants.fetchall()}
    with Store(db) as store:
        found["rows"] = [row.facts() for row in sorted(stored_rows(store), key=lambda row: row.key)]
        found["trajectories"] = sorted(t.to_json() for t in store.trajectories())
    return found


def line_count(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def living(log: Path, killed: set[int]) -> list[int]:
    """Workers at work, the latest last: a sweep keeps all of its workers to its end."""
    return [pid for pid, _ in calls_of(log) if pid not in killed] if log.exists() else []


def test_a_result_that_dies_with_its_worker_before_it_is_fetched(tmp_path: Path) -> None:
    """On a busy machine the driver comes late. Dask then calls the cell lost and runs it again; that is no failure."""
    options = Options(str(tmp_path / "s.sqlite"), str(tmp_path / "log"), shapes(1), specs=("fake",))
    chosen = load_settings(None, {}, {"policy.name": "random", "budget.evaluations": 2})
    spool = Spool(tmp_path / "s.sqlite.spool")
    spool.create()
    with open_farm(Place(options.specs), spool, tools_of(options), "late") as farm:
        scope = device_scope(next(iter(farm.hellos().values())).info)
        farm.submit(Cell("cell", "config", hgemm(64, 64, 64), chosen, scope))
        cell_id, future = farm._done.get(timeout=60)  # it is done, and we are busy with something else
        os.kill(calls_of(tmp_path / "log")[-1][0], signal.SIGKILL)
        until = time.monotonic() + 60
        while future.status != "lost" and time.monotonic() < until:
            time.sleep(0.005)
        farm._done.put((cell_id, future))
        found = None
        while found is None and time.monotonic() < until:
            found = farm.next(0.5)
        assert found is not None and found.result is not None and found.result.outcome == "done", found
    calls = [call for _, call in calls_of(tmp_path / "log")]
    assert len(calls) == len(set(calls)), "the journal had everything"


def test_killed_ten_times_it_ends_with_the_same_table(tmp_path: Path) -> None:
    calm = Options(str(tmp_path / "calm.sqlite"), str(tmp_path / "calm.log"), shapes(16), sleep_s=0.004)
    table = finish(start(calm))
    assert table.count("\n") == 17 and table.count(",won,") > 10
    calls = [call for _, call in calls_of(tmp_path / "calm.log")]
    assert len(calls) == len(set(calls)), "two workers measured the same"

    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown if the test fails
    rng = random.Random(seed)
    log = tmp_path / "wild.log"
    wild = Options(str(tmp_path / "wild.sqlite"), str(log), calm.shapes, sleep_s=0.004)
    victims = ["driver"] * 3 + ["worker"] * (KILLS - 3)
    rng.shuffle(victims)
    # How far the sweep is when it is hit. Not so many lines after the kill before: on a busy machine each kill comes a
    # little late, and ten times that would be after the end.
    moments = sorted(rng.sample(range(1, 4 * len(calls) // 5), KILLS))
    killed: set[int] = set()  # processes that did not end by themselves
    process = start(wild)
    for victim, moment in zip(victims, moments, strict=True):
        # A new line: what was started after the last kill is at work.
        moment = max(moment, line_count(log) + 1)
        while line_count(log) < moment or (victim == "worker" and not living(log, killed)):
            assert process.poll() is None, f"it ended before it was killed: {process.communicate()[1]}"
            time.sleep(0.001)
        if victim == "driver":
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()  # until its workers, which hold the other end, have ended with it
            killed |= {pid for pid, _ in calls_of(log)}
            process = start(wild)
        else:
            pid = living(log, killed)[-1]
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
    assert finish(process) == table
    assert contents(tmp_path / "wild.sqlite") == contents(tmp_path / "calm.sqlite")
    assert not (tmp_path / "wild.sqlite.spool").exists(), "everything is in the database"

    by_call: dict[str, list[int]] = defaultdict(list)
    for line, (_, call) in enumerate(calls_of(log)):
        by_call[call].append(line)
    assert set(by_call) == set(calls), "nothing is missing and nothing was measured in vain"
    last_line = {pid: line for line, (pid, _) in enumerate(calls_of(log))}
    for call, lines in by_call.items():
        for line in lines[:-1]:
            pid = calls_of(log)[line][0]
            in_flight = pid in killed and line == last_line[pid]
            assert in_flight, f"{call} was measured again although its result was kept"
