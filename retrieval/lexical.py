"""The lexical side: one SQLite file with the documents' text, the chunks, the symbols and two FTS5 indexes.

``exact`` holds identifiers as they are written (``cp.async.bulk`` and ``a::b`` are single tokens); ``words`` holds
English and the parts of identifiers, stemmed. Written once by a build, then only read.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from retrieval.cpp_chunks import COMMENTS
from retrieval.errors import RetrievalError
from retrieval.passages import Chunk, ChunkKind, Document, SourceInfo
from retrieval.tokens import chains, spaced
from tools.sqlite_errors import explain

SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE sources (id INTEGER PRIMARY KEY, info TEXT NOT NULL)",
    "CREATE TABLE documents (id INTEGER PRIMARY KEY, source INTEGER NOT NULL, path TEXT NOT NULL, "
    "licence TEXT NOT NULL, numbers TEXT, text BLOB NOT NULL)",
    "CREATE TABLE chunks (id INTEGER PRIMARY KEY, document INTEGER NOT NULL, kind TEXT NOT NULL, title TEXT NOT NULL, "
    "first INTEGER NOT NULL, last INTEGER NOT NULL, arch TEXT NOT NULL, members INTEGER NOT NULL)",
    "CREATE TABLE symbols (lowered TEXT NOT NULL, name TEXT NOT NULL, qualified TEXT NOT NULL, chunk INTEGER NOT NULL, "
    "first INTEGER NOT NULL, last INTEGER NOT NULL, alias_of TEXT, arch TEXT NOT NULL, member INTEGER NOT NULL)",
    "CREATE VIRTUAL TABLE exact USING fts5(body, content='', tokenize=\"unicode61 tokenchars '_.:'\")",
    "CREATE VIRTUAL TABLE words USING fts5(title, path, said, code, content='', tokenize='porter unicode61')",
)
INDEXES = (
    "CREATE INDEX symbols_lowered ON symbols (lowered)",
    "CREATE INDEX symbols_chunk ON symbols (chunk)",
)
_RANKED = "bm25(words, 6.0, 2.0, 3.0, 1.0)"


class ChunkRow(NamedTuple):
    id: int
    document: int
    kind: ChunkKind
    title: str
    first: int
    last: int
    arch: tuple[str, ...]
    members: int


class SymbolRow(NamedTuple):
    name: str
    qualified: str
    chunk: int
    first: int
    last: int
    alias_of: str | None
    arch: tuple[str, ...]
    member: bool


class DocumentRow(NamedTuple):
    source: SourceInfo
    licence: str
    document: Document


class PassageWriter:
    """Fills a new file; ``finish`` makes it durable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _sentences(path):
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = OFF")  # a killed build throws the whole file away
            self._db.execute("PRAGMA synchronous = OFF")
            for statement in SCHEMA:
                self._db.execute(statement)
            self._db.execute("BEGIN")
        self._chunks = 0

    def add_source(self, number: int, info: SourceInfo) -> None:
        with _sentences(self._path):
            self._db.execute("INSERT INTO sources VALUES (?, ?)", (number, info.to_json()))

    def add_document(
        self, number: int, source: int, licence: str, document: Document, chunks: Sequence[Chunk]
    ) -> list[int]:
        """The ids of its chunks, in order."""
        text = zlib.compress("\n".join(document.lines).encode(), 6)
        numbers = json.dumps(document.numbers) if document.numbers else None
        ids = []
        with _sentences(self._path):
            self._db.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?)",
                (number, source, document.path, licence, numbers, text),
            )
            for chunk in chunks:
                self._chunks += 1
                ids.append(self._chunks)
                self._add_chunk(self._chunks, number, document, chunk)
        return ids

    def _add_chunk(self, number: int, document_id: int, document: Document, chunk: Chunk) -> None:
        row = (number, document_id, chunk.kind, chunk.title, chunk.first, chunk.last, _joined(chunk.arch))
        self._db.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, 1 + len(chunk.more)))
        self._db.executemany(
            "INSERT INTO symbols VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (s.name.lower(), s.name, s.qualified, number, s.first, s.last, s.alias_of, _joined(s.arch), s.member)
                for s in chunk.symbols
            ],
        )
        text = document.text(chunk.first, chunk.last)
        exact = chains(text)
        for first, last in chunk.more:
            exact += dict.fromkeys(chains(document.text(first, last)))
        names = " ".join(dict.fromkeys(s.name for s in chunk.symbols))
        body = " ".join(dict.fromkeys(exact)) if chunk.more else " ".join(exact)
        self._db.execute("INSERT INTO exact (rowid, body) VALUES (?, ?)", (number, body))
        said, code = (text, "") if chunk.kind in ("prose", "file") else _said_and_code(text)
        words = (number, spaced(f"{chunk.title} {names}"), spaced(document.path), spaced(said), spaced(code))
        self._db.execute("INSERT INTO words (rowid, title, path, said, code) VALUES (?, ?, ?, ?, ?)", words)

    def finish(self, meta: dict[str, str]) -> None:
        with _sentences(self._path):
            self._db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            for statement in INDEXES:
                self._db.execute(statement)
            self._db.execute("COMMIT")
            self._db.close()


class PassageReader:
    """Reads a finished file. Errors of a damaged one come as RetrievalError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _sentences(path):
            self._db = sqlite3.connect(
                f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False
            )
            self.meta: dict[str, str] = dict(self._db.execute("SELECT key, value FROM meta"))
            self.sources = {n: SourceInfo.from_json(i) for n, i in self._db.execute("SELECT id, info FROM sources")}
        self.document = lru_cache(maxsize=64)(self._document)

    def close(self) -> None:
        self._db.close()

    def check(self) -> None:
        """Reads the whole file. Raises RetrievalError if it is damaged."""
        if self._all("PRAGMA quick_check(1)", ()) != [("ok",)]:
            raise RetrievalError(f"{self._path} is damaged: run `agent index build`")

    # --- what was indexed ------------------------------------------------------------------------------------------

    def chunks(self, ids: Sequence[int]) -> dict[int, ChunkRow]:
        marks = ",".join("?" * len(ids))
        rows = self._all(
            f"SELECT id, document, kind, title, first, last, arch, members FROM chunks WHERE id IN ({marks})", ids
        )
        return {row[0]: ChunkRow._make((*row[:6], _split(row[6]), row[7])) for row in rows}

    def _document(self, number: int) -> DocumentRow:
        rows = self._all("SELECT source, path, licence, numbers, text FROM documents WHERE id = ?", (number,))
        if not rows:
            raise RetrievalError(f"{self._path} is damaged: run `agent index build`")
        source, path, licence, numbers, blob = rows[0]
        try:
            lines = tuple(zlib.decompress(blob).decode().split("\n"))
        except (zlib.error, ValueError) as error:
            raise RetrievalError(f"{self._path} is damaged: run `agent index build`") from error
        mapped = tuple(json.loads(numbers)) if numbers else None
        return DocumentRow(self.sources[source], licence, Document(path, lines, mapped))

    def paths(self) -> list[str]:
        return [path for (path,) in self._all("SELECT path FROM documents ORDER BY id", ())]

    def symbols(self, name: str) -> list[SymbolRow]:
        """What declares this name; a qualified name matches any that ends with it. Exact case first."""
        last = name.rsplit("::", 1)[-1]
        found = self._symbols("lowered = ?", (last.lower(),))
        if "::" in name:
            suffix = "::" + name.lower()
            found = [s for s in found if ("::" + s.qualified.lower()).endswith(suffix)] or found
        return sorted(found, key=lambda s: s.name != last)

    def declared_in(self, chunk: int) -> list[SymbolRow]:
        """In the order of the text."""
        return self._symbols("chunk = ?", (chunk,))

    def _symbols(self, condition: str, values: Sequence[Any]) -> list[SymbolRow]:
        columns = "name, qualified, chunk, first, last, alias_of, arch, member"
        rows = self._all(f"SELECT {columns} FROM symbols WHERE {condition} ORDER BY rowid LIMIT 2000", values)
        return [SymbolRow._make((*row[:6], _split(row[6]), bool(row[7]))) for row in rows]

    def arches(self) -> tuple[str, ...]:
        """Every architecture that some chunk is written for."""
        rows = self._all("SELECT DISTINCT arch FROM chunks", ())
        return tuple(sorted({tag for (joined,) in rows for tag in _split(joined)}, key=lambda tag: int(tag[2:])))

    # --- search ------------------------------------------------------------------------------------------------------

    def exact_hits(self, identifiers: Iterable[str], limit: int, arch: str | None) -> list[int]:
        """Chunks that contain these identifiers, or longer ones that begin with them, best first."""
        quoted = [f'"{name}"' for name in identifiers]
        return self._hits(
            "exact", "bm25(exact)", " OR ".join(q for one in quoted for q in (one, f"{one}*")), limit, arch
        )

    def word_hits(self, words: Iterable[str], limit: int, arch: str | None) -> list[int]:
        """Chunks with these words, best first."""
        return self._hits("words", _RANKED, " OR ".join(f'"{word}"' for word in words), limit, arch)

    def _hits(self, table: str, ranked: str, match: str, limit: int, arch: str | None) -> list[int]:
        if not match:
            return []
        if arch is None:
            statement = f"SELECT rowid FROM {table} WHERE {table} MATCH ? ORDER BY {ranked}, rowid LIMIT ?"
            return [row[0] for row in self._all(statement, (match, limit))]
        statement = (
            f"SELECT {table}.rowid FROM {table} JOIN chunks ON chunks.id = {table}.rowid WHERE {table} MATCH ? "
            f"AND (arch = '' OR instr(arch, ?)) ORDER BY {ranked}, {table}.rowid LIMIT ?"
        )
        return [row[0] for row in self._all(statement, (match, f" {arch} ", limit))]

    def _all(self, statement: str, values: Sequence[Any]) -> list[Any]:
        with _sentences(self._path):
            return self._db.execute(statement, tuple(values)).fetchall()


def _said_and_code(text: str) -> tuple[str, str]:
    """Comments, and what is left."""
    return " ".join(COMMENTS.findall(text)), COMMENTS.sub(" ", text)


def _joined(arch: Sequence[str]) -> str:
    return f" {' '.join(arch)} " if arch else ""


def _split(joined: str) -> tuple[str, ...]:
    return tuple(joined.split())


@contextmanager
def _sentences(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RetrievalError(
            f"{explain(error, f'the index file {path}')} (`agent index build` makes it anew)"
        ) from error
