"""The candidate as a subject: bound to its operands, its known outputs, and proof that it computes them every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np

from tools.gpu.data import Kernels, new_stats, read_stats, seed
from tools.gpu.driver import BoundLaunch, Event, Gpu, Graph, Launcher, Module, memset16
from tools.gpu.operands import Operands
from tools.gpu.reference import product_blocks
from tools.gpu.replays import Enqueue, Subject
from tools.gpu.verify import Workspace, launch_deadline_s, wait
from tools.hgemm import flops
from tools.launching import ConcreteSpec
from tools.numerics import POISON, gamma32
from tools.records import Budget, Reason, Task, Variant
from tools.timing_plan import IMPOSSIBLE_FLOP_PER_US
from tools.verdicts import Rejected, Stats

WORKSPACE_RING_BYTES = 1 << 30


class Candidate:
    """Every launch of a replay gets its own slice of workspace where they fit, so that nothing is handed on in it."""

    def __init__(
        self,
        gpu: Gpu,
        kernels: Kernels,
        module: Module,
        variant: Variant,
        spec: ConcreteSpec,
        operands: Operands,
        task: Task,
    ) -> None:
        self.gpu, self.kernels, self.variant = gpu, kernels, variant
        self._launcher = Launcher(module, spec)
        self.spec, self.operands, self.task = spec, operands, task
        copies = 1
        if spec.workspace_bytes:
            copies = max(1, min(operands.slots, WORKSPACE_RING_BYTES // spec.workspace_bytes))
        self._workspaces = [Workspace(spec) for _ in range(copies)]
        for workspace in self._workspaces:
            workspace.prepare(kernels, first=True)
        self._bound: dict[tuple[int, int], BoundLaunch] = {}

    def enqueue(self, operand_set: int, c: int, stream: int) -> None:
        key = (operand_set, c)
        if key not in self._bound:
            a, b = self.operands.addresses(operand_set)
            slot = max(0, c - self.operands.slot(0)) // (2 * self.operands.stride)
            workspace = self._workspaces[slot % len(self._workspaces)]
            self._bound[key] = self._launcher.bind({"A": a, "B": b, "C": c}, workspace.address)
        self._bound[key].enqueue(stream)

    def scramble(self, stream: int) -> None:
        """Nothing but the declared state may be carried from one replay to the next."""
        del stream  # the kernels' own; fill nodes are captured on it
        for workspace in self._workspaces:
            workspace.prepare(self.kernels, first=False)

    def first_launch(self) -> None:
        """Before anything is captured: a kernel that never ends is found here."""
        self._launch(0, self.operands.slot(0))

    def subject(self, sets: Sequence[int], reference: Enqueue, budget: Budget) -> Subject:
        """With known outputs for ``sets``. All are checked against the reference library by the reviewers' clause, and
        the first, where more than a screening hangs on it, against FP64 by the a-priori interval."""
        operands, stream = self.operands, self.kernels.stream.ptr
        golden: list[Any] = [None] * (operands.sets + 1)
        stats = new_stats(2)
        check = cp.empty(operands.outputs, cp.uint16)
        for index in sets:
            golden[index] = self._fresh(index)
            reference(index, int(check.data.ptr), stream)
            self.kernels.compare_copies(golden[index], check, 1, operands.stride, True, stats[0])
        if budget != "screen":
            self._compare_with_fp64(golden[sets[0]], sets[0], stats[1])
        against_library, against_fp64 = read_stats(stats)
        self._judge(against_library, Reason.WRONG_RESULT, "wrong on the operands it is timed on")
        self._judge(against_fp64, Reason.WRONG_RESULT, "outside the FP32 bound on the operands it is timed on")
        self._refuse_stale(golden)
        return Subject("candidate", self.enqueue, golden, not self.spec.deterministic, self.scramble)

    def check_after(self) -> None:
        """The workspaces' guards and declared state, after the last replay. Raises Rejected."""
        counters = cp.zeros(2, cp.uint64)
        for workspace in self._workspaces:
            workspace.check_into(self.kernels, counters[0:1], counters[1:2])
        guards, state = (int(v) for v in cp.asnumpy(counters))
        if guards:
            raise Rejected(Reason.WROTE_OUT_OF_BOUNDS, f"{guards} guard words beside the workspace were overwritten")
        if state:
            raise Rejected(Reason.WORKSPACE_STATE, "the declared workspace state was not left as it was found")

    def refuse_impossible(self, time_us: float) -> None:
        """Faster than the tensor cores can multiply is not fast but a fault of ours or a fraud of theirs."""
        if time_us < flops(self.task) / IMPOSSIBLE_FLOP_PER_US:
            raise Rejected(
                Reason.SKIPPED_LAUNCH,
                f"{self.variant.label} took {time_us:.2f} us, faster than the hardware can multiply",
            )

    def _launch(self, index: int, c: int) -> None:
        """One launch, waited for: the hang check."""
        ran = Event()
        try:
            self.enqueue(index, c, self.kernels.stream.ptr)
            ran.record(self.kernels.stream.ptr)
            wait(self.gpu, ran, launch_deadline_s(self.task), self.variant.label)
        finally:
            ran.destroy()

    def _fresh(self, index: int) -> Any:
        """The output of one launch on operand set ``index`` into a poisoned C of its own."""
        out = cp.empty(self.operands.outputs, cp.uint16)
        out.fill(POISON)
        address = int(out.data.ptr)
        self._launch(index, address)
        del self._bound[index, address]  # its C is about to belong to someone else
        return out

    def _compare_with_fp64(self, golden: Any, index: int, stats: Any) -> None:
        a, b = self.operands.matrices(index)
        dims = self.task.dims
        for rows, ref, bound, offset in product_blocks(a, b, dims["M"], dims["N"], dims["K"], self.variant.b_layout):
            self.kernels.compare(golden[rows], ref, bound, offset, "interval", gamma32(dims["K"]), stats)

    def _refuse_stale(self, golden: list[Any]) -> None:
        """An answer kept from an earlier call is wrong as soon as the operands change behind the same pointers.

        Twice: with all operands exchanged, and, inside one graph, where no host is heard of, with one random word of A
        and one of B changed between two launches, as a cache that samples its inputs would not notice.
        """
        operands, loose = self.operands, not self.spec.deterministic
        stats = new_stats(2)
        first, second, spare = operands.words(0), operands.words(1), operands.words(operands.spare)
        kept = first.copy()
        self._fresh(0)  # whatever is kept is now kept for these pointers
        first[...] = second
        self.kernels.compare_copies(self._fresh(0), golden[1], 1, operands.stride, loose, stats[0])
        first[...] = kept
        stream = self.kernels.stream.ptr
        words = self._random_words()
        operands.poison(2, stream)

        def twice() -> None:
            self.enqueue(0, operands.slot(0), stream)
            for address, value in words:
                memset16(address, value, 1, stream)
            self.enqueue(0, operands.slot(1), stream)

        graph = Graph(stream, twice)
        try:
            graph.replay()
            self.kernels.stream.synchronize()
        finally:
            graph.destroy()
        spare[...] = first
        first[...] = kept
        self.scramble(stream)
        expected = self._fresh(operands.spare)
        self.kernels.compare_copies(operands.output(1), expected, 1, operands.stride, loose, stats[1])
        for found in read_stats(stats):
            self._judge(found, Reason.SKIPPED_LAUNCH, "stale when the operands change behind the same pointers")

    def _random_words(self) -> list[tuple[int, int]]:
        """Where in set 0 to write what: 8.0, an outlier among normal numbers, into A and into B."""
        rng = np.random.default_rng(seed())
        value = int(np.float16(8.0).view(np.uint16))
        return [
            (address + 2 * int(rng.integers(matrix.size)), value)
            for address, matrix in zip(self.operands.addresses(0), self.operands.matrices(0), strict=True)
        ]

    def _judge(self, found: Stats, reason: Reason, what: str) -> None:
        if found.unwritten:
            raise Rejected(
                Reason.SKIPPED_LAUNCH,
                f"{self.variant.label} left {found.unwritten} outputs of a repeated launch unwritten",
            )
        if found.mismatches:
            raise Rejected(reason, f"{found.mismatches} outputs of {self.variant.label} are {what}")
