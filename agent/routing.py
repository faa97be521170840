"""Where the graph goes next: pure functions of the state. Nodes do the work, graph.py only wires."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from agent.state import ActInput, MeasureInput, SessionState, ThinkInput

if TYPE_CHECKING:
    from langgraph.types import Send


def active(state: SessionState) -> bool:
    return any(rollout["ended_by"] is None for rollout in state["group"])


def evaluations_left(state: SessionState, budget: int) -> int:
    return max(0, budget - state["spent"]["evaluations"])


def thinks(state: SessionState) -> list[Send]:
    """One policy turn for every rollout that goes on. A rollout is told the earlier rounds and its own trials."""
    from langgraph.types import Send

    group = {rollout["number"] for rollout in state["group"]}
    sends = []
    for rollout in state["group"]:
        if rollout["ended_by"] is None:
            others = group - {rollout["number"]}
            payload = ThinkInput(
                rollout=rollout,
                trials=[row for row in state["trials"] if row["rollout"] not in others],
                round=state["round"],
                evaluations_left=max(0, rollout["quota"] - rollout["spent"]),
            )
            sends.append(Send("think", payload))
    return sends


def acts(state: SessionState) -> list[Send] | Literal["tell"]:
    """One task for every call, so that a resume repeats only the unfinished ones."""
    from langgraph.types import Send

    steps = {rollout["number"]: rollout["steps"] for rollout in state["group"]}
    sends = [Send("act", ActInput(call=call, steps=steps[call["rollout"]])) for call in state["calls"]]
    return sends or "tell"


def after_tell(state: SessionState) -> list[Send] | Literal["end_group"]:
    return thinks(state) if active(state) else "end_group"


def after_group(state: SessionState) -> Literal["start_group", "shortlist"]:
    return "shortlist" if state["searched"] else "start_group"


def measures(state: SessionState) -> list[Send] | Literal["conclude"]:
    from langgraph.types import Send

    return [Send("measure", MeasureInput(measure=call)) for call in state["measures"]] or "conclude"
