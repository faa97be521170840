"""Measure families on a GPU and keep the answers in a record file: what ``replay:h200`` later answers from.

Per shape: baselines; every plan that takes the shape (or those that the analytical model ranks first) through compile,
verify quick and a screen timing; the best few through verify full, sanitize and final timings in every mode; a profile
of the best one. Whatever the file holds already is not measured again, so an interrupted recording is resumed by the
same command.

By hand, on a host with a GPU: ``python -m tools.recording --device cuda:0 --out FILE --deadline 500``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.device import Device, DeviceBroken
from tools.families import ManifestError, accepted_plans, load_families
from tools.gate import MemoryResults, Toolbox
from tools.hgemm import ShapeError, hgemm
from tools.model import ModelError, rank
from tools.record_writer import RecordWriter
from tools.recording_device import RecordingDevice
from tools.records import HEADLINE_REFERENCE, MODES, DeviceInfo, Evaluation, Family, Status, Task, Variant, content_hash
from tools.sanitize_shapes import sanitize_tasks
from tools.shapes import Shape, parse_shapes_csv, regime, spread

#: Exit code of ``main`` when the deadline came first.
OUT_OF_TIME = 3
#: Starting ncu costs as much as some ten profiles; a deadline loses what waits for the batch to fill.
PROFILE_BATCH = 16
SANITIZE_BATCH = 128
#: A candidate that fails verify full or sanitize gives its place to the next, up to this many times ``top``.
FINALISTS_PER_PLACE = 2

Echo = Callable[[str], None]


@dataclass(frozen=True)
class Scope:
    """How much is recorded of a shape. Regret can be computed only where ``plans`` is None."""

    #: Finalists: verify full, sanitize, final timings.
    top: int = 3
    #: Of the finalists, so many are timed in server mode too, whose rounds are mostly waiting; None: all.
    server_top: int | None = None
    #: The plans that the analytical model ranks first, and its first of each family; None: every plan.
    plans: int | None = None
    profiles: bool = True

    def digest(self, variants: Iterable[Variant]) -> str:
        """Of all that makes the recording of a shape complete but its profile."""
        keys = [variant.key for variant in variants]
        return content_hash([self.top, *keys] if self.server_top is None else [self.top, self.server_top, *keys])


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


def record(
    device: Device,
    families: Mapping[str, Family],
    shapes: Sequence[Shape],
    out_path: Path,
    *,
    deadline_s: float,
    scope: Scope = Scope(),
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
        through = RecordingDevice(device, writer)
        toolbox = Toolbox(through, MemoryResults(), families)
        profiles = _Profiles(through, toolbox, deadline)
        finished = True
        try:
            wanted = {task.task_id: _wanted(writer, families, task, scope, device.info) for task in tasks}
            writer.check_contents({v.key: v for variants in wanted.values() for v in variants}.values())
            digests = {key: scope.digest(variants) for key, variants in wanted.items()}
            todo = [task for task in tasks if not writer.is_done(task, digests[task.task_id], scope.profiles)]
            done = len(tasks) - len(todo)
            if done:
                echo(f"{done} of {len(tasks)} shapes are in {out_path} already")
            _compile_ahead(through, _unmeasured(writer, wanted, todo), jobs or os.cpu_count() or 1, deadline, echo)
            _sanitize_ahead(through, families, wanted, todo, deadline, echo)
            for task in todo:
                before, lacking, started = through.measured, through.unavailable, time.monotonic()
                best, line = _record_task(toolbox, wanted[task.task_id], task, scope, deadline)
                if best is not None and scope.profiles:
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


def _wanted(
    writer: RecordWriter, families: Mapping[str, Family], task: Task, scope: Scope, info: DeviceInfo
) -> list[Variant]:
    """The plans to be recorded at ``task``. What the file holds of others there competes for the final timings."""
    every = accepted_plans(dict(families), task)
    if scope.plans is None:
        return every
    by_id = {variant.plan.plan_id: variant for variant in every if variant.plan is not None}
    ranking = [ranked.plan for ranked in rank([v.plan for v in by_id.values() if v.plan], task, info)]
    leaders = {plan.family: plan for plan in reversed(ranking)}
    chosen = {plan.plan_id for plan in (*ranking[: scope.plans], *leaders.values())}
    return [v for key, v in by_id.items() if key in chosen or writer.timed(v.key, task.task_id, "offline", "screen")]


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


def _compile_ahead(
    through: RecordingDevice, variants: Sequence[Variant], jobs: int, deadline: _Deadline, echo: Echo
) -> None:
    """In batches, so that the deadline is looked at and progress shown."""
    batch = 4 * jobs
    for start in range(0, len(variants), batch):
        deadline.check()
        if not through.compile_many(variants[start : start + batch], jobs):
            return
        echo(f"compiled {min(start + batch, len(variants))} of {len(variants)} plans ({deadline.left_s:.0f} s left)")


def _sanitize_ahead(
    through: RecordingDevice,
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
    toolbox: Toolbox, variants: Sequence[Variant], task: Task, scope: Scope, deadline: _Deadline
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
    for variant, _ in timed[: scope.top * FINALISTS_PER_PLACE]:
        in_server = scope.server_top is None or len(finalists) < scope.server_top
        if len(finalists) < scope.top and _finish(toolbox, variant, task, deadline, in_server):
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
    if not finalists:
        return timed[0][0], f"{line}, best screened {timed[0][1].ratio or 0:.3f}x {timed[0][0].label}"
    finals = {v.key: toolbox.time(v, task, "offline", "final").row(HEADLINE_REFERENCE) for v in finalists}
    ratios = {key: 0.0 if row is None else row.ratio for key, row in finals.items()}
    winner = max(finalists, key=lambda variant: ratios[variant.key])
    return winner, f"{line}, best {ratios[winner.key]:.3f}x {winner.label}"


def _finish(toolbox: Toolbox, variant: Variant, task: Task, deadline: _Deadline, in_server: bool = True) -> bool:
    """Verify full, sanitize, final timings. False if the candidate fell on the way. No sanitizer here is no failure."""
    deadline.check()
    if not toolbox.verify(variant, task, "full").ok:
        return False
    deadline.check()
    if toolbox.sanitize(variant, task).status is Status.FAILED:
        return False
    for mode in (mode for mode in MODES if in_server or mode != "server"):
        deadline.check()
        toolbox.time(variant, task, mode, "final")
    return True


class _Profiles:
    """Profiles to be taken, gathered over shapes because starting ncu costs more than a profile."""

    def __init__(self, through: RecordingDevice, toolbox: Toolbox, deadline: _Deadline) -> None:
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
    parser.add_argument(
        "--server-top", type=int, metavar="N", help="time only N finalists in server mode (default all)"
    )
    parser.add_argument(
        "--plans", type=int, metavar="N", help="only the N plans that the analytical model ranks first (default: all)"
    )
    parser.add_argument("--no-profiles", action="store_true", help="take no profiles")
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
                scope=Scope(options.top, options.server_top, options.plans, not options.no_profiles),
                jobs=options.jobs,
                commit=options.commit,
            )
        finally:
            device.close()
    except (DeviceBroken, ManifestError, ModelError, ShapeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept; the same command goes on from there", file=sys.stderr)
        return 130
    print(f"{summary.shapes_done} of {summary.shapes_total} shapes, {summary.measured} measurements → {options.out}")
    return 0 if summary.finished else OUT_OF_TIME


if __name__ == "__main__":
    sys.exit(main())
