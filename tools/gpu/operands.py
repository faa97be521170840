"""What a task is timed on: sets of A and B, the ring of outputs that all subjects share, and the L2's eviction."""

from __future__ import annotations

from typing import Any

import cupy as cp

from tools.gpu.data import Kernels, seed
from tools.gpu.driver import memset8, memset16
from tools.numerics import POISON
from tools.records import Task
from tools.timing_plan import MAX_SETS

RING_BYTES = 4 << 30
OPERAND_BYTES = 16 << 30
ALIGN_WORDS = 128  # FP16 words: 256 bytes
GAP_WORDS = 128  # between outputs of the ring: poisoned, and never to be written


class Operands:
    """Normal(0,1) entries. B is the same memory in either layout: random numbers are random in both."""

    def __init__(self, kernels: Kernels, task: Task, l2_bytes: int) -> None:
        self.task, self.kernels = task, kernels
        m, n, k = task.dims["M"], task.dims["N"], task.dims["K"]
        self.outputs = m * n
        self._a_words, self._b_words = _aligned(m * k), _aligned(k * n)
        set_bytes = 2 * (self._a_words + self._b_words)
        self.sets = max(2, min(MAX_SETS, OPERAND_BYTES // set_bytes))
        if set_bytes > 8 * l2_bytes:
            self.sets = 2  # each set alone overflows L2: more of them change nothing
        # One set more, not timed: a second home for operands that are to be met behind other pointers.
        self._pool = cp.empty((self.sets + 1) * (self._a_words + self._b_words), cp.uint16)
        kernels.fill(self._pool, "normal", 1.0, seed())
        self.stride = _aligned(self.outputs + GAP_WORDS)
        self.slots = max(2, min(MAX_SETS + 1, RING_BYTES // (2 * self.stride)))
        self.ring = cp.empty(self.slots * self.stride, cp.uint16)
        self.evict = cp.empty(2 * l2_bytes, cp.uint8)

    @property
    def spare(self) -> int:
        """The set that no subject is timed on."""
        return self.sets

    def addresses(self, index: int) -> tuple[int, int]:
        """Of A and B of one set."""
        base = int(self._pool.data.ptr) + 2 * index * (self._a_words + self._b_words)
        return base, base + 2 * self._a_words

    def words(self, index: int) -> Any:
        """A and B of one set, as one array of FP16 words."""
        size = self._a_words + self._b_words
        return self._pool[index * size : (index + 1) * size]

    def matrices(self, index: int) -> tuple[Any, Any]:
        """A and B of one set as flat arrays, without the padding."""
        m, n, k = (self.task.dims[d] for d in ("M", "N", "K"))
        words = self.words(index)
        return words[: m * k], words[self._a_words : self._a_words + k * n]

    def slot(self, index: int) -> int:
        """Address of an output of the ring."""
        return int(self.ring.data.ptr) + 2 * index * self.stride

    def output(self, index: int) -> Any:
        return self.ring[index * self.stride : index * self.stride + self.outputs]

    def poison(self, slots: int, stream: int) -> None:
        """The first ``slots`` outputs and the gaps behind them; a memset node under capture."""
        memset16(self.slot(0), POISON, slots * self.stride, stream)

    def count_gaps_into(self, slots: int, counter: Any) -> None:
        """Words behind the outputs that are not poison any more."""
        self.kernels.count_gaps(self.ring, self.outputs, self.stride, slots, counter)

    def evict_l2(self, stream: int) -> None:
        memset8(int(self.evict.data.ptr), 0, self.evict.size, stream)

    def checksum(self) -> int:
        """Of all operand sets that are timed."""
        counter = cp.zeros(1, cp.uint64)
        self.kernels.hash_into(self._pool[: self.sets * (self._a_words + self._b_words)], counter)
        return int(counter[0])


def _aligned(words: int) -> int:
    return -(-words // ALIGN_WORDS) * ALIGN_WORDS
