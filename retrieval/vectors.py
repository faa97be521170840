"""The Chroma collection: the only module that imports chromadb.

Chroma's default embedder downloads a model at the first text it is given. Ours is registered under its own name and
given to every collection, and refuses: vectors are always made here, by the embedder that the index remembers. No
telemetry. Chroma writes to its folder whenever it opens it, so the folder must be writable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from retrieval.embedding import Vectors
from retrieval.errors import RetrievalError
from tools.extras import install_command

COLLECTION = "passages"  # Chroma wants at least three characters
MAX_BATCH = 5461  # more at once is refused
NEUTRAL = "any_arch"

Metadata = Mapping[str, str | int | bool]


class VectorIndex:
    """Nearest neighbours by inner product of unit vectors."""

    def __init__(self, client: Any, collection: Any, folder: Path) -> None:
        self._client = client
        self._collection = collection
        self._folder = folder

    @classmethod
    def create(cls, folder: Path, expected: int, embedder_name: str) -> VectorIndex:
        """A new collection for ``expected`` vectors: they reach the disk together with the last one."""
        with _sentences(folder):
            client = _client(folder)
            hnsw = {
                "space": "ip",
                "ef_construction": 200,
                "ef_search": 400,  # near exact: many passages are near-identical, which misleads a short search
                "max_neighbors": 24,
                "batch_size": max(3, min(expected, MAX_BATCH)),  # smaller is refused
                "sync_threshold": max(3, expected),
            }
            collection = client.create_collection(
                COLLECTION, embedding_function=_own()(embedder_name), configuration={"hnsw": hnsw}
            )
        return cls(client, collection, folder)

    @classmethod
    def open(cls, folder: Path, embedder_name: str) -> VectorIndex:
        with _sentences(folder):
            client = _client(folder)
            return cls(client, client.get_collection(COLLECTION, embedding_function=_own()(embedder_name)), folder)

    def add(self, ids: Sequence[int], vectors: Vectors, metadatas: Sequence[Metadata]) -> None:
        with _sentences(self._folder):
            for at in range(0, len(ids), MAX_BATCH):
                end = at + MAX_BATCH
                self._collection.add(
                    ids=[str(number) for number in ids[at:end]],
                    embeddings=vectors[at:end],
                    metadatas=[dict(metadata) for metadata in metadatas[at:end]],
                )

    def count(self) -> int:
        with _sentences(self._folder):
            return int(self._collection.count())

    def nearest(self, vector: Vectors, limit: int, arch: str | None) -> list[tuple[int, float]]:
        """Ids and similarities (1 = the same direction), nearest first; with ``arch`` only what is written for it or
        for any."""
        where = {"$or": [{arch: True}, {NEUTRAL: True}]} if arch else None
        with _sentences(self._folder):
            found = self._collection.query(
                query_embeddings=vector[None, :], n_results=limit, where=where, include=["distances"]
            )
        return [(int(i), 1.0 - float(d)) for i, d in zip(found["ids"][0], found["distances"][0], strict=True)]

    def close(self) -> None:
        with _sentences(self._folder):
            self._client.close()


def arch_metadata(arch: Sequence[str]) -> dict[str, bool]:
    """How architecture tags are kept: one flag each, because Chroma filters by equality."""
    return dict.fromkeys(arch, True) if arch else {NEUTRAL: True}


def _client(folder: Path) -> Any:
    import chromadb
    from chromadb.config import Settings

    settings = Settings(anonymized_telemetry=False, is_persistent=True, persist_directory=str(folder))
    return chromadb.PersistentClient(path=str(folder), settings=settings)


@cache
def _own() -> Any:
    """Our embedding function, registered so that Chroma finds it by name when it reopens a collection."""
    from chromadb import EmbeddingFunction
    from chromadb.utils.embedding_functions import register_embedding_function

    class OwnVectors(EmbeddingFunction):  # type: ignore[misc]
        def __init__(self, embedder: str = "") -> None:
            self._embedder = embedder

        def __call__(self, input: Any) -> Any:  # Chroma checks the name `input`
            raise RetrievalError("this index is searched with explicit vectors, never with Chroma's own embedding")

        @staticmethod
        def name() -> str:
            return "hgemm-agent"

        def get_config(self) -> dict[str, Any]:
            return {"embedder": self._embedder}

        @staticmethod
        def build_from_config(config: dict[str, Any]) -> OwnVectors:
            return OwnVectors(str(config.get("embedder", "")))

    return register_embedding_function(OwnVectors)


@contextmanager
def _sentences(folder: Path) -> Iterator[None]:
    """Chroma's errors, a panic of its native part included, as one sentence."""
    try:
        yield
    except RetrievalError:
        raise
    except ImportError as error:
        raise RetrievalError(
            f"{error.name or 'chromadb'} is not installed, which the index needs: {install_command('retrieval')}"
        ) from error
    except Exception as error:
        raise RetrievalError(_explained(folder, error)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RetrievalError(_explained(folder, error)) from error


def _explained(folder: Path, error: BaseException) -> str:
    said = str(error).split("\n", 1)[0][:160]
    if "readonly" in said or "ermission denied" in said or "unable to open database" in said:
        return f"the vector index {folder} cannot be written to, which Chroma needs even to read: check its permissions"
    return f"the vector index {folder} is damaged ({said}): run `agent index build`"


__all__ = ["COLLECTION", "MAX_BATCH", "VectorIndex", "arch_metadata"]
