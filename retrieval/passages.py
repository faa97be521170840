"""The values that retrieval passes around: what a file is cut into, and what a search answers with.

Line numbers count from 1 and both ends are included. ``first``/``last`` of a chunk count lines of the *readable* text
(a notebook's cells, a page without its tags); ``Document.numbers`` maps them to lines of the file, which is what a
citation shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from tools.records import Record

ChunkKind = Literal["declaration", "group", "body", "file", "prose", "code"]
Ranking = Literal["hybrid", "vectors", "lexical"]


@dataclass(frozen=True, slots=True)
class Document:
    """A file as text. ``numbers[i]`` is the file's line of ``lines[i]``; None when they are the same."""

    path: str
    lines: tuple[str, ...]
    numbers: tuple[int, ...] | None = None

    def text(self, first: int, last: int) -> str:
        return "\n".join(self.lines[first - 1 : last])

    def cited(self, first: int, last: int) -> tuple[int, int]:
        if self.numbers is None:
            return first, last
        return self.numbers[first - 1], self.numbers[last - 1]


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that a chunk declares, where, and the name it is an alias of. ``arch`` as in Chunk; ``member``: of a
    class, not of a namespace."""

    name: str
    qualified: str
    first: int
    last: int
    alias_of: str | None = None
    arch: tuple[str, ...] = ()
    member: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is found as one. ``title`` is a qualified symbol or a path of headings. ``embed`` is what its vector is made
    of; empty: it has none, and only the lexical side finds it. ``more`` holds the line ranges of the other members of a
    group, whose text only the lexical side reads. ``arch`` names the architectures it is written for (``sm90``); empty
    means any."""

    kind: ChunkKind
    title: str
    first: int
    last: int
    embed: str
    arch: tuple[str, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    more: tuple[tuple[int, int], ...] = field(default=())


class Passage(Record):
    """One answer of a search: text from a document, to be quoted and never obeyed."""

    citation: str = Field(description="path:line-line in the file of the source")
    path: str
    first_line: int
    last_line: int
    title: str
    kind: ChunkKind
    text: str
    arch: tuple[str, ...] = ()
    source: str
    version: str
    licence: str
    score: float
    #: Names declared here, the first few; those that the query asked for come first.
    declares: tuple[str, ...] = ()
    #: Citations of near-identical passages that were left out.
    also_at: tuple[str, ...] = ()
    #: How many near-identical declarations this one stands for, itself included.
    stands_for: int = 1


class SearchResult(Record):
    """``hidden`` counts the passages among the best that only the architecture filter kept out."""

    query: str
    arch: str | None
    ranking: Ranking
    passages: tuple[Passage, ...]
    hidden: int = 0
    elapsed_ms: float = 0.0


class Skipped(Record):
    path: str
    reason: str


class SourceInfo(Record):
    """Where documents come from. ``root`` is a folder of this machine; paths in citations are relative to it and
    begin with ``prefix``."""

    name: str
    kind: Literal["package", "folder", "git"]
    root: str
    version: str
    licence: str
    prefix: str = ""
