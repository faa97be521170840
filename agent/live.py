"""Progress on stderr: a live panel on a terminal, plain lines elsewhere. Rendering only."""

from __future__ import annotations

import time
from collections import Counter
from threading import Lock
from typing import TYPE_CHECKING, Any

from agent.panel import Panel
from agent.progress import Event

if TYPE_CHECKING:
    from rich.table import Table

#: Plain lines: at most one every so often, but for changes of the best.
_LINE_EVERY_S = 2.0


class Progress(Panel):
    """Safe to call from several threads. ``quiet`` shows nothing at all."""

    def __init__(self, budget_evaluations: int, quiet: bool = False) -> None:
        super().__init__(quiet, refreshes_per_second=8)
        self._budget = budget_evaluations
        self._lock = Lock()
        self._last_line = 0.0
        self._evaluations = 0
        self._doing = "starting"
        self._phase = "search"
        self._best: tuple[float, str] | None = None
        self._reasons: Counter[str] = Counter()
        self._reference_us: float | None = None
        self._tokens = 0
        self._usd = 0.0

    def __call__(self, event: Event) -> None:
        with self._lock:
            line = self._take(event)
        if line:
            self._line_of_text(line)

    def _take(self, event: Event) -> str | None:
        """The event into the picture; a line for a screen that is no terminal, if it is worth one."""
        fields: dict[str, Any] = event.fields
        match event.kind:
            case "opened":
                self._reference_us = fields.get("reference_us")
                what = f"{self._reference_us:.3f} us" if self._reference_us else fields.get("detail") or "not known"
                return f"auto-tuned cuBLASLt at {event.text}, offline: {what}"
            case "trying":
                self._doing = event.text
            case "tried":
                return self._tried(event)
            case "told":
                self._evaluations = int(fields.get("evaluations", 0))
                self._tokens, self._usd = int(fields.get("tokens", 0)), float(fields.get("usd", 0.0))
                return self._line_now_and_then()
            case "finish":
                self._phase = "finish"
                return f"finish: {event.text} through verify full, sanitize, final timing, profile"
            case "measuring":
                self._doing = event.text
            case "measured":
                if fields["status"] == "not_recorded":
                    return None  # the summary counts them
                verdict = fields["status"] if fields["status"] != "failed" else f"rejected: {fields['reason']}"
                return f"finish: {event.text}: {verdict}"
            case _:
                return None
        return None

    def _tried(self, event: Event) -> str | None:
        reason, ratio = event.fields.get("reason"), event.fields.get("ratio")
        if reason:
            self._reasons[str(reason)] += 1
        elif event.fields.get("status") == "not_recorded":
            self._reasons["not recorded"] += 1
        if ratio is not None and (self._best is None or ratio > self._best[0]):
            self._best = (float(ratio), event.text)
            return f"best so far {self._best[0]:.3f}x of cuBLASLt: {self._best[1]}"
        return None

    def _line_now_and_then(self) -> str | None:
        now = time.monotonic()
        if now - self._last_line < _LINE_EVERY_S:
            return None
        self._last_line = now
        return f"{self._counted()}; {self._failures()}"

    def _counted(self) -> str:
        text = f"{self._evaluations}/{self._budget} evaluations"
        if self._tokens:
            text += f", {self._tokens} tokens, ${self._usd:.2f}"
        return text

    def _failures(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common()) or "none rejected"

    def _panel(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        with self._lock:
            table = Table.grid(padding=(0, 2))
            table.add_row(self._phase, ProgressBar(total=self._budget, completed=self._evaluations, width=40))
            table.add_row("", self._counted())
            best = f"{self._best[0]:.3f}x of cuBLASLt  {self._best[1]}" if self._best else "none yet"
            table.add_row("best", best)
            table.add_row("trying", self._doing)
            table.add_row("gate", self._failures())
            return table
