"""The driver with workers in this process: broken devices, dying workers, full disks, cells that come back half."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedDevice, toy_families
from loop_kit import settings

pytest.importorskip("distributed")

from agent.sweep import Driver, Outcome, Sweep, keep, same_device
from agent.sweep_cell import Cell, CellResult, Workshop, run_cell
from agent.sweep_farm import Farm, Finished, Place
from agent.sweep_journal import Spool, SweepError
from agent.sweep_progress import Progress
from agent.sweep_rows import SweepRow, stored_rows
from agent.sweep_table import means, summarise, to_csv
from agent.sweep_worker import Hello, Tools
from memory.store import Store
from policy.search import SearchPolicy
from tools.hgemm import hgemm

SHAPES = [(64, 64, 64), (128, 64, 64), (128, 128, 64), (128, 128, 128)]

Answer = Callable[[str, Cell], Finished | None]


def search(chosen: Any, families: Any) -> SearchPolicy:
    return SearchPolicy(chosen.policy, families)


class Yard:
    """A farm whose workers run in this process, one cell after the other. ``answer`` may answer for a worker."""

    def __init__(self, spool: Spool, workers: list[str], answer: Answer = lambda worker, cell: None) -> None:
        self.device = ScriptedDevice()
        self._names = list(workers)
        self._answer = answer
        self._queue: deque[tuple[str, Cell]] = deque()
        self._turn = 0
        self._shop = Workshop(spool, "fake", lambda spec: self.device, toy_families, search)
        self.retired: list[str] = []
        self.most_ahead = 0

    def workers(self) -> list[str]:
        return [name for name in self._names if name not in self.retired]

    def retire(self, address: str) -> None:
        self.retired.append(address)

    def forget(self, addresses: list[str], done: list[str]) -> None:
        assert not addresses

    def seed(self, addresses: list[str], entries: list[Any]) -> None:
        assert not addresses

    def submit(self, cell: Cell) -> None:
        self._turn += 1
        self._queue.append((self.workers()[self._turn % len(self.workers())], cell))
        self.most_ahead = max(self.most_ahead, len(self._queue))

    def next(self, timeout_s: float) -> Finished | None:
        worker, cell = self._queue.popleft()
        found = self._answer(worker, cell)
        return found or Finished(cell.cell_id, worker, run_cell(cell, self._shop))


class Ground:
    """A database with its spool, and sweeps over it."""

    def __init__(self, folder: Path) -> None:
        self.spool = Spool(folder / "db.sqlite.spool")
        self.spool.create()
        self.store = Store(folder / "db.sqlite")
        self.yard: Yard

    def sweep(
        self, answer: Answer = lambda w, c: None, workers: tuple[str, ...] = ("a", "b"), **overrides: Any
    ) -> Outcome:
        self.yard = Yard(self.spool, list(workers), answer)
        tools = Tools(lambda spec: self.yard.device, toy_families, search)
        chosen = settings(**{"budget__evaluations": 4, "policy__name": "random", **overrides})
        tasks = [hgemm(*shape) for shape in SHAPES]
        sweep = Sweep(tasks, chosen, self.store.path, Place(("fake",) * len(workers)), tools)
        farm: Any = self.yard
        return Driver(sweep, self.store, self.spool, farm, self.yard.device.info, Progress(quiet=True)).run([])


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


def broken(worker: str, cell: Cell) -> Finished:
    return Finished(cell.cell_id, worker, CellResult(cell.cell_id, "broken", "cuda:0 cannot answer"))


def test_all_shapes_are_swept_and_few_are_ahead(ground: Ground) -> None:
    outcome = ground.sweep()
    assert [row.shape for row in outcome.rows] == ["64x64x64", "128x64x64", "128x128x64", "128x128x128"]
    assert ground.yard.most_ahead <= 4 and not outcome.unfinished
    assert outcome.results == len(ground.yard.device.calls), "each measurement reaches the database once"
    assert list(ground.spool.cells.glob("*/*.jsonl")) == []


def test_the_same_command_again_does_nothing(ground: Ground) -> None:
    first = ground.sweep()
    again = ground.sweep()
    assert again.resumed == 4 and again.results == 0 and ground.yard.device.calls == []
    assert to_csv(again.rows) == to_csv(first.rows)


def test_another_seed_shares_what_was_measured(ground: Ground) -> None:
    ground.sweep()
    ground.sweep(session__seed=1)
    calls = ground.yard.device.calls
    assert not [c for c in calls if c.tool == "baselines"] and ground.yard.device.count("compile") < 16
    assert len(stored_rows(ground.store)) == 8


def test_a_worker_whose_device_broke_is_retired_and_its_shapes_are_done_by_others(ground: Ground) -> None:
    outcome = ground.sweep(lambda worker, cell: broken(worker, cell) if worker == "a" else None, session__seed=3)
    assert ground.yard.retired == ["a"] and len(outcome.rows) + len(outcome.unfinished) == 4
    assert len(outcome.rows) >= 3


def test_without_any_device_left_it_stops_with_a_sentence(ground: Ground) -> None:
    with pytest.raises(SweepError, match=r"cuda:0 cannot answer; no device is left, nothing is lost"):
        ground.sweep(broken, workers=("a",))


def test_one_shape_that_breaks_every_device_is_left_out(ground: Ground) -> None:
    def answer(worker: str, cell: Cell) -> Finished | None:
        return broken(worker, cell) if cell.task.label == "128x64x64" else None

    outcome = ground.sweep(answer)
    assert list(outcome.unfinished) == ["128x64x64"] and len(outcome.rows) == 3 and not ground.yard.retired
    assert ground.sweep().resumed == 3


def test_a_shape_that_ends_its_workers_is_left_out(ground: Ground) -> None:
    def answer(worker: str, cell: Cell) -> Finished | None:
        died = cell.task.label == "64x64x64"
        return Finished(cell.cell_id, "", died="its worker died 6 times") if died else None

    outcome = ground.sweep(answer)
    assert outcome.unfinished == {"64x64x64": "its worker died 6 times"} and len(outcome.rows) == 3


def test_a_full_disk_stops_at_once(ground: Ground) -> None:
    seen: list[str] = []

    def answer(worker: str, cell: Cell) -> Finished | None:
        seen.append(cell.cell_id)
        result = CellResult(cell.cell_id, "stop", "x.jsonl cannot grow because the disk is full")
        return Finished(cell.cell_id, worker, result) if len(seen) == 3 else None

    with pytest.raises(SweepError, match="disk is full; nothing is lost"):
        ground.sweep(answer)
    assert len(stored_rows(ground.store)) == 2
    assert ground.sweep().resumed == 2


def test_a_tool_that_no_machine_has_stops_before_the_whole_grid_is_tried(ground: Ground) -> None:
    tried: list[str] = []

    def answer(worker: str, cell: Cell) -> Finished:
        tried.append(cell.cell_id)
        result = CellResult(cell.cell_id, "unavailable", "compute-sanitizer is not here; `agent doctor` says")
        return Finished(cell.cell_id, worker, result)

    with pytest.raises(SweepError, match="agent doctor"):
        ground.sweep(answer)
    assert len(tried) == 3 and stored_rows(ground.store) == []


def test_a_bug_of_ours_is_not_taken_for_a_result(ground: Ground) -> None:
    with pytest.raises(SweepError, match="64x64x64 could not be swept: division by zero"):
        ground.sweep(lambda worker, cell: Finished(cell.cell_id, "", error="division by zero"))


def test_a_cell_is_committed_whole_or_not_at_all(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    put = ground.store.put_trajectory
    count = [0]

    def fail(trajectory: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise RuntimeError("power")
        put(trajectory)

    monkeypatch.setattr(ground.store, "put_trajectory", fail)
    with pytest.raises(RuntimeError, match="power"):
        ground.sweep()
    assert len(stored_rows(ground.store)) == 2
    timed = {t.task.task_id for t in ground.store.trajectories()}
    assert set(ground.store.task_ids(next(s for s in ground.store.scopes() if s != "sweep"))) == timed
    monkeypatch.undo()
    calls = list(ground.yard.device.calls)
    outcome = ground.sweep()
    calls += ground.yard.device.calls
    assert len(outcome.rows) == 4 and len(calls) == len(set(calls)) == stored_results(ground.store)


def stored_results(store: Store) -> int:
    scope = next(s for s in store.scopes() if s != "sweep")
    return sum(len(store.entries(scope, task_id)) for task_id in (*(hgemm(*s).task_id for s in SHAPES), None))


def test_leftovers_of_a_killed_sweep_reach_the_database(ground: Ground) -> None:
    class Killed(BaseException):
        pass

    def answer(worker: str, cell: Cell) -> Finished | None:
        if cell.task.label == "128x128x64":
            ground.yard.device._script = lambda tool, v, t: (
                (_ for _ in ()).throw(Killed()) if tool == "profile" else None
            )
        return None

    with pytest.raises(Killed):
        ground.sweep(answer)
    measured = len(ground.yard.device.calls) - 1  # the profile that was cut off
    keep(ground.store, ground.spool.leftovers())
    assert stored_results(ground.store) == measured


def test_a_spool_elsewhere_is_a_folder_of_its_own(tmp_path: Path) -> None:
    """It is removed at the end, so it must never be the user's folder itself."""
    tools = Tools(lambda spec: ScriptedDevice(), toy_families, search)
    sweeps = [Sweep([], settings(), tmp_path / d / "s.sqlite", Place(), tools, spool=tmp_path) for d in ("a", "b")]
    assert len({sweep.spool_path for sweep in sweeps}) == 2
    assert all(sweep.spool_path.parent == tmp_path for sweep in sweeps)
    beside = Sweep([], settings(), tmp_path / "s.sqlite", Place(), tools)
    assert beside.spool_path == tmp_path / "s.sqlite.spool"


def test_different_devices_do_not_mix() -> None:
    one, other = ScriptedDevice().info, ScriptedDevice(driver="2.0").info
    assert same_device({"a": Hello("h", True, one), "b": Hello("h", True, one)}) == one
    with pytest.raises(SweepError, match="different devices"):
        same_device({"a": Hello("h", True, one), "b": Hello("h", True, other)})
    with pytest.raises(SweepError, match=r"worker at b \(h2\) has no device: no GPU"):
        same_device({"a": Hello("h", True, one), "b": Hello("h2", True, error="no GPU")})


def test_dask_has_two_edges() -> None:
    """A sweep's cells, journals and driver run without it; a farm of another kind would be one more module."""
    root = Path(__file__).resolve().parent.parent / "agent"
    pattern = re.compile(r"^\s*(import|from) (dask|distributed)", re.M)
    users = {path.name for path in root.rglob("*.py") if pattern.search(path.read_text())}
    assert users == {"sweep_farm.py", "sweep_worker.py"}


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_means_count_a_shape_without_a_kernel_as_the_library(ground: Ground) -> None:
    rows = ground.sweep().rows
    empty = rows[0].model_copy(update={"status": "no_kernel", "modes": (), "variant_key": None})
    unknown = rows[1].model_copy(update={"status": "not_recorded", "modes": ()})
    timed = rows[2:]
    found = means([empty, unknown, *timed], "offline")
    ratios = [row.modes[0].ratio for row in timed]
    assert found is not None and found.shapes == 2
    assert found.mean.value == pytest.approx(sum(ratios) / 2) and found.mean.lo <= found.mean.value <= found.mean.hi
    assert found.geo_mean.value == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    assert found.with_fallback.value == pytest.approx((sum(max(r, 1.0) for r in ratios) + 1.0) / 3)
    assert means([empty, unknown], "offline") is None
    summary = summarise([empty, unknown, *timed], config_id="c", device="d", db="x", unfinished={"1x1x1": "why"})
    assert summary.states == {"no_kernel": 1, "not_recorded": 1, "won": 2} and summary.shapes == 5


def test_progress_says_how_far_how_good_and_what_failed(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ground.sweep().rows
    rejected = rows[1].model_copy(
        update={"status": "no_kernel", "modes": (), "rejected": {"wrong_result": 3, "race": 1}}
    )
    progress = Progress()
    progress.begin(3, [rows[0]])
    assert progress.eta_s() is None, "nothing was done yet by this run"
    progress.done(rejected)
    assert progress.eta_s() is not None and "2/3 shapes" in progress.summary() and "ETA" in progress.summary()
    assert progress.failures() == "1 shapes without a kernel, 3 wrong_result, 1 race"
    progress.done(rows[2])
    timed: list[SweepRow] = [rows[0], rows[2]]
    best = sum(row.modes[0].ratio for row in timed) / 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"3/3 shapes, best mean so far {best:.3f}x of cuBLASLt; failures: 1 shapes without a kernel")


def test_workers_are_asked_of_the_scheduler_and_not_of_a_cache_without_them() -> None:
    """Dask's client keeps a summary that names no worker, and may write it over an answer that is being returned."""

    class Scheduler:
        def identity(self, n_workers: int) -> dict[str, Any]:
            facts = {"tcp://a:1": {"resources": {"GPU": 1.0}}, "tcp://b:1": {"resources": {}}}
            return {"workers": facts if n_workers == -1 else {}}

    class Client:
        scheduler = Scheduler()

        def sync(self, function: Callable[..., Any], **given: Any) -> Any:
            return function(**given)

        def scheduler_info(self, n_workers: int = -1) -> dict[str, Any]:
            return {"workers": {}}

    farm = Farm(Client(), "sweep", Place(), None)  # type: ignore[arg-type]
    assert farm.workers() == ["tcp://a:1"]
