"""The command ``agent report``. agent/cli.py registers it."""

from __future__ import annotations

import importlib.util
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.edge import guarded
from agent.errors import UsageError
from tools.extras import install_command

if TYPE_CHECKING:
    from agent.reporting.model import Report

From = Annotated[
    Path | None,
    typer.Option("--from", metavar="PATH", help="A record file, or the store of sessions or a sweep (default: H200)."),
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of report.html, .json and .md (default: report).")
]
DevicePart = Annotated[
    str | None, typer.Option("--device", metavar="TEXT", help="Of a store with several devices: part of one's label.")
]


def report(
    source: From = None,
    out: Out = None,
    device: DevicePart = None,
    json_output: Annotated[bool, typer.Option("--json", help="The report as JSON on stdout.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The report as Markdown on stdout.")] = False,
) -> None:
    """Tables, pictures and every single number of a record file or store: one HTML page, JSON and Markdown.

    With --json or --markdown nothing is written to files unless --out is given.

    Example: agent report --from records/h200.sqlite --out report
    """
    with guarded():
        if json_output and markdown:
            raise UsageError("--json and --markdown both write to stdout: give one of them")
        to_files = out is not None or not (json_output or markdown)
        _needs(("scipy", "plotly") if to_files else ("scipy",))
        built = build_report(source, device)
        from agent.reporting.markdown import render_markdown
        from agent.reporting.tables import headline

        if to_files:
            write_report(built, out or Path("report"))
        if json_output:
            sys.stdout.write(built.document())
        elif markdown:
            sys.stdout.write(render_markdown(built))
        else:
            for line in headline(built):
                print(line)
            print(f"→ {(out or Path('report')) / 'report.html'}, report.json, report.md")


def build_report(path: Path | None = None, device: str | None = None) -> Report:
    """Reads and computes. Raises UsageError, DeviceBroken or StoreError with one sentence."""
    from agent.reporting.data import build
    from agent.reporting.model import Fact
    from agent.reporting.published import load_peaks, load_published
    from agent.reporting.source import load
    from tools.families import load_families
    from tools.replay import default_path

    measured = load(path or default_path(), device)
    facts = (
        Fact(
            name="report made", value=f"{datetime.now(UTC).isoformat(timespec='seconds')} by hgemm-agent {_version()}"
        ),
    )
    return build(measured, load_families(), load_published(), load_peaks(measured.device.name), facts)


def write_report(report: Report, folder: Path) -> None:
    """report.json, report.md and, last, report.html; each is whole or not there. Raises UsageError."""
    from agent.files import write_atomic
    from agent.reporting.html import render_html
    from agent.reporting.markdown import render_markdown

    page = render_html(report)
    texts = {"report.json": report.document(), "report.md": render_markdown(report), "report.html": page}
    for name, text in texts.items():
        write_atomic(folder / name, text, "--out")
        (folder / name).chmod(0o644)  # a report is made to be shown


def _needs(modules: tuple[str, ...]) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"agent report needs {' and '.join(missing)}: {install_command('report')}")


def _version() -> str:
    try:
        return version("hgemm-agent")
    except PackageNotFoundError:
        return "(a checkout)"
