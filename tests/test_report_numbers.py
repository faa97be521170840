"""Every number of the report's tables, recomputed from the same database by a few lines that share nothing with it."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.reporting import details
from agent.reporting.data import build
from agent.reporting.markdown import render_markdown
from agent.reporting.model import Report
from agent.reporting.published import load_peaks, load_published
from agent.reporting.source import load
from agent.reporting.tables import headline
from tests.report_kit import FAMILIES, HOPELESS, SHAPES, make_record
from tools.record_file import RecordReader
from tools.records import MODES, PROTOCOL_VERSION, TimingResult

MODE_TITLES = {mode: mode.capitalize() for mode in MODES}
BINS = {
    "< 2^24": (0, 2**24),
    "2^24 to 2^27": (2**24, 2**27),
    "2^27 to 2^30": (2**27, 2**30),
    "2^30 to 2^33": (2**30, 2**33),
    "2^33 to 2^36": (2**33, 2**36),
    ">= 2^36": (2**36, 2**99),
}
REFERENCES = {
    "torch.matmul": "torch",
    "cuBLAS": "cublas",
    "cuBLASLt heuristic": "cublaslt_heuristic",
    "cuBLASLt auto-tuned": "cublaslt_auto",
}
Ratios = list[tuple[float, float, float, float, float, str]]  # ratio, lo, hi, time, reference's time, shape


DIMS = {64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384}


def on_grid(shape: tuple[int, int, int]) -> bool:
    return set(shape) <= DIMS


def off_grid(shape: tuple[int, int, int]) -> bool:
    return not on_grid(shape)


class Oracle:
    """The winner of each shape and layout, found by trying every plan at every shape."""

    def __init__(self, path: Path) -> None:
        self.reader = RecordReader(path)
        self.layouts = {plan.plan_id: plan.b_layout for plan in self.reader.plans()}
        self.shapes: dict[str, tuple[int, int, int]] = {
            task.task_id: (task.dims["M"], task.dims["N"], task.dims["K"]) for task in self.reader.tasks()
        }
        self.finals: dict[str, list[str]] = {
            task: [k for k in self.layouts if self._admitted(k, task)] for task in self.shapes
        }

    def _admitted(self, key: str, task: str) -> bool:
        verified, sanitized = self.reader.verified(key, task, "full"), self.reader.sanitized(key)
        timed = self.reader.timed(key, task, "offline", "final")
        return all(result is not None and result.ok for result in (verified, sanitized, timed))

    def timed(self, key: str, task: str, mode: str) -> TimingResult:
        found = self.reader.timed(key, task, mode, "final")  # type: ignore[arg-type]
        assert found is not None
        return found

    def winner(self, task: str, layout: str = "max") -> str | None:
        keys = [k for k in self.finals[task] if layout == "max" or {"NN": "kn", "TN": "nk"}[layout] == self.layouts[k]]
        reference = "cublaslt_auto" + ("_max" if layout == "max" else "")
        return max(keys, key=lambda k: self.timed(k, task, "offline").row(reference).ratio, default=None)  # type: ignore[union-attr]

    def ratios(
        self,
        mode: str,
        reference: str = "cublaslt_auto",
        layout: str = "max",
        lo: int = 0,
        hi: int = 2**99,
        of: Callable[[tuple[int, int, int]], bool] = on_grid,
    ) -> Ratios:
        found = []
        for task, shape in self.shapes.items():
            key = self.winner(task, layout)
            if key is not None and of(shape) and lo <= math.prod(shape) < hi:
                row = self.timed(key, task, mode).row(reference + ("_max" if layout == "max" else ""))
                assert row is not None
                found.append(
                    (row.ratio, row.ratio_lo, row.ratio_hi, row.time_us, row.ref_us, "x".join(map(str, shape)))
                )
        return sorted(
            found, key=lambda entry: (math.prod(map(int, entry[5].split("x"))), [int(d) for d in entry[5].split("x")])
        )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("report") / "r.sqlite")


@pytest.fixture(scope="module")
def report(path: Path) -> Report:
    return build(load(path), FAMILIES, load_published(), load_peaks("NVIDIA H200"))


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path)


@pytest.fixture(scope="module")
def tables(report: Report) -> dict[tuple[str, str], list[list[str]]]:
    """(section, table title) → rows of cells, header first, as a reader of the Markdown sees them."""
    found: dict[tuple[str, str], list[list[str]]] = {}
    section = title = ""
    for line in render_markdown(report).splitlines():
        plain = line.replace("\\", "")
        if plain.startswith("## "):
            section, title = plain[3:], ""
        elif plain.startswith("**"):
            title = plain.strip("*")
        elif plain.startswith("| "):
            found.setdefault((section, title), []).append([text(cell) for cell in plain.strip("| ").split(" | ")])
    return found


def text(cell: str) -> str:
    """``<a id="x"></a>[shown](#anchor)`` → shown."""
    cell = cell.partition("</a>")[2] if cell.startswith("<a ") else cell
    return cell[1:].rpartition("](#")[0] if cell.startswith("[") and "](#" in cell else cell


def percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


def boot(values: Any) -> str:
    """The 95 % interval of the mean, by the documented bootstrap: 2,000 resamples, NumPy's generator with seed 0."""
    picks = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    lo, hi = np.percentile(np.asarray(values)[picks].mean(1), (2.5, 97.5))
    return f"{100 * lo:+.1f} … {100 * hi:+.1f} %"


def rank_p(ratios: Any) -> float:
    """Signed-rank test, exact: the distribution of the sum of ranks over all signs, by convolution."""
    logs = np.log(ratios)
    assert len(set(np.abs(logs))) == len(logs) <= 50, "the recomputation below is for samples without ties"
    ranks = np.abs(logs).argsort().argsort() + 1
    total = len(logs) * (len(logs) + 1) // 2
    ways = np.zeros(total + 1)
    ways[0] = 1
    for rank in range(1, len(logs) + 1):
        ways[rank:] = ways[rank:] + ways[:-rank].copy()
    least = min(ranks[logs > 0].sum(), ranks[logs < 0].sum())
    return float(min(1.0, 2 * ways[: least + 1].sum() / ways.sum()))


def stats_cells(found: Ratios) -> list[str]:
    ratio, lo, hi, time_us, ref_us, _ = (np.array(column) for column in zip(*found, strict=True))
    worst = int(np.argmin(ratio))
    p = rank_p(ratio)
    return [
        str(len(ratio)),
        percent(float(np.mean(ratio)) - 1),
        boot(ratio - 1) if len(ratio) > 1 else "-",
        f"{100 * np.std(ratio, ddof=1):.1f} %" if len(ratio) > 1 else "-",
        f"{np.exp(np.mean(np.log(ratio))):.3f}",
        f"{100 * np.mean(ratio > 1):.0f} % ({np.sum(ratio > 1)})",
        f"{np.sum(lo > 1)}, {np.sum(hi < 1)}",
        f"{ratio[worst]:.3f}",
        found[worst][5],
        f"{np.max(ratio):.3f}",
        f"{np.sum(ref_us) / np.sum(time_us):.3f}",
        "< 1e-12" if p < 1e-12 else f"{p:.1g}" if p < 0.001 else f"{p:.3f}",
    ]


def named(cell: str) -> dict[str, str]:
    reference, _, layout = cell.rpartition(", ")
    return {"reference": REFERENCES[reference], "layout": layout}


Tables = dict[tuple[str, str], list[list[str]]]


def test_table_1(tables: Tables, oracle: Oracle) -> None:
    header, *short = tables["Table 1. Mean speedup", "Mean speedup over each reference"]
    assert header[1:] == list(MODES)
    assert len(short) == 12
    for row in short:
        means = [np.mean([r[0] for r in oracle.ratios(mode, **named(row[0]))]) - 1 for mode in MODES]
        assert row[1:] == [percent(mean) for mean in means]
    for mode in MODES:
        rows = tables["Table 1. Mean speedup", f"In detail, {mode}"][1:]
        assert len(rows) == 12
        for row in rows:
            assert row[1:] == stats_cells(oracle.ratios(mode, **named(row[0]))), row[0]


def test_server_net_of_the_empty_kernel(tables: Tables, oracle: Oracle) -> None:
    title = next(t for s, t in tables if s.startswith("Table 1") and t.startswith("Server, gross and net"))
    gross, net = tables["Table 1. Mean speedup", title][1:]
    empty = 1.25  # of the scripted device
    clear = [r for r in oracle.ratios("server") if min(r[3], r[4]) - empty >= 0.5]
    assert 0 < len(clear) < len(oracle.ratios("server"))
    assert f"{len(oracle.ratios('server')) - len(clear)} shapes" in title
    assert gross[1:] == stats_cells(clear)
    rest = [((r * t - empty) / (t - empty), (lo * t - empty) / (t - empty), (hi * t - empty) / (t - empty), t - empty,
             ref - empty, shape) for r, lo, hi, t, ref, shape in clear]  # fmt: skip
    assert net[1:] == stats_cells(rest)


def test_table_2(tables: Tables, oracle: Oracle) -> None:
    for mode, title in MODE_TITLES.items():
        rows = tables["Table 2. max(custom, reference)", title][1:]
        assert len(rows) == 12
        for row in rows:
            found = oracle.ratios(mode, **named(row[0]))
            best = np.maximum([r[0] for r in found], 1)
            clear = np.mean([r[0] if r[1] > 1 else 1 for r in found]) - 1
            assert row[1:] == [
                str(len(best)),
                percent(np.mean(best) - 1),
                boot(best - 1),
                f"{100 * np.std(best, ddof=1):.1f} %",
                f"{np.exp(np.mean(np.log(best))):.3f}",
                f"{100 * np.mean(best > 1):.0f} % ({np.sum(best > 1)})",
                percent(float(clear)),
            ]


def test_the_mean_weighted_by_the_sizes_of_the_grid(report: Report, oracle: Oracle) -> None:
    products = [m * n * k for m in DIMS for n in DIMS for k in DIMS]
    for mode in MODE_TITLES:
        parts = []
        for lo, hi in BINS.values():
            ratios = [row[0] for row in oracle.ratios(mode, lo=lo, hi=hi)]
            share = sum(lo <= product < hi for product in products) / 1000
            parts.append(share * (np.mean(ratios) - 1) if ratios else np.nan)
        expected = None if np.isnan(parts).any() else pytest.approx(sum(parts))
        assert report.grid_weighted[mode] == expected


def test_table_3(tables: Tables, oracle: Oracle) -> None:
    for mode, title in MODE_TITLES.items():
        rows = tables["Table 3. By size", title][1:]
        assert [row[0] for row in rows] == list(BINS)
        for row in rows:
            lo, hi = BINS[row[0]]
            assert row[1] == str(sum(lo <= math.prod(s) < hi for s in SHAPES if on_grid(s)))
            assert row[2:] == stats_cells(oracle.ratios(mode, lo=lo, hi=hi))


def test_off_the_grid(tables: Tables, oracle: Oracle, report: Report) -> None:
    for mode, title in MODE_TITLES.items():
        rows = {row[0]: row[1:] for row in tables["Off the grid", f"{title}, off the grid"][1:]}
        assert list(rows) == ["all", "16", "96"]
        assert rows["all"] == stats_cells(oracle.ratios(mode, of=off_grid))
        for m in (16, 96):
            assert rows[str(m)] == stats_cells(oracle.ratios(mode, of=lambda s, m=m: off_grid(s) and s[0] == m))
    first, *_, last = headline(report)
    assert f"over {len(oracle.ratios('offline'))} shapes of the grid, " in first
    assert f"off the grid, offline: mean speedup {rows_mean(oracle)} " in "\n".join(headline(report))
    assert last.startswith(f"{len(SHAPES)} shapes in the database")


def rows_mean(oracle: Oracle) -> str:
    return percent(float(np.mean([row[0] for row in oracle.ratios("offline", of=off_grid)])) - 1)


@pytest.mark.parametrize("on", [0, 2])
def test_where_few_are_on_the_grid_all_count(on: int, tmp_path: Path) -> None:
    shapes = [*filter(off_grid, SHAPES), *[shape for shape in SHAPES if on_grid(shape) and shape != HOPELESS][:on]]
    path = make_record(tmp_path / "r.sqlite", shapes)
    report = build(load(path), FAMILIES, load_published(), load_peaks("NVIDIA H200"))
    assert report.off_grid == ()
    assert f" over {len(shapes)} shapes, " in headline(report)[0]
    assert report.comparison("offline").stats.shapes == len(shapes)  # type: ignore[union-attr]
    assert "Off the grid" not in render_markdown(report)


def test_bands_of_figure_3(tables: Tables, oracle: Oracle) -> None:
    sizes: dict[str, tuple[Callable[[list[int]], float], float]] = {
        "log2 of M*N*K": (math.prod, 1.0),
        "log2 of the mean of M, N, K": (lambda dims: sum(dims) / 3, 0.5),
        "log2 of the largest of M, N, K": (max, 0.5),
    }
    for name, (size, width) in sizes.items():
        rows = tables["Figure 3. Speedup against size", f"Bands against {name}"][1:]
        shown = {float(row[0]): row[1:] for row in rows}
        for index, mode in enumerate(MODES):
            bands: dict[float, list[float]] = {}
            for ratio, *_, shape in oracle.ratios(mode):
                log = math.log2(size([int(d) for d in shape.split("x")]))
                bands.setdefault(min(shown, key=lambda x, log=log: (abs(x - log), -x)), []).append(ratio - 1)
            assert set(bands) == set(shown)
            for x, values in bands.items():
                std = f"{100 * np.std(values, ddof=1):.1f} %" if len(values) > 1 else "-"
                assert shown[x][3 * index : 3 * index + 3] == [str(len(values)), percent(float(np.mean(values))), std]
            assert all(abs(x / width - round(x / width)) < 1e-9 for x in shown)


def test_every_loss_is_listed_worst_first(tables: Tables, oracle: Oracle) -> None:
    for mode in MODES:
        found = oracle.ratios(mode)
        assert any(r[0] < 1 for r in found), "the kit is to have losses in every mode"
        check_losses(tables, mode.capitalize(), found)
        check_losses(tables, f"{mode.capitalize()}, off the grid", oracle.ratios(mode, of=off_grid))


def check_losses(tables: Tables, title: str, found: Ratios) -> None:
    losses = sorted((r for r in found if r[0] < 1), key=lambda r: r[0])
    whole = ("Losses and worst cases", f"{title}: {len(losses)} losses among {len(found)} shapes")
    assert (whole in tables) == bool(losses), "a table without rows has no header"
    if losses:
        rows = tables[whole][1:]
        assert [(row[0], row[2], row[3], row[4]) for row in rows] == [
            (shape, f"{r:.3f}", f"{lo:.3f} … {hi:.3f}", "clear" if hi < 1 else "within noise")
            for r, lo, hi, _, _, shape in losses
        ]
        assert [(row[5], row[6]) for row in rows] == [(us(r[3]), us(r[4])) for r in losses]


def us(value: float) -> str:
    return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"


def test_every_shape(tables: Tables, oracle: Oracle) -> None:
    rows = {row[0]: row for row in tables["Every shape", f"{len(SHAPES)} shapes"][1:]}
    assert len(rows) == len(SHAPES)
    labels = {plan.plan_id: plan.label for plan in oracle.reader.plans()}
    for task, shape in oracle.shapes.items():
        row = rows["x".join(map(str, shape))]
        key = oracle.winner(task)
        if key is None:
            assert shape == HOPELESS
            assert row[1].startswith("none: ")
            assert set(row[2:]) == {"not measured"}
            continue
        assert row[1] == labels[key]
        for index, mode in enumerate(MODES):
            timing = oracle.timed(key, task, mode)
            r = timing.row("cublaslt_auto_max")
            assert r is not None
            marks = "*" * timing.noisy + "!" * timing.throttled
            assert row[2 + 5 * index : 7 + 5 * index] == [
                f"{r.ratio:.3f}{marks}",
                f"{r.ratio_lo:.3f} … {r.ratio_hi:.3f}",
                us(r.time_us),
                us(r.ref_us),
                f"{100 * (timing.spread or 0):.1f} %",
            ]
        verified = oracle.reader.verified(key, task, "full")
        assert verified is not None
        assert row[17:19] == [f"{verified.max_abs_error:.3g}", f"{verified.cublas_max_abs_error:.3g}"]
        assert row[19] == ("record" if oracle.reader.profiled(key, task) else "not measured")


def test_accuracy(tables: Tables, oracle: Oracle) -> None:
    rows = tables["Accuracy", "Error by size"][1:]
    for row, (lo, hi) in zip(rows, BINS.values(), strict=True):
        errors = []
        for task, shape in oracle.shapes.items():
            key = oracle.winner(task)
            verified = oracle.reader.verified(key, task, "full") if key and lo <= math.prod(shape) < hi else None
            if verified is not None:
                errors.append((verified.max_abs_error, verified.cublas_max_abs_error))
        ours, theirs = (np.array(side) for side in zip(*errors, strict=True))
        assert row[1:] == [
            str(len(ours)),
            *(f"{value:.3g}" for value in (np.median(ours), max(ours), np.median(theirs), max(theirs))),
            f"{np.sum(ours <= theirs)} of {len(ours)}",
        ]


def test_rejections(tables: Tables, path: Path) -> None:
    section = "What the gate rejected"
    with sqlite3.connect(path) as db:
        count = partial(lambda *args: db.execute(*args).fetchone()[0])
        for row in tables[section, "Rejections by reason"][1:]:
            stage, setting, reason, shown, shapes, *_ = row
            if stage == "verify":
                depth = ("quick", "full").index(setting)
                where = "FROM verifies WHERE depth = ? AND reason = ?"
                assert int(shown) == count(f"SELECT count(*) {where}", (depth, reason))
                assert int(shapes) == count(f"SELECT count(DISTINCT task) {where}", (depth, reason))
        shown = {(r[0], r[2]) for r in tables[section, "Rejections by reason"][1:]}
        assert shown >= {("compile", "register_spill"), ("verify", "wrong_result"), ("sanitize", "race")}
        title = next(t for s, t in tables if s == section and t.startswith("What each stage"))
        stages = {(row[0], row[1]): [int(cell) for cell in row[2:]] for row in tables[section, title][1:]}
        assert stages["verify", "quick"] == [
            count("SELECT count(*) FROM verifies WHERE depth = 0 AND status = ?", (status,))
            for status in ("ok", "failed", "not_recorded")
        ]
        assert stages["time", "offline/screen"][0] == count(
            "SELECT count(*) FROM timings WHERE mode = 0 AND budget = 0 AND status = 'ok'"
        )
        assert sum(stages["compile", "-"]) == count("SELECT count(*) FROM compiles")
        assert sum(stages["sanitize", "-"]) == count("SELECT count(*) FROM sanitizes")


def test_published_columns_stand_beside_ours(tables: Tables, oracle: Oracle) -> None:
    section = "CUDA-L2's published results beside ours"
    header, *rows = tables[section, "Mean speedup, offline / server (-: not published)"]
    assert header[3:] == [f"{h} accumulate" for h in ("H100, FP32", "A100, FP32", "RTX 3090, FP32", "A100, FP16")]
    row = next(row for row in rows if row[0] == "cuBLASLt auto-tuned, max")
    ours = [percent(np.mean([r[0] for r in oracle.ratios(mode)]) - 1) for mode in ("offline", "server")]
    assert row[1] == " / ".join(ours)
    assert row[3:] == ["+7.0 % / +22.1 %", "+12.2 % / +12.7 %", "+12.7 % / +19.8 %", "+11.4 % / +15.9 %"]
    bins = tables[section, "By size, offline, over cuBLASLt auto-tuned, max"]
    assert [row[2] for row in bins[1:7]] == [
        *("+17.7 % (56)", "+15.5 % (118)", "+12.2 % (205)", "+13.4 % (241)", "-2.1 % (214)", "-6.4 % (166)")
    ]
    found = oracle.ratios("offline")
    ratio = np.array([r[0] for r in found])
    assert [row[1] for row in bins[7:]] == [
        percent(np.mean(ratio) - 1),
        f"{np.exp(np.mean(np.log(ratio))):.3f}",
        f"{100 * np.mean(ratio > 1):.1f} %",
    ]


def test_numbers_of_shapes_stand_in_the_order_of_the_modes(report: Report) -> None:
    count = {"offline": 9, "rotating": 8, "server": 7}
    comparisons = tuple(
        one.model_copy(update={"stats": one.stats.model_copy(update={"shapes": count[one.mode]})})
        for one in report.comparisons
        if one.stats is not None
    )
    section = details.published(report.model_copy(update={"comparisons": comparisons}))
    assert section.tables[0].rows[0].cells[2] == "9 / 7"


def test_roofline_table(tables: Tables, oracle: Oracle) -> None:
    for row in tables["Roofline", "The fastest kernels"][1:]:
        rates = {}
        for *_, time_us, _, shape in oracle.ratios(row[0], of=lambda _: True):
            m, n, k = map(int, shape.split("x"))
            rates[shape] = (2 * m * n * k / time_us / 1e6, 2 * (m * k + k * n + m * n) / time_us / 1e6)
        fast, wide = (max(rates, key=lambda s, i=i: rates[s][i]) for i in (0, 1))
        assert row[1:] == [f"{rates[fast][0]:.1f}", fast, f"{rates[wide][1]:.2f}", wide]


def test_profiles_and_provenance(tables: Tables, oracle: Oracle, report: Report) -> None:
    profiled = [t for t in oracle.shapes if (k := oracle.winner(t)) and oracle.reader.profiled(k, t)]
    rows = tables["ncu records", f"{len(profiled)} ncu records"]
    assert 0 < len(profiled) < report.shapes_with_kernel
    assert {row[0] for row in rows[1:]} == {"x".join(map(str, oracle.shapes[t])) for t in profiled}
    facts = dict(tables["Provenance", ""][1:])
    clocks = [
        timing.clocks.sm_mhz_median
        for task in oracle.shapes
        if (key := oracle.winner(task))
        for timing in (oracle.timed(key, task, mode) for mode in MODES)
        if timing.clocks
    ]
    assert facts["SM clock, median of a timing"].startswith(f"{min(clocks)} to {max(clocks)} MHz")
    assert facts["source commit of the recording"] == "0123abc"
    assert facts["protocol version"] == str(PROTOCOL_VERSION)
