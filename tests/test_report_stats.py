"""Statistics, winners and published numbers of reports, on small values worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as scipy_stats

from agent.errors import UsageError
from agent.reporting.data import build
from agent.reporting.measured import Measured
from agent.reporting.published import load_peaks, load_published
from agent.reporting.sizes import SIZE_BINS, in_bin
from agent.reporting.source import load
from agent.reporting.stats import Sample, mean_interval, signed_rank_p, summarise, with_fallback
from agent.reporting.winners import choose, hindrance
from tests.fakes import ScriptedDevice
from tests.report_kit import FAMILIES, HOPELESS, make_record
from tools.hgemm import grid
from tools.records import Reason, SanitizeResult, Status, VerifyResult


def sample(ratio: float, shape: str = "s", width: float = 0.01, time_us: float = 1.0) -> Sample:
    return Sample(shape, ratio, ratio - width, ratio + width, time_us, ratio * time_us)


def test_a_small_sample_by_hand() -> None:
    found = summarise([sample(2.0, "a"), sample(0.5, "b", time_us=10.0), sample(1.005, "c")])
    assert found is not None
    assert found.mean_speedup == pytest.approx((1.0 - 0.5 + 0.005) / 3)
    assert found.geo_mean_ratio == pytest.approx(1.005 ** (1 / 3))
    assert (found.wins, found.clear_wins, found.clear_losses) == (2, 1, 1)
    assert (found.worst_ratio, found.worst_shape, found.best_ratio, found.best_shape) == (0.5, "b", 2.0, "a")
    assert found.total_time_ratio == pytest.approx((2 + 5 + 1.005) / 12)
    fallback = with_fallback([sample(2.0), sample(0.5), sample(1.005)])
    assert fallback is not None
    assert fallback.mean_speedup == pytest.approx(1.005 / 3)
    assert fallback.mean_speedup_if_clear == pytest.approx(1.0 / 3)
    assert fallback.custom_used == 2


def test_one_shape_has_no_deviation_and_none_has_nothing() -> None:
    one = summarise([sample(1.2)])
    assert one is not None
    assert (one.std_speedup, one.mean_lo, one.mean_hi) == (None, None, None)
    assert one.mean_speedup == pytest.approx(0.2)
    assert summarise([]) is None
    assert with_fallback([]) is None


def test_the_interval_covers_the_mean_and_narrows() -> None:
    values = np.random.default_rng(3).normal(0.1, 0.2, 400)
    lo, hi = mean_interval(values)
    assert lo is not None
    assert hi is not None
    assert lo < values.mean() < hi
    assert hi - lo == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.15)
    assert mean_interval(values) == (lo, hi), "the same values give the same interval"


@pytest.mark.parametrize("count", [6, 40, 300])
def test_the_signed_rank_test_agrees_with_simulation(count: int) -> None:
    ratios = np.exp(np.random.default_rng(count).normal(0.02, 0.1, count))
    logs = np.log(ratios)
    ranks = scipy_stats.rankdata(np.abs(logs))
    observed = abs((ranks * np.sign(logs)).sum())
    signs = np.random.default_rng(1).choice((-1.0, 1.0), (20_000, count))
    simulated = float(np.mean(np.abs(signs @ ranks) >= observed - 1e-9))
    assert signed_rank_p(ratios) == pytest.approx(simulated, abs=0.015)


def test_the_signed_rank_test_at_the_edges() -> None:
    assert signed_rank_p(np.array([1.0, 1.0])) is None
    assert signed_rank_p(np.full(12, 1.1)) == pytest.approx(
        scipy_stats.norm.sf(12 * 13 / 4 / math.sqrt(12 * 12 * 13 / 4 / 4)) * 2, abs=0.002
    )
    assert signed_rank_p(np.array([1.1, 0.9, 1.0])) is not None


def test_the_grid_falls_into_the_papers_bins() -> None:
    counts = [sum(in_bin(math.prod(shape), lo, hi) for shape in grid()) for _, lo, hi in SIZE_BINS]
    published = load_published()
    assert all(tuple(counts) == bins.shapes for entry in published.sets for bins in entry.bins)
    assert sum(counts) == 1000


def test_published_means_agree_with_their_own_bins() -> None:
    """A slip of a digit in configs/published.yaml shows here."""
    for entry in load_published().sets:
        for bins in entry.bins:
            mean = sum(s * n for s, n in zip(bins.speedups, bins.shapes, strict=True)) / sum(bins.shapes)
            assert mean == pytest.approx(bins.mean_speedup, abs=0.0015), (entry.hardware, bins.mode)
            row = next(m for m in entry.table1 if (m.reference, m.layout) == ("cublaslt_auto", "max"))
            if entry.origin.startswith("recomputed"):
                assert getattr(row, bins.mode) == bins.mean_speedup


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sets: [", "is not valid YAML"),
        ("title: x\n", "is missing"),
        ("devices: 3\n", "devices: must be a list"),
    ],
)
def test_a_broken_file_of_published_numbers(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"p.yaml.*({sentence})"):
        (load_peaks if "devices" in text else lambda _, p: load_published(p))("NVIDIA H200", path)


def test_peaks_are_found_by_the_beginning_of_the_name() -> None:
    h200 = load_peaks("NVIDIA H200 NVL")
    assert h200 is not None
    assert h200.dram_tb_per_s == 4.8
    assert load_peaks("Scripted GPU") is None


# --- winners ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    shapes = [(64, 64, 64), (512, 256, 128), HOPELESS]
    return load(make_record(tmp_path_factory.mktemp("winners") / "r.sqlite", shapes))


TASK = "hgemm-f32acc/M=512,N=256,K=128"


def without(measured: Measured, key: str, **change: object) -> str:
    """Why the winner is out after ``change``, and that another kernel or none takes its place."""
    from dataclasses import replace

    changed = replace(measured, **change)  # type: ignore[arg-type]
    assert choose(changed)[TASK].best != key
    return hindrance(changed, (TASK, key))


def test_a_winner_has_passed_the_whole_gate(measured: Measured) -> None:
    key = choose(measured)[TASK].best
    assert key is not None
    at = (TASK, key)
    assert hindrance(measured, at) == ""
    wrong = VerifyResult(
        status=Status.FAILED, reason=Reason.WRONG_RESULT, detail="x", variant_key=key, task_id=TASK, depth="full"
    )
    racing = SanitizeResult(status=Status.FAILED, reason=Reason.RACE, detail="x", variant_key=key)
    verified = {a: v for a, v in measured.verified.items() if a != at}
    sanitized = {a: s for a, s in measured.sanitized.items() if a != at}
    assert without(measured, key, verified={**verified, at: wrong}) == "failed verification"
    assert without(measured, key, verified=verified) == "not verified at full depth"
    assert without(measured, key, quick_failed=frozenset({at})) == "failed verification"
    assert without(measured, key, sanitized={**sanitized, at: racing}) == "failed the sanitizer"
    assert without(measured, key, sanitized=sanitized) == "not sanitized"
    assert without(measured, key, timing_failed=frozenset({at})) == "failed a timing"
    offline_gone = {a: {m: t for m, t in modes.items() if m != "offline"} for a, modes in measured.timings.items()}
    gone = choose(Measured(**{**measured.__dict__, "timings": offline_gone}))
    assert gone[TASK].best is None
    assert "not timed offline" in gone[TASK].why_none


def test_the_headline_takes_the_better_layout_on_both_sides(measured: Measured) -> None:
    for task_id, found in choose(measured).items():
        candidates = {
            k: m["offline"]
            for (t, k), m in measured.timings.items()
            if t == task_id and not hindrance(measured, (t, k))
        }
        if not candidates:
            assert found.best is None
            continue
        best = max(candidates, key=lambda k: candidates[k].row("cublaslt_auto_max").ratio)  # type: ignore[union-attr]
        assert found.best == best
        assert {candidates[k].rows[0].b_layout for k in found.by_layout.values()} == {
            t.rows[0].b_layout for t in candidates.values()
        }


def test_a_mode_without_timings_is_not_measured(measured: Measured) -> None:
    from dataclasses import replace

    timings = {at: {"offline": modes["offline"]} for at, modes in measured.timings.items()}
    report = build(replace(measured, timings=timings), FAMILIES, load_published(), None)  # type: ignore[arg-type]
    assert report.headline("offline") is not None
    assert report.headline("server") is None
    assert report.server_net is None
    assert [b.stats for b in report.sizes if b.mode == "rotating"] == [None] * 6
    assert all(not panel.bands for panel in report.panels if panel.mode != "offline")
    assert report.from_json(report.document()) == report, "the JSON document holds all of it"


def test_the_certify_budget_is_shown_apart_and_stands_in_for_final(measured: Measured) -> None:
    from dataclasses import replace

    key = choose(measured)[TASK].best
    assert key is not None
    long_runs = {mode: t.model_copy(update={"budget": "certify"}) for mode, t in measured.timings[TASK, key].items()}
    report = build(replace(measured, certified={(TASK, key): long_runs}), FAMILIES, load_published(), None)
    shape = next(s for s in report.shapes if s.task_id == TASK)
    assert set(shape.certified) == {"offline", "rotating", "server"}
    from agent.reporting.markdown import render_markdown

    assert "Certified again at the long budget" in render_markdown(report)


def test_the_scripted_device_says_that_it_is_scripted(measured: Measured) -> None:
    assert measured.device.label == ScriptedDevice(name="NVIDIA H200").info.label
    assert "scripted" in measured.device.label
