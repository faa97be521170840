"""Candidates of one task and the references, timed in one interleaved run; and what the references alone take.

Most of a run is the references, so that several candidates in one cost little more than one. Each is timed as it would
be alone: by as many launches in a replay, in at least as many rounds, on operands and outputs of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.gpu.candidate import Candidate
from tools.gpu.nvml import driver_version
from tools.gpu.references import LAYOUTS, References, versions
from tools.gpu.replays import Prepared, Subject, run_interleaved, time_of
from tools.launching import resolve
from tools.records import (
    BaselineResult,
    BaselineTime,
    BLayout,
    Budget,
    Clocks,
    Mode,
    Reason,
    Status,
    Task,
    TimingResult,
    TimingRow,
    Variant,
)
from tools.stats import paired_ratio, relative_iqr, strongest
from tools.timing_plan import launches_per_replay, rounds, sets_in_use
from tools.verdicts import Rejected

if TYPE_CHECKING:
    from tools.gpu.worker import Worker

NOISY_SPREAD = 0.05
THROTTLE_SLACK = 0.03

Samples = dict[str, Any]


class Timed(NamedTuple):
    """``baselines`` only where all references ran."""

    results: list[TimingResult]
    baselines: BaselineResult | None


@dataclass(frozen=True)
class _Contestant:
    variant: Variant
    candidate: Candidate
    own_us: float
    launches: int


def time_candidates(
    worker: Worker,
    asked: Sequence[tuple[Variant, str]],
    task: Task,
    mode: Mode,
    budget: Budget,
    aim_s: float | None = None,
    warm_s: float | None = None,
) -> Timed:
    """``asked``: each variant and the path of its cubin; the results are in their order.

    Raises Rejected, LaunchError or CudaError for the first that is at fault, though where there are several it may be
    another that caused it.
    """
    started = time.monotonic()
    modules = [worker.module(cubin) for _, cubin in asked]
    specs = [
        resolve(variant, task, worker.gpu.sm_count, module.occupancy)
        for (variant, _), module in zip(asked, modules, strict=True)
    ]
    bench = worker.bench_for(task)
    operands, references = bench.operands, bench.references
    candidates = [
        Candidate(worker.gpu, worker.kernels, module, variant, spec, operands, task)
        for (variant, _), module, spec in zip(asked, modules, specs, strict=True)
    ]
    before = operands.checksum() if budget != "screen" else 0
    contestants = []
    for (variant, _), candidate in zip(asked, candidates, strict=True):
        candidate.first_launch()
        own_us = time_of(candidate.enqueue, operands, worker.stream)
        fastest = references.fastest_us()
        launches = launches_per_replay(fastest, own_us, mode, 2 * operands.outputs, operands.slots)
        contestants.append(_Contestant(variant, candidate, own_us, launches))
    found: dict[int, TimingResult] = {}
    baselines: BaselineResult | None = None
    for launches in sorted({c.launches for c in contestants}, reverse=True):
        together = [i for i, c in enumerate(contestants) if c.launches == launches]
        group = [contestants[i] for i in together]
        samples, alone = _run(worker, group, references, task, mode, budget, launches, aim_s, warm_s)
        took_s = time.monotonic() - started
        for index, contestant, own in zip(together, group, alone, strict=True):
            found[index] = _result(worker, contestant.variant, task, mode, budget, samples | own, took_s / len(asked))
        if budget != "screen" and baselines is None:
            baselines = _baselines(references, samples, task, mode, budget, launches, took_s)
    if budget != "screen" and operands.checksum() != before:
        raise Rejected(Reason.MODIFIED_INPUT, "A or B changed while the kernel was timed")
    for index, candidate in enumerate(candidates):
        candidate.refuse_impossible(found[index].time_us or 0.0)
    return Timed([found[index] for index in range(len(asked))], baselines)


def time_references(worker: Worker, task: Task, mode: Mode, budget: Budget) -> BaselineResult:
    started = time.monotonic()
    bench = worker.bench_for(task)
    references = bench.references
    fastest = references.fastest_us()
    launches = launches_per_replay(fastest, fastest, mode, 2 * bench.operands.outputs, bench.operands.slots)
    keys = [(name, layout) for name in references.names() for layout in LAYOUTS]
    prepared = [references.prepared(name, layout, mode, launches) for name, layout in keys]
    round_s = launches * 1e-6 * sum(references.estimate_us(name, layout) for name, layout in keys)
    samples = run_interleaved(prepared, worker.kernels, mode, budget, round_s, worker.clocks)
    return _baselines(references, samples, task, mode, budget, launches, time.monotonic() - started)


# --- pieces ----------------------------------------------------------------------------------------------------------


def _run(
    worker: Worker,
    group: Sequence[_Contestant],
    references: References,
    task: Task,
    mode: Mode,
    budget: Budget,
    launches: int,
    aim_s: float | None,
    warm_s: float | None,
) -> tuple[Samples, list[Samples]]:
    """Samples of the references (and of the empty kernel), and of each candidate under the name ``candidate``."""
    operands = references.operands
    sets = sets_in_use(mode, launches, operands.sets)
    subjects = []
    for i, c in enumerate(group):
        cublas = references.enqueue_of("cublas", c.variant.b_layout)
        subject = c.candidate.subject(range(sets), cublas, budget)
        if len(group) > 1:
            subject.name = f"{subject.name}/{i}"
        subjects.append(subject)
    keys = _keys(references, budget)
    prepared = [references.prepared(name, layout, mode, launches) for name, layout in keys]
    theirs_us = sum(references.estimate_us(name, layout) for name, layout in keys)
    others = len(keys) + (mode == "server")
    alone = [rounds(budget, mode, others + 1, launches * 1e-6 * (c.own_us + theirs_us), aim_s) for c in group]
    round_s = launches * 1e-6 * (theirs_us + sum(c.own_us for c in group))
    mine: list[Prepared] = []
    try:
        for subject in subjects:
            mine.append(Prepared(subject, operands, mode, launches, worker.stream.ptr))  # noqa: PERF401, else one leaks
        if mode == "server":
            empty = Subject("empty", lambda _set, _c, _stream: worker.kernels.empty())
            mine.append(Prepared(empty, operands, "server", 1, worker.stream.ptr))
        samples = run_interleaved(
            [*prepared, *mine], worker.kernels, mode, budget, round_s, worker.clocks,
            aim_s=aim_s, warm_s=warm_s, least=max(alone),
        )  # fmt: skip
    finally:
        for p in mine:
            p.destroy()
    for c in group:
        c.candidate.check_after()
    own = [{"candidate": samples.pop(subject.name)} for subject in subjects]
    return samples, own


def _keys(references: References, budget: Budget) -> list[tuple[str, BLayout]]:
    names = ["cublaslt_auto"] if budget == "screen" else references.names()
    return [(name, layout) for name in names for layout in LAYOUTS]


def _result(
    worker: Worker, variant: Variant, task: Task, mode: Mode, budget: Budget, samples: Samples, took_s: float
) -> TimingResult:
    own = samples["candidate"]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    rows = []
    for name in dict.fromkeys(subject.split("/")[0] for subject in samples if "/" in subject):
        by_layout = {layout: samples[strongest(samples, name, layout)] for layout in LAYOUTS}
        medians = {layout: _median(times) for layout, times in by_layout.items()}
        best = min(LAYOUTS, key=medians.__getitem__)
        against = {layout: paired_ratio(own, by_layout[layout]) for layout in {variant.b_layout, best}}
        for reference, layout in ((name, variant.b_layout), (f"{name}_max", best)):
            r = against[layout]
            rows.append(
                TimingRow(
                    task_id=task.task_id, dims=task.dims, b_layout=variant.b_layout, mode=mode, budget=budget,
                    reference=reference, ratio=r.ratio, ratio_lo=r.lo, ratio_hi=r.hi, time_us=r.time_us,
                    ref_us=r.ref_us, samples=int(own.size), key=variant.key, device=worker.gpu.name,
                    driver=driver_version(), measured_at=now,
                )
            )  # fmt: skip
    clocks = worker.clocks.summary()
    spread = relative_iqr(own)
    headline = rows[-1]
    return TimingResult(
        status=Status.OK,
        variant_key=variant.key,
        task_id=task.task_id,
        mode=mode,
        budget=budget,
        rows=tuple(rows),
        spread=spread,
        empty_kernel_us=_median(samples["empty"]) if "empty" in samples else None,
        clocks=clocks,
        noisy=spread > NOISY_SPREAD or (headline.ratio_hi - headline.ratio_lo) / headline.ratio > NOISY_SPREAD,
        throttled=_throttled(clocks),
        elapsed_s=took_s,
    )


def _baselines(
    references: References,
    samples: Mapping[str, Any],
    task: Task,
    mode: Mode,
    budget: Budget,
    launches: int,
    took_s: float,
) -> BaselineResult:
    """From the samples of a run in which all references took part."""
    stands_for = {(name, layout): strongest(samples, name, layout) for name in references.names() for layout in LAYOUTS}
    times = tuple(
        BaselineTime(
            reference=name,
            b_layout=layout,
            time_us=_median(samples[subject]),
            algorithm=references.describe(subject.split("/")[0], layout, mode, launches),
        )
        for (name, layout), subject in stands_for.items()
    )
    return BaselineResult(
        status=Status.OK,
        task_id=task.task_id,
        mode=mode,
        budget=budget,
        times=times,
        library=versions(),
        elapsed_s=took_s,
    )


def _median(samples: Any) -> float:
    return float(statistics.median(samples))


def _throttled(clocks: Clocks | None) -> bool:
    """A thermal or hardware limit, or a power cap that took more than THROTTLE_SLACK off the clock."""
    if clocks is None or not clocks.throttle_reasons:
        return False
    capped = clocks.sm_mhz_limit is not None and clocks.sm_mhz_median < (1 - THROTTLE_SLACK) * clocks.sm_mhz_limit
    return capped or any(reason != "sw_power_cap" for reason in clocks.throttle_reasons)
