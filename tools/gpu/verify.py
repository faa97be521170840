"""verify: does a candidate compute the product? Every tier of the gate, against FP64 on the same device.

Order matters: inputs from a fresh secret seed, output poisoned, candidate run, run again, and only then is the
reference computed, so that it cannot be found in memory. Peak memory is about 2 (MK + KN + 2 MN) bytes for the operands
plus 16 KN for FP64 B and |B| plus row blocks of at most BLOCK_BYTES.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np

from tools.gpu.blas import Cublas
from tools.gpu.data import CompareMode, GuardedBuffer, Kernels, Kind, Stats, new_stats, read_stats
from tools.gpu.driver import BoundLaunch, Event, Gpu, Module, memset8
from tools.launching import ConcreteSpec
from tools.numerics import binary_density, gamma32, integer_bound
from tools.records import Depth, Reason, Status, Task, TierResult, Variant, VerifyResult

BLOCK_BYTES = 2 << 30


class Rejected(Exception):
    """The candidate failed here; becomes the FAILED record."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Tier:
    """How the operands are drawn and what is demanded of the result. ``reported`` tiers never reject."""

    name: str
    a: tuple[Kind, float]
    b: tuple[Kind, float]
    modes: tuple[CompareMode, ...]
    special: bool = False


def tiers(k: int, depth: Depth) -> list[Tier]:
    """DESIGN section 3. quick: integer and normal; full: all of them, the paper's binary tier first."""
    v = float(integer_bound(k))
    integer = Tier("integer", ("integer", v), ("integer", v), ("exact",))
    normal = Tier("normal", ("normal", 1.0), ("normal", 1.0), ("interval", "clause"))
    if depth == "quick":
        return [integer, normal]
    density = binary_density(k)
    # Outputs near sqrt(K) * scale^2 = 50,000 straddle FP16's largest number, so that overflow is exercised too.
    large = (50_000 / k**0.5) ** 0.5
    return [
        Tier("binary", ("binary", density), ("binary", density), ("exact",)),
        integer,
        normal,
        Tier("uniform", ("uniform", 1.0), ("uniform", 1.0), ("interval", "clause")),
        Tier("large", ("normal", large), ("normal", large), ("interval",)),
        Tier("cancellation", ("pair_a", 1.0), ("pair_b", 1.0), ("interval",)),
        Tier("subnormal_a", ("subnormal", 1.0), ("normal", 1024.0), ("interval",)),
        Tier("subnormal_b", ("normal", 1024.0), ("subnormal", 1.0), ("interval",)),
        Tier("special", ("normal", 1.0), ("normal", 1.0), ("interval",), special=True),
    ]


def seed() -> int:
    """Fresh and secret for every draw."""
    return int.from_bytes(os.urandom(8), "little")


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
    """Runs the tiers of one variant at one task; buffers are allocated once and reused across tiers."""

    def __init__(self, gpu: Gpu, kernels: Kernels, module: Module, variant: Variant, task: Task, spec: ConcreteSpec):
        self.gpu, self.kernels, self.variant, self.task = gpu, kernels, variant, task
        self.m, self.n, self.k = task.dims["M"], task.dims["N"], task.dims["K"]
        self.stream = kernels.stream
        self.a, self.b = cp.empty(self.m * self.k, cp.uint16), cp.empty(self.n * self.k, cp.uint16)
        self.c = (GuardedBuffer(self.m * self.n), GuardedBuffer(self.m * self.n))
        self.workspace = Workspace(spec)
        self.deterministic = spec.deterministic
        operands = {"A": int(self.a.data.ptr), "B": int(self.b.data.ptr)}
        self.launches = tuple(
            BoundLaunch(module, spec, {**operands, "C": c.address}, self.workspace.address) for c in self.c
        )
        self.ran = Event()

    def draw(self, tier: Tier) -> None:
        nk = self.variant.b_layout == "nk"
        self.kernels.fill(self.a, tier.a[0], tier.a[1], seed(), self.k, True, self.k)
        pair_seed = seed()
        if tier.b[0] == "pair_b":  # B cancels along k by itself: its own pairs are opposite, A's are equal
            self.kernels.fill(self.b, "pair_b", 1.0, pair_seed, self.k if nk else self.n, nk, self.k)
        else:
            self.kernels.fill(self.b, tier.b[0], tier.b[1], pair_seed)
        if tier.special:
            self._poke()

    def _poke(self) -> None:
        """Infinities of both signs and a NaN at random places of A and B."""
        rng = np.random.default_rng(seed())
        for buffer in (self.a, self.b):
            places = rng.integers(0, buffer.size, 3)
            for place, bits in zip(places, (0x7C00, 0xFC00, 0x7E00), strict=True):
                buffer[int(place)] = np.uint16(bits)

    def run(self, tier: Tier, first: bool) -> tuple[list[Stats], dict[str, int]]:
        """Candidate twice, then the reference. Returns a Stats per mode and the side-effect counters."""
        counters = cp.zeros(8, cp.uint64)  # hash before, after; guards; state; repeat mismatches in a Stats row below
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

        def compare(rows: slice, ref: Any, bound: Any, offset: int) -> None:
            for i, mode in enumerate(tier.modes):
                self.kernels.compare(first_c[rows], ref, bound, offset, mode, gamma32(self.k), stats[i])

        self.reference(compare)
        values = [int(v) for v in cp.asnumpy(counters)]
        side = {
            "inputs": int(values[0:2] != values[2:4]),
            "guards": values[4],
            "state": values[5],
        }
        return read_stats(stats), side

    def reference(self, visit: Callable[[slice, Any, Any, int], None]) -> None:
        """Blocks of rows of C64 and |A||B|, each handed to ``visit(flat slice, C64, |A||B|, offset)``."""
        a = self.a.view(cp.float16).reshape(self.m, self.k)
        b = self.b.view(cp.float16)
        b = b.reshape(self.n, self.k).T if self.variant.b_layout == "nk" else b.reshape(self.k, self.n)
        b64 = b.astype(cp.float64)
        b_abs = cp.abs(b64)
        rows = max(1, min(self.m, BLOCK_BYTES // (16 * (self.k + self.n))))
        for start in range(0, self.m, rows):
            block = a[start : start + rows].astype(cp.float64)
            ref = cp.matmul(block, b64)
            cp.abs(block, out=block)
            bound = cp.matmul(block, b_abs)
            offset = start * self.n
            visit(slice(offset, offset + ref.size), ref, bound, offset)

    def cublas_error(self, cublas: Cublas) -> float:
        """cuBLAS's own largest error against FP64 on the operands now in place."""
        out = cp.empty(self.m * self.n, cp.uint16)
        operands = (int(self.a.data.ptr), int(self.b.data.ptr), int(out.data.ptr))
        cublas.enqueue(self.m, self.n, self.k, self.variant.b_layout, *operands, self.stream.ptr)
        stats = new_stats(1)
        self.reference(
            lambda rows, ref, bound, offset: self.kernels.compare(
                out[rows], ref, bound, offset, "interval", gamma32(self.k), stats[0]
            )
        )
        return read_stats(stats)[0].max_abs_error


def judge(tier: Tier, stats: list[Stats], side: dict[str, int], task: Task, deterministic: bool) -> TierResult:
    """One tier's verdict. Raises Rejected with the named reason. Pure."""
    checked = task.dims["M"] * task.dims["N"]
    if side["guards"]:
        raise Rejected(
            Reason.WROTE_OUT_OF_BOUNDS, f"{side['guards']} guard words beside C or the workspace were overwritten"
        )
    if side["inputs"]:
        raise Rejected(Reason.MODIFIED_INPUT, "A or B changed while the kernel ran")
    unwritten = max(s.unwritten for s in stats)
    if unwritten:
        raise Rejected(
            Reason.UNWRITTEN_OUTPUT, f"{unwritten} of {checked} outputs still hold the poison pattern ({tier.name})"
        )
    if side["state"]:
        raise Rejected(Reason.WORKSPACE_STATE, "the declared workspace state was not left as it was found")
    for mode, s in zip(tier.modes, stats, strict=False):
        if s.mismatches:
            row, column = divmod(s.first_bad or 0, task.dims["N"])
            raise Rejected(
                Reason.WRONG_RESULT,
                f"{s.mismatches} of {checked} outputs are wrong on {tier.name} inputs ({mode} bound); "
                f"the first at row {row}, column {column}; largest error {s.max_abs_error:.4g}",
            )
    bitwise, loose = stats[-2], stats[-1]
    if bitwise.mismatches and (deterministic or (loose.mismatches and tier.name == "normal")):
        raise Rejected(
            Reason.NOT_DETERMINISTIC, f"two runs on the same {tier.name} inputs differ in {bitwise.mismatches} outputs"
        )
    return TierResult(tier=tier.name, ok=True, checked=checked, max_abs_error=stats[0].max_abs_error)


def verify(
    gpu: Gpu, kernels: Kernels, module: Module, variant: Variant, task: Task, spec: ConcreteSpec, depth: Depth,
    cublas: Cublas, baseline_spread: Callable[[Verifier], float] | None,
) -> VerifyResult:  # fmt: skip
    """All tiers of ``depth``. Raises Rejected or CudaError; the worker turns them into records."""
    started = time.monotonic()
    verifier = Verifier(gpu, kernels, module, variant, task, spec)
    results: list[TierResult] = []
    accuracy: float | None = None
    cublas_accuracy: float | None = None
    repeatable = True
    for i, tier in enumerate(tiers(task.dims["K"], depth)):
        verifier.draw(tier)
        stats, side = verifier.run(tier, first=i == 0)
        results.append(judge(tier, stats, side, task, spec.deterministic))
        repeatable &= stats[-2].mismatches == 0
        if tier.name == "normal":
            accuracy = stats[0].max_abs_error
            if depth == "full":
                cublas_accuracy = verifier.cublas_error(cublas)
                if baseline_spread is not None:
                    results.append(_baseline_bounded(baseline_spread(verifier), accuracy, task))
    return VerifyResult(
        status=Status.OK,
        variant_key=variant.key,
        task_id=task.task_id,
        depth=depth,
        tiers=tuple(results),
        bitwise_repeatable=repeatable,
        max_abs_error=accuracy,
        cublas_max_abs_error=cublas_accuracy,
        peak_memory_bytes=int(cp.get_default_memory_pool().total_bytes()),
        elapsed_s=time.monotonic() - started,
    )


def _baseline_bounded(spread: float, error: float, task: Task) -> TierResult:
    """The paper's second tier, reported but never rejecting: cuBLAS variants can agree to the last bit."""
    within = "within" if error <= spread else "beyond"
    return TierResult(
        tier="baseline_bounded",
        ok=True,
        checked=task.dims["M"] * task.dims["N"],
        max_abs_error=error,
        detail=f"error {error:.4g} is {within} the largest difference {spread:.4g} between cuBLAS variants and FP64",
    )


def fits(task: Task, gpu: Gpu) -> str | None:
    """None, or the sentence that says why this shape cannot be verified in this GPU's memory."""
    m, n, k = task.dims["M"], task.dims["N"], task.dims["K"]
    need = 2 * (m * k + k * n + 2 * m * n) + 18 * k * n + 2 * BLOCK_BYTES
    if need > 0.95 * gpu.memory_bytes:
        return (
            f"{task.label} needs about {need / 2**30:.0f} GiB to verify, "
            f"more than this GPU's {gpu.memory_bytes / 2**30:.0f} GiB"
        )
    return None
