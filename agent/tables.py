"""Tables for whatever width there is: where a table does not fit without breaking words, its rows become lists."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Where nobody looks at a screen: a file, a pipe.
WIDTH = 140
_NARROWEST = 20
#: Longer words are names, which may be folded; numbers are shorter.
_FOLDED = 14


def console_for_result() -> Console:
    """On stdout, as wide as the terminal."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if console.width < _NARROWEST:  # COLUMNS=1, or a terminal that does not know its size
        console.width = _NARROWEST
    return console


def print_table(table: Table, console: Console) -> None:
    """No number is cut or broken, however narrow the console is."""
    for column in table.columns:
        column.overflow = "fold"
    needed = 1 + sum(3 + max(map(_longest_word, (column.header, *column.cells))) for column in table.columns)
    if needed <= console.width:
        console.print(table)
    else:
        _print_list(table, console)


def _longest_word(cell: object) -> int:
    return max((min(len(word), _FOLDED) for word in str(cell).split()), default=0)


def _print_list(table: Table, console: Console) -> None:
    def line(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if table.title:
        line(str(table.title))
    names = [str(column.header) for column in table.columns]
    for row in zip(*(list(column.cells) for column in table.columns), strict=True):
        cells = [(name, str(cell)) for name, cell in zip(names, row, strict=True) if str(cell)]
        for index, (name, cell) in enumerate(cells):
            line(f"{'- ' if index == 0 else '  '}{f'{name}: ' if name else ''}{cell}")
