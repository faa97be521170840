"""The trace as messages of Gradio's Chatbot: reasoning, calls and answers as collapsed thoughts, nested. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from agent.ui.html import answer_html, call_html, link, said
from inspection.trace import PENDING, TraceStep
from inspection.words import title
from memory.contrast_budget import one_line

Message = dict[str, Any]
EVERYTHING = "everything"
#: Of a part: a browser shows no thousands of messages.
MAX_STEPS = 200
MAX_TITLE = 300


def parts(steps: Sequence[TraceStep], size: int = MAX_STEPS) -> dict[str, list[TraceStep]]:
    """What can be shown at a time: everything where that is little, each rollout in pieces, the finish. The names stay
    while the session grows."""
    by_rollout: dict[str, list[TraceStep]] = {}
    for step in steps:
        by_rollout.setdefault("finish" if step.rollout is None else f"rollout {step.rollout}", []).append(step)
    found: dict[str, list[TraceStep]] = {EVERYTHING: list(steps)} if len(steps) <= size else {}
    for name, mine in by_rollout.items():
        for number, begin in enumerate(range(0, len(mine), size), start=1):
            found[name if number == 1 else f"{name}, part {number}"] = mine[begin : begin + size]
    return found


def part_with(found: dict[str, list[TraceStep]], step_id: str | None, running: bool) -> str:
    """The part that holds a step; else the first one, or of a session that goes on the last one."""
    holding = (name for name, steps in found.items() if any(step.step_id == step_id for step in steps))
    names = list(found)
    return next(holding, names[-1 if running and EVERYTHING not in found else 0])


def messages(session_id: str, steps: Sequence[TraceStep]) -> list[Message]:
    """Each begins with its step's id, in its title or as a link: agent/ui/app.py's script reads it from there."""
    return [message for step in steps for message in _messages(session_id, step)]


def _messages(session_id: str, step: TraceStep) -> Iterator[Message]:
    here = link(session_id, step.step_id)
    match step.kind:
        case "system" | "user":
            yield _thought(f"{step.step_id} {title(step)}", here + said(step.text), role="user")
        case "assistant":
            if step.reasoning:
                yield _thought(f"{step.step_id} reasoning", here + said(step.reasoning))
            if step.text or not step.reasoning:
                yield {"role": "assistant", "content": _whole(here + (said(step.text) or said("(no words)", "quiet")))}
        case "call":
            heading = f"{step.step_id} {title(step)}"
            yield _thought(heading, here + call_html(step), pending=step.status == PENDING, identity=step.step_id)
            if step.status != PENDING:
                yield _thought("answer", here + answer_html(step), parent=step.step_id)
        case _:
            yield _thought(f"{step.step_id} {title(step)}", here + answer_html(step))


def _thought(
    heading: str,
    content: str,
    role: str = "assistant",
    pending: bool = False,
    identity: str | None = None,
    parent: str | None = None,
) -> Message:
    """Closed until it is clicked; one that waits for its answer stands open."""
    metadata = {"title": _plain(one_line(heading, MAX_TITLE)), "status": "pending" if pending else "done"}
    if identity is not None:
        metadata["id"] = identity
    if parent is not None:
        metadata["parent_id"] = parent
    return {"role": role, "content": _whole(content), "metadata": metadata}


def _whole(content: str) -> str:
    """One block of HTML: what begins with a link would be a paragraph of Markdown."""
    return f"<div>{content}</div>"


def _plain(text: str) -> str:
    """The title passes through the component's Markdown reader."""
    text = escape(text)
    return "".join(f"&#{ord(char)};" if char in "*_`[]()!#~|\\$:" else char for char in text)
