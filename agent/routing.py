"""Where the graph goes next: pure functions of the state. Nodes do the work, graph.py only wires.

A router answers with the name of a node, or with one input for each task of the node that it fans out to.
"""

from __future__ import annotations

from typing import Literal

from agent.state import ActInput, MeasureInput, SessionState, ThinkInput


def active(state: SessionState) -> bool:
    return any(rollout["ended_by"] is None for rollout in state["group"])


def evaluations_left(state: SessionState, budget: int) -> int:
    return max(0, budget - state["spent"]["evaluations"])


def thinks(state: SessionState) -> list[ThinkInput]:
    """One policy turn for every rollout that goes on. A rollout is told the earlier rounds and its own trials."""
    group = {rollout["number"] for rollout in state["group"]}
    beside = sum(rollout["ended_by"] is None for rollout in state["group"])
    inputs = []
    for rollout in state["group"]:
        if rollout["ended_by"] is None:
            others = group - {rollout["number"]}
            one = ThinkInput(
                rollout=rollout,
                trials=[row for row in state["trials"] if row["rollout"] not in others],
                round=state["round"],
                evaluations_left=max(0, rollout["quota"] - rollout["spent"]),
                beside=beside,
            )
            inputs.append(one)
    return inputs


def acts(state: SessionState) -> list[ActInput] | Literal["tell"]:
    """One task for every call, so that a resume repeats only the unfinished ones."""
    steps = {rollout["number"]: rollout["steps"] for rollout in state["group"]}
    return [ActInput(call=call, steps=steps[call["rollout"]]) for call in state["calls"]] or "tell"


def after_tell(state: SessionState) -> list[ThinkInput] | Literal["end_group"]:
    return thinks(state) if active(state) else "end_group"


def after_group(state: SessionState) -> Literal["start_group", "shortlist"]:
    return "shortlist" if state["searched"] else "start_group"


def measures(state: SessionState) -> list[MeasureInput] | Literal["conclude"]:
    return [MeasureInput(measure=call) for call in state["measures"]] or "conclude"
