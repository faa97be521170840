"""About how long the recording of a shape takes, and in which order shapes are handed to several GPUs. Pure.

Milliseconds of recording by microseconds of a shape's floor: fitted by hand to the calls of a recording of 98 shapes on
one H200. Only proportions matter; a recording corrects the scale by what it sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from tools.recording_scope import Job, Scope
from tools.records import MODES
from tools.shapes import floor_us

T = TypeVar("T")


def job_seconds(job: Job, scope: Scope) -> float:
    floor = floor_us(job.task)
    screening_ms = (8.0 + 0.06 * floor) * len(job.missing)
    final_ms = (1200.0 + 3.5 * floor) * (8 + scope.top) / 10 * len(scope.modes) / len(MODES)
    return 1e-3 * (screening_ms + final_ms)


class Queue(Generic[T]):
    """Work in the order given, but so that all who take from it end at about the same time: what would last longer than
    everybody's fair share of the rest is handed out first. Not thread-safe."""

    def __init__(self, items: Sequence[T], seconds: Mapping[int, float] | None = None) -> None:
        """``seconds``: the cost of each item by its index; all the same if it is not given."""
        self._items = dict(enumerate(items))
        self._seconds = dict(seconds) if seconds is not None else dict.fromkeys(self._items, 1.0)
        self.left_s = sum(self._seconds[index] for index in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def take(self, takers: int) -> tuple[T, float] | None:
        """The next item for one of ``takers``, and its cost; None if there is none."""
        if not self._items:
            return None
        longest = max(self._items, key=lambda index: self._seconds[index])
        index = longest if self._seconds[longest] * max(1, takers) > self.left_s else next(iter(self._items))
        self.left_s -= self._seconds[index]
        return self._items.pop(index), self._seconds[index]


class Pace:
    """How much longer than estimated things take."""

    def __init__(self) -> None:
        self._estimated_s = 0.0
        self._took_s = 0.0

    def saw(self, estimated_s: float, took_s: float) -> None:
        self._estimated_s += estimated_s
        self._took_s += took_s

    def of(self, estimated_s: float, takers: int) -> float | None:
        """Seconds that so much work takes ``takers`` GPUs; None before anything was seen."""
        if not self._estimated_s:
            return None
        return max(0.0, estimated_s) * self._took_s / self._estimated_s / max(1, takers)
