"""Measure families on a GPU and keep the answers in a record file: what ``replay:h200`` later answers from.

Per shape: baselines; every plan that takes the shape (or those that the analytical model ranks first) through compile,
verify quick and a screen timing; the best few through verify full, sanitize and final timings in every mode; a profile
of the best one. Whatever the file holds already is not measured again, so an interrupted recording is resumed by the
same command.

By hand, on a host with GPUs: ``python -m tools.recording --device all --out FILE --deadline 500``.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.device import Device, DeviceBroken
from tools.families import ManifestError, load_families
from tools.hgemm import ShapeError, grid, hgemm
from tools.model import ModelError
from tools.record_merge import merge_files
from tools.record_writer import RecordWriter
from tools.recording_device import RecordingDevice
from tools.recording_farm import FarmSummary, Gpu, record_on
from tools.recording_parts import parts_of
from tools.recording_scope import Deadline, Echo, OutOfTimeError, Scope, jobs, unmeasured, unsanitized
from tools.recording_shape import Profiles, record_shape
from tools.records import Family
from tools.shapes import Shape, parse_shapes_csv, spread
from tools.visible_gpus import named_gpus, visible_gpus

#: Exit codes of ``main``: the deadline came first; fewer shapes agree than should.
OUT_OF_TIME = 3
DISAGREES = 2
GRIDS = {"spread": spread, "paper": lambda: spread(len(grid()))}
EXAMPLES = """examples:
  all 1000 shapes on every GPU of this machine, 24 plans each; again, to go on where it stopped:
    %(prog)s --device all --grid paper --plans 24 --top 5 --server-top 3 --no-profiles --out h200.sqlite --deadline 560
  every plan at your shapes on two GPUs:
    %(prog)s --device cuda:0 --device cuda:1 --shapes my.csv --top 2 --out my.sqlite --deadline 500
  recordings of two hosts with the same kind of GPU:
    %(prog)s --merge a.sqlite b.sqlite --out both.sqlite
  do 60 shapes, drawn at random, come out as they were recorded?
    %(prog)s --check h200.sqlite --random 60 --seed 1 --device all --out again.sqlite --deadline 300
"""

#: (ordinal, compile processes) → the command of a recorder.
RecorderArgv = Callable[[int, int], Sequence[str]]
SANITIZE_BATCH = 128
_DEFAULT = Scope()


@dataclass(frozen=True)
class RecordingSummary:
    """``finished`` is False if the deadline came first; the same call again goes on from there."""

    shapes_done: int
    shapes_total: int
    measured: int  # tool calls that went to the device; the rest was in the file
    finished: bool


def _say(line: str) -> None:
    print(line, flush=True)


def recorder_argv(ordinal: int, jobs: int) -> Sequence[str]:
    return [sys.executable, "-m", "tools.recorder", "--ordinal", str(ordinal), "--jobs", str(jobs)]


def record(
    device: Device,
    families: Mapping[str, Family],
    shapes: Sequence[Shape],
    out_path: Path,
    *,
    deadline_s: float,
    scope: Scope = _DEFAULT,
    processes: int | None = None,
    commit: str = "",
    echo: Echo = _say,
) -> RecordingSummary:
    """Record HGEMM ``shapes`` on an open device, in the order given, until all are done or ``deadline_s`` seconds have
    passed. In this process alone; tools/recording_farm.py is for several GPUs.

    The deadline is looked at between tool calls, so it is overrun by at most one of them. ``commit`` names the source
    revision, for provenance. Raises DeviceBroken if the device or the file fails; what was measured until then is kept.
    """
    deadline = Deadline(deadline_s)
    tasks = [hgemm(*shape) for shape in shapes]
    with RecordWriter(out_path, device.info) as writer:
        writer.put_meta({"commit": commit})
        through = RecordingDevice(device, writer, together=scope.together)
        profiles = Profiles(through, families, deadline)
        todo = jobs(writer, families, tasks, scope, device.info)
        done = len(tasks) - len(todo)
        if done:
            echo(f"{done} of {len(tasks)} shapes are in {out_path} already")
        finished = True
        try:
            wanted, at_once = unmeasured(todo), processes or os.cpu_count() or 1
            for start in range(0, len(wanted), 4 * at_once):  # so that the deadline is looked at and progress shown
                deadline.check()
                if not through.compile_many(wanted[start : start + 4 * at_once], at_once):
                    break
                so_far = min(start + 4 * at_once, len(wanted))
                echo(f"compiled {so_far} of {len(wanted)} plans ({deadline.left_s:.0f} s left)")
            plans = unsanitized(writer, families, todo) if through.sanitizes_many and scope.sanitize else []
            for start in range(0, len(plans), SANITIZE_BATCH):
                deadline.check()
                through.sanitize_many(plans[start : start + SANITIZE_BATCH])
                so_far = min(start + SANITIZE_BATCH, len(plans))
                echo(f"sanitized {so_far} of {len(plans)} plans ({deadline.left_s:.0f} s left)")
            for job in todo:
                found = record_shape(through, families, job, scope, deadline)
                if found.best is not None and scope.profiles:
                    profiles.add(found.best, job.task)
                if found.complete:  # else a host that has the tool completes it
                    writer.mark_done(job.task, job.digest, found.best)
                writer.commit()
                done += 1
                echo(f"{done}/{len(tasks)} {found.line}, {max(0.0, deadline.left_s):.0f} s left)")
            profiles.flush()
            if through.measured:
                writer.compact()
        except OutOfTimeError:
            finished = False
            profiles.flush(late=True)
            echo(f"deadline: {done} of {len(tasks)} shapes are complete in {out_path}; the same command goes on")
        return RecordingSummary(done, len(tasks), through.measured, finished)


def main(arguments: Sequence[str] | None = None, recorder_argv: RecorderArgv = recorder_argv) -> int:
    """``recorder_argv``: what starts the recorder of GPU N, with so many compile processes."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.recording",
        description=(__doc__ or "").split("\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", action="append", metavar="cuda:N", help="cuda:0 (default), repeated for more, or all"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="record file to begin or to go on with")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="stop after this long")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shapes", type=Path, metavar="CSV", help="M,N,K a line (default: the built-in spread)")
    what.add_argument("--grid", choices=sorted(GRIDS), help="spread: 128 shapes (default); paper: all 1000")
    what.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="put these record files into --out")
    what.add_argument("--check", type=Path, metavar="FILE", help="time recorded winners again, into --out, and compare")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N shapes")
    parser.add_argument("--top", type=int, default=3, metavar="N", help="finalists a shape (default 3)")
    parser.add_argument(
        "--server-top", type=int, metavar="N", help="time only N finalists in server mode (default all)"
    )
    parser.add_argument(
        "--plans", type=int, metavar="N", help="only the N plans that the analytical model ranks first (default: all)"
    )
    parser.add_argument("--no-profiles", action="store_true", help="take no profiles")
    parser.add_argument("--no-sanitize", action="store_true", help="leave the sanitizer for a later recording")
    parser.add_argument("--one-by-one", action="store_true", help="no two candidates in one run: as before, and slower")
    parser.add_argument("--jobs", type=int, metavar="N", help="compile processes (default: one a core)")
    parser.add_argument("--commit", default="", metavar="REVISION", help="source revision, kept as provenance")
    parser.add_argument(
        "--random", type=int, default=60, metavar="N", help="with --check: shapes (default 60; 0: what --out holds)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="with --check: which shapes (default 0)")
    parser.add_argument("--json", action="store_true", help="with --check: one JSON document on stdout")
    options = parser.parse_args(arguments)
    if options.random < 0:
        parser.error("--random is 0 or more")
    if options.deadline is None and not options.merge:
        parser.error("--deadline SECONDS is needed: how long may it take?")
    if bad := [name for name in options.device or [] if not re.fullmatch(r"cuda:[0-9]{1,3}|all", name)]:
        parser.error(f"--device is cuda:N, for example cuda:0, or all, not '{bad[0]}'")
    try:
        if options.merge:
            return _merge(options.merge, options.out)
        if options.check:
            return _check(options, recorder_argv)
        return _record(options, recorder_argv)
    except (DeviceBroken, ManifestError, ModelError, ShapeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print("interrupted: what was measured is kept; the same command goes on from there", file=sys.stderr)
        return int(getattr(error, "exit_code", 130))


def _record(options: argparse.Namespace, argv: RecorderArgv) -> int:
    shapes = parse_shapes_csv(options.shapes) if options.shapes else GRIDS[options.grid or "spread"]()
    scope = Scope(
        top=options.top,
        server_top=options.server_top,
        plans=options.plans,
        profiles=not options.no_profiles,
        sanitize=not options.no_sanitize,
        together=not options.one_by_one,
    )
    jobs = options.jobs or os.cpu_count() or 1
    summary = record_on(
        gpus_of(options.device, jobs, argv),
        load_families(),
        shapes[: options.limit],
        options.out,
        deadline_s=options.deadline,
        scope=scope,
        processes=jobs,
        commit=options.commit,
        echo=_say,
    )
    print(f"{summary.shapes_done} of {summary.shapes_total} shapes, {summary.measured} measurements → {options.out}")
    return exit_code(summary)


def _check(options: argparse.Namespace, argv: RecorderArgv) -> int:
    from tools.record_check import check

    jobs = options.jobs or os.cpu_count() or 1
    echo = (lambda line: print(line, file=sys.stderr, flush=True)) if options.json else _say
    report, summary = check(
        options.check,
        options.random,
        options.seed,
        lambda: gpus_of(options.device, jobs, argv),
        load_families(),
        options.out,
        deadline_s=options.deadline,
        processes=jobs,
        echo=echo,
    )
    print(report.to_json() if options.json else report.text())
    if summary is not None and not summary.finished:
        return exit_code(summary)
    return 0 if report.agrees else DISAGREES


def _merge(sources: Sequence[Path], out: Path) -> int:
    merged = merge_files(sources, parts_of, out)
    again = f"; {merged.again} were measured twice, of which the first is kept" if merged.again else ""
    print(f"{merged.added} measurements of {len(sources)} files → {out}{again}")
    return 0


def exit_code(summary: FarmSummary) -> int:
    if summary.interrupted is not None:
        raise summary.interrupted
    if summary.finished:
        return 0
    if summary.late:
        return OUT_OF_TIME
    left = summary.shapes_total - summary.shapes_done
    why = f" ({summary.lost[-1]})" if summary.lost else ""
    print(f"error: {left} shapes were not finished{why}; the same command goes on", file=sys.stderr)
    return 1


def gpus_of(given: Sequence[str] | None, jobs: int, argv: RecorderArgv) -> list[Gpu]:
    """The GPUs that ``--device`` names. Raises DeviceBroken."""
    names = list(dict.fromkeys(given or ["cuda:0"]))
    if "all" in names:
        if len(names) > 1:
            raise DeviceBroken("--device all is all there are: name no others beside it")
        count = gpus_here()
        if not count:
            raise DeviceBroken("--device all: this machine shows no NVIDIA GPU; name one, for example --device cuda:0")
        names = [f"cuda:{ordinal}" for ordinal in range(count)]
    return [Gpu(name, argv(int(name.removeprefix("cuda:")), max(1, jobs // len(names)))) for name in names]


def gpus_here() -> int:
    """How many GPUs a process of ours can see, by whatever tells."""
    if (named := named_gpus()) is not None:
        return len(named)
    return len(visible_gpus()) or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` asks for an end like ctrl-C
    sys.exit(main())
