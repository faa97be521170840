"""Keys under which the store holds what a session's own calls and final measurements came to."""

from __future__ import annotations

from tools.records import content_hash


def answer_id(session_id: str, rollout: int, steps: int, index: int) -> str:
    """Of the answer to call ``index`` of the rollout's step before ``steps``."""
    return f"answer-{content_hash([session_id, rollout, steps, index])}"


def final_id(session_id: str, key: str, tool: str, mode: str | None) -> str:
    """Of one measurement of the finish."""
    return f"final-{content_hash([session_id, key, tool, mode])}"
