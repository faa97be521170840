"""What a build has already worked out, kept between builds and across a kill: chunks by content, vectors by text.

Every put is on the disk when it returns, so a killed build goes on where it was.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from retrieval.chunking import from_plain, to_plain
from retrieval.embedding import Vectors
from retrieval.errors import RetrievalError
from retrieval.passages import Chunk
from tools.sqlite_errors import explain

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS chunks (key TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS vectors (key TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID",
)


class BuildCache:
    def __init__(self, path: Path) -> None:
        self._path = path
        with self._sentences():
            self._db = sqlite3.connect(path)
            self._db.execute("PRAGMA journal_mode = WAL")
            for statement in _SCHEMA:
                self._db.execute(statement)
            self._db.commit()

    def chunks(self, key: str) -> list[Chunk] | None:
        with self._sentences():
            row = self._db.execute("SELECT data FROM chunks WHERE key = ?", (key,)).fetchone()
            return None if row is None else [from_plain(plain) for plain in json.loads(zlib.decompress(row[0]))]

    def put_chunks(self, cut: Mapping[str, list[Chunk]]) -> None:
        rows = [(key, zlib.compress(json.dumps([to_plain(c) for c in chunks]).encode())) for key, chunks in cut.items()]
        self._put("chunks", rows)

    def known_vectors(self) -> set[str]:
        with self._sentences():
            return {key for (key,) in self._db.execute("SELECT key FROM vectors")}

    def vectors(self, keys: list[str], dims: int) -> Vectors:
        """In the order of ``keys``, each of which must be known."""
        found = np.zeros((len(keys), dims), np.float32)
        with self._sentences():
            for at, key in enumerate(keys):
                (blob,) = self._db.execute("SELECT data FROM vectors WHERE key = ?", (key,)).fetchone()
                found[at] = np.frombuffer(blob, np.float32)
        return found

    def put_vectors(self, keys: list[str], vectors: Vectors) -> None:
        rows = [(key, vector.astype(np.float32).tobytes()) for key, vector in zip(keys, vectors, strict=True)]
        self._put("vectors", rows)

    def keep_only(self, chunk_keys: Iterable[str], vector_keys: Iterable[str]) -> None:
        """Forgets what no document uses any more."""
        with self._sentences():
            for table, keys in (("chunks", chunk_keys), ("vectors", vector_keys)):
                self._db.execute("CREATE TEMP TABLE used (key TEXT PRIMARY KEY) WITHOUT ROWID")
                self._db.executemany("INSERT OR IGNORE INTO used VALUES (?)", [(key,) for key in keys])
                self._db.execute(f"DELETE FROM {table} WHERE key NOT IN (SELECT key FROM used)")
                self._db.execute("DROP TABLE used")
            self._db.commit()

    def close(self) -> None:
        self._db.close()

    def _put(self, table: str, rows: list[tuple[str, bytes]]) -> None:
        with self._sentences():
            self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", rows)
            self._db.commit()

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, zlib.error, json.JSONDecodeError) as error:
            said = (
                explain(error, f"the build cache {self._path}")
                if isinstance(error, sqlite3.Error)
                else f"the build cache {self._path} is damaged"
            )
            raise RetrievalError(f"{said} (`agent index build --rebuild` begins afresh)") from error
