"""Document → chunks: the cutter by kind of file, and the fingerprint that says when chunks must be cut again."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path, PurePosixPath

from retrieval import arch, cpp_chunks, cpp_scan, glossary, prose, tokens
from retrieval.passages import Chunk, Document, Symbol
from retrieval.reading import CODE_SUFFIXES


def readable(path: str, text: str) -> Document:
    """Raises ValueError with a phrase if the file is not what its name says."""
    return prose.readable(path, text)


def cut(document: Document) -> list[Chunk]:
    """In order of their first lines."""
    code = PurePosixPath(document.path).suffix.lower() in CODE_SUFFIXES
    found = cpp_chunks.cut(document) if code else prose.cut(document)
    return sorted(found, key=lambda chunk: (chunk.first, chunk.last))


@cache
def fingerprint() -> str:
    """A hash of the cutters themselves: other code may cut otherwise, and must not leave old chunks behind."""
    hashed = hashlib.sha256()
    for module in (arch, cpp_chunks, cpp_scan, glossary, prose, tokens):
        hashed.update(Path(str(module.__file__)).read_bytes())
    return hashed.hexdigest()[:16]


def to_plain(chunk: Chunk) -> list[object]:
    """For JSON; ``from_plain`` is the inverse."""
    symbols = [[s.name, s.qualified, s.first, s.last, s.alias_of, s.arch, s.member] for s in chunk.symbols]
    return [chunk.kind, chunk.title, chunk.first, chunk.last, chunk.embed, chunk.arch, symbols, chunk.more]


def from_plain(plain: list[object]) -> Chunk:
    kind, title, first, last, embed, tags, symbols, more = plain
    return Chunk(
        kind,  # type: ignore[arg-type]
        str(title),
        int(first),  # type: ignore[call-overload]
        int(last),  # type: ignore[call-overload]
        str(embed),
        tuple(tags),  # type: ignore[arg-type]
        tuple(Symbol(s[0], s[1], s[2], s[3], s[4], tuple(s[5]), s[6]) for s in symbols),  # type: ignore[attr-defined]
        tuple((a, b) for a, b in more),  # type: ignore[attr-defined]
    )
