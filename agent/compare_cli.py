"""The command ``agent compare``. agent/cli.py registers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.edge import guarded

if TYPE_CHECKING:
    from rich.table import Table

    from agent.compare import Comparison, ModeComparison
    from agent.compare_stats import Estimate

#: Shapes that the table shows of each end.
SHOWN = 5


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A database, FILE@CONFIG, or with --db a CONFIG, e.g. random.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same; over 1 means that B is faster.")],
    db: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The database of both, if A and B are configs.")
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, every shape in it.")
    ] = False,
) -> None:
    """Compare two databases, or two policies of one, on the shapes that both have.

    Example: agent compare random search --db sweep.sqlite
    """
    with guarded():
        from agent import compare as comparing

        sides = [comparing.read_side(*comparing.split_operand(text, db)) for text in (a, b)]
        found = comparing.compare(*sides)
        if json_output:
            print(comparing.to_json(found))
            return
        from agent.tables import console_for_result, print_table

        console = console_for_result()
        print_table(_mode_table(found), console)
        offline = found.mode()
        if offline is not None:
            print_table(_shape_table(offline), console)
        for line in _lines(found):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _mode_table(found: Comparison) -> Table:
    from rich.table import Table

    table = Table(title=f"A = {found.a}, B = {found.b}, on {found.device}", title_justify="left")
    for name in (
        "mode",
        "shapes",
        "A mean",
        "B mean",
        "B/A mean",
        "B/A geo-mean",
        "B faster",
        "clear wins A / B / tie",
    ):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode in found.modes:
        table.add_row(
            mode.mode,
            str(len(mode.pairs)),
            f"{mode.mean_a.value:.3f}",
            f"{mode.mean_b.value:.3f}",
            _interval(mode.mean_change),
            _interval(mode.geo_mean_change),
            f"{100 * mode.b_faster.value:.0f} %",
            f"{mode.wins_a} / {mode.wins_b} / {mode.ties}",
        )
    return table


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.lo:.3f}, {estimate.hi:.3f}]"


def _shape_table(mode: ModeComparison) -> Table:
    from rich.table import Table

    ordered = sorted(mode.pairs, key=lambda pair: pair.change)
    shown = ordered if len(ordered) <= 2 * SHOWN else [*ordered[:SHOWN], *ordered[-SHOWN:]]
    title = "Offline, shape by shape" if shown is ordered else f"Offline, the {SHOWN} shapes at either end"
    table = Table(title=title, title_justify="left")
    for name in ("shape", "A", "B", "B/A", "clear", "kernel of A", "kernel of B"):
        table.add_column(name, justify="right" if name in ("A", "B", "B/A") else "left")
    for pair in shown:
        table.add_row(
            pair.shape, f"{pair.a:.3f}", f"{pair.b:.3f}", f"{pair.change:.3f}", pair.verdict, pair.a_label, pair.b_label
        )
    return table


def _lines(found: Comparison) -> Iterator[str]:
    text = f"{found.shared} shapes in common"
    if found.only_a or found.only_b:
        text += f"; {found.only_a} only in A, {found.only_b} only in B"
    yield text
    if found.none_a or found.none_b:
        yield f"without a kernel: A at {found.none_a} of them, B at {found.none_b}"
