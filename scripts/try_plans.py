"""Time chosen plans at chosen shapes on a GPU, against cuBLASLt in the same run and the best that was recorded before.

    python scripts/try_plans.py --out try.sqlite --shapes 4096x256x8192,256x1024x8192 \
        --plans "wgmma_persistent BM=128 BN=192,256 CLUSTER_M=2" --plans "wgmma_tile/nk CLUSTER_K=2"
    python scripts/try_plans.py --out try.sqlite --job jobs.txt --deadline 200

A filter is a family, perhaps with a layout of B, and values of knobs; what it does not name may be anything. A job file
has lines "SHAPES: FILTER", tried in that order. Every plan goes through compile, verify quick and a screen timing; the
best --finals of a shape through verify full and final timings; those through sanitize in the end, many at a time. All
is kept in the record file --out: the same command goes on where the last one stopped, and so can ``tools.recording``.
With a copy of a recording as --out what is known already is not measured again. On the host it needs what
``tools.recording`` needs: the GPU packages, pydantic and PyYAML.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.device import Device, DeviceBroken  # noqa: E402
from tools.families import ManifestError, load_families  # noqa: E402
from tools.gate import MemoryResults, Toolbox  # noqa: E402
from tools.hgemm import ShapeError, parse_shape  # noqa: E402
from tools.plan_filters import FilterError, parse_job  # noqa: E402
from tools.record_file import RecordReader, Records  # noqa: E402
from tools.record_writer import RecordWriter  # noqa: E402
from tools.recording_device import RecordingDevice  # noqa: E402
from tools.records import HEADLINE_REFERENCE, MODES, Evaluation, Family, Mode, Outcome, Reason, Status, Task, Variant  # noqa: E402
from tools.replay import default_path  # noqa: E402
from tools.sanitize_shapes import sanitize_tasks  # noqa: E402
from tools.shapes import Shape, parse_shapes_csv, regime  # noqa: E402
from tools.text_files import UnreadableFile, read_text  # noqa: E402
from tools.whole_files import replacing  # noqa: E402

#: Exit code when the deadline came first.
OUT_OF_TIME = 3
#: A plan that hangs or kills its worker costs half a minute: its source is not tried again, nor, after so many
#: sources, its family.
FATAL = (Reason.HANG, Reason.CRASH)
FATAL_SOURCES = 2
NOT_MEASURED = "not measured"
JOB_BYTES = 1 << 20

Echo = Callable[[str], None]


class OutOfTimeError(Exception):
    """The deadline has passed."""


@dataclass
class Tried:
    """One plan at one shape; times in microseconds, ratios to the better layout of cuBLASLt in the same run."""

    label: str
    key: str
    status: str = NOT_MEASURED
    detail: str = ""
    screen_us: float | None = None
    screen_ratio: float | None = None
    final_us: float | None = None
    final_ratio: float | None = None
    final_lo: float | None = None
    final_hi: float | None = None
    other_modes: dict[str, float] = field(default_factory=dict)
    sanitize: str = ""


@dataclass
class ShapeReport:
    """``recorded``: the best final ratio, offline, that the earlier record holds, and whose it is."""

    shape: str
    regime: str
    recorded_ratio: float | None
    recorded_label: str
    tried: list[Tried]


@dataclass(frozen=True)
class Effort:
    finals: int = 2
    modes: tuple[Mode, ...] = ("offline",)
    sanitize: str = "finalists"  # finalists, all, none


def best_recorded(records: Records, families: Mapping[str, Family]) -> dict[str, tuple[float, str]]:
    """By task_id: the best final ratio offline, and the plan's label."""
    labels = {plan.plan_id: plan.label for plan in records.plans()}
    found: dict[str, tuple[float, str]] = {}
    for task_id, key, mode in records.timed_keys("final"):
        timing = records.timed(key, task_id, mode, "final") if mode == "offline" else None
        row = timing.row(HEADLINE_REFERENCE) if timing is not None else None
        if row is not None and row.ratio > found.get(task_id, (0.0, ""))[0]:
            found[task_id] = (row.ratio, labels.get(key, key))
    return found


def try_plans(
    device: Device,
    families: Mapping[str, Family],
    job: Sequence[tuple[Task, Sequence[Variant]]],
    out: Path,
    *,
    deadline_s: float,
    effort: Effort = Effort(),
    earlier: Mapping[str, tuple[float, str]] | None = None,
    jobs: int | None = None,
    commit: str = "",
    echo: Echo = print,
) -> tuple[list[ShapeReport], bool]:
    """Reports of the shapes begun, and whether all was done before ``deadline_s`` seconds had passed."""
    end = time.monotonic() + deadline_s
    earlier = earlier or {}
    reports: list[ShapeReport] = []
    with RecordWriter(out, device.info) as writer:
        writer.put_meta({"commit": commit})
        through = RecordingDevice(device, writer)
        run = _Run(Toolbox(through, MemoryResults(), families), through, families, end, effort, echo)
        try:
            distinct = {v.key: v for _, variants in job for v in variants}
            writer.check_contents(distinct.values())
            run.compile_ahead(list(distinct.values()), jobs or os.cpu_count() or 1)
            if effort.sanitize == "all":
                run.sanitize([(v, task) for task, variants in job for v in variants], [])
            for number, (task, variants) in enumerate(job, 1):
                before, started = through.measured, time.monotonic()
                ratio, label = earlier.get(task.task_id, (None, ""))
                report = ShapeReport(task.label, regime(task), ratio, label, [])
                reports.append(report)
                try:
                    run.shape(task, variants, report.tried)
                finally:
                    writer.commit()
                    took = time.monotonic() - started
                    echo(f"== {number}/{len(job)} ({through.measured - before} measured in {took:.1f} s, {run.left()})")
                    for line in table(report):
                        echo(line)
            run.sanitize(run.finalists, reports)
            return reports, True
        except OutOfTimeError:
            echo(f"deadline: the same command goes on; {len(reports)} of {len(job)} shapes were begun → {out}")
            return reports, False


class _Run:
    def __init__(
        self,
        toolbox: Toolbox,
        through: RecordingDevice,
        families: Mapping[str, Family],
        end: float,
        effort: Effort,
        echo: Echo,
    ) -> None:
        self.toolbox, self.through, self.families, self.end = toolbox, through, families, end
        self.effort, self.echo = effort, echo
        self.finalists: list[tuple[Variant, Task]] = []
        self._fatal: dict[str, str] = {}  # source → family

    def left(self) -> str:
        return f"{max(0.0, self.end - time.monotonic()):.0f} s left"

    def check(self) -> None:
        if time.monotonic() > self.end:
            raise OutOfTimeError

    def compile_ahead(self, variants: Sequence[Variant], jobs: int) -> None:
        batch = 4 * jobs
        for start in range(0, len(variants), batch):
            self.check()
            if not self.through.compile_many(variants[start : start + batch], jobs):
                return
            self.echo(f"compiled {min(start + batch, len(variants))} of {len(variants)} plans ({self.left()})")

    def shape(self, task: Task, variants: Sequence[Variant], tried: list[Tried]) -> None:
        """Screens all, then times the best again. What was measured is in ``tried`` whenever it ends."""
        rows = {v.key: Tried(v.label, v.key) for v in variants}
        tried += rows.values()
        screened: list[tuple[float, Variant]] = []
        for variant in variants:
            self.check()
            row = rows[variant.key]
            if why := self._hopeless(variant):
                row.status = why
                continue
            evaluation = self.toolbox.evaluate(variant, task)
            self._note(row, variant, evaluation)
            if evaluation.ok and row.screen_ratio is not None:
                screened.append((row.screen_ratio, variant))
        screened.sort(key=lambda pair: -pair[0])
        done = 0
        for _, variant in screened:
            if done == self.effort.finals:
                break
            done += self._final(variant, task, rows[variant.key])

    def _hopeless(self, variant: Variant) -> str:
        family = variant.plan.family if variant.plan else ""
        if variant.source in self._fatal:
            return "skipped: its source hung or crashed at another shape or with other knobs"
        if Counter(self._fatal.values())[family] >= FATAL_SOURCES:
            return f"skipped: {FATAL_SOURCES} sources of {family} hung or crashed"
        return ""

    def _say_why(self, row: Tried, variant: Variant, found: Outcome) -> None:
        row.status, row.detail = (found.reason or found.status).value, found.detail
        if found.reason in FATAL and variant.plan is not None:
            self._fatal[variant.source] = variant.plan.family

    def _note(self, row: Tried, variant: Variant, found: Evaluation) -> None:
        self._say_why(row, variant, found)
        timing = found.timing.row(HEADLINE_REFERENCE) if found.timing is not None else None
        if timing is not None:
            row.screen_us, row.screen_ratio = timing.time_us, timing.ratio

    def _final(self, variant: Variant, task: Task, row: Tried) -> bool:
        self.check()
        verified = self.toolbox.verify(variant, task, "full")
        if not verified.ok:
            self._say_why(row, variant, verified)
            return False
        for mode in self.effort.modes:
            self.check()
            timed = self.toolbox.time(variant, task, mode, "final")
            found = timed.row(HEADLINE_REFERENCE)
            if found is None:
                self._say_why(row, variant, timed)
                return False
            if mode == "offline":
                row.final_us, row.final_ratio = found.time_us, found.ratio
                row.final_lo, row.final_hi = found.ratio_lo, found.ratio_hi
            else:
                row.other_modes[mode] = found.ratio
        self.finalists.append((variant, task))
        return True

    def sanitize(self, pairs: Sequence[tuple[Variant, Task]], reports: Sequence[ShapeReport]) -> None:
        """Each plan once, many in a process where the device can."""
        if self.effort.sanitize == "none":
            return
        once = {v.key: (v, task) for v, task in pairs if self.through.compile(v).ok}
        self.check()
        if once and self.through.sanitizes_many:
            self.echo(f"sanitizing {len(once)} plans ({self.left()})")
            self.through.sanitize_many([(v, sanitize_tasks(v, task, self.families)) for v, task in once.values()])
        verdicts: dict[str, str] = {}
        for variant, task in once.values():
            self.check()
            result = self.toolbox.sanitize(variant, task)
            verdicts[variant.key] = "ok" if result.ok else f"{(result.reason or result.status).value}: {result.detail}"
            if result.status is Status.FAILED:
                self.echo(f"sanitize: {variant.label}: {verdicts[variant.key]}")
        for report in reports:
            for row in report.tried:
                row.sanitize = verdicts.get(row.key, row.sanitize)
        bad = sum(verdict != "ok" for verdict in verdicts.values())
        self.echo(f"sanitized {len(verdicts)} plans, {bad} with findings ({self.left()})")


def table(report: ShapeReport) -> list[str]:
    """The shape's plans, best first: microseconds and ratios, screened and final, and what went wrong."""
    known = "nothing" if report.recorded_ratio is None else f"{report.recorded_ratio:.3f}x {report.recorded_label}"
    lines = [f"{report.shape} {report.regime}; recorded before: {known}"]
    reached = [row for row in report.tried if row.status != NOT_MEASURED]
    order = sorted(reached, key=lambda r: (-(r.final_ratio or 0.0), -(r.screen_ratio or 0.0)))
    for row in order:
        screen = "" if row.screen_us is None else f"{row.screen_us:9.2f} us {row.screen_ratio:.3f}x"
        final = "" if row.final_us is None else f"{row.final_us:9.2f} us {row.final_ratio:.3f}x"
        if row.final_lo is not None:
            final += f" ({row.final_lo:.3f}–{row.final_hi:.3f})"
        modes = "".join(f" {mode} {ratio:.3f}x" for mode, ratio in row.other_modes.items())
        wrong = "" if row.status == "ok" else f" [{row.status}{': ' + row.detail[:120] if row.detail else ''}]"
        lines.append(f"  {screen:19s} {final:33s}{modes} {row.label}{wrong}")
    if len(reached) < len(report.tried):
        lines.append(f"  {len(report.tried) - len(reached)} plans were not reached")
    return lines


def summary(reports: Sequence[ShapeReport]) -> list[str]:
    """A line a shape: the best now against the best before."""
    lines = ["shape | best now | recorded before | gain | plan"]
    for report in reports:
        before = "-" if report.recorded_ratio is None else f"{report.recorded_ratio:.3f}"
        best = max(report.tried, key=lambda r: r.final_ratio or 0.0, default=None)
        if best is None or best.final_ratio is None:
            lines.append(f"{report.shape} | - | {before} | - | -")
            continue
        gain = "-"
        if report.recorded_ratio:
            gain = f"{100 * (best.final_ratio / report.recorded_ratio - 1):+.1f} %"
        lines.append(f"{report.shape} | {best.final_ratio:.3f} | {before} | {gain} | {best.label}")
    return lines


def read_shapes(text: str) -> list[Shape]:
    """ "MxNxK,MxNxK", or the path of a CSV. Raises ShapeError."""
    if Path(text).suffix == ".csv":
        return parse_shapes_csv(Path(text))
    return [parse_shape(shape) for shape in text.replace(",", " ").split()]


def main(arguments: Sequence[str] | None = None, device: Device | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="try_plans.py"
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:N (default cuda:0)")
    parser.add_argument("--out", type=Path, required=True, help="record file to begin or to go on with")
    parser.add_argument("--plans", action="append", default=[], metavar="FILTER", help="may be given several times")
    parser.add_argument("--shapes", metavar="SHAPES", help="MxNxK,MxNxK… or a CSV; for --plans")
    parser.add_argument("--job", type=Path, metavar="FILE", help='lines "SHAPES: FILTER"')
    parser.add_argument("--kernels", type=Path, metavar="DIR", help="families (default: the packaged ones)")
    parser.add_argument("--records", type=Path, help="what to compare with (default: the packaged record)")
    parser.add_argument("--finals", type=int, default=2, help="plans of a shape that are timed again (default 2)")
    parser.add_argument("--all-modes", action="store_true", help="final timings in all modes, not only offline")
    parser.add_argument("--sanitize", choices=("finalists", "all", "none"), default="finalists")
    parser.add_argument("--deadline", type=float, default=3600.0, metavar="SECONDS", help="default: an hour")
    parser.add_argument("--jobs", type=int, help="compile processes (default: one a core)")
    parser.add_argument("--json", type=Path, help="also write the reports here")
    parser.add_argument("--commit", default="", help="source revision, kept as provenance")
    parser.add_argument("--list", action="store_true", help="only say what would be tried; needs no GPU")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    kind, _, ordinal = options.device.partition(":")
    if kind != "cuda" or not ordinal.isdigit():
        parser.error(f"--device is cuda:N, for example cuda:0, not '{options.device}'")
    if bool(options.plans) != bool(options.shapes) or not (options.plans or options.job):
        parser.error("give --plans and --shapes, or --job, or all three")
    try:
        families = load_families(options.kernels)
        lines = read_text(options.job, "the job file", JOB_BYTES).splitlines() if options.job else []
        if options.shapes:
            shapes = " ".join("x".join(map(str, shape)) for shape in read_shapes(options.shapes))
            lines += [f"{shapes}: {words}" for words in options.plans]
        job = parse_job(lines, families)
        if options.list:
            for task, variants in job:
                print(f"{task.label} {regime(task)}: {len(variants)} plans")
            distinct = {v.key: v for _, variants in job for v in variants}
            pairs, sources = sum(len(v) for _, v in job), len({v.source for v in distinct.values()})
            print(f"{len(job)} shapes, {pairs} plans at shapes, {len(distinct)} plans, {sources} sources")
            return 0
        records = RecordReader(options.records or default_path())
        earlier = best_recorded(records, families)
        records.close()
        finished = _measure(options, families, job, earlier, started, device, int(ordinal))
    except (DeviceBroken, ManifestError, ShapeError, FilterError, UnreadableFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept; the same command goes on from there", file=sys.stderr)
        return 130
    return 0 if finished else OUT_OF_TIME


def _measure(
    options: argparse.Namespace,
    families: Mapping[str, Family],
    job: Sequence[tuple[Task, Sequence[Variant]]],
    earlier: Mapping[str, tuple[float, str]],
    started: float,
    device: Device | None,
    ordinal: int,
) -> bool:
    own: Device | None = None
    if device is None:
        from tools.cuda_device import CudaDevice

        device = own = CudaDevice(ordinal)

    def say(line: str) -> None:
        print(line, flush=True)

    modes: tuple[Mode, ...] = MODES if options.all_modes else ("offline",)
    try:
        reports, finished = try_plans(
            device,
            families,
            job,
            options.out,
            deadline_s=options.deadline - (time.monotonic() - started),
            effort=Effort(options.finals, modes, options.sanitize),
            earlier=earlier,
            jobs=options.jobs,
            commit=options.commit,
            echo=say,
        )
    finally:
        if own is not None:
            own.close()
    for line in summary(reports):
        say(line)
    if options.json:
        with replacing(options.json) as new:
            new.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    return finished


if __name__ == "__main__":
    sys.exit(main())
