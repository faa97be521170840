"""Measure families on a GPU and keep the answers in a record file: what ``replay:h200`` later answers from.

Per shape: baselines; every plan that takes the shape through compile, verify quick and a screen timing; the best few
through verify full, sanitize and final timings in every mode; a profile of the best one. Whatever the file holds
already is not measured again, so an interrupted recording is resumed by the same command.

By hand, on a host with a GPU: ``python -m tools.recording --device cuda:0 --out FILE --deadline 500``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from tools.device import Device, DeviceBroken
from tools.families import ManifestError, accepted_plans, load_families
from tools.gate import MemoryResults, Toolbox
from tools.hgemm import ShapeError, hgemm
from tools.record_writer import RecordWriter
from tools.records import (
    MODES,
    BaselineResult,
    Budget,
    Clocks,
    CompileResult,
    Depth,
    DeviceInfo,
    Evaluation,
    Family,
    Mode,
    Outcome,
    ProfileResult,
    SanitizeResult,
    Status,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
    content_hash,
)
from tools.replay import covers
from tools.sanitize_shapes import sanitize_tasks
from tools.shapes import Shape, parse_shapes_csv, regime, spread

#: Exit code of ``main`` when the deadline came first.
OUT_OF_TIME = 3
COMMIT_EVERY_S = 5.0
#: Starting ncu costs as much as some ten profiles; a deadline loses what waits for the batch to fill.
PROFILE_BATCH = 16
SANITIZE_BATCH = 128
#: A candidate that fails verify full or sanitize gives its place to the next, up to this many times ``top``.
FINALISTS_PER_PLACE = 2

Echo = Callable[[str], None]


@runtime_checkable
class CompilesMany(Protocol):
    """A device that compiles several variants at once, on ``jobs`` processes; results in the order asked."""

    def compile_many(self, variants: Sequence[Variant], jobs: int) -> list[CompileResult]: ...


@runtime_checkable
class ProfilesMany(Protocol):
    """A device that profiles several candidates under one ncu process; results in the order asked."""

    def profile_many(self, pairs: Sequence[tuple[Variant, Task]]) -> list[ProfileResult]: ...


@runtime_checkable
class SanitizesMany(Protocol):
    """A device that sanitizes several candidates in one process; results in the order asked."""

    def sanitize_many(self, items: Sequence[tuple[Variant, Sequence[Task]]]) -> list[SanitizeResult]: ...


@dataclass(frozen=True)
class RecordingSummary:
    """``finished`` is False if the deadline came first; the same call again goes on from there."""

    shapes_done: int
    shapes_total: int
    measured: int  # tool calls that went to the device; the rest was in the file
    finished: bool


class _OutOfTimeError(Exception):
    """The deadline has passed."""


def _say(line: str) -> None:
    print(line, flush=True)


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def check(self) -> None:
        if self.left_s <= 0:
            raise _OutOfTimeError


class _Through:
    """A device that answers from the record file where it can, and otherwise measures and adds to it."""

    def __init__(self, device: Device, writer: RecordWriter) -> None:
        self._device = device
        self._writer = writer
        self._committed = time.monotonic()
        self._clocks: tuple[int, int] | None = None
        self._profiled: dict[tuple[str, str], ProfileResult] = {}  # also what the file does not keep (UNAVAILABLE)
        self.measured = 0
        self.unavailable = 0  # answers that this host could not give; profiles are looked after by RecordWriter.is_done

    @property
    def info(self) -> DeviceInfo:
        return self._device.info

    def compile(self, variant: Variant) -> CompileResult:
        known = self._writer.compiled(variant.key)
        return known or self._keep_compile(variant, self._device.compile(variant))

    def compile_many(self, variants: Sequence[Variant], jobs: int) -> bool:
        """False if the device cannot. Warms the device's own cache too, so recorded compiles are asked for again."""
        if not isinstance(self._device, CompilesMany):
            return False
        for variant, result in zip(variants, self._device.compile_many(variants, jobs), strict=True):
            self._keep_compile(variant, result)
        return True

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult:
        known = self._writer.verified(variant.key, task.task_id, depth)
        if known is None:
            known = self._device.verify(variant, task, depth)
            self._writer.put_verify(variant, task, known)
            self._count(known)
        return known

    def sanitize(self, variant: Variant, tasks: Sequence[Task]) -> SanitizeResult:
        known = self._sanitized(variant, tasks)
        if known is None:
            known = self._device.sanitize(variant, tasks)
            self._writer.put_sanitize(variant, known)
            self._count(known)
        return known

    def _sanitized(self, variant: Variant, tasks: Sequence[Task]) -> SanitizeResult | None:
        known = self._writer.sanitized(variant.key)
        return known if known is not None and (known.status is Status.FAILED or covers(known, tasks)) else None

    @property
    def sanitizes_many(self) -> bool:
        return isinstance(self._device, SanitizesMany)

    def sanitize_many(self, items: Sequence[tuple[Variant, Sequence[Task]]]) -> None:
        """Plans whose result is known are left out."""
        todo = [(variant, tasks) for variant, tasks in items if self._sanitized(variant, tasks) is None]
        if todo and isinstance(self._device, SanitizesMany):
            for (variant, _), result in zip(todo, self._device.sanitize_many(todo), strict=True):
                self._writer.put_sanitize(variant, result)
                self._count(result)

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
        known = self._writer.timed(variant.key, task.task_id, mode, budget)
        if known is None:
            known = self._device.time(variant, task, mode, budget)
            self._writer.put_timing(variant, task, known)
            self._note_clocks(known.clocks)
            self._count(known)
        return known

    def profile(self, variant: Variant, task: Task) -> ProfileResult:
        known = self._profiled.get((variant.key, task.task_id)) or self._writer.profiled(variant.key, task.task_id)
        return known or self._keep_profile(variant, task, self._device.profile(variant, task))

    def profile_many(self, pairs: Sequence[tuple[Variant, Task]]) -> None:
        todo = [pair for pair in pairs if self._writer.profiled(pair[0].key, pair[1].task_id) is None]
        if todo and isinstance(self._device, ProfilesMany):
            for (variant, task), result in zip(todo, self._device.profile_many(todo), strict=True):
                self._keep_profile(variant, task, result)

    def baselines(self, task: Task, mode: Mode, budget: Budget) -> BaselineResult:
        known = self._writer.baselines(task.task_id, mode, budget)
        if known is None:
            known = self._device.baselines(task, mode, budget)
            self._writer.put_baselines(task, known)
            self._writer.put_meta({"library": known.library})
            self._count(known)
        return known

    def close(self) -> None:
        """The device belongs to the caller."""

    def _keep_compile(self, variant: Variant, result: CompileResult) -> CompileResult:
        self._writer.put_compile(variant, result)
        self._writer.put_meta({"compiler": result.compiler or ""})
        self._count(result)
        return result

    def _keep_profile(self, variant: Variant, task: Task, result: ProfileResult) -> ProfileResult:
        self._writer.put_profile(variant, task, result)
        self._profiled[variant.key, task.task_id] = result
        self._count(None)
        return result

    def _note_clocks(self, clocks: Clocks | None) -> None:
        if clocks is not None:
            low, high = self._clocks or (clocks.sm_mhz_median, clocks.sm_mhz_median)
            self._clocks = (min(low, clocks.sm_mhz_median), max(high, clocks.sm_mhz_median))
            self._writer.put_meta({"clocks": json.dumps({"sm_mhz_median_range": self._clocks})})

    def _count(self, result: Outcome | None) -> None:
        self.measured += 1
        self.unavailable += result is not None and result.status is Status.UNAVAILABLE
        if time.monotonic() - self._committed > COMMIT_EVERY_S:
            self._writer.commit()
            self._committed = time.monotonic()


def record(
    device: Device,
    families: Mapping[str, Family],
    shapes: Sequence[Shape],
    out_path: Path,
    *,
    deadline_s: float,
    top: int = 3,
    jobs: int | None = None,
    commit: str = "",
    echo: Echo = _say,
) -> RecordingSummary:
    """Record HGEMM ``shapes`` in the order given until all are done or ``deadline_s`` seconds have passed.

    The deadline is looked at between tool calls, so it is overrun by at most one of them. ``commit`` names the source
    revision, for provenance. Raises DeviceBroken if the device or the file fails; what was measured until then is kept.
    """
    deadline = _Deadline(deadline_s)
    tasks = [hgemm(*shape) for shape in shapes]
    done = 0
    with RecordWriter(out_path, device.info) as writer:
        writer.put_meta({"commit": commit})
        through = _Through(device, writer)
        toolbox = Toolbox(through, MemoryResults(), families)
        profiles = _Profiles(through, toolbox, deadline)
        finished = True
        try:
            wanted = {task.task_id: accepted_plans(dict(families), task) for task in tasks}
            writer.check_contents({v.key: v for variants in wanted.values() for v in variants}.values())
            digests = {key: content_hash([top, *(v.key for v in variants)]) for key, variants in wanted.items()}
            todo = [task for task in tasks if not writer.is_done(task, digests[task.task_id])]
            done = len(tasks) - len(todo)
            if done:
                echo(f"{done} of {len(tasks)} shapes are in {out_path} already")
            _compile_ahead(through, _unmeasured(writer, wanted, todo), jobs or os.cpu_count() or 1, deadline, echo)
            _sanitize_ahead(through, families, wanted, todo, deadline, echo)
            for task in todo:
                before, lacking, started = through.measured, through.unavailable, time.monotonic()
                best, line = _record_task(toolbox, wanted[task.task_id], task, top, deadline)
                if best is not None:
                    profiles.add(best, task)
                if through.unavailable == lacking:  # else a host that has the tool completes it
                    writer.mark_done(task, digests[task.task_id], best)
                writer.commit()
                done += 1
                echo(
                    f"{done}/{len(tasks)} {task.label} {regime(task)}: {line} "
                    f"({through.measured - before} measured in {time.monotonic() - started:.1f} s, "
                    f"{max(0.0, deadline.left_s):.0f} s left)"
                )
            profiles.flush()
            if through.measured:
                writer.compact()
        except _OutOfTimeError:
            finished = False
            profiles.flush(late=True)
            echo(f"deadline: {done} of {len(tasks)} shapes are complete in {out_path}; the same command goes on")
        return RecordingSummary(done, len(tasks), through.measured, finished)


def _unmeasured(writer: RecordWriter, wanted: Mapping[str, Sequence[Variant]], tasks: Iterable[Task]) -> list[Variant]:
    """Variants with a screen timing still to be taken, in the order in which they will be needed."""
    found: dict[str, Variant] = {}
    for task in tasks:
        for variant in wanted[task.task_id]:
            if variant.key not in found and not _screened(writer, variant, task):
                found[variant.key] = variant
    return list(found.values())


def _screened(writer: RecordWriter, variant: Variant, task: Task) -> bool:
    compiled = writer.compiled(variant.key)
    if compiled is None or not compiled.ok:
        return compiled is not None
    verified = writer.verified(variant.key, task.task_id, "quick")
    if verified is None or not verified.ok:
        return verified is not None
    return writer.timed(variant.key, task.task_id, "offline", "screen") is not None


def _compile_ahead(through: _Through, variants: Sequence[Variant], jobs: int, deadline: _Deadline, echo: Echo) -> None:
    """In batches, so that the deadline is looked at and progress shown."""
    batch = 4 * jobs
    for start in range(0, len(variants), batch):
        deadline.check()
        if not through.compile_many(variants[start : start + batch], jobs):
            return
        echo(f"compiled {min(start + batch, len(variants))} of {len(variants)} plans ({deadline.left_s:.0f} s left)")


def _sanitize_ahead(
    through: _Through,
    families: Mapping[str, Family],
    wanted: Mapping[str, Sequence[Variant]],
    todo: Sequence[Task],
    deadline: _Deadline,
    echo: Echo,
) -> None:
    """Every plan that compiles, in batches: several candidates share a process, whose start is most of the cost."""
    if not through.sanitizes_many:
        return
    items: dict[str, tuple[Variant, Sequence[Task]]] = {}
    for task in todo:
        for variant in wanted[task.task_id]:
            if variant.key not in items and through.compile(variant).ok:
                items[variant.key] = (variant, sanitize_tasks(variant, task, families))
    ordered = list(items.values())
    for start in range(0, len(ordered), SANITIZE_BATCH):
        deadline.check()
        through.sanitize_many(ordered[start : start + SANITIZE_BATCH])
        done = min(start + SANITIZE_BATCH, len(ordered))
        echo(f"sanitized {done} of {len(ordered)} plans ({deadline.left_s:.0f} s left)")


def _record_task(
    toolbox: Toolbox, variants: Sequence[Variant], task: Task, top: int, deadline: _Deadline
) -> tuple[Variant | None, str]:
    """The best finalist, which is worth a profile, and a progress line."""
    deadline.check()
    toolbox.baselines(task, "offline", "screen")
    evaluated: list[tuple[Variant, Evaluation]] = []
    for variant in variants:
        deadline.check()
        evaluated.append((variant, toolbox.evaluate(variant, task)))
    timed = [(variant, evaluation) for variant, evaluation in evaluated if evaluation.ok]
    timed.sort(key=lambda pair: (-(pair[1].ratio or 0.0), (pair[1].timing and pair[1].timing.time_us) or 0.0))
    finalists: list[Variant] = []
    for variant, _ in timed[: top * FINALISTS_PER_PLACE]:
        if len(finalists) < top and _finish(toolbox, variant, task, deadline):
            finalists.append(variant)
    # Winners are kept per layout of B, each against the baseline of its own layout.
    for layout in {variant.b_layout for variant, _ in timed} - {variant.b_layout for variant in finalists}:
        of_layout = [variant for variant, _ in timed if variant.b_layout == layout]
        for variant in of_layout[:FINALISTS_PER_PLACE]:
            if _finish(toolbox, variant, task, deadline):
                finalists.append(variant)
                break
    for mode in MODES:
        deadline.check()
        toolbox.baselines(task, mode, "final")
    line = f"{len(evaluated)} plans, {len(timed)} timed, {len(finalists)} finalists"
    if not timed:
        return None, line
    winner, evaluation = timed[0]
    ratio = "" if evaluation.ratio is None else f", best {evaluation.ratio:.3f}x"
    return (finalists or [winner])[0], f"{line}{ratio} {winner.label}"


def _finish(toolbox: Toolbox, variant: Variant, task: Task, deadline: _Deadline) -> bool:
    """Verify full, sanitize, final timings. False if the candidate fell on the way. No sanitizer here is no failure."""
    deadline.check()
    if not toolbox.verify(variant, task, "full").ok:
        return False
    deadline.check()
    if toolbox.sanitize(variant, task).status is Status.FAILED:
        return False
    for mode in MODES:
        deadline.check()
        toolbox.time(variant, task, mode, "final")
    return True


class _Profiles:
    """Profiles to be taken, gathered over shapes because starting ncu costs more than a profile."""

    def __init__(self, through: _Through, toolbox: Toolbox, deadline: _Deadline) -> None:
        self._through = through
        self._toolbox = toolbox
        self._deadline = deadline
        self._waiting: list[tuple[Variant, Task]] = []

    def add(self, variant: Variant, task: Task) -> None:
        self._waiting.append((variant, task))
        if len(self._waiting) >= PROFILE_BATCH:
            self.flush()

    def flush(self, late: bool = False) -> None:
        """``late``: although the deadline has passed, as the last call of shapes that are complete but for it."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            if not late:
                self._deadline.check()
            self._through.profile_many(waiting)
        for variant, task in waiting:
            self._toolbox.profile(variant, task)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.recording", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda:0", help="cuda:N (default cuda:0)")
    parser.add_argument("--out", type=Path, required=True, help="record file to begin or to go on with")
    parser.add_argument("--deadline", type=float, required=True, metavar="SECONDS", help="stop after this long")
    parser.add_argument("--shapes", type=Path, metavar="CSV", help="M,N,K a line (default: the built-in spread)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N shapes")
    parser.add_argument("--top", type=int, default=3, help="finalists a shape (default 3)")
    parser.add_argument("--jobs", type=int, help="compile processes (default: one a core)")
    parser.add_argument("--commit", default="", help="source revision, kept as provenance")
    options = parser.parse_args(arguments)
    kind, _, ordinal = options.device.partition(":")
    if kind != "cuda" or not ordinal.isdigit():
        parser.error(f"--device is cuda:N, for example cuda:0, not '{options.device}'")
    try:
        shapes = parse_shapes_csv(options.shapes) if options.shapes else spread()
        families = load_families()
        from tools.cuda_device import CudaDevice

        device = CudaDevice(int(ordinal))
        try:
            summary = record(
                device,
                families,
                shapes[: options.limit],
                options.out,
                deadline_s=options.deadline,
                top=options.top,
                jobs=options.jobs,
                commit=options.commit,
            )
        finally:
            device.close()
    except (DeviceBroken, ManifestError, ShapeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept; the same command goes on from there", file=sys.stderr)
        return 130
    print(f"{summary.shapes_done} of {summary.shapes_total} shapes, {summary.measured} measurements → {options.out}")
    return 0 if summary.finished else OUT_OF_TIME


if __name__ == "__main__":
    sys.exit(main())
