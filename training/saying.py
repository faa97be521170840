"""What a synthesised rollout says before each call: short, and true of the recorded numbers. Pure.

A plan of the prompt's list is called by its number, any other by what it changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from memory.exemplars_read import Selection, Tried
from memory.shortlist import Expected
from tools.records import Plan


def opening(known: Selection, listed: Sequence[Expected], plan: Plan) -> str:
    shown = known.own or known.exemplars
    if not shown:
        return next_words(None, listed, plan) if listed else f"Nothing is measured; {named(plan)} suits the shape."
    best = shown[0]
    text = f"Best so far {best.score or 0.0:.3f}."
    if len(shown) > 1 and best.score and shown[-1].score:
        apart = difference(plan_of(shown[-1]), plan_of(best))
        text = f"{best.score / shown[-1].score:.2f}x by {apart}."
    return f"{text} {next_words(plan_of(best), listed, plan)}"


def after(previous: Tried, best: Tried | None, listed: Sequence[Expected], plan: Plan) -> str:
    """Between an answer and the next plan."""
    base = plan_of(best or previous)
    if previous.score is None:
        return f"Rejected. {next_words(base, listed, plan)}"
    led = best is not None and best.key == previous.key
    return f"{previous.score:.3f} {'leads' if led else 'is slower'}. {next_words(base, listed, plan)}"


def verdict(best: Tried | None) -> str:
    return f"Best ratio {best.score:.3f}." if best is not None and best.score is not None else "No plan passed."


def next_words(before: Plan | None, listed: Sequence[Expected], plan: Plan) -> str:
    for number, one in enumerate(listed, 1):
        if one.plan.plan_id == plan.plan_id:
            return f"Next: {number}."
    if listed:
        return f"Next: 1 with {difference(listed[0].plan, plan)}."
    return f"Next: {difference(before, plan) if before is not None else named(plan)}."


def difference(before: Plan, after: Plan) -> str:
    """What one changes to get from one plan to the other."""
    if before.family != after.family:
        return named(after)
    changed = [f"{k}={v}" for k, v in after.knobs.items() if before.knobs.get(k) != v]
    if before.b_layout != after.b_layout:
        changed.insert(0, after.b_layout)
    return " ".join(changed) or "the same plan"


def named(plan: Plan) -> str:
    return f"{plan.family}/{plan.b_layout}"


def plan_of(one: Tried) -> Plan:
    if one.variant.plan is None:  # pragma: no cover - a record file's variants are plans
        raise ValueError(f"{one.key} is no plan of a family")
    return one.variant.plan
