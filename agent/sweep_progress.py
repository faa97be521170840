"""A sweep's progress on stderr: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agent.panel import Panel
from agent.sweep_rows import SweepRow

if TYPE_CHECKING:
    from rich.table import Table

#: Plain lines come at most this often.
LINE_EVERY_S = 5.0


class Progress(Panel):
    """Called from one thread. ``quiet`` shows nothing at all."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet, refreshes_per_second=4)
        self._total = 0
        self._before = 0
        self._started = self._last_line = time.monotonic()
        self._states: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._ratios: list[float] = []
        self._latest = ""
        self._workers: int | None = None

    def begin(self, total: int, rows: Sequence[SweepRow]) -> None:
        """``rows`` are those that an earlier run of the command has finished."""
        self._total, self._before = total, len(rows)
        for row in rows:
            self._count(row)
        self._started = self._last_line = time.monotonic()
        if rows:
            self.note(f"going on: {len(rows)} of {total} shapes are done")

    def done(self, row: SweepRow) -> None:
        self._count(row)
        self._latest = f"{row.shape}: {_came_to(row)}"
        self._line()

    def tick(self, workers: int) -> None:
        """While nothing comes back."""
        if workers == 0 and self._workers != 0:
            self.note("no worker is there; waiting for one")
        self._workers = workers
        self._line()

    def summary(self) -> str:
        """``312/1000 shapes, mean 1.034x of cuBLASLt, ETA 2 min, failures: …``"""
        done = sum(self._states.values())
        parts = [f"{done}/{self._total} shapes"]
        if self._ratios:
            parts.append(f"best mean so far {sum(self._ratios) / len(self._ratios):.3f}x of cuBLASLt")
        if self._states["not_recorded"]:
            parts.append(f"{self._states['not_recorded']} not recorded")
        left = self.eta_s()
        if left is not None:
            parts.append(f"ETA {_duration(left)}")
        return ", ".join(parts)

    def failures(self) -> str:
        """Shapes without a kernel, then rejected candidates by reason."""
        found = [f"{self._states[name]} shapes {words}" for name, words in _STATES.items() if self._states[name]]
        found += [f"{count} {reason}" for reason, count in self._reasons.most_common(6)]
        return ", ".join(found) or "none"

    def eta_s(self) -> float | None:
        """From the shapes that this run has done; None before the first and at the end."""
        done = sum(self._states.values())
        here, left = done - self._before, self._total - done
        if here < 1 or left < 1:
            return None
        return (time.monotonic() - self._started) / here * left

    def _count(self, row: SweepRow) -> None:
        self._states[row.status] += 1
        self._reasons.update(row.rejected)
        timing = row.timing()
        if timing is not None:
            self._ratios.append(timing.ratio)

    def _line(self) -> None:
        now = time.monotonic()
        at_end = sum(self._states.values()) == self._total
        if self._quiet or self._live is not None or (now - self._last_line < LINE_EVERY_S and not at_end):
            return
        self._last_line = now
        self._line_of_text(f"{self.summary()}; failures: {self.failures()}")

    def _panel(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_row("sweep", ProgressBar(total=max(1, self._total), completed=sum(self._states.values()), width=40))
        table.add_row("", self.summary())
        table.add_row("latest", self._latest or "none yet")
        table.add_row("failures", self.failures())
        return table


_STATES = {"no_kernel": "without a kernel", "too_large": "too large for the device"}


def _came_to(row: SweepRow) -> str:
    timing = row.timing()
    return f"{timing.ratio:.3f}x, {row.label}" if timing is not None else row.detail or row.status


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
