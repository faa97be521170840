"""What a synthesised rollout says before each call: short, and true of the recorded numbers. Pure.

A turn begins with how many evaluations are left, and a plan of the prompt's list is called by its number, as the
grammar has it (policy/grammar.py); any other plan by what it changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from memory.exemplars_read import Selection, Tried
from memory.shortlist import Expected
from policy.grammar import NUMBER, lead_of
from tools.records import Plan


def opening(known: Selection, listed: Sequence[Expected], plan: Plan, left: int) -> str:
    shown = known.own or known.exemplars
    best = shown[0] if shown else None
    seen = f" Best shown {best.score:.3f}." if best is not None and best.score is not None else ""
    return f"{lead_of(left)}{seen} {next_words(plan_of(best) if best else None, listed, plan)}"


def after(previous: Tried, best: Tried | None, listed: Sequence[Expected], plan: Plan, left: int) -> str:
    """Between an answer and the next plan."""
    said = "Rejected."
    if previous.score is not None:
        led = best is not None and best.key == previous.key
        said = f"{previous.score:.3f} {'leads' if led else 'is slower'}."
    return f"{lead_of(left)} {said} {next_words(plan_of(best or previous), listed, plan)}"


def verdict(best: Tried | None) -> str:
    said = f"Best {best.score:.3f}." if best is not None and best.score is not None else "All rejected."
    return f"{lead_of(0)} {said}"


def next_words(before: Plan | None, listed: Sequence[Expected], plan: Plan) -> str:
    for number, one in enumerate(listed, 1):
        if one.plan.plan_id == plan.plan_id:
            return f"Next: {NUMBER}{number}"
    if listed:
        return f"Next: the first with {difference(listed[0].plan, plan)}."
    return f"Next: {difference(before, plan) if before is not None else named(plan)}."


def difference(before: Plan, after: Plan) -> str:
    """What one changes to get from one plan to the other."""
    if before.family != after.family:
        return named(after)
    names = dict.fromkeys((*after.knobs, *before.knobs))
    changed = [f"{k}={after.knob(k)}" for k in names if before.knob(k) != after.knob(k)]
    if before.b_layout != after.b_layout:
        changed.insert(0, after.b_layout)
    return " ".join(changed) or "the same plan"


def named(plan: Plan) -> str:
    return f"{plan.family}/{plan.b_layout}"


def plan_of(one: Tried) -> Plan:
    if one.variant.plan is None:  # pragma: no cover - a record file's variants are plans
        raise ValueError(f"{one.key} is no plan of a family")
    return one.variant.plan
