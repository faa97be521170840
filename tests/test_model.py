"""The analytical model: physics it must obey, quality against the H200 record, speed, and the command."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import toy_families
from typer.testing import CliRunner

from agent.cli import app
from tools import model_quality
from tools.families import accepted_plans, load_families
from tools.hgemm import hgemm
from tools.launching import environment
from tools.model import (
    FOLDS,
    GpuSize,
    ModelError,
    estimates_us,
    floor_us,
    fold_of,
    held_out,
    load_fitted,
    rank,
)
from tools.model_quality import Measured, evaluate, measured, random_regrets, regrets, spearman
from tools.model_terms import FAMILIES, Case, longest, missing_rows, occupancy, splitk_split
from tools.records import Plan, Task
from tools.replay import ReplayDevice
from tools.shapes import spread

H200 = GpuSize(sm_count=132, l2_bytes=62_914_560)
ODD_SHAPES = [(1, 8, 8), (7, 4096, 4096), (100, 128, 24), (8191, 7168, 2048), (33, 28672, 8192), (131072, 8, 65536)]


FAMILIES_OF_KERNELS = load_families()


def plans_of(task: Task) -> list[Plan]:
    return [v.plan for v in accepted_plans(FAMILIES_OF_KERNELS, task) if v.plan is not None]


@lru_cache(maxsize=1)
def h200() -> tuple[Measured, ...]:
    device = ReplayDevice()
    try:
        return tuple(measured(device.records, load_families())[0])
    finally:
        device.close()


def plan(family: str, like: dict[str, int], task: Task) -> Plan:
    return next(p for p in plans_of(task) if p.family == family and like.items() <= p.knobs.items())


# --- physics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*spread(40), *ODD_SHAPES])
def test_every_plan_has_a_finite_time_above_the_launch(shape: tuple[int, int, int]) -> None:
    task = hgemm(*shape)
    estimates = estimates_us(plans_of(task), task, H200)
    assert np.isfinite(estimates).all() and estimates.min() > load_fitted().constants["machine.launch_us"]


def test_the_model_splits_as_the_launch_does() -> None:
    compared = 0
    for task in (hgemm(*shape) for shape in [*spread(120), *ODD_SHAPES]):
        for variant in accepted_plans({"wgmma_splitk": FAMILIES_OF_KERNELS["wgmma_splitk"]}, task):
            assert variant.plan is not None
            told = environment(variant.launch, task.dims, variant.b_layout, H200.sm_count)
            columns = {name: np.array([value]) for name, value in variant.plan.knobs.items()}
            found = splitk_split(columns, Case.of(*task.dims.values(), H200))
            assert [int(one[0]) for one in found] == [told[n] for n in ("TILES", "STAGES", "SPLITS")], variant.label
            compared += 1
    assert compared > 200


@pytest.mark.parametrize("grow", ["M", "N", "K"])
def test_more_work_is_never_quicker(grow: str) -> None:
    """Doubling a dimension of any grid shape, for every plan that takes both. K: but for the last part of a split."""
    for shape in itertools.product((64, 4096), (128, 2048), (64, 1024, 8192)):
        small = dict(zip("MNK", shape, strict=True))
        large = {**small, grow: 2 * small[grow]}
        a, b = (hgemm(*(d[x] for x in "MNK")) for d in (small, large))
        accepted = {p.plan_id for p in plans_of(b)}
        both = [p for p in plans_of(a) if p.plan_id in accepted]
        assert (estimates_us(both, b, H200) >= estimates_us(both, a, H200) * (1 - 1e-9)).all(), (shape, grow)


def test_a_last_wave_costs_a_whole_round() -> None:
    """132 tiles of 128 x 128 fill the GPU; one more column of tiles is a second round, nearly twice the time."""
    full, over = hgemm(128 * 11, 128 * 12, 4096), hgemm(128 * 11, 128 * 13, 4096)
    p = plan("wgmma_persistent", {"BM": 128, "BN": 128, "PINGPONG": 1, "CLUSTER_M": 1, "CLUSTER_N": 1}, full)
    one, two = (float(estimates_us([p], t, H200)[0]) for t in (full, over))
    assert 1.6 < two / one < 2.0
    more_sms = GpuSize(sm_count=144, l2_bytes=H200.l2_bytes)
    assert float(estimates_us([p], over, more_sms)[0]) < 1.2 * one


def test_split_k_pays_where_tiles_are_few_and_not_where_they_are_many() -> None:
    knobs = {"LOADER": 1, "BM": 64, "BN": 64, "BK": 128}
    for shape, pays in (((128, 128, 8192), True), ((2048, 2048, 256), False)):
        task = hgemm(*shape)
        one, four = (plan("wgmma_tile", {**knobs, "CLUSTER_K": s}, hgemm(128, 128, 8192)) for s in (1, 4))
        a, b = estimates_us([one, four], task, H200)
        assert (b < a) == pays, shape


def test_rows_that_are_not_there_cost_more_than_none_fetched() -> None:
    """At few rows that fill no tile the plan with RAGGED comes before its twin; elsewhere there is no such cost."""
    for m in (1, 33, 100, 300):
        task = hgemm(m, 4096, 4096)
        ps = plans_of(task)
        found = {p.plan_id: t for p, t in zip(ps, estimates_us(ps, task, H200), strict=True)}
        twins = [(p, Plan(**{**p.model_dump(), "knobs": {k: v for k, v in p.knobs.items() if k != "RAGGED"}}))
                 for p in ps if p.knob("RAGGED")]  # fmt: skip
        assert len(twins) > 20 and all(found[p.plan_id] < found[twin.plan_id] for p, twin in twins)
    whole = np.array([128.0])
    for m, cost in ((64, 1.0), (1000, 1.0), (33, 1 + 0.6 * (1 - 33 / 128)), (100, 1 + 0.6 * (1 - 100 / 128))):
        assert missing_rows({}, Case.of(m, 4096, 4096, H200), whole, 0.6) == pytest.approx(cost)
    assert missing_rows({"RAGGED": np.array([1.0])}, Case.of(33, 4096, 4096, H200), whole, 0.6) == 1.0


def test_smooth_maximum_lies_between_the_maximum_and_the_sum() -> None:
    a, b = np.array([1.0, 2.0, 5.0]), np.array([1.0, 0.5, 5.0])
    found = longest(4.0, a, b)
    assert (found >= np.maximum(a, b)).all() and (found < a + b).all()
    assert longest(4.0, a, np.zeros(3)) == pytest.approx(a)


def test_occupancy_is_the_tightest_limit() -> None:
    one = np.ones(1)
    assert occupancy(100_000 * one, 128 * one, 32 * one)[0] == 2  # shared memory: 2 x (100,000 + 1,024) of 233,472
    assert occupancy(0 * one, 1024 * one, 32 * one)[0] == 2  # threads
    assert occupancy(0 * one, 128 * one, 128 * one)[0] == 4  # registers
    assert occupancy(0 * one, 32 * one, 16 * one)[0] == 32  # CTAs
    assert occupancy(232_448 * one, 384 * one, 168 * one)[0] == 1


# --- what it does not know ---------------------------------------------------------------------------------------


def test_unknown_plans_come_last_in_their_order() -> None:
    task = hgemm(512, 512, 512)
    strange = [Plan(family="x", revision=1, b_layout="nk", knobs={"TILE": i}) for i in (3, 1)]
    ranked = rank([strange[0], *plans_of(task), strange[1]], task, H200)
    assert [r.plan for r in ranked[-2:]] == strange and [r.time_us for r in ranked[-2:]] == [None, None]
    assert all(r.time_us is not None for r in ranked[:-2])


def test_families_without_terms_go_by_tile() -> None:
    families = toy_families()
    task = hgemm(4096, 4096, 4096)
    toys = [v.plan for v in accepted_plans(families, task) if v.plan is not None]
    assert np.isfinite(estimates_us(toys, task, H200)).all()


def test_another_revision_without_a_knob_goes_by_tile() -> None:
    other = Plan(family="wgmma_tile", revision=9, b_layout="nk", knobs={"BM": 128, "BN": 128})
    assert np.isfinite(estimates_us([other], hgemm(512, 512, 512), H200)).all()


def test_another_operation_is_not_known() -> None:
    task = hgemm(64, 64, 64)
    reduced = task.model_copy(update={"dims": {"N": 64}})
    assert np.isnan(estimates_us(plans_of(task)[:3], reduced, H200)).all()


# --- against the record ------------------------------------------------------------------------------------------


def test_held_out_regret_and_correlation() -> None:
    """The issue's targets, 3 % at k = 4 and 0.5 % at k = 16, by constants that were fitted without the shape."""
    rows = evaluate(h200(), H200, load_fitted())
    model, tile, chance = rows[:3]
    assert (model.regime, model.order, tile.order, chance.order) == ("all", "model", "tile cost", "random")
    assert model.shapes == len(h200())
    assert model.regret[4].mean <= 0.03 and model.regret[16].mean <= 0.005 and model.spearman > 0.85  # type: ignore[operator]
    for k in (1, 4, 8, 16, 24):
        assert model.regret[k].mean < tile.regret[k].mean / 3 and model.regret[k].mean < chance.regret[k].mean / 3


def test_floor_is_below_everything_measured_and_not_far_below_the_best() -> None:
    reach = []
    for shape in h200():
        floor = floor_us(shape.task, H200, held_out(shape.task))
        assert floor < shape.times_us.min(), shape.task.label
        reach.append(floor / shape.times_us.min())
    assert np.median(reach) > 0.35 and max(reach) > 0.7


def test_folds_hold_twins_out_together_and_are_all_used() -> None:
    folds = [fold_of(s.task) for s in h200()]
    assert set(folds) == set(range(FOLDS)) and max(np.bincount(folds)) < len(folds) / 2
    assert fold_of(hgemm(64, 4096, 512)) == fold_of(hgemm(4096, 64, 512))
    task = hgemm(64, 4096, 512)
    assert held_out(task) is load_fitted().folds[fold_of(task)]


def test_constants_are_complete_and_stable_over_folds() -> None:
    """A constant that flips when a fifth of the shapes is missing is no constant."""
    fitted = load_fitted()
    assert {name.split(".")[0] for name in fitted.constants} == {"machine", *FAMILIES}
    for name, value in fitted.constants.items():
        for fold in fitted.folds:
            assert 0.25 < fold[name] / value < 4, name


# --- measures of quality -----------------------------------------------------------------------------------------


def test_regret_is_of_the_best_among_the_first_k() -> None:
    ratios = np.array([0.5, 0.8, 0.7, 0.9, *[0.1] * 10, 1.0])
    assert regrets(ratios) == pytest.approx([0.5, 0.1, 0.1, 0.0, 0.0])


def test_random_regret_is_the_mean_over_all_orders() -> None:
    ratios = np.array([0.2, 1.0, 0.6, 0.4, 0.9])
    for k, found in zip((1, 4), random_regrets(ratios)[:2], strict=True):
        brute = [1 - max(c) for c in itertools.combinations(ratios, k)]
        assert found == pytest.approx(np.mean(brute))
    assert random_regrets(ratios)[2:] == pytest.approx([0.0, 0.0, 0.0])


def test_spearman_handles_ties() -> None:
    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 90])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    assert spearman(np.array([1.0, 1, 2]), np.array([1.0, 2, 3])) == pytest.approx(0.8660254)


# --- speed, files, commands --------------------------------------------------------------------------------------


def test_ranking_takes_milliseconds() -> None:
    """The limit is 5 ms for some 270 plans; the fastest of several runs, because the machine may be busy."""
    task = hgemm(512, 512, 1024)
    plans = plans_of(task)
    assert len(plans) > 200
    times = []
    for _ in range(15):
        started = time.process_time()
        rank(plans, task, H200)
        times.append(time.process_time() - started)
    assert min(times) < 0.005


@pytest.mark.parametrize("text", ["", "a: [", "constants: {machine: {launch_us: -1}}", "constants: 3\nfolds: []"])
def test_a_damaged_file_of_constants_is_said_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"model\.yaml cannot be used .*fit_model"):
        load_fitted(path)
    with pytest.raises(ModelError, match="cannot be used"):
        load_fitted(tmp_path / "nothing.yaml")


def test_rank_command() -> None:
    done = CliRunner().invoke(app, ["model", "rank", "--shape", "1000,4096,7168", "--top", "3", "--json"])
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and len(document["ranked"]) == 3 < document["plans"]
    estimates = [entry["estimate_us"] for entry in document["ranked"]]
    assert estimates == sorted(estimates) and 0 < document["floor_us"] < estimates[0]
    shown = CliRunner().invoke(app, ["model", "rank", "--shape", "33,35,37"])
    assert shown.exit_code == 0 and "plain_tiled" in shown.stdout and "floor" in shown.stdout
    wrong = CliRunner().invoke(app, ["model", "rank", "--shape", "0,1"])
    assert wrong.exit_code == 1 and "is not a shape" in wrong.stderr


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    answers: list[Any] = []

    def asked(*given: Any) -> Any:
        answers[:] = answers or [function(*given)]
        return answers[0]

    return asked


def test_evaluate_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("measured", "evaluate"):  # seconds each, and the table is of the same rows
        monkeypatch.setattr(model_quality, name, once(getattr(model_quality, name)))
    done = CliRunner().invoke(app, ["model", "evaluate", "--json"])
    document = json.loads(done.stdout)
    assert done.exit_code == 0 and document["shapes"] == len(h200())
    best = document["quality"][0]
    assert best["order"] == "model" and 0 < best["regret"]["4"]["mean"] <= best["regret"]["1"]["mean"]
    table = CliRunner().invoke(app, ["model", "evaluate"]).stdout
    assert "| few-tiles |" in table and "k = 24" in table
    gone = CliRunner().invoke(app, ["model", "evaluate", "--from", str(tmp_path / "gone.sqlite")])
    assert gone.exit_code == 1 and "there is no record file" in gone.stderr and "Traceback" not in gone.stderr
