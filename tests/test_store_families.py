"""A family edited under its old revision: numbers of the old source are never given for the new one. Damaged rows."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memory.store import Store, StoreError
from tests.fakes import ScriptedDevice, toy_families
from tests.records_kit import ROOT, environment
from tests.sweep_kit import Options, run_options, shapes
from tools.device import DeviceBroken
from tools.families import accepted_plans
from tools.gate import Toolbox
from tools.hgemm import hgemm
from tools.paths import kernels_dir
from tools.records import Family, Knob, LaunchSpec, Status, Step, Trajectory

TASK = hgemm(256, 256, 256)
Edit = Callable[[Family], Family]


def edited(**changes: object) -> Edit:
    return lambda family: family.model_copy(update=changes)


def launched(block: int) -> Edit:
    def edit(family: Family) -> Family:
        (launch,) = family.launch.launches
        spec = LaunchSpec(launches=(launch.model_copy(update={"block": (block, 1, 1)}),))
        return family.model_copy(update={"launch": spec})

    return edit


SAME: list[Edit] = [
    edited(source='extern "C"   __global__ void gemm() {} // a remark\n'),
    edited(source='/* another\n */ extern "C" __global__ void gemm() {}\n'),
    edited(source='extern "C" __global__ void gemm() { __syncthreads(); }\n', revision=2),
    edited(knobs={"BM": Knob(values=(32, 64, 128, 256), doc="more"), "BN": toy_families()["toy"].knobs["BN"]}),
    edited(constraints=("BM >= BN",), accepts=("M > 3",), summary="said otherwise"),
]
OTHER: list[Edit] = [
    edited(source='extern "C" __global__ void gemm() { __syncthreads(); }\n'),
    edited(flags=("-use_fast_math",)),
    edited(knobs={"BM": Knob(values=(32, 64), doc="", runtime=True), "BN": toy_families()["toy"].knobs["BN"]}),
    launched(256),
]


@pytest.mark.parametrize("old", [False, True], ids=["", "filled before families were noted"])
@pytest.mark.parametrize(("edit", "same"), [(e, True) for e in SAME] + [(e, False) for e in OTHER])
def test_an_edit_under_the_old_revision(tmp_path: Path, edit: Edit, same: bool, old: bool) -> None:
    families, path = toy_families(), tmp_path / "store.sqlite"
    with Store(path) as store:
        store.check_families(families)
        toolbox = Toolbox(ScriptedDevice(), store, families)
        for plan in accepted_plans(families, TASK)[:3]:
            store.put_variant(plan)
            assert toolbox.evaluate(plan, TASK).ok
        if old:
            store._db.execute("DELETE FROM meta WHERE key LIKE 'family/%'")
    changed = {**families, "toy": edit(families["toy"])}
    with Store(path) as store:
        if same:
            store.check_families(changed)
            store.check_families(changed)
            return
        with pytest.raises(StoreError) as caught:
            store.check_families(changed)
        text = str(caught.value)
        assert "the source of family toy changed since" in text and "under revision 1: bump `revision`" in text
        store.check_families(families)  # undone
        bumped = changed["toy"].model_copy(update={"revision": 2})
        store.check_families({**families, "toy": bumped})


def test_a_family_of_which_nothing_was_measured_may_change(tmp_path: Path) -> None:
    """On replay an edited source is "not recorded": undoing the edit must lead back."""
    families = toy_families()
    changed = {**families, "toy": OTHER[0](families["toy"])}
    with Store(tmp_path / "store.sqlite") as store:
        store.check_families(changed)
        plan = next(p for p in accepted_plans(changed, TASK) if p.plan and p.plan.family == "toy")
        store.put_variant(plan)
        device = ScriptedDevice(lambda tool, variant, task: Status.NOT_RECORDED)
        assert not Toolbox(device, store, changed).evaluate(plan, TASK).ok
        store.check_families(families)
        store.check_families(changed)
        store.check_families(families)
        assert store.variant(plan.key) is None  # its source was the edited one
        plan = next(p for p in accepted_plans(families, TASK) if p.key == plan.key)
        store.put_variant(plan)
        assert Toolbox(ScriptedDevice(), store, families).evaluate(plan, TASK).ok
        with pytest.raises(StoreError, match="the source of family toy changed"):
            store.check_families(changed)


def test_a_sweep_into_the_database_of_another_source(tmp_path: Path) -> None:
    before = toy_families()
    before["toy"] = OTHER[0](before["toy"])
    with Store(tmp_path / "db.sqlite") as store:
        store.check_families(before)
        plan = next(p for p in accepted_plans(before, TASK) if p.plan and p.plan.family == "toy")
        store.put_variant(plan)
        assert Toolbox(ScriptedDevice(), store, before).evaluate(plan, TASK).ok
    options = Options(db=str(tmp_path / "db.sqlite"), log=str(tmp_path / "log"), shapes=shapes(2))
    with pytest.raises(StoreError, match="the source of family toy changed"):
        run_options(options)
    assert not (tmp_path / "log").exists()  # no worker was started


#: `agent` with the families of a folder.
AGENT = """
import pathlib, sys, tools.families
kernels = pathlib.Path(sys.argv.pop(1))
tools.families.kernels_dir = lambda: kernels
from agent.cli import main
main()
"""


def optimize(kernels: Path, home: Path, session: str) -> subprocess.CompletedProcess[str]:
    arguments = ["optimize", "--shape", "64,64,64", "--policy", "random", "--evaluations", "1", "--quiet"]
    arguments += ["--device", "replay:h200", "--session", session]
    return subprocess.run(
        [sys.executable, "-c", AGENT, str(kernels), *arguments],
        capture_output=True, text=True, cwd=ROOT, env=environment(home), timeout=60, check=False,
    )  # fmt: skip


def test_sessions_before_and_after_an_edit(tmp_path: Path) -> None:
    kernels, home = tmp_path / "kernels", tmp_path / "home"
    shutil.copytree(kernels_dir(), kernels)
    assert optimize(kernels, home, "first").returncode in (0, 2)
    with Store(home / "store.sqlite") as store:
        measured = store._one(
            "SELECT v.plan FROM results r JOIN variants v ON v.key = r.variant_key WHERE status = 'ok'", ()
        )
    family = json.loads(measured[0])["family"]
    source = kernels / family / "kernel.cu"
    source.write_text(source.read_text() + "\n__device__ int of_the_edit() { return 1; }\n")
    after = optimize(kernels, home, "second")
    assert after.returncode == 1
    assert f"the source of family {family} changed since" in after.stderr and "Traceback" not in after.stderr
    # A broken manifest is found before there is a session.
    (kernels / "plain_tiled" / "family.yaml").write_text("revision: [\n")
    broken = optimize(kernels, home, "third")
    assert broken.returncode == 1
    assert broken.stderr.startswith("error: ") and "plain_tiled/family.yaml" in broken.stderr
    assert not (home / "sessions" / "third").exists()


# --- damaged rows ----------------------------------------------------------------------------------------------------

DAMAGE = [
    ("UPDATE results SET payload = '{\"rows\": 3'", "is damaged"),
    ("UPDATE results SET payload = '[]'", "is damaged"),
    ("UPDATE variants SET source = x'00ff'", "variant .* does not read"),
    ("UPDATE variants SET rest = '{}'", "variant .* does not read"),
    ("UPDATE variants SET rest = '[1]'", "variant .* does not read"),
    ("UPDATE variants SET plan = 'x'", "variant .* does not read"),
    ("UPDATE trajectories SET payload = x'789c00'", "trajectory t0 does not read"),
    ("UPDATE trajectories SET payload = NULL", "NOT NULL|does not read"),
    ("UPDATE sessions SET config = '{'", "a session does not read"),
    ("UPDATE sessions SET status = 'eating'", "a session does not read"),
    ("UPDATE results SET status = 'well' WHERE kind = 'verify'", "a timing of .* does not read"),
]


@pytest.mark.parametrize(("statement", "words"), DAMAGE, ids=lambda value: value[:40])
def test_rows_that_do_not_read(tmp_path: Path, statement: str, words: str) -> None:
    families, path = toy_families(), tmp_path / "store.sqlite"
    plan = accepted_plans(families, TASK)[0]
    with Store(path) as store:
        store.put_variant(plan)
        store.create_session("s1", {})
        store.put_trajectory(
            Trajectory(
                trajectory_id="t0",
                session_id="s1",
                task=TASK,
                policy="p",
                device="d",
                round=0,
                index_in_group=0,
                steps=(Step(role="user", text="hello"),),
            )
        )
        Toolbox(ScriptedDevice(), store, families).evaluate(plan, TASK)
        with pytest.raises((StoreError, DeviceBroken, sqlite3.IntegrityError), match=words) as caught:
            store._db.execute(statement)
            store.variant(plan.key)
            list(store.trajectories())
            store.sessions()
            Toolbox(ScriptedDevice(), store, families).evaluate(plan, TASK)
            store.leaderboard(TASK.task_id)
        assert "\n" not in str(caught.value)


def test_values_that_sqlite_cannot_hold(tmp_path: Path) -> None:
    with Store(tmp_path / "store.sqlite") as store:
        with pytest.raises(StoreError, match="cannot hold such a value"):
            store.put("s-k", "verify", f'{{"status": "ok", "task_id": {2**70}}}')
        with pytest.raises(StoreError, match="cannot hold such a value"):
            store.get("\ud800")
        store.put("s-k", "verify", '{"status": "ok"}')
