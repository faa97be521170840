"""One suite for every device: the scripted fake, the replay of a recording, and a GPU (marked ``gpu``)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from tests.fakes import ScriptedDevice, raw_variant, toy_families
from tools.device import Device
from tools.families import accepted_plans, load_families
from tools.gate import MemoryResults, Toolbox
from tools.hgemm import hgemm
from tools.recording import record
from tools.records import (
    HEADLINE_REFERENCE,
    MODES,
    PROTOCOL_VERSION,
    REFERENCES,
    Depth,
    Family,
    Mode,
    Outcome,
    Reason,
    Status,
    Task,
    Variant,
)
from tools.replay import ReplayDevice
from tools.sanitize_shapes import sanitize_tasks
from tools.visible_gpus import visible_gpus

TASK = hgemm(256, 128, 192)
SANITIZERS = {"memcheck", "racecheck", "initcheck", "synccheck"}


@dataclass(frozen=True)
class Bench:
    """A device, a variant that is right and fast there, and the ones that are not."""

    kind: str
    device: Device
    families: dict[str, Family]
    good: Variant
    demanding: Variant  # does not take ``untaken``
    untaken: Task
    broken: Variant  # does not compile


def scripted() -> ScriptedDevice:
    """The fake, with a compiler that stumbles over #error."""
    return ScriptedDevice(lambda tool, variant, task: Reason.COMPILE_ERROR if "#error" in variant.source else None)


def broken() -> Variant:
    return raw_variant().model_copy(update={"source": "#error no kernel here\n"})


@pytest.fixture(scope="module")
def record_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("contract") / "records.sqlite"
    shape = (TASK.dims["M"], TASK.dims["N"], TASK.dims["K"])
    record(scripted(), toy_families(), [shape], path, deadline_s=60.0, echo=lambda _: None)
    return path


@pytest.fixture(scope="module", params=["fake", "replay", pytest.param("cuda", marks=pytest.mark.gpu)])
def bench(
    request: pytest.FixtureRequest, record_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    if request.param == "cuda":
        cuda_device = pytest.importorskip("tools.cuda_device", reason="the GPU packages are not installed")
        if not any(gpu.usable for gpu in visible_gpus()):
            pytest.skip("no GPU of compute capability 9.0 here")
        families = load_families()
        device: Device = cuda_device.CudaDevice(0, tmp_path_factory.mktemp("cubins"))
        good = next(v for v in accepted_plans(families, TASK) if v.plan and v.plan.family == "plain_tiled")
    else:
        families = toy_families()
        fake = scripted()
        device = fake if request.param == "fake" else ReplayDevice(record_file)
        good = min(accepted_plans(families, TASK), key=lambda v: fake.time_us(v, TASK))
    demanding = next(v for v in accepted_plans(families, TASK) if v.accepts)
    yield Bench(request.param, device, families, good, demanding, hgemm(255, 127, 191), broken())
    device.close()


def test_info_is_complete_and_constant(bench: Bench) -> None:
    info = bench.device.info
    assert info == bench.device.info
    assert info.kind == bench.kind
    assert info.name in info.label
    assert info.driver
    assert re.fullmatch(r"\d+\.\d", info.compute_capability)
    for size in (info.sm_count, info.memory_bytes, info.l2_bytes, info.smem_per_block_bytes):
        assert size > 0
    assert (info.recorded_on is not None) == (info.kind == "replay")


def test_compile(bench: Bench) -> None:
    result = bench.device.compile(bench.good)
    assert result.ok, result.detail
    assert result.variant_id == bench.good.variant_id
    assert len(result.cubin_sha256 or "") == 64
    assert (result.registers or 0) > 0
    again = bench.device.compile(bench.good)
    assert (again.build_id, again.cubin_sha256) == (result.build_id, result.cubin_sha256)


@pytest.mark.parametrize("depth", ["quick", "full"])
def test_verify(bench: Bench, depth: Depth) -> None:
    for _ in range(2):  # the same verdict with other seeds
        result = bench.device.verify(bench.good, TASK, depth)
        assert result.ok, result.detail
        assert (result.depth, result.variant_key, result.task_id) == (depth, bench.good.key, TASK.task_id)
        assert all(tier.checked > 0 and tier.mismatches == 0 for tier in result.tiers)
        assert result.bitwise_repeatable is True
        assert result.max_abs_error is not None


def test_full_looks_at_more_than_quick(bench: Bench) -> None:
    quick = {t.tier for t in bench.device.verify(bench.good, TASK, "quick").tiers}
    full = {t.tier for t in bench.device.verify(bench.good, TASK, "full").tiers}
    assert quick < full


@pytest.mark.parametrize("mode", MODES)
def test_time(bench: Bench, mode: Mode) -> None:
    result = bench.device.time(bench.good, TASK, mode, "final")
    assert result.ok, result.detail
    assert (result.variant_key, result.task_id, result.mode, result.budget) == (
        bench.good.key,
        TASK.task_id,
        mode,
        "final",
    )
    assert (result.empty_kernel_us is not None) == (mode == "server")
    rows = {row.reference: row for row in result.rows}
    assert len(rows) == len(result.rows)
    assert HEADLINE_REFERENCE in rows
    assert rows.keys() <= set(REFERENCES)
    for reference, row in rows.items():
        assert row.ratio_lo <= row.ratio <= row.ratio_hi
        # The interval holds what the row's own times say; a wide margin, since a paired ratio is no ratio of medians.
        assert row.ratio_lo * 0.98 <= row.ref_us / row.time_us <= row.ratio_hi * 1.02
        assert row.time_us == pytest.approx(result.time_us)  # one run: the same candidate samples for all references
        assert (row.key, row.task_id, row.dims) == (bench.good.key, TASK.task_id, TASK.dims)
        assert (row.mode, row.budget, row.b_layout) == (mode, "final", bench.good.b_layout)
        assert (row.device, row.driver) == (bench.device.info.name, bench.device.info.driver)
        assert row.protocol_version == PROTOCOL_VERSION
        assert row.samples > 0
        assert datetime.fromisoformat(row.measured_at).tzinfo is not None
        if f"{reference}_max" in rows:  # the better of both layouts is no slower than one of them
            assert rows[f"{reference}_max"].ref_us <= row.ref_us * 1.0001


def test_a_screen_timing_is_there_for_every_plan(bench: Bench) -> None:
    assert bench.device.time(bench.good, TASK, "offline", "screen").ok


def test_sanitize(bench: Bench) -> None:
    tasks = sanitize_tasks(bench.good, TASK, bench.families)
    result = bench.device.sanitize(bench.good, tasks)
    assert result.variant_key == bench.good.key
    if result.status is Status.UNAVAILABLE and bench.kind == "cuda":
        pytest.skip(result.detail)
    assert result.ok, result.detail
    for task in tasks:
        assert {check.tool for check in result.checks if check.dims == task.dims} == SANITIZERS


def test_profile(bench: Bench) -> None:
    result = bench.device.profile(bench.good, TASK)
    assert (result.variant_key, result.task_id) == (bench.good.key, TASK.task_id)
    if result.status is Status.UNAVAILABLE and bench.kind == "cuda":
        pytest.skip(result.detail)
    assert result.ok, result.detail
    assert len(result.sentences) == 3
    assert result.metrics
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("mode", MODES)
def test_baselines(bench: Bench, mode: Mode) -> None:
    result = bench.device.baselines(TASK, mode, "final")
    assert result.ok, result.detail
    assert (result.task_id, result.mode, result.budget) == (TASK.task_id, mode, "final")
    pairs = {(time.reference, time.b_layout) for time in result.times}
    references = {name for name in REFERENCES if not name.endswith("_max")}
    assert pairs == {(name, layout) for name in references for layout in ("kn", "nk")}
    assert all(time.time_us > 0 for time in result.times)
    assert result.best_us() is not None
    assert result.library


def test_a_source_that_does_not_compile_gets_an_answer_from_every_tool(bench: Bench) -> None:
    results: list[Outcome] = [
        bench.device.compile(bench.broken),
        bench.device.verify(bench.broken, TASK, "quick"),
        bench.device.sanitize(bench.broken, [TASK]),
        bench.device.time(bench.broken, TASK, "offline", "screen"),
        bench.device.profile(bench.broken, TASK),
    ]
    expected = Status.NOT_RECORDED if bench.kind == "replay" else Status.FAILED
    for result in results:
        assert result.status is expected
        assert result.detail


def test_a_shape_that_is_not_accepted_gets_an_answer_from_every_tool(bench: Bench) -> None:
    results: list[Outcome] = [
        bench.device.verify(bench.demanding, bench.untaken, "quick"),
        bench.device.time(bench.demanding, bench.untaken, "offline", "screen"),
        bench.device.profile(bench.demanding, bench.untaken),
    ]
    expected = (Status.NOT_RECORDED, None) if bench.kind == "replay" else (Status.FAILED, Reason.NOT_ACCEPTED)
    for result in results:
        assert (result.status, result.reason) == expected
        assert result.detail


def test_the_gate_holds_around_it(bench: Bench) -> None:
    toolbox = Toolbox(bench.device, MemoryResults(), bench.families)
    assert toolbox.verify(bench.good, TASK).status is Status.REFUSED
    assert toolbox.time(bench.good, TASK).status is Status.REFUSED
    evaluation = toolbox.evaluate(bench.good, TASK)
    assert evaluation.ok, evaluation.detail
    assert (evaluation.ratio or 0) > 0
    assert toolbox.evaluate(bench.good, TASK) == evaluation
    assert toolbox.time(bench.good, TASK, "offline", "final").status is Status.REFUSED
    assert toolbox.verify(bench.good, TASK, "full").ok
    assert not toolbox.on_leaderboard(bench.good, TASK)
    sanitized = toolbox.sanitize(bench.good, TASK)
    assert toolbox.time(bench.good, TASK, "offline", "final").ok
    assert bool(toolbox.on_leaderboard(bench.good, TASK)) == sanitized.ok
    assert toolbox.verify(bench.demanding, bench.untaken).reason is Reason.NOT_ACCEPTED
    refused = toolbox.evaluate(bench.broken, TASK)
    assert refused.status is (Status.NOT_RECORDED if bench.kind == "replay" else Status.FAILED)
    assert refused.compile is not None
    assert refused.verify is None
