"""Device memory, inputs and checks for the gate, on CuPy; the kernels are in gate.cu."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

from tools.numerics import POISON
from tools.verdicts import COMPARE_MODES, KINDS, CompareMode, Kind, Stats

GUARD_WORDS = 2048  # 4 KiB before and after each guarded buffer
GUARD_PATTERN = 0x5AA5
_NO_FIRST = 2**64 - 1


class Kernels:
    """gate.cu's entry points on one stream. Counters live on the device until ``read``."""

    def __init__(self, stream: Any) -> None:
        source = (Path(__file__).parent / "gate.cu").read_text(encoding="utf-8")
        self._module = cp.RawModule(code=source, options=("-std=c++17",))
        self.stream = stream
        self._functions: dict[str, Any] = {}

    def launch(self, name: str, n: int, *args: Any) -> None:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._module.get_function(name)
        blocks = max(1, min(-(-n // 256), 132 * 8))
        function((blocks,), (256,), args, stream=self.stream)

    def fill(self, out: Any, kind: Kind, p: float, seed: int, inner: int = 1, k_inner: bool = True, k: int = 1) -> None:
        self.launch(
            "fill", out.size, out, np.uint64(out.size), np.int32(KINDS.index(kind)), np.float32(p), np.uint64(seed),
            np.uint64(inner), np.int32(k_inner), np.uint64(k),
        )  # fmt: skip

    def hash_into(self, x: Any, counter: Any) -> None:
        self.launch("hash_words", x.size, x, np.uint64(x.size), counter)

    def count_not(self, x: Any, pattern: int, counter: Any) -> None:
        self.launch("count_not", x.size, x, np.uint64(x.size), np.uint16(pattern), counter)

    def count_gaps(self, ring: Any, n: int, stride: int, slots: int, counter: Any) -> None:
        self.launch(
            "count_gaps", (stride - n) * slots, ring, np.uint64(n), np.uint64(stride), np.uint64(slots),
            np.uint16(POISON), counter,
        )  # fmt: skip

    def compare(self, c: Any, ref: Any, bound: Any, offset: int, mode: CompareMode, gamma: float, stats: Any) -> None:
        self.launch(
            "compare", c.size, c, ref, bound, np.uint64(c.size), np.uint64(offset), np.int32(COMPARE_MODES.index(mode)),
            np.float64(gamma), np.uint16(POISON), stats,
        )  # fmt: skip

    def compare_copies(self, ring: Any, golden: Any, slots: int, stride: int, loose: bool, stats: Any) -> None:
        n = golden.size
        self.launch(
            "compare_copies", n * slots, ring, golden, np.uint64(n), np.uint64(slots), np.uint64(stride),
            np.int32(loose), np.uint16(POISON), stats,
        )  # fmt: skip

    def max_difference(self, a: Any, b: Any, stats: Any) -> None:
        self.launch("max_difference", a.size, a, b, np.uint64(a.size), stats)

    def empty(self) -> None:
        self.launch("empty", 1)


def seed() -> int:
    """Fresh and secret for every draw."""
    return int.from_bytes(os.urandom(8), "little")


def new_stats(rows: int) -> Any:
    """``rows`` counter rows on the device, zeroed, with first_bad at the largest value."""
    stats = cp.zeros((rows, 4), cp.uint64)
    stats[:, 3] = np.uint64(_NO_FIRST)
    return stats


def read_stats(stats: Any) -> list[Stats]:
    """One copy back and one synchronisation for all rows."""
    rows = cp.asnumpy(stats)
    errors = rows[:, 2].copy().view(np.float64)
    return [
        Stats(int(r[0]), int(r[1]), float(e), None if int(r[3]) == _NO_FIRST else int(r[3]))
        for r, e in zip(rows, errors, strict=True)
    ]


class GuardedBuffer:
    """``n`` FP16 words between two guard bands."""

    def __init__(self, n: int) -> None:
        self._all = cp.empty(n + 2 * GUARD_WORDS + 128, cp.uint16)
        # The payload starts 256-byte aligned, as cuBLAS and TMA want; all words past its end are guard.
        self.data = self._all[GUARD_WORDS : GUARD_WORDS + n]
        self._bands = (self._all[:GUARD_WORDS], self._all[GUARD_WORDS + n :])

    @property
    def address(self) -> int:
        return int(self.data.data.ptr)

    def arm(self) -> None:
        """Guards set, payload poisoned."""
        for band in self._bands:
            band.fill(GUARD_PATTERN)
        self.data.fill(POISON)

    def check_into(self, kernels: Kernels, counter: Any) -> None:
        for band in self._bands:
            kernels.count_not(band, GUARD_PATTERN, counter)
