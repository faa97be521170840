"""The one error of this package: its message is what the user reads."""

from __future__ import annotations


class RetrievalError(RuntimeError):
    """One sentence: what is wrong with the index, a source or a query, and what to do."""
