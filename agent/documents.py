"""The documentation index as a policy's tool: passages as quotations within a budget of tokens. A damaged index is an
answer to the model, never the end of a session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from memory.contrast_budget import estimate_tokens
from policy.tool_schemas import DocsArguments

if TYPE_CHECKING:
    from retrieval.passages import Passage

_ERROR_SHOWN = 300


class Documents:
    """Opened at the first question. One question at a time: an opened index is not shared between threads."""

    def __init__(self, folder: Path, budget_tokens: int) -> None:
        self._folder = folder
        self._budget_tokens = budget_tokens
        self._lock = Lock()

    def answer(self, arguments: DocsArguments) -> str:
        """The tool's text; an error of the index is one, too."""
        from retrieval.errors import RetrievalError
        from retrieval.search import search_docs

        try:
            with self._lock:
                found = search_docs(arguments.query, arguments.arch, arguments.limit, folder=self._folder)
        except RetrievalError as error:
            return json.dumps({"error": str(error)})
        except Exception as error:  # SQLite, Chroma and the embedder have a hundred ways to fail on a damaged file
            what = " ".join(f"{type(error).__name__}: {error}".split())[:_ERROR_SHOWN]
            return json.dumps({"error": f"the documentation index cannot be read ({what})"})
        return within(found, self._budget_tokens)


def find_documents(folder: Path, budget_tokens: int) -> Documents | None:
    """None where there is nothing to ask: no index, or not what it takes to read one. A damaged one counts as there."""
    from retrieval import layout
    from retrieval.embedding import make_embedder
    from retrieval.errors import RetrievalError

    if find_spec("chromadb") is None:
        return None
    try:
        generation = layout.current(folder)
        if generation is None:
            return None
        name = layout.read_manifest(generation).embedder
    except RetrievalError:
        return Documents(folder, budget_tokens)
    try:
        make_embedder(name)
    except RetrievalError:
        return None
    return Documents(folder, budget_tokens)


def within(passages: Sequence[Passage], budget_tokens: int) -> str:
    """The first passages that fit, quoted with their citations; the first one cut if not even that does."""
    from retrieval.quoting import quoted

    taken = list(passages)
    while len(taken) > 1 and estimate_tokens(quoted(taken)) > budget_tokens:
        taken.pop()
    if taken:
        taken[0] = _cut(taken[0], taken, budget_tokens)
    left_out = len(passages) - len(taken)
    more = f"\n\n{left_out} more did not fit; ask for something narrower, or for fewer." if left_out else ""
    return quoted(taken) + more


def _cut(passage: Passage, taken: Sequence[Passage], budget_tokens: int) -> Passage:
    from retrieval.quoting import quoted

    lines = passage.text.splitlines()
    shown = passage
    while len(taken) == 1 and len(lines) > 1 and estimate_tokens(quoted([shown])) > budget_tokens:
        lines = lines[: len(lines) * 3 // 4]
        shown = passage.model_copy(update={"text": "\n".join([*lines, "… (cut)"])})
    return shown
