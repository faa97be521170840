"""time: the candidate and its references interleaved in one run, each as a CUDA graph with event nodes inside.

A graph is: poison a ring of outputs (or evict L2), event, L launches, event. Every launch writes its own C, and every C
is compared with the candidate's known output for these operands after the replay: a launch that does nothing, or coasts
on the last result, is seen. Operand sets change between replays. Samples are microseconds per launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np

from tools.gpu.data import Kernels, new_stats, read_stats
from tools.gpu.driver import BoundLaunch, Event, Gpu, Graph, Module, memset8, memset16
from tools.gpu.nvml import ClockLog
from tools.gpu.verify import Workspace, launch_deadline_s, seed, wait
from tools.launching import ConcreteSpec
from tools.numerics import POISON
from tools.records import Budget, Mode, Reason, Task, Variant
from tools.verdicts import Rejected, Stats

REPLAY_US = 200.0  # aim of one replay: L = REPLAY_US / time, so that event resolution (0.5 us) is under 0.5 %
MAX_LAUNCHES = 40
MAX_ROTATING_SETS = 64
RING_BYTES = 4 << 30
HOT_RING_BYTES = 24 << 20  # offline outputs of one replay stay in L2, as a single reused C would
OPERAND_BYTES = 16 << 30
SLOW_ROUND_S = 20e-3
SERVER_GAP_S = 1e-3  # mean of the exponential gap between server-mode calls

Enqueue = Callable[[int, int, int], None]  # (operand set, address of C, stream)


@dataclass(frozen=True)
class Effort:
    """Rounds a subject is replayed: between ``least`` and ``most``, aiming at ``aim_s`` of device time in all."""

    least: int
    most: int
    aim_s: float
    warm_s: float = 0.0


EFFORTS: dict[Budget, Effort] = {
    "screen": Effort(least=5, most=11, aim_s=1.5e-3),
    "final": Effort(least=15, most=60, aim_s=20e-3, warm_s=10e-3),
    "certify": Effort(least=30, most=1_000_000, aim_s=30.0, warm_s=10.0),
}


class Operands:
    """Sets of A and B with normal(0,1) entries, and the ring of C that all subjects of a task share."""

    def __init__(self, kernels: Kernels, task: Task, l2_bytes: int) -> None:
        self.task, self.kernels = task, kernels
        m, n, k = task.dims["M"], task.dims["N"], task.dims["K"]
        self.outputs = m * n
        align = 128  # FP16 words: 256 bytes
        self._a_words, self._b_words = -(-m * k // align) * align, -(-k * n // align) * align
        set_bytes = 2 * (self._a_words + self._b_words)
        self.sets = max(2, min(MAX_ROTATING_SETS, OPERAND_BYTES // set_bytes))
        if set_bytes > 8 * l2_bytes:
            self.sets = 2  # each set alone overflows L2: more of them change nothing
        self._pool = cp.empty(self.sets * (self._a_words + self._b_words), cp.uint16)
        kernels.fill(self._pool, "normal", 1.0, seed())
        self.stride = -(-self.outputs // align) * align
        self.slots = max(2, min(MAX_ROTATING_SETS + 1, RING_BYTES // (2 * self.stride)))
        self.ring = cp.empty(self.slots * self.stride, cp.uint16)
        self.evict = cp.empty(2 * l2_bytes, cp.uint8)

    def addresses(self, index: int) -> tuple[int, int]:
        base = int(self._pool.data.ptr) + 2 * index * (self._a_words + self._b_words)
        return base, base + 2 * self._a_words

    def words(self, index: int) -> Any:
        """A and B of one set, as one array of FP16 words."""
        size = self._a_words + self._b_words
        return self._pool[index * size : (index + 1) * size]

    def slot(self, index: int) -> int:
        return int(self.ring.data.ptr) + 2 * index * self.stride

    def evict_l2(self, stream: int) -> None:
        memset8(int(self.evict.data.ptr), 0, self.evict.size, stream)


@dataclass
class Subject:
    """Something timed: a name, how to enqueue one launch, and (for the candidate) its outputs per operand set."""

    name: str
    enqueue: Enqueue
    golden: list[Any] | None = None
    loose: bool = False
    before: Callable[[int], None] | None = None  # recorded ahead of the clock: scrambles a workspace


@dataclass
class _Replay:
    graph: Graph
    start: Event
    end: Event
    launches: int  # between the events
    first_slot: int  # outputs first_slot … first_slot + launches - 1 belong to the timed launches
    operand_sets: tuple[int, ...]

    def sample_us(self) -> float:
        return self.end.elapsed_us_since(self.start) / self.launches

    def destroy(self) -> None:
        self.graph.destroy()
        self.start.destroy()
        self.end.destroy()


class Prepared:
    """A subject's graphs for one mode: one per operand set offline, one over all sets when rotating."""

    def __init__(self, subject: Subject, operands: Operands, mode: Mode, launches: int, stream: int) -> None:
        self.subject, self.operands, self.mode = subject, operands, mode
        if mode == "rotating":
            sets = min(operands.sets, operands.slots, max(2, launches))
            half = max(1, sets // 2)
            # Two graphs over different halves, so that operands change between replays as well as inside one.
            groups = [tuple(range(half)), tuple(range(half, 2 * half))]
        elif mode == "server":
            groups = [(s,) for s in range(min(4, operands.sets))]
        else:
            launches = min(launches, operands.slots - 1)
            groups = [(s,) * launches for s in range(2)]
        self.replays = [self._record(group, stream) for group in groups]

    def _record(self, sets: tuple[int, ...], stream: int) -> _Replay:
        operands, subject = self.operands, self.subject
        start, end = Event(), Event()
        warm = self.mode == "offline" and len(sets) > 1  # operands hot, as in the paper's back-to-back calls
        slots = len(sets) + int(warm)

        def record() -> None:
            memset16(operands.slot(0), POISON, slots * operands.stride, stream)
            if subject.before is not None:
                subject.before(stream)
            if self.mode != "offline":
                operands.evict_l2(stream)
            if warm:
                subject.enqueue(sets[0], operands.slot(0), stream)
            start.record(stream, external=True)
            for i, operand_set in enumerate(sets):
                subject.enqueue(operand_set, operands.slot(i + int(warm)), stream)
            end.record(stream, external=True)

        return _Replay(Graph(stream, record), start, end, len(sets), int(warm), sets)

    def check_into(self, replay: _Replay, kernels: Kernels, stats: Any) -> None:
        """Compare every output the replay wrote with the known one; counts accumulate on the device."""
        golden = self.subject.golden
        if golden is None:
            return
        operands = self.operands
        if len(set(replay.operand_sets)) == 1:
            ring = operands.ring[replay.first_slot * operands.stride :]
            copies = len(replay.operand_sets)
            kernels.compare_copies(
                ring, golden[replay.operand_sets[0]], copies, operands.stride, self.subject.loose, stats
            )
            return
        for i, operand_set in enumerate(replay.operand_sets):
            ring = operands.ring[(replay.first_slot + i) * operands.stride :]
            kernels.compare_copies(ring, golden[operand_set], 1, operands.stride, self.subject.loose, stats)

    def destroy(self) -> None:
        for replay in self.replays:
            replay.destroy()


class CandidateSubject:
    """The candidate bound to every operand set it needs; goldens are made by single launches outside any graph."""

    def __init__(
        self, kernels: Kernels, module: Module, variant: Variant, spec: ConcreteSpec, operands: Operands, task: Task
    ) -> None:
        self.kernels, self.module, self.spec, self.operands, self.task = kernels, module, spec, operands, task
        self.label = variant.label
        self.workspace = Workspace(spec)
        self.workspace.prepare(kernels, first=True)
        self._bound: dict[tuple[int, int], BoundLaunch] = {}

    def enqueue(self, operand_set: int, c: int, stream: int) -> None:
        key = (operand_set, c)
        if key not in self._bound:
            a, b = self.operands.addresses(operand_set)
            self._bound[key] = BoundLaunch(self.module, self.spec, {"A": a, "B": b, "C": c}, self.workspace.address)
        self._bound[key].enqueue(stream)

    def single_run_us(self, gpu: Gpu, operand_set: int, c: int) -> float:
        """One launch, timed from outside; also the hang check."""
        stream = self.kernels.stream.ptr
        start, end = Event(), Event()
        start.record(stream)
        self.enqueue(operand_set, c, stream)
        end.record(stream)
        wait(gpu, end, launch_deadline_s(self.task), self.label)
        return end.elapsed_us_since(start)

    def subject(self, gpu: Gpu, sets: Sequence[int], reference: Enqueue) -> Subject:
        """With known outputs for ``sets``, each checked against the reference library by the reviewers' clause."""
        operands, stream = self.operands, self.kernels.stream.ptr
        golden: list[Any] = [None] * operands.sets
        stats = new_stats(1)
        check = cp.empty(operands.outputs, cp.uint16)
        for index in sets:
            golden[index] = self._fresh(gpu, index)
            reference(index, int(check.data.ptr), stream)
            self.kernels.compare_copies(golden[index], check, 1, operands.stride, True, stats[0])
        self._judge(read_stats(stats)[0], "on the operands it is timed on")
        self._refuse_stale(gpu, golden)
        return Subject("candidate", self.enqueue, golden, not self.spec.deterministic, self._scramble)

    def _fresh(self, gpu: Gpu, index: int) -> Any:
        """The output of one launch on operand set ``index`` into a poisoned C of its own."""
        out = cp.empty(self.operands.outputs, cp.uint16)
        out.fill(POISON)
        address = int(out.data.ptr)
        self.single_run_us(gpu, index, address)
        del self._bound[index, address]  # its C is about to belong to someone else
        return out

    def _refuse_stale(self, gpu: Gpu, golden: list[Any]) -> None:
        """Same pointers, same workspace, other contents: an answer kept from an earlier call would now be wrong."""
        operands = self.operands
        first, second = operands.words(0), operands.words(1)
        kept = first.copy()
        self._fresh(gpu, 0)  # whatever is kept is now kept for these pointers
        first[...] = second
        out = self._fresh(gpu, 0)
        first[...] = kept
        stats = new_stats(1)
        self.kernels.compare_copies(out, golden[1], 1, operands.stride, not self.spec.deterministic, stats[0])
        self._judge(read_stats(stats)[0], "when the operands change behind the same pointers")

    def _judge(self, found: Stats, when: str) -> None:
        if found.unwritten:
            raise Rejected(
                Reason.SKIPPED_LAUNCH, f"{self.label} left {found.unwritten} outputs of a repeated launch unwritten"
            )
        if found.mismatches:
            stale = "behind" in when
            raise Rejected(
                Reason.SKIPPED_LAUNCH if stale else Reason.WRONG_RESULT,
                f"{found.mismatches} outputs of {self.label} are {'stale' if stale else 'wrong'} {when}",
            )

    def _scramble(self, stream: int) -> None:
        """Nothing but the declared state may be carried from one replay to the next."""
        state, total = self.spec.state_bytes, self.spec.workspace_bytes
        memset8(self.workspace.address + state, 0xA5, total - state, stream)


def launches_for(time_us: float, mode: Mode, output_bytes: int) -> int:
    """How many launches one replay holds: REPLAY_US worth of them, outputs of short ones kept inside L2."""
    if mode == "server":
        return 1
    if mode == "rotating":
        return max(1, min(MAX_ROTATING_SETS, round(REPLAY_US / time_us)))
    hot = max(4, HOT_RING_BYTES // output_bytes)
    return max(1, min(MAX_LAUNCHES, hot, round(REPLAY_US / time_us)))


@dataclass(frozen=True)
class Samples:
    """us[subject] holds one entry per round, all subjects in each round, in random order inside it."""

    us: dict[str, Any]


def run_interleaved(
    prepared: Sequence[Prepared], kernels: Kernels, mode: Mode, budget: Budget, per_round_s: float, clocks: ClockLog,
    aim_s: float | None = None, warm_s: float | None = None,
) -> Samples:  # fmt: skip
    """Replay all subjects round by round. Raises Rejected(SKIPPED_LAUNCH) if any timed output was not the right one."""
    effort = EFFORTS[budget]
    aim = effort.aim_s if aim_s is None else aim_s
    rounds = effort.most
    if budget != "certify":
        # Two dozen shapes cost more than all others together; three rounds still screen them.
        least = min(effort.least, 3) if budget == "screen" and per_round_s > SLOW_ROUND_S else effort.least
        rounds = int(np.clip(aim * len(prepared) / max(per_round_s, 1e-9), least, effort.most))
    if mode == "server":
        rounds = {"screen": 12, "final": 30}.get(budget, rounds)
    rng = np.random.default_rng(seed())
    stats = new_stats(1)
    samples: dict[str, list[float]] = {p.subject.name: [] for p in prepared}
    clocks.start()
    warm_until = time.monotonic() + (effort.warm_s if warm_s is None else warm_s)
    timed_until: float | None = None
    done = 0
    while done < rounds:
        warming = time.monotonic() < warm_until
        if not warming and budget == "certify":
            timed_until = timed_until or time.monotonic() + aim
            if time.monotonic() > timed_until and done >= effort.least:
                break
        used = []
        for index in rng.permutation(len(prepared)):
            subject = prepared[index]
            replay = subject.replays[done % len(subject.replays)]
            if mode == "server":
                _sleep(rng.exponential(SERVER_GAP_S))
            replay.graph.replay()
            subject.check_into(replay, kernels, stats[0])
            if mode == "server":
                kernels.stream.synchronize()
            used.append((subject, replay))
        kernels.stream.synchronize()
        clocks.poll()
        if warming:
            continue
        for subject, replay in used:
            samples[subject.subject.name].append(replay.sample_us())
        done += 1
    found = read_stats(stats)[0]
    if found.mismatches or found.unwritten:
        raise Rejected(
            Reason.SKIPPED_LAUNCH,
            f"{found.unwritten} outputs of timed launches were never written and {found.mismatches} differ from the "
            "kernel's own result: a launch was skipped or coasted on an earlier one",
        )
    return Samples({name: np.asarray(values) for name, values in samples.items()})


def _sleep(seconds: float) -> None:
    """Sleep for most of the gap and spin for the rest, for precision well under a millisecond."""
    end = time.perf_counter() + seconds
    if seconds > 3e-4:
        time.sleep(seconds - 2e-4)
    while time.perf_counter() < end:
        pass
