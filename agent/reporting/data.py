"""Measurements → the numbers of a report. Pure: the same measurements give the same report, byte for byte."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median

from agent.reporting import evidence
from agent.reporting.kernels import describe_kernels
from agent.reporting.measured import Measured
from agent.reporting.model import (
    LAYOUTS,
    Accuracy,
    Band,
    Choice,
    Comparison,
    Fact,
    Layout,
    ModeTiming,
    NetOfLaunch,
    OffGrid,
    Panel,
    Peaks,
    PublishedWork,
    RatioRow,
    Report,
    ShapeReport,
    SizeBin,
)
from agent.reporting.sizes import EVENT_RESOLUTION_US, PANELS, SIZE_BINS, grid_shapes, in_bin, of_grid, on_grid, size_of
from agent.reporting.stats import Sample, std, summarise, with_fallback
from agent.reporting.winners import Winners, choose
from tools.hgemm import GRID_DIMS
from tools.records import HEADLINE_REFERENCE, MODES, Family, Mode, TimingResult

BASELINES = ("torch", "cublas", "cublaslt_heuristic", "cublaslt_auto")


def build(
    measured: Measured,
    families: Mapping[str, Family],
    published: PublishedWork,
    peaks: Peaks | None,
    provenance: Sequence[Fact] = (),
) -> Report:
    """``provenance`` is put before what the measurements themselves say."""
    winners = choose(measured)
    shapes = sorted(
        (_shape(measured, task_id, dims, winners[task_id]) for task_id, dims in measured.tasks.items()),
        key=lambda s: (s.mnk, s.m, s.n, s.k),
    )
    counted, others = of_grid(shapes)
    kernels, sources = describe_kernels(measured, families, shapes)
    labels = {kernel.key: kernel.label for kernel in kernels}
    return Report(
        device=measured.device.label,
        driver=measured.device.driver,
        protocol_version=measured.device.protocol_version,
        reference=HEADLINE_REFERENCE,
        shapes_known=len(shapes),
        shapes_with_kernel=sum(s.best is not None for s in shapes),
        comparisons=tuple(_comparisons(counted)),
        sizes=tuple(_sizes(counted)),
        grid_weighted={mode: _grid_weighted(counted, mode) for mode in MODES},
        server_net=_server_net(counted),
        off_grid=tuple(_off_grid(others)),
        panels=tuple(_panels(counted)),
        shapes=tuple(shapes),
        kernels=kernels,
        sources=sources,
        profiles=tuple(evidence.profiles(measured, shapes)),
        accuracy=tuple(evidence.accuracy(shapes)),
        stages=evidence.stages(measured),
        rejections=tuple(evidence.rejections(measured, labels)),
        peaks=peaks,
        published=published,
        provenance=(*provenance, *evidence.provenance(measured, shapes)),
    )


# --- shapes ----------------------------------------------------------------------------------------------------------


def _shape(measured: Measured, task_id: str, dims: Mapping[str, int], winners: Winners) -> ShapeReport:
    keys = {key for key in (winners.best, *winners.by_layout.values()) if key is not None}
    certified = measured.certified.get((task_id, winners.best or ""), {})
    return ShapeReport(
        m=dims["M"],
        n=dims["N"],
        k=dims["K"],
        task_id=task_id,
        best=winners.best,
        why_none="; ".join(filter(None, (winners.why_none, measured.remarks.get(task_id)))) if not winners.best else "",
        by_layout=winners.by_layout,
        choices={key: _choice(measured, task_id, key) for key in sorted(keys)},
        certified={mode: _mode_timing(timing) for mode, timing in certified.items()},
    )


def _choice(measured: Measured, task_id: str, key: str) -> Choice:
    timings = measured.timings[task_id, key]
    verified = measured.verified[task_id, key]
    profile = measured.profiles.get((task_id, key))
    return Choice(
        timings={mode: _mode_timing(timings[mode]) for mode in MODES if mode in timings},
        accuracy=Accuracy(
            max_abs_error=verified.max_abs_error, cublas_max_abs_error=_finite(verified.cublas_max_abs_error)
        )
        if verified.max_abs_error is not None and math.isfinite(verified.max_abs_error)
        else None,
        profiled=profile is not None and profile.ok,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mode_timing(timing: TimingResult) -> ModeTiming:
    first = timing.rows[0]
    return ModeTiming(
        budget=timing.budget,
        time_us=first.time_us,
        samples=first.samples,
        spread=timing.spread,
        empty_kernel_us=timing.empty_kernel_us,
        noisy=timing.noisy,
        throttled=timing.throttled,
        sm_mhz_median=timing.clocks.sm_mhz_median if timing.clocks else None,
        measured_at=first.measured_at,
        rows=tuple(
            RatioRow(
                reference=row.reference,
                ratio=row.ratio,
                ratio_lo=row.ratio_lo,
                ratio_hi=row.ratio_hi,
                ref_us=row.ref_us,
            )
            for row in timing.rows
        ),
    )


# --- tables ----------------------------------------------------------------------------------------------------------


def samples(
    shapes: Sequence[ShapeReport], mode: Mode, reference: str = HEADLINE_REFERENCE, layout: Layout = "max"
) -> list[Sample]:
    """One a shape that has a kernel timed in this mode against this reference. With layout ``max`` the kernel is the
    better of both layouts, and ``reference`` has to be one of the ``_max`` ones to be so too."""
    found = []
    for shape in shapes:
        timing = shape.timing(mode, layout)
        row = timing.row(reference) if timing else None
        if timing is not None and row is not None:
            found.append(Sample(shape.label, row.ratio, row.ratio_lo, row.ratio_hi, timing.time_us, row.ref_us))
    return found


def _comparisons(shapes: Sequence[ShapeReport]) -> Iterator[Comparison]:
    for reference in BASELINES:
        for layout in LAYOUTS:
            for mode in MODES:
                name = f"{reference}_max" if layout == "max" else reference
                found = samples(shapes, mode, name, layout)
                yield Comparison(
                    reference=reference,
                    layout=layout,
                    mode=mode,
                    stats=summarise(found),
                    with_fallback=with_fallback(found),
                )


def _sizes(shapes: Sequence[ShapeReport]) -> Iterator[SizeBin]:
    for label, lo, hi in SIZE_BINS:
        members = [shape for shape in shapes if in_bin(shape.mnk, lo, hi)]
        for mode in MODES:
            yield SizeBin(
                label=label,
                log2_lo=lo,
                log2_hi=hi,
                shapes_known=len(members),
                mode=mode,
                stats=summarise(samples(members, mode)),
            )


def _grid_weighted(shapes: Sequence[ShapeReport], mode: Mode) -> float | None:
    """A stratified mean: a spread has other shares of small and large shapes than the grid."""
    total = 0.0
    for _, lo, hi in SIZE_BINS:
        members = [shape for shape in shapes if on_grid(shape) and in_bin(shape.mnk, lo, hi)]
        speedups = [sample.ratio - 1 for sample in samples(members, mode)]
        if not speedups:
            return None
        total += grid_shapes(lo, hi) * mean(speedups)
    return total / len(GRID_DIMS) ** 3


def _off_grid(shapes: Sequence[ShapeReport]) -> Iterator[OffGrid]:
    """All, then by M, which is what varies where weights are given."""
    rows = sorted({shape.m for shape in shapes})
    for m in (None, *rows) if rows else ():
        members = [shape for shape in shapes if m is None or shape.m == m]
        for mode in MODES:
            yield OffGrid(m=m, mode=mode, stats=summarise(samples(members, mode)))


def _server_net(shapes: Sequence[ShapeReport]) -> NetOfLaunch | None:
    gross, net, below, empties = [], [], [], []
    for shape in shapes:
        timing = shape.timing("server")
        row = timing.row(HEADLINE_REFERENCE) if timing else None
        if timing is None or row is None or timing.empty_kernel_us is None:
            continue
        empty = timing.empty_kernel_us
        empties.append(empty)
        if min(timing.time_us, row.ref_us) - empty < EVENT_RESOLUTION_US:
            below.append(shape.label)
            continue
        gross.append(Sample(shape.label, row.ratio, row.ratio_lo, row.ratio_hi, timing.time_us, row.ref_us))
        # The interval of the net ratio: each bound is a ratio to the same kernel time.
        time_us = timing.time_us - empty
        ratio, lo, hi = (
            (bound * timing.time_us - empty) / time_us for bound in (row.ratio, row.ratio_lo, row.ratio_hi)
        )
        net.append(Sample(shape.label, ratio, lo, hi, time_us, row.ref_us - empty))
    stats_gross, stats_net = summarise(gross), summarise(net)
    if stats_gross is None or stats_net is None:
        return None
    return NetOfLaunch(
        shapes=len(gross),
        empty_kernel_us_median=median(empties),
        gross=stats_gross,
        net=stats_net,
        not_above_empty=tuple(below),
    )


# --- figures ---------------------------------------------------------------------------------------------------------


def _panels(shapes: Sequence[ShapeReport]) -> Iterator[Panel]:
    by_label = {shape.label: shape for shape in shapes}
    for mode in MODES:
        found = samples(shapes, mode)
        for x, width in PANELS:
            bins: dict[float, list[float]] = defaultdict(list)
            for sample in found:
                at = math.floor(size_of(by_label[sample.shape], x) / width + 0.5) * width
                bins[at].append(sample.ratio - 1.0)
            yield Panel(
                x=x,
                mode=mode,
                bands=tuple(
                    Band(x=at, shapes=len(v), mean_speedup=sum(v) / len(v), std_speedup=_std(v))
                    for at, v in sorted(bins.items())
                ),
            )


def _std(values: Sequence[float]) -> float | None:
    import numpy as np

    return std(np.array(values))
