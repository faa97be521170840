"""A recording on the GPUs of one host: one process a GPU (tools/recorder.py), shapes handed out as each gets free.

In rounds: first all plans are compiled, on all cores, then all are sanitized, then the shapes are measured, so that no
compiler disturbs a timing and nothing is done once a GPU that is needed once. At the end of a round the parts that the
processes measured into are merged into the record file. Whatever dies at whatever moment, the same command goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

from tools.device import DeviceBroken
from tools.hgemm import hgemm
from tools.record_merge import part_opened
from tools.record_writer import RecordWriter
from tools.recording_cost import Pace, Queue, job_seconds
from tools.recording_parts import Parts
from tools.recording_scope import Deadline, Echo, Job, Scope, jobs, unmeasured, unsanitized
from tools.recording_team import START_S, Hand, Post, Reply, Request, Team
from tools.records import DeviceInfo, Family, Task, Variant
from tools.shapes import Shape
from tools.text_files import irregular

T = TypeVar("T")

#: Beyond the deadline, for the call that runs then. A call has deadlines of its own; this is for what they do not see.
OVERRUN_S = 4500.0
SANITIZE_BATCH = 128
#: A shape under which a process died is tried again, once all others are done, but not for ever.
ATTEMPTS = 2


@dataclass(frozen=True)
class FarmSummary:
    """``lost``: a sentence for each GPU that did not see the end."""

    shapes_done: int
    shapes_total: int
    measured: int  # tool calls that went to a device; the rest was in the file
    lost: tuple[str, ...]
    late: bool  # the deadline came first
    interrupted: KeyboardInterrupt | None

    @property
    def finished(self) -> bool:
        return self.shapes_done == self.shapes_total


@dataclass(frozen=True)
class Gpu:
    """``argv`` starts its recorder: see tools/recorder.py."""

    name: str
    argv: Sequence[str]


@dataclass
class _Work(Generic[T]):
    """Of one kind, for all hands. ``done`` hears, in one thread, of each piece, its reply and its estimated cost."""

    queue: Queue[T]
    request: Callable[[T], Request]
    what: Callable[[T], str]
    done: Callable[[Hand, T, Reply, float], None]


def record_on(
    gpus: Sequence[Gpu],
    families: Mapping[str, Family],
    shapes: Sequence[Shape],
    out: Path,
    *,
    deadline_s: float,
    scope: Scope,
    echo: Echo,
    given: Mapping[str, Sequence[Variant]] | None = None,
    processes: int | None = None,
    commit: str = "",
) -> FarmSummary:
    """Record HGEMM ``shapes`` on ``gpus``, about in the order given, until all are done or ``deadline_s`` seconds have
    passed. ``given``: plans by task_id, instead of those that ``scope`` names. ``processes`` compile at once, on all
    GPUs together.

    Raises DeviceBroken if no GPU can be opened, if they cannot share a file, or if the file cannot be written; what was
    measured until then is kept.
    """
    parts = Parts(out)
    with parts.held():
        before = parts.merge()
        if before.added:
            echo(f"{before.added} measurements that an earlier recording left were merged into {out}")
        hands: list[Hand] = []
        try:
            hands += [Hand(gpu.name, gpu.argv) for gpu in gpus]
            team = Team(hands, echo)
            recording = _Recording(team, parts, families, scope, given, Deadline(deadline_s), commit, echo)
            return recording.run([hgemm(*shape) for shape in shapes], processes or os.cpu_count() or 1)
        finally:
            for hand in hands:
                hand.kill()
            with contextlib.suppress(DeviceBroken):  # else the next recording merges what there is
                parts.merge()


class _Recording:
    def __init__(
        self,
        team: Team,
        parts: Parts,
        families: Mapping[str, Family],
        scope: Scope,
        given: Mapping[str, Sequence[Variant]] | None,
        deadline: Deadline,
        commit: str,
        echo: Echo,
    ) -> None:
        self._team, self._parts, self._families, self._given = team, parts, families, given
        self._scope, self._deadline, self._commit, self._echo = scope, deadline, commit, echo
        self._lock = Lock()
        self._late = False
        self._measured = 0

    def run(self, tasks: Sequence[Task], processes: int) -> FarmSummary:
        out = self._parts.out
        early = known_device(out)
        opened = self._team.greet()
        todo = None if early is None else self._todo(early, tasks)  # while the GPUs are opened: both take seconds
        if todo != []:
            info = opened()
            with RecordWriter(out, info):  # begins it, or refuses
                pass
            if todo is None or early != info:
                todo = self._todo(info, tasks)
        done = len(tasks) - len(todo)
        if done:
            self._echo(f"{done} of {len(tasks)} shapes are in {out} already")
        if todo:
            self._compile(todo, max(1, processes // max(1, len(self._team))))
            self._sanitize(info, todo)
            done = self._measure(info, todo, len(tasks))
        if self._measured:
            with RecordWriter(out, info) as writer:
                writer.compact()
        if done < len(tasks) and self._late and self._team.interrupted is None:
            self._echo(f"deadline: {done} of {len(tasks)} shapes are complete in {out}; the same command goes on")
        lost = tuple(self._team.lost)
        return FarmSummary(done, len(tasks), self._measured, lost, self._late, self._team.interrupted)

    # --- rounds ------------------------------------------------------------------------------------------------------

    def _compile(self, todo: Sequence[Job], at_once: int) -> None:
        variants = unmeasured(todo)
        batches = [variants[start : start + 4 * at_once] for start in range(0, len(variants), 4 * at_once)]
        self._batches(
            "compile",
            [{"op": "compile", "keys": [variant.key for variant in batch], "jobs": at_once} for batch in batches],
            len(variants),
        )

    def _sanitize(self, info: DeviceInfo, todo: Sequence[Job]) -> None:
        if not self._going_on or not self._scope.sanitize:
            return
        with RecordWriter(self._parts.out, info) as writer:
            keys = [variant.key for variant, _ in unsanitized(writer, self._families, todo)]
        size = max(1, min(SANITIZE_BATCH, -(-len(keys) // max(1, len(self._team)))))
        batches = [keys[start : start + size] for start in range(0, len(keys), size)]
        dims = _dims(todo[0].task)
        self._batches("sanitize", [{"op": "sanitize", "keys": batch, "dims": dims} for batch in batches], len(keys))

    def _batches(self, verb: str, requests: Sequence[Request], total: int) -> None:
        so_far = 0

        def done(_: Hand, request: Request, __: Reply, ___: float) -> None:
            nonlocal so_far
            so_far += len(request["keys"])
            self._echo(f"{verb}d {so_far} of {total} plans ({max(0.0, self._deadline.left_s):.0f} s left)")

        what = f"when it was to {verb}"
        rest = list(requests)
        for _ in range(ATTEMPTS):
            rest = self._round(_Work(Queue(rest), lambda request: request, lambda _: what, done))

    def _measure(self, info: DeviceInfo, todo: Sequence[Job], total: int) -> int:
        """How many shapes of ``total`` are complete in the end."""
        left = len(todo)
        pace = Pace()

        def done(hand: Hand, job: Job, reply: Reply, estimated_s: float) -> None:
            nonlocal left
            left -= 1
            pace.saw(estimated_s, reply["seconds"])
            to_go = pace.of(shapes.left_s, len(self._team)) or 0.0
            self._echo(
                f"{total - left}/{total} {hand.name} {reply['line']}, {max(0.0, self._deadline.left_s):.0f} s left; "
                f"all in about {to_go:.0f} s)"
            )

        for _ in range(ATTEMPTS):
            lost = len(self._team.lost)
            shapes = Queue(todo, {i: job_seconds(job, self._scope) for i, job in enumerate(todo)})
            self._round(_Work(shapes, _shape_request, lambda job: f"at {job.task.label}", done))
            if len(self._team.lost) == lost or not self._going_on:
                break
            # What it was doing, and profiles that waited in it.
            todo = self._todo(info, [job.task for job in todo])
            left = len(todo)
        return total - left

    def _round(self, work: _Work[T]) -> list[T]:
        """Hands the work out until there is none, or no time; then everything measured is in the record file. What was
        given to a hand that was lost is the result."""
        if not self._going_on or not work.queue:
            return []
        common = {
            "op": "open",
            "base": str(self._parts.out),
            "scope": dataclasses.asdict(self._scope),
            "commit": self._commit,
        }
        held: dict[str, T] = {}

        def drive(hand: Hand, post: Post) -> None:
            request = {**common, "part": str(self._parts.new()), "left_s": self._deadline.left_s}
            hand.ask(request, "when it was to begin", START_S)
            while (taken := self._take(work)) is not None:
                item, cost = taken
                held[hand.name] = item
                left_s = self._deadline.left_s
                reply = hand.ask(
                    {**work.request(item), "left_s": left_s}, work.what(item), max(0.0, left_s) + OVERRUN_S
                )
                del held[hand.name]
                if reply.get("late"):
                    self._late = True
                else:
                    post(lambda item=item, reply=reply, cost=cost: work.done(hand, item, reply, cost))  # type: ignore[misc]

        def close(hand: Hand, post: Post) -> None:
            request = {"op": "close", "at_once": self._team.interrupted is not None}
            reply = hand.ask(request, "when it was to end", OVERRUN_S)
            post(lambda: self._count(reply["measured"]))

        self._team.do(drive)
        self._team.do(close)
        self._parts.merge()
        return list(held.values())

    # --- pieces ------------------------------------------------------------------------------------------------------

    @property
    def _going_on(self) -> bool:
        if self._deadline.left_s <= 0:
            self._late = True
        return len(self._team) > 0 and not self._late and self._team.interrupted is None

    def _take(self, work: _Work[T]) -> tuple[T, float] | None:
        with self._lock:
            return work.queue.take(len(self._team)) if self._going_on else None

    def _count(self, measured: int) -> None:
        self._measured += measured

    def _todo(self, info: DeviceInfo, tasks: Sequence[Task]) -> list[Job]:
        with RecordWriter(self._parts.out, info) as writer:
            return jobs(writer, self._families, tasks, self._scope, info, self._given)


def known_device(out: Path) -> DeviceInfo | None:
    """Of a record file; None if it is to be begun. Raises DeviceBroken for what is none, before a GPU opens."""
    if what := irregular(out):
        raise DeviceBroken(f"the record file {out} {what}: give another path")
    if not out.exists() or not out.stat().st_size:
        return None
    with part_opened(out) as records:  # not a reader, which refuses what a killed merge has left
        return records.device if records is not None else None


def _dims(task: Task) -> list[int]:
    return [task.dims[name] for name in ("M", "N", "K")]


def _shape_request(job: Job) -> Request:
    keys = [variant.key for variant in job.variants]
    return {"op": "shape", "dims": _dims(job.task), "keys": keys, "digest": job.digest}
