"""An opened index: the lexical file, the vectors and the embedder that goes with them."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from retrieval import layout
from retrieval.embedding import Embedder, Vectors, make_embedder
from retrieval.errors import RetrievalError
from retrieval.layout import Manifest
from retrieval.lexical import PassageReader
from retrieval.vectors import VectorIndex
from tools.records import Record


class IndexStatus(Record):
    """What lies in an index folder. ``manifest`` is None if nothing was built yet."""

    folder: str
    generation: str | None
    manifest: Manifest | None
    added: tuple[str, ...]
    disk_bytes: int


class Index:
    """Read-only; a rebuild goes to another generation and is seen by the next ``open``. Not shared between threads."""

    def __init__(self, manifest: Manifest, reader: PassageReader, vectors: VectorIndex, embedder: Embedder) -> None:
        self.manifest = manifest
        self.reader = reader
        self.vectors = vectors
        self.embedder = embedder

    @classmethod
    def open(cls, folder: Path, embedder: Embedder | None = None) -> Index:
        """Everything is loaded here, so that the first answer is as quick as the later ones. Raises RetrievalError if
        there is no index, it is damaged, or it was made with another embedder."""
        generation = layout.current(folder)
        if generation is None:
            raise RetrievalError(f"there is no documentation index in {folder}: run `agent index build`")
        manifest = layout.read_manifest(generation)
        embedder = embedder or make_embedder(manifest.embedder)
        layout.check_embedder(manifest, embedder, folder)
        layout.check_graph(generation, manifest)
        reader = PassageReader(generation / layout.PASSAGES)
        if reader.meta.get("digest") != manifest.digest:
            raise RetrievalError(f"the index {folder} is damaged, its parts do not belong together: {layout.REPAIR}")
        vectors = VectorIndex.open(generation / layout.CHROMA, manifest.embedder)
        if vectors.count() != manifest.vectors:
            raise RetrievalError(f"the index {folder} is damaged, vectors are missing: {layout.REPAIR}")
        index = cls(manifest, reader, vectors, embedder)
        index.nearest("warm up", 1, None)
        return index

    def nearest(self, text: str, limit: int, arch: str | None) -> list[tuple[int, float]]:
        vector: Vectors = self.embedder.embed_query(text)
        return self.vectors.nearest(vector, min(limit, self.manifest.vectors), arch)

    def close(self) -> None:
        self.reader.close()
        self.vectors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def status(folder: Path) -> IndexStatus:
    """Raises RetrievalError if what lies there is damaged."""
    generation = layout.current(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    return IndexStatus(
        folder=str(folder),
        generation=generation.name if generation else None,
        manifest=layout.read_manifest(generation) if generation else None,
        added=tuple(map(str, layout.read_added(folder))),
        disk_bytes=size,
    )
