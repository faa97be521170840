"""Cuts Markdown, reST, plain text, notebooks and HTML at headings.

Notebooks and pages are first turned into lines of plain text that remember which line of the file they came from.
A chunk's title is its path of headings, "GEMM API > Threadblock-level"; long sections are cut between paragraphs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser

from retrieval.arch import in_name
from retrieval.passages import Chunk, Document
from retrieval.tokens import spaced

SECTION_CHARS = 1400  # longer sections are cut between paragraphs
SHORT_CHARS = 200  # a shorter section goes with the next one of the same heading path
EMBED_CHARS = 1000  # about the 256 word pieces that the model reads

_ATX = re.compile(r"^(#{1,6})\s+(.*?)\s*#*\s*$")
_RULER = re.compile(r"^([=\-~^\"'`#*+.:_])\1{2,}\s*$")
_MARKDOWN_RULER = re.compile(r"^([=-])\1{2,}\s*$")
_FENCE = re.compile(r"^\s*(```+|~~~+)")
_MARKUP = re.compile(
    r"!\[[^\]]*\]\([^)]*\)|\[([^\]]*)\]\([^)]*\)|`+|\*\*|(?<!\w)_(?!\w)|\.\. _[\w-]+:|\\\w+\{|<[^>\n]{1,80}>"
)
_CONVERTIBLE = (".ipynb", ".html", ".htm")


@dataclass(frozen=True, slots=True)
class _Section:
    headings: tuple[str, ...]
    first: int
    last: int


def readable(path: str, text: str) -> Document:
    """The file as lines to read. Raises ValueError with one sentence if a notebook is no notebook."""
    lowered = path.lower()
    if lowered.endswith(".ipynb"):
        return _notebook(path, text)
    if lowered.endswith((".html", ".htm")):
        return _page(path, text)
    return Document(path, tuple(text.splitlines()))


def cut(document: Document) -> list[Chunk]:
    """The chunks of one document of prose."""
    arch = in_name(document.path)
    chunks = []
    for section in _sections(document):
        for first, last in _pieces(document.lines, section.first, section.last):
            if chunk := _chunk(document, section.headings, first, last, arch):
                chunks.append(chunk)
    return chunks


def _chunk(document: Document, headings: tuple[str, ...], first: int, last: int, arch: tuple[str, ...]) -> Chunk | None:
    while first <= last and not document.lines[first - 1].strip():
        first += 1
    while last >= first and not document.lines[last - 1].strip():
        last -= 1
    text = document.text(first, last)
    words = re.findall(r"[A-Za-z]{2,}", text)
    if (
        len(words) < 4
        or "Redistribution and use in source and binary forms" in text
        or _only_heading(document, first, last)
    ):
        return None
    title = " > ".join(headings) or document.path.rsplit("/", 1)[-1]
    said = re.sub(r"\s+", " ", _MARKUP.sub(r"\1", text)).strip()
    *above, file = document.path.rsplit(".", 1)[0].split("/")
    name = spaced(" ".join([*above[-1:], file]).replace("_", " "))
    embed = f"{name}: {' '.join(headings[-2:])}. {said}"[:EMBED_CHARS]
    return Chunk("prose", title, first, last, embed, in_name(headings[-1]) or arch if headings else arch)


def _only_heading(document: Document, first: int, last: int) -> bool:
    """A heading with nothing under it."""
    return all(
        not line.strip() or _ATX.match(line) or _RULER.match(line) for line in document.lines[first - 1 : last]
    ) or (last == first + 1 and bool(_RULER.match(document.lines[last - 1])))


def _sections(document: Document) -> Iterator[_Section]:
    """A section for every heading; what precedes the first heading has none."""
    # the order in which reST rulers appear gives their level; Markdown has two
    underlined = [] if document.path.lower().endswith((".rst", ".txt")) else ["=", "-"]
    rulers = _RULER if not underlined else _MARKDOWN_RULER
    stack: list[tuple[int, str]] = []
    first = 1
    for line, level, heading in _headings(document.lines, underlined, rulers):
        if line > first:
            yield _Section(tuple(h for _, h in stack), first, line - 1)
        while stack and stack[-1][0] >= level:
            stack.pop()
        stack.append((level, heading))
        first = line
    if first <= len(document.lines):
        yield _Section(tuple(h for _, h in stack), first, len(document.lines))


def _headings(lines: Sequence[str], underlined: list[str], rulers: re.Pattern[str]) -> Iterator[tuple[int, int, str]]:
    """Line, level and text of each heading: ATX, or a line with a ruler below; not inside fenced code."""
    fence: str | None = None
    for index, line in enumerate(lines):
        if found := _FENCE.match(line):
            mark = found[1][:3]
            fence = mark if fence is None else None if mark == fence else fence
            continue
        if fence is not None:
            continue
        if found := _ATX.match(line):
            yield index + 1, len(found[1]), _bare(found[2])
        elif (
            index + 1 < len(lines)
            and (ruler := rulers.match(lines[index + 1]))
            and line.strip()
            and not line.startswith((" ", "\t", "|", "-", ".."))
            and not _RULER.match(line)
            and len(lines[index + 1].strip()) >= min(3, len(line.strip()))
            and (index == 0 or not lines[index - 1].strip() or _RULER.match(lines[index - 1]))
        ):
            if ruler[1] not in underlined:
                underlined.append(ruler[1])
            yield index + 1, underlined.index(ruler[1]) + 1, _bare(line)


def _bare(heading: str) -> str:
    return re.sub(r"\s+", " ", _MARKUP.sub(r"\1", heading)).strip(" *:")


def _pieces(lines: Sequence[str], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Cut between paragraphs so that a piece has about SECTION_CHARS; a fenced block stays whole while it can."""
    start, size, fenced = first, 0, False
    for number in range(first, last + 1):
        line = lines[number - 1]
        fenced ^= bool(_FENCE.match(line))
        size += len(line) + 1
        between = not line.strip() and not fenced
        if (between and size > SECTION_CHARS) or size > 3 * SECTION_CHARS:
            yield start, number
            start, size = number + 1, 0
    if start <= last:
        yield start, last


# --- notebooks -------------------------------------------------------------------------------------------------------


def _notebook(path: str, text: str) -> Document:
    try:
        cells = json.loads(text)["cells"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("is named like a notebook, but is not one") from error
    raw = text.splitlines()
    lines: list[str] = []
    numbers: list[int] = []
    at = 0
    for cell in cells if isinstance(cells, list) else []:
        source = cell.get("source", "") if isinstance(cell, dict) else ""
        pieces = (
            source.splitlines(keepends=True) if isinstance(source, str) else [s for s in source if isinstance(s, str)]
        )
        code = isinstance(cell, dict) and cell.get("cell_type") == "code"
        shown = [(piece.rstrip("\n"), (at := _line_of(raw, piece, at))) for piece in pieces]
        if code and shown:
            shown = [("```python", shown[0][1]), *shown, ("```", shown[-1][1])]
        for piece, line in [*shown, ("", at)]:
            for part in piece.split("\n"):
                lines.append(part)
                numbers.append(line + 1)
    return Document(path, tuple(lines), tuple(numbers))


def _line_of(raw: Sequence[str], piece: str, at: int) -> int:
    """The index of the JSON line that holds this piece, from ``at`` on; ``at`` itself when it is not found."""
    wanted = {json.dumps(piece), json.dumps(piece, ensure_ascii=False)}
    for index in range(at, len(raw)):
        if raw[index].strip().rstrip(",") in wanted:
            return index
    return min(at, max(len(raw) - 1, 0))


# --- HTML ------------------------------------------------------------------------------------------------------------

_BLOCK_TAGS = "p div section article li tr table ul ol dl dt dd pre blockquote header main br hr figure td th"
_UNSEEN_TAGS = "script style nav head noscript svg template footer button form"
_BLOCKS = frozenset(_BLOCK_TAGS.split())
_UNSEEN = frozenset(_UNSEEN_TAGS.split())


def _page(path: str, text: str) -> Document:
    parser = _Page()
    parser.feed(text)
    parser.close()
    parser.new_line()
    return Document(path, tuple(parser.lines), tuple(parser.numbers))


class _Page(HTMLParser):
    """Headings become ``# …``, blocks lines, ``pre`` keeps its lines; scripts and navigation are dropped."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines: list[str] = []
        self.numbers: list[int] = []
        self._text = ""
        self._line = 1
        self._unseen: list[str] = []
        self._preformatted = 0

    def new_line(self) -> None:
        shown = self._text if self._preformatted else re.sub(r"\s+", " ", self._text).strip()
        if shown.strip() or (self.lines and self.lines[-1]):
            self.lines.append(shown.rstrip())
            self.numbers.append(self._line)
        self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _UNSEEN:
            self._unseen.append(tag)
        elif re.fullmatch(r"h[1-6]", tag):
            self.new_line()
            self._text = "#" * int(tag[1]) + " "
            self._line = self.getpos()[0]
        elif tag in _BLOCKS:
            self.new_line()
            if tag == "pre":
                self._fence()
                self._preformatted += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in self._unseen:
            while self._unseen and self._unseen.pop() != tag:
                pass
        elif tag == "pre" and self._preformatted:
            self.new_line()
            self._preformatted -= 1
            self._fence()
        elif tag in _BLOCKS or re.fullmatch(r"h[1-6]", tag):
            self.new_line()

    def handle_data(self, data: str) -> None:
        if self._unseen:
            return
        if not self._text.strip():
            self._line = self.getpos()[0] + len(data) - len(data.lstrip("\n"))
        if not self._preformatted:
            self._text += data.replace("¶", "")
            return
        first, *rest = data.split("\n")
        self._text += first
        for offset, line in enumerate(rest, 1):
            self.new_line()
            self._line = self.getpos()[0] + offset
            self._text = line

    def _fence(self) -> None:
        self.lines.append("```")
        self.numbers.append(self.getpos()[0])
