"""The kernel of each shape. Pure.

A candidate counts if the leaderboard's rule (tools/admission.py) admits it at this shape. The best is the one with the
highest ratio of its own interleaved run, so clocks of another day do not decide. It is then reported in every mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.reporting.measured import At, Measured
from agent.reporting.model import LAYOUT_OF, Layout
from tools import admission
from tools.records import HEADLINE_REFERENCE, Status, TimingResult


@dataclass(frozen=True)
class Winners:
    """Keys. ``by_layout`` is chosen against the reference of the candidate's own layout."""

    best: str | None
    by_layout: dict[Layout, str]
    why_none: str = ""


def choose(measured: Measured) -> dict[str, Winners]:
    """By task_id, for every task."""
    candidates: dict[str, list[tuple[str, TimingResult]]] = {task_id: [] for task_id in measured.tasks}
    hindrances: dict[str, list[str]] = {task_id: [] for task_id in measured.tasks}
    for (task_id, key), modes in measured.timings.items():
        offline = modes.get("offline")
        why = "not timed offline" if offline is None else hindrance(measured, (task_id, key))
        if offline is None or why:
            hindrances[task_id].append(why)
        else:
            candidates[task_id].append((key, offline))
    return {task_id: _ranked(candidates[task_id], hindrances[task_id]) for task_id in measured.tasks}


def hindrance(measured: Measured, at: At) -> str:
    """What keeps a timed candidate out; empty if nothing does."""
    full, sanitized = measured.verified.get(at), measured.sanitized.get(at)
    verify = [("full", full.status)] if full is not None else []
    time = [(f"{mode}/{timing.budget}", timing.status) for mode, timing in measured.timings.get(at, {}).items()]
    found = admission.hindrance(
        [*verify, *([("quick", Status.FAILED)] if at in measured.quick_failed else [])],
        [sanitized.status] if sanitized is not None else [],
        [*time, *([("", Status.FAILED)] if at in measured.timing_failed else [])],
    )
    return found.value if found is not None else ""


def _ranked(candidates: list[tuple[str, TimingResult]], hindrances: list[str]) -> Winners:
    best = _best(candidates, HEADLINE_REFERENCE)
    by_layout: dict[Layout, str] = {}
    for b_layout, layout in LAYOUT_OF.items():
        of_layout = [(key, timing) for key, timing in candidates if timing.rows[0].b_layout == b_layout]
        found = _best(of_layout, HEADLINE_REFERENCE.removesuffix("_max"))
        if found is not None:
            by_layout[layout] = found
    if best is not None:
        return Winners(best, by_layout)
    if not hindrances and not candidates:
        return Winners(None, by_layout, "no candidate was timed at the final budget")
    counts = {why: hindrances.count(why) for why in dict.fromkeys(hindrances)}
    if candidates:
        counts[f"not timed against {HEADLINE_REFERENCE}"] = len(candidates)
    return Winners(None, by_layout, "; ".join(f"{count} candidates {why}" for why, count in counts.items()))


def _best(candidates: list[tuple[str, TimingResult]], reference: str) -> str | None:
    """Ties go to the smaller key, so that the order of measurement does not matter."""
    rated = [(row.ratio, key) for key, timing in candidates if (row := timing.row(reference)) is not None]
    return min(rated, key=lambda pair: (-pair[0], pair[1]))[1] if rated else None
