"""What every progress display is: a live panel on a terminal, lines on stderr elsewhere, nothing when quiet.

That a broken stderr ends nothing is seen to by agent/streams.py.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table


class Panel:
    """Entered, it takes the terminal; a subclass draws ``_panel``, ``refreshes_per_second`` times a second."""

    def __init__(self, quiet: bool, refreshes_per_second: int) -> None:
        self._quiet = quiet
        self._refreshes_per_second = refreshes_per_second
        self._live: Live | None = None

    def _panel(self) -> Table:
        raise NotImplementedError

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True)
            if console.is_dumb_terminal:
                return self
            self._live = Live(
                get_renderable=self._panel,
                console=console,
                refresh_per_second=self._refreshes_per_second,
                transient=True,
                redirect_stdout=False,  # what goes to stdout is a result, and may go to a file
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """A line that stays, above the live panel."""
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            self._line_of_text(text)

    def _line_of_text(self, text: str) -> None:
        """Where there is no live panel."""
        if not self._quiet and self._live is None:
            print(text, file=sys.stderr, flush=True)
