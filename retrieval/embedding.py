"""Embedders: text to unit vectors. The Protocol, a hashing embedder without a model, and the choice by name.

An index remembers its embedder's ``name`` and ``digest``; vectors of another one do not compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import RetrievalError
from retrieval.tokens import chains, parts

Vectors = NDArray[np.float32]


class Embedder(Protocol):
    """``digest`` changes whenever the same text may get another vector. Vectors have length 1."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def dims(self) -> int: ...

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """(len(texts), dims). May be slow to begin with: a model is loaded on the first call."""
        ...

    def embed_query(self, text: str) -> Vectors:
        """(dims,). Quick: a few milliseconds for a question."""
        ...


class HashingEmbedder:
    """Words, identifier parts and letter triples hashed into signed buckets, square-root counts. No model, no training
    and no torch: it finds shared words and spellings, not meaning."""

    name = "hashing"

    def __init__(self, dims: int = 512) -> None:
        self.dims = dims
        self.digest = f"hashing-1-{dims}"

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        return np.stack([self.embed_query(text) for text in texts]) if texts else np.zeros((0, self.dims), np.float32)

    def embed_query(self, text: str) -> Vectors:
        counts = np.zeros(self.dims, np.float32)
        for token in chains(text):
            for piece in {token, *parts(token)}:
                self._count(counts, piece.lower(), 1.0)
            padded = f"^{token.lower()}$"
            for at in range(len(padded) - 2):
                self._count(counts, padded[at : at + 3], 0.25)
        counts = np.sign(counts) * np.sqrt(np.abs(counts))
        norm = float(np.linalg.norm(counts))
        if norm == 0.0:
            counts[0] = norm = 1.0
        return (counts / norm).astype(np.float32)

    def _count(self, counts: Vectors, feature: str, weight: float) -> None:
        number = int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "little")
        counts[(number >> 1) % self.dims] += weight if number & 1 else -weight


def _minilm() -> Embedder:
    from retrieval.minilm import MiniLm

    return MiniLm()


EMBEDDERS: dict[str, Callable[[], Embedder]] = {"minilm": _minilm, "hashing": HashingEmbedder}
DEFAULT_EMBEDDER = "minilm"


def make_embedder(name: str) -> Embedder:
    """Raises RetrievalError for an unknown name or a missing package."""
    if name not in EMBEDDERS:
        raise RetrievalError(f"'{name}' is not an embedder: {', '.join(EMBEDDERS)}")
    return EMBEDDERS[name]()
