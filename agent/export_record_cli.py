"""The command ``agent export-record``. agent/cli.py registers it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.edge import guarded

if TYPE_CHECKING:
    from agent.session_record import Exported


def export_record(
    session: Annotated[str, typer.Argument(help="A session that measured on a GPU; `agent show` lists them.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Record file to begin or add to, e.g. session.sqlite.")],
    commit: Annotated[str, typer.Option(help="Source revision, where the session's program was no checkout.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="The summary as one JSON document on stdout.")] = False,
) -> None:
    """Keep what a session measured, raw sources included, for `--device replay:FILE`. Once more changes nothing.

    Example: agent export-record live-64 --out live-64.sqlite
    """
    with guarded():
        from agent.session_record import export_record as export
        from tools.paths import home_dir

        found = export(home_dir(), session, out, commit)
        print(found.to_json() if json_output else _told(found))


def _told(found: Exported) -> str:
    sources = f", {found.raw_sources} of them raw sources" if found.raw_sources else ""
    return (
        f"{found.file}: {found.results} results of {found.variants} variants{sources}, at {found.task}; "
        f"{found.added} of the results are new. Play them: --device replay:{found.file}"
    )
