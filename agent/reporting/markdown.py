"""A report as Markdown: every table of the page; the figures are on the page. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from agent.reporting.details import source_anchor
from agent.reporting.model import Report
from agent.reporting.tables import READING, Cell, Link, Section, Table, headline, sections


def render_markdown(report: Report) -> str:
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# HGEMM on {_text(report.device)}"
    yield ""
    for line in headline(report):
        yield f"- {_text(line)}"
    yield ""
    for line in READING:
        yield f"> {_text(line)}"
        yield ">"
    for section in sections(report):
        yield from _section(section)
    if report.sources:
        yield ""
        yield "## Sources"
        yield ""
        yield "In full in the JSON document and on the page:"
        yield ""
        for source in report.sources:
            yield f'- <a id="{source_anchor(source.source_id)}"></a>{_text(source.title)}'


def _section(section: Section) -> Iterator[str]:
    yield ""
    yield f"## {section.title}"
    for text in section.text:
        yield ""
        yield _text(text)
    if section.figure is not None:
        yield ""
        yield "(The figure is on the HTML page.)"
    for table in section.tables:
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield ""
        yield f"**{_text(table.title)}**"
    yield ""
    if not table.rows:
        yield "None."
        return
    yield "| " + " | ".join(_text(name) for name in table.columns) + " |"
    yield "|" + "|".join("---" if i < table.text_columns else "---:" for i in range(len(table.columns))) + "|"
    for row in table.rows:
        first, *rest = (_cell(cell) for cell in row.cells)
        anchor = f'<a id="{row.anchor}"></a>' if row.anchor else ""
        yield "| " + " | ".join((anchor + first, *rest)) + " |"


def _cell(cell: Cell) -> str:
    return f"[{_text(cell.text)}](#{cell.anchor})" if isinstance(cell, Link) else _text(cell)


def _text(text: str) -> str:
    """Keeps a cell a cell, and a sentence free of accidental markup."""
    for char in ("\\", "`", "*", "|", "[", "]", "<"):
        text = text.replace(char, f"\\{char}")
    return " ".join(text.split())
