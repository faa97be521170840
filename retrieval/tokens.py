"""Identifier-aware words: the exact token is kept, and its parts (split at ``_``, case and dots) are searchable."""

from __future__ import annotations

import re

#: ``cute::SM90_TMA_LOAD``, ``cp.async.bulk.tensor``, ``mbarrier::complete_tx::bytes``: one token with its joints.
_CHAIN = re.compile(r"[A-Za-z_]\w*(?:(?:::|\.)\w+)*")
_WORD = re.compile(r"\w+")
_PART = re.compile(r"\d+(?:x\d+)+|\d+[A-Z](?![A-Za-z0-9])|[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|[A-Z]\d*|\d+")
_LOOKS_EXACT = re.compile(r"_|::|\w\.\w|[a-z][A-Z]|[A-Z][a-z]+[A-Z0-9]|[A-Z]{2,}\d|\d[A-Z]|[a-z]\d")


def chains(text: str) -> list[str]:
    """Every identifier, with chains (``a::b``, ``a.b``) both whole and as their members."""
    found: list[str] = []
    for token in _CHAIN.findall(text):
        found.append(token)
        if not token.isidentifier():
            found.extend(part for part in re.split(r"::|\.", token) if not part.isdigit())
    return found


def parts(identifier: str) -> list[str]:
    """``SM90_64x128x16_F32F16F16_SS`` → SM90, 64x128x16, F32, F16, F16, SS; ``TiledMma`` → Tiled, Mma."""
    return [part for word in _WORD.findall(identifier) for piece in word.split("_") for part in _PART.findall(piece)]


def spaced(text: str) -> str:
    """The text with its compound identifiers written as words; what the embedder and the word index read."""

    def split(found: re.Match[str]) -> str:
        word = found[0]
        return word if word.isalpha() and (word.islower() or word.isupper()) else " ".join(parts(word)) or word

    return _WORD.sub(split, text)


def looks_exact(word: str) -> bool:
    """Whether a word of a question is an identifier and not English: it has a joint, inner capitals or digits."""
    return bool(_LOOKS_EXACT.search(word)) or (len(word) > 2 and word.isupper() and word.isalpha())
