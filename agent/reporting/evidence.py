"""What stands beside the times: accuracy, rejections, profiles, provenance. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from agent.reporting.measured import Measured
from agent.reporting.model import AccuracyBin, Fact, Profiled, Rejection, ShapeReport, StageCount
from agent.reporting.sizes import SIZE_BINS, in_bin
from tools.records import Status

_STAGES = {"compile": 0, "verify": 1, "sanitize": 2, "time": 3}


def accuracy(shapes: Sequence[ShapeReport]) -> Iterator[AccuracyBin]:
    for label, lo, hi in SIZE_BINS:
        choices = [choice for s in shapes if in_bin(s.mnk, lo, hi) and (choice := s.choice()) is not None]
        found = [choice.accuracy for choice in choices if choice.accuracy is not None]
        if not found:
            continue
        ours = [a.max_abs_error for a in found]
        both = [(a.max_abs_error, a.cublas_max_abs_error) for a in found if a.cublas_max_abs_error is not None]
        yield AccuracyBin(
            label=label,
            shapes=len(found),
            median_error=median(ours),
            max_error=max(ours),
            cublas_shapes=len(both),
            cublas_median_error=median(theirs for _, theirs in both) if both else None,
            cublas_max_error=max(theirs for _, theirs in both) if both else None,
            no_worse=sum(own <= theirs for own, theirs in both),
        )


def stages(measured: Measured) -> tuple[StageCount, ...]:
    counts: dict[tuple[str, str], dict[Status, int]] = {}
    for tally in sorted(measured.tallies, key=lambda t: _STAGES[t.stage]):
        group = counts.setdefault((tally.stage, tally.setting), {})
        group[tally.status] = group.get(tally.status, 0) + tally.count
    return tuple(
        StageCount(
            stage=stage,
            setting=setting,
            passed=group.get(Status.OK, 0),
            rejected=group.get(Status.FAILED, 0),
            not_recorded=group.get(Status.NOT_RECORDED, 0),
        )
        for (stage, setting), group in counts.items()
    )


def rejections(measured: Measured, labels: Mapping[str, str]) -> Iterator[Rejection]:
    rejected = [t for t in measured.tallies if t.reason is not None]
    for tally in sorted(rejected, key=lambda t: (_STAGES[t.stage], t.setting, -t.count)):
        key = tally.variant_key or ""
        plan = measured.plans.get(key)
        yield Rejection(
            stage=tally.stage,
            setting=tally.setting,
            reason=tally.reason.value if tally.reason else "",
            count=tally.count,
            shapes=tally.tasks,
            example_kernel=labels.get(key) or (plan.label if plan else f"kernel {key}"),
            example_shape=_shape_label(measured, tally.task_id),
            detail=tally.detail,
        )


def _shape_label(measured: Measured, task_id: str | None) -> str:
    if task_id is None:
        return ""
    dims = measured.tasks.get(task_id)
    return "x".join(str(v) for v in dims.values()) if dims else task_id


def profiles(measured: Measured, shapes: Sequence[ShapeReport]) -> Iterator[Profiled]:
    for shape in shapes:
        choice = shape.choice()
        if shape.best is None or choice is None or not choice.profiled:
            continue
        found = measured.profiles[shape.task_id, shape.best]
        yield Profiled(
            shape=shape.label,
            kernel=shape.best,
            metrics=found.metrics,
            stalls=found.stalls,
            sentences=found.sentences,
        )


def provenance(measured: Measured, shapes: Sequence[ShapeReport]) -> Iterator[Fact]:
    info = measured.device
    yield Fact(name="GPU", value=info.label)
    yield Fact(name="driver", value=info.driver)
    yield Fact(name="CUDA runtime", value=info.cuda_runtime)
    if info.sm_count:
        memory = f"{info.memory_bytes / 2**30:.0f} GiB memory, {info.l2_bytes / 2**20:.0f} MiB L2"
        yield Fact(name="device", value=f"{info.sm_count} SMs, compute capability {info.compute_capability}, {memory}")
    for name, value in measured.facts:
        yield Fact(name=name, value=value)
    remark = f" ({info.protocol_remark})" if info.protocol_remark else ""
    yield Fact(name="protocol version", value=f"{info.protocol_version}{remark}")
    timings = [timing for shape in shapes if (c := shape.choice()) for timing in c.timings.values()]
    stamps = sorted(timing.measured_at for timing in timings)
    if stamps:
        yield Fact(name="reported timings taken", value=f"{stamps[0][:19]} to {stamps[-1][:19]} UTC")
    clocks = [timing.sm_mhz_median for timing in timings if timing.sm_mhz_median is not None]
    text = f"{min(clocks)} to {max(clocks)} MHz ({len(clocks)} of {len(timings)} timings)" if clocks else "not recorded"
    yield Fact(name="SM clock, median of a timing", value=text)
    throttled, noisy = sum(t.throttled for t in timings), sum(t.noisy for t in timings)
    yield Fact(name="throttled or noisy", value=f"{throttled} throttled, {noisy} noisy, of {len(timings)} timings")
    certify = sum(t.budget == "certify" for t in timings)
    if certify:
        yield Fact(name="budget", value=f"{len(timings) - certify} timings at final, {certify} at certify")
    if measured.left_out:
        yield Fact(name="left out", value=f"{len(measured.left_out)} tasks of other operations")
