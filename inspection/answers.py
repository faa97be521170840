"""The tools over a trace: what they answer, as records. Every claim names the steps that it rests on. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from inspection.trace import PENDING, Trace, TraceStep
from inspection.words import named, outcome, title
from memory.contrast import failure_lines, verdict
from memory.contrast_budget import one_line
from memory.contrast_diff import knob_rows, source_diff
from memory.contrast_metrics import compare_profiles as compared
from memory.exemplars_read import Tried
from tools.records import ProfileResult, Record, Status, Variant

MIN_PREFIX = 4
MAX_LINES = 500


class NotFound(ValueError):
    """There is no such variant, step or rollout; one sentence."""


class Claim(Record):
    """One sentence and the steps behind it. Without steps it rests on what an earlier session measured."""

    text: str
    steps: tuple[str, ...] = ()


class Finding(Record):
    """What a tool answers. ``claims`` say it in sentences; the fields of its kinds hold it as data."""

    tool: str
    claims: tuple[Claim, ...] = ()


class Timeline(Finding):
    tool: Literal["timeline"] = "timeline"
    total: int = 0  # steps there are, of which claims may hold only the last ones


class StepShown(Finding):
    tool: Literal["step"] = "step"
    step: TraceStep


class VariantShown(Finding):
    tool: Literal["get_variant"] = "get_variant"
    key: str
    variant: Variant


class Diff(Finding):
    """From ``keys[0]`` to ``keys[1]``. ``knobs`` that differ, of plans of one family; ``lines`` of a unified diff."""

    tool: Literal["diff"] = "diff"
    keys: tuple[str, str]
    knobs: tuple[tuple[str, str, str], ...] = ()
    lines: tuple[str, ...] = ()


class MetricRow(Record):
    name: str
    a: float | None = None
    b: float | None = None


class Profiles(Finding):
    tool: Literal["compare_profiles"] = "compare_profiles"
    keys: tuple[str, str]
    rows: tuple[MetricRow, ...] = ()


class Rejection(Finding):
    """``reason`` is None where nothing rejected it. ``log`` holds what the compiler said, as far as it matters."""

    tool: Literal["why_rejected"] = "why_rejected"
    key: str
    rejected: bool
    reason: str | None = None
    log: tuple[str, ...] = ()


class CurvePoint(Record):
    evaluated: int
    ratio: float
    key: str
    label: str
    step_id: str


class Best(Finding):
    """``winner`` is the variant that passed the whole gate; None while there is none."""

    tool: Literal["best_so_far"] = "best_so_far"
    points: tuple[CurvePoint, ...] = ()
    winner: str | None = None


@dataclass(frozen=True)
class View:
    """A trace, and how to look a variant of it up."""

    trace: Trace
    tried: Callable[[str], Tried | None]


# --- the tools --------------------------------------------------------------------------------------------------------


def timeline(view: View, rollout: int | None = None, limit: int = MAX_LINES) -> Timeline:
    """The last ``limit`` steps, of one rollout or of all."""
    trace = view.trace
    steps = [s for s in trace.steps if rollout is None or s.rollout == rollout]
    if not steps and rollout is not None:
        known = [one.rollout for one in trace.rollouts]
        there = f"there are {min(known)} to {max(known)}" if known else "none has begun"
        raise NotFound(f"session {trace.session_id} has no rollout {rollout}; {there}")
    shown = steps[-limit:] if limit > 0 else []
    return Timeline(claims=tuple(Claim(text=title(s), steps=(s.step_id,)) for s in shown), total=len(steps))


def show_step(view: View, step_id: str) -> StepShown:
    """All of one step: what was thought and said, the call's arguments, its answer."""
    step = find_step(view.trace, step_id)
    return StepShown(step=step, claims=(Claim(text=title(step), steps=(step.step_id,)),))


def get_variant(view: View, key: str) -> VariantShown:
    """The source and launch spec of a variant, and what became of it."""
    found = _tried(view, key)
    return VariantShown(key=found.key, variant=found.variant, claims=tuple(_history(view.trace, found.key)))


def diff(view: View, a: str, b: str) -> Diff:
    """What leads from ``a`` to ``b``."""
    first, second = _tried(view, a), _tried(view, b)
    names = (first.key, second.key)
    steps = _scored(view.trace, first.key) + _scored(view.trace, second.key)
    claims = [Claim(text=verdict(second, first, (named_variant(second), named_variant(first))), steps=steps)]
    for one in (first, second):
        if one.failure is not None and one.failure.reason is not None:
            against = tuple(s.step_id for s in view.trace.of_key(one.key) if s.reason)
            text = f"{named_variant(one)} was rejected: {one.failure.reason.value}: {one_line(one.failure.detail)}"
            claims.append(Claim(text=text, steps=against))
    lines = source_diff(first.variant.source, second.variant.source, names)
    origin = _first(view.trace, first.key) + _first(view.trace, second.key)
    knobs = _knobs(first.variant, second.variant)
    if knobs:
        told = ", ".join(f"{name} {old} → {new}" for name, old, new in knobs)
        claims.append(Claim(text=f"Both are plans of one family; these knobs differ: {told}.", steps=origin))
    if lines:
        added = sum(line.startswith("+") and not line.startswith("+++") for line in lines)
        removed = sum(line.startswith("-") and not line.startswith("---") for line in lines)
        claims.append(Claim(text=f"The sources differ: lines added {added}, removed {removed}.", steps=origin))
    else:
        same = "the same" if first.variant.launch == second.variant.launch else "the same; their launch specs differ"
        claims.append(Claim(text=f"The sources are {same}.", steps=origin))
    return Diff(keys=names, knobs=tuple(knobs), lines=tuple(lines), claims=tuple(claims))


def compare_profiles(view: View, a: str, b: str) -> Profiles:
    """ncu's metrics of two variants side by side, and what sets them apart."""
    both = (_tried(view, a), _tried(view, b))
    keys = (both[0].key, both[1].key)
    profiles = [one.profile for one in both]
    steps = tuple(s for one in both for s in _measured(view.trace, one.key, ("profile",)))
    missing = [one for one in both if one.profile is None]
    claims = [
        Claim(text=f"{named_variant(one)} was not profiled.", steps=_first(view.trace, one.key)) for one in missing
    ]
    if profiles[0] is not None and profiles[1] is not None:
        claims.append(Claim(text=compared(profiles[0], profiles[1], keys), steps=steps))
    for one in both:
        found = _measured(view.trace, one.key, ("profile",))
        sentences = one.profile.sentences if one.profile is not None else ()
        claims += [Claim(text=f"{one.key}: {one_line(sentence)}", steps=found) for sentence in sentences]
    return Profiles(keys=keys, rows=tuple(_rows(profiles[0], profiles[1])), claims=tuple(claims))


def why_rejected(view: View, key: str) -> Rejection:
    """Which verdict went against a variant, at which step, and what came next; or that none did."""
    found = _tried(view, key)
    trace = view.trace
    against = [s for s in trace.of_key(found.key) if s.status == Status.FAILED and s.reason]
    claims = [
        Claim(text=f"{_stage(s)} rejected it: {s.reason}: {one_line(s.detail or 'no detail', 600)}", steps=(s.step_id,))
        for s in against
    ]
    final = next((f for f in trace.finals if f.key == found.key), None)
    if final is not None and final.why and not against:
        gate = tuple(s.step_id for s in trace.of_key(found.key) if s.kind == "finish" and s.status != Status.OK)
        claims.append(Claim(text=f"It is not on the leaderboard: {one_line(final.why, 600)}", steps=gate))
    if not against and found.failure is not None:  # by another session: the store is shared
        failure = found.failure
        reason = failure.reason.value if failure.reason else failure.status.value
        claims.append(Claim(text=f"It was rejected: {reason}: {one_line(failure.detail, 600)}"))
    rejected = bool(against) or found.failure is not None
    if not claims:
        claims = list(_not_rejected(trace, found.key))
    if against:
        claims += _what_came_next(trace, against[0])
    reason_given = against[0].reason if against else None
    if reason_given is None and found.failure is not None and found.failure.reason is not None:
        reason_given = found.failure.reason.value
    log = tuple(failure_lines(found)[2:]) if found.failure is not None else ()
    return Rejection(key=found.key, rejected=rejected, reason=reason_given, log=log, claims=tuple(claims))


def best_so_far(view: View) -> Best:
    """Every rise of the best screen ratio, and what passed the whole gate."""
    trace = view.trace
    points = [
        CurvePoint(evaluated=s.evaluated, ratio=s.ratio, key=s.key, label=s.label, step_id=s.step_id)
        for s in trace.steps
        if s.rose and s.ratio is not None and s.key is not None
    ]
    claims = [
        Claim(text=f"after {s.evaluated} variants {s.ratio:.3f}x: {named(s)}", steps=(s.step_id,))
        for s in trace.steps
        if s.rose
    ]
    if not points:
        claims.append(Claim(text="No variant has passed the screen yet.", steps=tuple(_last(trace))))
    winner = next((f for f in trace.finals if f.admitted), None)
    if winner is not None:
        gate = _measured(trace, winner.key, ("verify", "sanitize", "time"), "finish")
        ratio = f" at {winner.ratio:.3f}x, offline, final budget" if winner.ratio is not None else ""
        name = winner.label if winner.key in winner.label else f"{winner.label} ({winner.key})"
        text = f"{one_line(name, 240)} passed the whole gate{ratio}."
        claims.append(Claim(text=text, steps=gate))
    return Best(points=tuple(points), winner=winner.key if winner else None, claims=tuple(claims))


# --- looking up -------------------------------------------------------------------------------------------------------


def find_step(trace: Trace, step_id: str) -> TraceStep:
    found = trace.step(step_id.strip().strip("[]"))
    if found is None:
        raise NotFound(f"session {trace.session_id} has no step {one_line(step_id, 60)}; /timeline lists them")
    return found


def resolve(trace: Trace, word: str) -> str:
    """A key from itself, from a beginning of it that no other has, from a step's id, or from ``best``."""
    word = word.strip().strip("[]")
    if word == "best":
        points = [s for s in trace.steps if s.rose]
        winner = next((f.key for f in trace.finals if f.admitted), points[-1].key if points else None)
        if winner is None:
            raise NotFound("no variant has passed the screen yet, so there is no best one")
        return winner
    step = trace.step(word)
    if step is not None:
        if step.key is None:
            raise NotFound(f"step {step.step_id} is about no variant: {title(step)}")
        return step.key
    keys = trace.keys
    if word in keys:
        return word
    begin = [key for key in keys if len(word) >= MIN_PREFIX and key.startswith(word)]
    if len(begin) == 1:
        return begin[0]
    shown = one_line(word, 60)
    if begin:
        raise NotFound(f"{shown} is the beginning of {len(begin)} keys: {', '.join(begin[:5])}")
    close = difflib.get_close_matches(word, keys, n=2, cutoff=0.6)
    advice = f"did you mean {' or '.join(close)}?" if close else "/timeline and /best show keys"
    raise NotFound(f"session {trace.session_id} has no variant {shown}; {advice}")


def named_variant(one: Tried) -> str:
    return f"{one_line(one.variant.label, 240)} ({one.key})" if one.variant.plan else one.key


def _tried(view: View, word: str) -> Tried:
    key = resolve(view.trace, word)
    found = view.tried(key)
    if found is None:
        raise NotFound(f"the source of variant {key} is not in the store; was that file exchanged?")
    return found


def _history(trace: Trace, key: str) -> Iterator[Claim]:
    for step in trace.of_key(key):
        what = "proposed" if step.step_id in _first(trace, key) else _stage(step)
        yield Claim(text=f"{what}: {outcome(step)}", steps=(step.step_id,))


def _stage(step: TraceStep) -> str:
    return (
        f"{step.tool or '?'}{f' ({step.mode})' if step.mode else ''}{' of the finish' if step.kind == 'finish' else ''}"
    )


def _not_rejected(trace: Trace, key: str) -> Iterator[Claim]:
    steps = trace.of_key(key)
    scored = next((s for s in steps if s.ratio is not None and s.evaluates), None)
    final = next((f for f in trace.finals if f.key == key), None)
    if scored is not None and scored.ratio is not None:
        yield Claim(text=f"It was not rejected: the screen gave it {scored.ratio:.3f}x.", steps=(scored.step_id,))
    else:
        without = next((s for s in reversed(steps)), None)
        if without is not None:
            yield Claim(text=f"Nothing rejected it: {_stage(without)}: {outcome(without)}", steps=(without.step_id,))
    if final is not None and final.admitted:
        gate = _measured(trace, key, ("verify", "sanitize", "time"), "finish")
        yield Claim(text="It passed the whole gate and is on the leaderboard.", steps=gate)
    better = max((s for s in trace.steps if s.rose), key=lambda s: s.ratio or 0.0, default=None)
    if better is not None and better.key != key and scored is not None and (better.ratio or 0) > (scored.ratio or 0):
        yield Claim(text=f"A faster one was found: {named(better)} at {better.ratio:.3f}x.", steps=(better.step_id,))


def _what_came_next(trace: Trace, step: TraceStep) -> list[Claim]:
    """The next variant that the same rollout sent."""
    later = trace.steps[trace.steps.index(step) + 1 :]
    following = next(
        (s for s in later if s.rollout == step.rollout and s.kind == "call" and s.key not in (None, step.key)), None
    )
    if following is None or following.status == PENDING:
        return []
    text = f"The next variant of the same rollout was {named(following)}: {outcome(following)}"
    return [Claim(text=text, steps=(following.step_id,))]


def _first(trace: Trace, key: str) -> tuple[str, ...]:
    return tuple(s.step_id for s in trace.of_key(key)[:1])


def _scored(trace: Trace, key: str) -> tuple[str, ...]:
    """The steps whose time ``verdict`` tells: the screen's."""
    return tuple(s.step_id for s in trace.of_key(key) if s.ratio is not None and s.kind == "call")[:1] or _first(
        trace, key
    )


def _measured(trace: Trace, key: str, tools: Sequence[str], kind: str | None = None) -> tuple[str, ...]:
    return tuple(
        s.step_id
        for s in trace.of_key(key)
        if s.tool in tools and kind in (None, s.kind) and s.status not in (PENDING, Status.REFUSED)
    )


def _last(trace: Trace) -> list[str]:
    return [s.step_id for s in trace.steps[-1:]]


def _knobs(a: Variant, b: Variant) -> list[tuple[str, str, str]]:
    if a.plan is None or b.plan is None or a.plan.family != b.plan.family:
        return []
    return [(name, str(old), str(new)) for name, old, new in knob_rows(a.plan, b.plan) if old != new]


def _rows(a: ProfileResult | None, b: ProfileResult | None) -> Iterator[MetricRow]:
    for part, prefix in (("metrics", ""), ("stalls", "stall ")):
        ours, theirs = (getattr(one, part) if one is not None else {} for one in (a, b))
        for name in dict.fromkeys((*ours, *theirs)):
            yield MetricRow(name=prefix + name, a=ours.get(name), b=theirs.get(name))
