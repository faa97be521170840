"""Two databases, or two policies of one: pairs, means with intervals, and what does not compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedDevice, toy_families
from loop_kit import settings
from typer.testing import CliRunner

from agent import compare
from agent.cli import app
from agent.compare import Best, Side
from agent.compare_stats import geometric_mean, mean, share
from agent.errors import UsageError
from agent.sweep_rows import Stamp, SweepRow, config_id
from memory.store import Store
from tools.families import render, validate_plan
from tools.gate import Toolbox, device_scope
from tools.hgemm import hgemm
from tools.records import MODES, Status, Task, Variant

SHAPES = [(64, 64, 64), (128, 64, 64), (128, 128, 64), (128, 128, 128)]


def variant_of(bm: int = 64, bn: int = 64) -> Variant:
    toy = toy_families()["toy"]
    return render(toy, validate_plan(toy, "nk", {"BM": bm, "BN": bn}))


def row(shape: tuple[int, int, int], factor: float | None, device: ScriptedDevice, **overrides: Any) -> SweepRow:
    """A winner that is ``factor`` times as fast as the scripted one; None: no kernel."""
    chosen = settings(**{"budget__evaluations": 8, **overrides})
    task, families = hgemm(*shape), toy_families()
    stamp = Stamp(config_id(chosen, families), device_scope(device.info), task, chosen, device.info)
    if factor is None:
        return stamp.row("no_kernel", "none passed", 0.1)
    timings = []
    for mode in MODES:
        timing = device.time(variant_of(), task, mode, "final").row()
        assert timing is not None
        scaled = {name: factor * getattr(timing, name) for name in ("ratio", "ratio_lo", "ratio_hi")}
        timings.append(timing.model_copy(update=scaled))
    return stamp.row("won", "", 0.1, variant_key=variant_of().key, label="toy", b_layout="nk", modes=tuple(timings))


def fill(path: Path, factors: list[float | None], device: ScriptedDevice | None = None, **overrides: Any) -> Path:
    with Store(path) as store:
        for shape, factor in zip(SHAPES, factors, strict=False):
            found = row(shape, factor, device or ScriptedDevice(), **overrides)
            store.put(found.key, "sweep", found.to_json())
    return path


def of(path: Path, config: str = "") -> Side:
    return compare.read_side(path, config)


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_pairs_means_and_clear_wins(tmp_path: Path) -> None:
    a = fill(tmp_path / "a.sqlite", [1.0, 1.0, 1.0, 1.0])
    b = fill(tmp_path / "b.sqlite", [2.0, 0.5, 1.005, None])
    found = compare.compare(of(a), of(b))
    offline = found.mode("offline")
    assert offline is not None and found.shared == 4 and (found.none_a, found.none_b) == (0, 1)
    assert [pair.change for pair in offline.pairs] == pytest.approx([2.0, 0.5, 1.005])
    assert [pair.verdict for pair in offline.pairs] == ["B", "A", "tie"], "1 % to either side: half a percent is a tie"
    assert (offline.wins_a, offline.wins_b, offline.ties) == (1, 1, 1)
    assert offline.mean_change.value == pytest.approx(3.505 / 3)
    assert offline.geo_mean_change.value == pytest.approx(1.005 ** (1 / 3)), "2 and 1/2 cancel"
    assert offline.b_faster.value == pytest.approx(2 / 3)
    assert [m.mode for m in found.modes] == list(MODES)
    mirrored = compare.compare(of(b), of(a)).mode("offline")
    assert mirrored is not None
    assert mirrored.geo_mean_change.value == pytest.approx(1 / offline.geo_mean_change.value)


def test_intervals_cover_the_mean_of_the_population() -> None:
    import numpy as np

    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(100):
        found = geometric_mean(rng.lognormal(0.1, 0.3, 60).tolist())
        hits += found.lo <= float(np.exp(0.1)) <= found.hi
    assert 88 <= hits <= 100
    assert mean([2.0]).lo == mean([2.0]).hi == 2.0 and share([True, False]).value == 0.5
    with pytest.raises(ValueError):
        mean([])


# --- choosing a side --------------------------------------------------------------------------------------------------


def test_two_policies_of_one_database(tmp_path: Path) -> None:
    db = fill(tmp_path / "s.sqlite", [1.0, 1.0], policy__name="random")
    fill(db, [1.1, 1.1, 1.1], policy__name="search")
    with pytest.raises(UsageError, match=r"several sweeps.*random/8/seed0.*search/8/seed0"):
        of(db)
    found = compare.compare(of(db, "random"), of(db, "search/8/seed0"))
    assert found.shared == 2 and (found.only_a, found.only_b) == (0, 1)
    assert found.a == "s.sqlite@random/8/seed0"
    with pytest.raises(UsageError, match="no sweep 'magic'; there are random/8/seed0, search/8/seed0"):
        of(db, "magic")
    by_id = of(db, config_id(settings(budget__evaluations=8, policy__name="random"), toy_families()))
    assert by_id.config == "random/8/seed0"


def test_operands(tmp_path: Path) -> None:
    db = tmp_path / "s.sqlite"
    db.write_text("")
    assert compare.split_operand("x.sqlite@random", None) == (Path("x.sqlite"), "random")
    assert compare.split_operand("x@y/z.sqlite@search/24", None) == (Path("x@y/z.sqlite"), "search/24")
    assert compare.split_operand("random", db) == (db, "random")
    assert compare.split_operand(str(db), db) == (db, "")
    assert compare.split_operand("x.sqlite", None) == (Path("x.sqlite"), "")


def test_a_store_of_sessions_has_the_best_of_each_shape(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    device = ScriptedDevice()
    task = hgemm(*SHAPES[0])
    with Store(path) as store:
        toolbox = Toolbox(device, store, toy_families())
        for variant in (variant_of(32, 32), variant_of(64, 64)):
            store.put_variant(variant)
            toolbox.compile(variant)
            toolbox.verify(variant, task, "full")
            toolbox.sanitize(variant, task)
            toolbox.time(variant, task, "offline", "final")
        best = store.leaderboard(task.task_id)[0].ratio
    side = of(path)
    assert side.budget is None and side.shapes[task.task_id]["offline"].ratio == best
    assert side.shapes[task.task_id]["server"] == Best()
    found = compare.compare(side, of(fill(tmp_path / "s.sqlite", [1.0, 1.0])))
    assert found.shared == 1 and [m.mode for m in found.modes] == ["offline"]


# --- what does not compare --------------------------------------------------------------------------------------------


def test_other_devices_drivers_protocols_budgets_and_shapes(tmp_path: Path) -> None:
    a = of(fill(tmp_path / "a.sqlite", [1.0, 1.0]))
    other = fill(tmp_path / "b.sqlite", [1.0], ScriptedDevice(name="Other GPU"))
    with pytest.raises(UsageError, match=r"Scripted GPU, driver 1.0.*Other GPU.*do not compare"):
        compare.compare(a, of(other))
    driver = fill(tmp_path / "c.sqlite", [1.0], ScriptedDevice(driver="9"))
    with pytest.raises(UsageError, match="driver 9"):
        compare.compare(a, of(driver))
    with pytest.raises(UsageError, match=r"8 evaluations a shape and b.* 32 evaluations: give both the same budget"):
        compare.compare(a, of(fill(tmp_path / "bb.sqlite", [1.0], budget__evaluations=32)))
    with pytest.raises(UsageError, match="no shape in common"):
        compare.compare(a, a.model_copy(update={"shapes": {}}))
    with Store(tmp_path / "d.sqlite") as store:
        old = row(SHAPES[0], 1.0, ScriptedDevice()).model_copy(update={"protocol_version": 0})
        store.put(old.key, "sweep", old.to_json())
    with pytest.raises(UsageError, match=r"protocol version \d+, .* 0: they do not compare"):
        compare.compare(a, of(tmp_path / "d.sqlite"))


def test_databases_without_anything(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no database"):
        of(tmp_path / "gone.sqlite")
    Store(tmp_path / "e.sqlite").close()
    with pytest.raises(UsageError, match="holds no kernel"):
        of(tmp_path / "e.sqlite")
    with pytest.raises(UsageError, match="holds no sweep"):
        of(tmp_path / "e.sqlite", "search")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    db = fill(tmp_path / "s.sqlite", [1.0, 1.0, None], policy__name="random")
    fill(db, [1.5, 0.8, 1.0, 1.0], policy__name="search")
    table = CliRunner().invoke(app, ["compare", "random", "search", "--db", str(db)])
    assert table.exit_code == 0, table.output
    assert "3 shapes in common; 0 only in A, 1 only in B" in table.stdout
    assert "without a kernel: A at 1 of them, B at 0" in table.stdout and "1 / 1 / 0" in table.stdout
    document = json.loads(CliRunner().invoke(app, ["compare", f"{db}@random", f"{db}@search", "--json"]).stdout)
    assert document["reference"] == "cublaslt_auto_max" and len(document["modes"][0]["pairs"]) == 2
    refused = CliRunner().invoke(app, ["compare", str(db), str(db)])
    assert refused.exit_code == 1 and refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1


def test_nothing_of_a_shape_that_one_side_did_not_measure(tmp_path: Path) -> None:
    """A shape that a recording lacks is neither a loss nor a shape in common."""
    db = fill(tmp_path / "a.sqlite", [1.0])
    task: Task = hgemm(*SHAPES[1])
    chosen = settings(budget__evaluations=8)
    info = ScriptedDevice().info
    stamp = Stamp(config_id(chosen, toy_families()), device_scope(info), task, chosen, info)
    with Store(db) as store:
        unknown = stamp.row("not_recorded", "nothing was recorded", 0.0)
        store.put(unknown.key, "sweep", unknown.to_json())
    assert list(of(db).shapes) == [hgemm(*SHAPES[0]).task_id]
    assert Status.NOT_RECORDED.value == unknown.status
