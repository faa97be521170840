"""Subjects as CUDA graphs with event nodes inside, replayed interleaved and in random order.

A graph is: poison the ring of outputs, evict L2 unless offline, event, L launches, event. L is the same for all
subjects of a run. Every launch writes its own C; the candidate's are compared with its known output for these operands
after the replay, so that a launch that does nothing, or coasts on the last result, is seen. Operand sets change between
replays. Samples are microseconds a launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np

from tools.gpu.data import Kernels, new_stats, read_stats, seed
from tools.gpu.driver import Event, Graph
from tools.gpu.nvml import ClockLog
from tools.gpu.operands import Operands
from tools.records import Budget, Mode, Reason
from tools.timing_plan import EFFORTS, SERVER_GAP_S, rounds, sets_in_use
from tools.verdicts import Rejected

Enqueue = Callable[[int, int, int], None]  # (operand set, address of C, stream)


@dataclass
class Subject:
    """Something timed: a name, how to enqueue one launch, and (for the candidate) its outputs per operand set."""

    name: str
    enqueue: Enqueue
    golden: list[Any] | None = None
    loose: bool = False
    before: Callable[[int], None] | None = None  # recorded ahead of the clock: scrambles a workspace


@dataclass
class Replay:
    graph: Graph
    start: Event
    end: Event
    warm: int  # launches before the events, into the first slots
    operand_sets: tuple[int, ...]  # of the timed launches, in order

    @property
    def elapsed_us(self) -> float:
        return self.end.elapsed_us_since(self.start)

    def destroy(self) -> None:
        self.graph.destroy()
        self.start.destroy()
        self.end.destroy()


class Prepared:
    """A subject's graphs for one mode: one per operand set offline, two over halves of the sets when rotating."""

    def __init__(self, subject: Subject, operands: Operands, mode: Mode, launches: int, stream: int) -> None:
        self.subject, self.operands, self.mode, self.launches = subject, operands, mode, launches
        sets = sets_in_use(mode, launches, operands.sets)
        if mode == "rotating":
            half = sets // 2
            groups = [tuple(i % half for i in range(launches)), tuple(half + i % half for i in range(launches))]
        else:
            groups = [(s,) * launches for s in range(sets)]
        self.replays: list[Replay] = []
        try:
            for group in groups:
                self.replays.append(self._record(group, stream))
        except BaseException:
            self.destroy()
            raise

    def _record(self, sets: tuple[int, ...], stream: int) -> Replay:
        operands, subject = self.operands, self.subject
        start, end = Event(), Event()
        # Operands hot, as in the paper's back-to-back calls; a single launch is long enough to warm itself.
        warm = int(self.mode == "offline" and len(sets) > 1)

        def record() -> None:
            operands.poison(len(sets) + warm, stream)
            if subject.before is not None:
                subject.before(stream)
            if self.mode != "offline":
                operands.evict_l2(stream)
            if warm:
                subject.enqueue(sets[0], operands.slot(0), stream)
            start.record(stream, external=True)
            for i, operand_set in enumerate(sets):
                subject.enqueue(operand_set, operands.slot(i + warm), stream)
            end.record(stream, external=True)

        return Replay(Graph(stream, record), start, end, warm, sets)

    def check_into(self, replay: Replay, kernels: Kernels, stats: Any, gaps: Any) -> None:
        """Compare every output the replay wrote with the known one; counts accumulate on the device."""
        golden = self.subject.golden
        if golden is None:
            return
        operands, loose, stride = self.operands, self.subject.loose, self.operands.stride
        ring = operands.ring[replay.warm * stride :]
        if len(set(replay.operand_sets)) == 1:
            copies = len(replay.operand_sets)
            kernels.compare_copies(ring, golden[replay.operand_sets[0]], copies, stride, loose, stats)
        else:
            for i, operand_set in enumerate(replay.operand_sets):
                kernels.compare_copies(ring[i * stride :], golden[operand_set], 1, stride, loose, stats)
        operands.count_gaps_into(replay.warm + len(replay.operand_sets), gaps)

    def destroy(self) -> None:
        for replay in self.replays:
            replay.destroy()
        self.replays.clear()


def time_of(enqueue: Enqueue, operands: Operands, stream: Any, launches: int = 4) -> float:
    """Microseconds a launch, roughly, from a small graph, so without host time. Only decides how much is timed."""
    prepared = Prepared(
        Subject("estimate", enqueue), operands, "offline", min(launches, operands.slots - 1), stream.ptr
    )
    try:
        for _ in range(2):  # the first loads the code
            prepared.replays[0].graph.replay()
            stream.synchronize()
        return max(prepared.replays[0].elapsed_us / prepared.launches, 0.1)
    finally:
        prepared.destroy()


def run_interleaved(
    prepared: Sequence[Prepared],
    kernels: Kernels,
    mode: Mode,
    budget: Budget,
    round_s: float,
    clocks: ClockLog,
    aim_s: float | None = None,
    warm_s: float | None = None,
    least: int = 0,
) -> dict[str, Any]:
    """Samples per subject, one a round, all subjects in each round in random order; at least ``least`` rounds.

    Raises Rejected(SKIPPED_LAUNCH or WROTE_OUT_OF_BOUNDS) if any timed output, or a word beside one, is not what it
    should be.
    """
    effort = EFFORTS[budget]
    aim = effort.aim_s if aim_s is None else aim_s
    warm_until = time.monotonic() + (effort.warm_s if warm_s is None else warm_s)
    wanted = max(least, rounds(budget, mode, len(prepared), round_s, aim_s))
    rng = np.random.default_rng(seed())
    stats, gaps = new_stats(1), cp.zeros(1, cp.uint64)
    samples: dict[str, list[float]] = {p.subject.name: [] for p in prepared}
    timed_s = dict.fromkeys(samples, 0.0)
    clocks.start()
    done = 0
    while done < wanted:
        warming = time.monotonic() < warm_until
        if not warming and budget == "certify" and done >= effort.least and _timed_enough(timed_s, aim):
            break
        used: list[tuple[str, Replay]] = []
        served_s: dict[str, float] = {}
        for index in rng.permutation(len(prepared)):
            subject = prepared[index]
            replay = subject.replays[done % len(subject.replays)]
            began = time.monotonic()
            if mode == "server":
                _sleep(rng.exponential(SERVER_GAP_S))
            replay.graph.replay()
            subject.check_into(replay, kernels, stats[0], gaps)
            if mode == "server":
                kernels.stream.synchronize()
                # A call comes with its gap: 30 s of kernels of microseconds alone would take a day.
                served_s[subject.subject.name] = time.monotonic() - began
            used.append((subject.subject.name, replay))
        kernels.stream.synchronize()
        clocks.poll()
        if warming:
            continue
        for name, replay in used:
            elapsed_us = replay.elapsed_us
            samples[name].append(elapsed_us / len(replay.operand_sets))
            timed_s[name] += served_s.get(name, elapsed_us * 1e-6)
        done += 1
    found = read_stats(stats)[0]
    if int(gaps[0]):
        raise Rejected(Reason.WROTE_OUT_OF_BOUNDS, f"{int(gaps[0])} words beside the outputs of timed launches changed")
    if found.mismatches or found.unwritten:
        raise Rejected(
            Reason.SKIPPED_LAUNCH,
            f"{found.unwritten} outputs of timed launches were never written and {found.mismatches} differ from the "
            "kernel's own result: a launch was skipped or coasted on an earlier one",
        )
    return {name: np.asarray(values) for name, values in samples.items()}


def _timed_enough(timed_s: dict[str, float], aim_s: float) -> bool:
    """Whether the candidate and each reference have been timed for ``aim_s`` together; in server mode with gaps."""
    own = timed_s.get("candidate", 0.0)
    return all(own + seconds >= aim_s for name, seconds in timed_s.items() if name not in ("candidate", "empty"))


def _sleep(seconds: float) -> None:
    """Sleep for most of the gap and spin for the rest, for precision well under a millisecond."""
    end = time.perf_counter() + seconds
    if seconds > 3e-4:
        time.sleep(seconds - 2e-4)
    while time.perf_counter() < end:
        pass
