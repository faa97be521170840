"""verify: does a candidate compute the product? Every tier of the gate, against FP64 on the same device.

Order matters: inputs from a fresh secret seed, output poisoned, candidate run, run again, and only then is the
reference computed, so that it cannot be found in memory. Peak memory is about 2 (MK + KN + 2 MN) bytes for the operands
plus 16 KN for FP64 B and |B| plus row blocks of at most BLOCK_BYTES.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy as cp
import numpy as np

from tools.gpu.blas import Cublas
from tools.gpu.data import GuardedBuffer, Kernels, new_stats, read_stats, seed
from tools.gpu.driver import Event, Gpu, Launcher, Module, memset8
from tools.gpu.reference import product_blocks
from tools.launching import ConcreteSpec
from tools.memory_needs import too_large
from tools.numerics import gamma32
from tools.records import Depth, Reason, Status, Task, TierResult, Variant, VerifyResult
from tools.verdicts import Rejected, SideEffects, Tier, baseline_bounded, judge, tiers


def wait(gpu: Gpu, event: Event, deadline_s: float, what: str) -> None:
    """Poll until ``event``; raises Rejected(HANG) at the deadline. The caller's process must then end."""
    end = time.monotonic() + deadline_s
    while not event.done():
        if time.monotonic() > end:
            raise Rejected(Reason.HANG, f"{what} did not end within {deadline_s:.0f} s")
        time.sleep(20e-6)


def launch_deadline_s(task: Task) -> float:
    """Five seconds plus the time at one TFLOP/s, a thousandth of the machine's speed."""
    return 5.0 + 2.0 * task.dims["M"] * task.dims["N"] * task.dims["K"] / 1e12


class Workspace:
    """A variant's workspace: state set before the first call and checked after every one, the rest scrambled."""

    def __init__(self, spec: ConcreteSpec) -> None:
        self.spec = spec
        words = -(-spec.workspace_bytes // 2)
        self.buffer = GuardedBuffer(words) if words else None

    @property
    def address(self) -> int:
        return self.buffer.address if self.buffer else 0

    def prepare(self, kernels: Kernels, first: bool) -> None:
        if self.buffer is None:
            return
        if first:
            self.buffer.arm()
            memset8(self.address, self.spec.state_fill, self.spec.state_bytes, kernels.stream.ptr)
        rest = self.buffer.data[-(-self.spec.state_bytes // 2) :]
        if rest.size:
            kernels.fill(rest, "bits", 0.0, seed())

    def check_into(self, kernels: Kernels, guard: Any, state: Any) -> None:
        if self.buffer is None:
            return
        self.buffer.check_into(kernels, guard)
        held = self.buffer.data[: self.spec.state_bytes // 2]
        if held.size:
            kernels.count_not(held, self.spec.state_fill * 0x0101, state)


class Verifier:
    """Runs the tiers of one variant at one task; buffers are allocated once and reused across tiers.

    ``beside``: another of the same task and layout of B, whose operands this one shares.
    """

    def __init__(
        self, gpu: Gpu, kernels: Kernels, module: Module, variant: Variant, task: Task, spec: ConcreteSpec,
        beside: Verifier | None = None,
    ) -> None:  # fmt: skip
        self.gpu, self.kernels, self.variant, self.task = gpu, kernels, variant, task
        self.m, self.n, self.k = task.dims["M"], task.dims["N"], task.dims["K"]
        self.stream = kernels.stream
        self.a: Any = cp.empty(self.m * self.k, cp.uint16) if beside is None else beside.a
        self.b: Any = cp.empty(self.n * self.k, cp.uint16) if beside is None else beside.b
        self.c = (GuardedBuffer(self.m * self.n), GuardedBuffer(self.m * self.n))
        self.workspace = Workspace(spec)
        self.deterministic = spec.deterministic
        operands = {"A": int(self.a.data.ptr), "B": int(self.b.data.ptr)}
        launcher = Launcher(module, spec)
        self.launches = tuple(launcher.bind({**operands, "C": c.address}, self.workspace.address) for c in self.c)
        self.ran = Event()

    def draw(self, tier: Tier) -> None:
        nk = self.variant.b_layout == "nk"
        self.kernels.fill(self.a, tier.a[0], tier.a[1], seed(), self.k, True, self.k)
        self.kernels.fill(self.b, tier.b[0], tier.b[1], seed(), self.k if nk else self.n, nk, self.k)
        if tier.special:
            self._poke()

    def _poke(self) -> None:
        """Infinities of both signs and a NaN at random places of A and B."""
        rng = np.random.default_rng(seed())
        for buffer in (self.a, self.b):
            places = rng.integers(0, buffer.size, 3)
            for place, bits in zip(places, (0x7C00, 0xFC00, 0x7E00), strict=True):
                buffer[int(place)] = np.uint16(bits)

    def run(self, tier: Tier, first: bool) -> tuple[Any, Any]:
        """The candidate twice, on the operands in place: what it left beside its outputs, and, to be filled, a row of
        statistics for each mode; the last two rows compare the runs with each other."""
        counters = cp.zeros(6, cp.uint64)  # hashes of A, B before and after; guard words; state words
        stats = new_stats(len(tier.modes) + 2)
        for i, buffer in enumerate((self.a, self.b)):
            self.kernels.hash_into(buffer, counters[i : i + 1])
        for i, c in enumerate(self.c):
            c.arm()
            self.workspace.prepare(self.kernels, first=first and i == 0)
            self.launches[i].enqueue(self.stream.ptr)
            self.ran.record(self.stream.ptr)
            wait(self.gpu, self.ran, launch_deadline_s(self.task), self.variant.label)
            c.check_into(self.kernels, counters[4:5])
            self.workspace.check_into(self.kernels, counters[4:5], counters[5:6])
        for i, buffer in enumerate((self.a, self.b)):
            self.kernels.hash_into(buffer, counters[2 + i : 3 + i])
        first_c, second_c = self.c[0].data, self.c[1].data
        self.kernels.compare_copies(second_c, first_c, 1, 0, False, stats[-2])
        self.kernels.compare_copies(second_c, first_c, 1, 0, True, stats[-1])
        return counters, stats

    def compare(self, tier: Tier, rows: slice, ref: Any, bound: Any, offset: int, stats: Any) -> None:
        """The first run's rows with a block of the reference."""
        for i, mode in enumerate(tier.modes):
            self.kernels.compare(self.c[0].data[rows], ref, bound, offset, mode, gamma32(self.k), stats[i])

    def product_blocks(self, bounded: bool = True) -> Iterator[tuple[slice, Any, Any, int]]:
        """The reference on the operands now in place, block by block."""
        return product_blocks(self.a, self.b, self.m, self.n, self.k, self.variant.b_layout, bounded)

    def cublas_error(self, cublas: Cublas) -> float:
        """cuBLAS's own largest error against FP64 on the operands now in place."""
        out = cp.empty(self.m * self.n, cp.uint16)
        operands = (int(self.a.data.ptr), int(self.b.data.ptr), int(out.data.ptr))
        cublas.enqueue(self.m, self.n, self.k, self.variant.b_layout, *operands, self.stream.ptr)
        stats = new_stats(1)
        for rows, ref, bound, offset in self.product_blocks():
            self.kernels.compare(out[rows], ref, bound, offset, "interval", gamma32(self.k), stats[0])
        return read_stats(stats)[0].max_abs_error


def verify(
    gpu: Gpu, kernels: Kernels, candidates: Sequence[tuple[Module, Variant, ConcreteSpec]], task: Task, depth: Depth,
    cublas: Cublas, baseline_spread: Callable[[Verifier], float] | None,
) -> list[VerifyResult]:  # fmt: skip
    """All tiers of ``depth``. Candidates must have one layout of B in common: they then share the operands of each tier
    and the reference, which is computed when all have run and costs more than they do.

    Raises Rejected or CudaError for the first that is at fault; the worker turns them into records.
    """
    started = time.monotonic()
    verifiers: list[Verifier] = []
    for module, variant, spec in candidates:
        beside = verifiers[0] if verifiers else None
        verifiers.append(Verifier(gpu, kernels, module, variant, task, spec, beside))
    passed: list[list[TierResult]] = [[] for _ in verifiers]
    repeatable = [True] * len(verifiers)
    accuracy: list[float | None] = [None] * len(verifiers)
    cublas_accuracy: float | None = None
    for i, tier in enumerate(tiers(task.dims["K"], depth)):
        verifiers[0].draw(tier)
        ran = [verifier.run(tier, first=i == 0) for verifier in verifiers]
        for rows, ref, bound, offset in verifiers[0].product_blocks(bounded=tier.modes != ("exact",)):
            for verifier, (_, stats) in zip(verifiers, ran, strict=True):
                verifier.compare(tier, rows, ref, bound, offset, stats)
        for v, (verifier, (counters, stats)) in enumerate(zip(verifiers, ran, strict=True)):
            *against_reference, repeat, repeat_loose = read_stats(stats)
            values = [int(value) for value in cp.asnumpy(counters)]
            side = SideEffects(values[4], values[0:2] != values[2:4], values[5])
            passed[v].append(judge(tier, against_reference, repeat, repeat_loose, side, task, verifier.deterministic))
            repeatable[v] &= repeat.mismatches == 0
            if tier.name == "normal":
                accuracy[v] = against_reference[0].max_abs_error
        if tier.name == "normal" and depth == "full":
            cublas_accuracy = verifiers[0].cublas_error(cublas)
            if baseline_spread is not None:
                spread = baseline_spread(verifiers[0])
                for results, error in zip(passed, accuracy, strict=True):
                    results.append(baseline_bounded(spread, error or 0.0, task))
    peak = int(cp.get_default_memory_pool().total_bytes())
    took_s = time.monotonic() - started
    return [
        VerifyResult(
            status=Status.OK,
            variant_key=verifier.variant.key,
            task_id=task.task_id,
            depth=depth,
            tiers=tuple(passed[v]),
            bitwise_repeatable=repeatable[v],
            max_abs_error=accuracy[v],
            cublas_max_abs_error=cublas_accuracy,
            peak_memory_bytes=peak,
            elapsed_s=took_s / len(verifiers),
        )
        for v, verifier in enumerate(verifiers)
    ]


def fits(task: Task, gpu: Gpu) -> str | None:
    """None, or the sentence that says why this shape cannot be verified in this GPU's memory."""
    return too_large(task, gpu.memory_bytes)
