"""Findings as text, for a terminal and for a model: claims with their steps, what others wrote in quotation. Pure."""

from __future__ import annotations

import json
from typing import Any

from inspection.answers import Best, Diff, Finding, Profiles, Rejection, StepShown, Timeline, VariantShown
from inspection.trace import TraceStep
from memory.contrast_budget import PREFACE, barred, fenced, one_line, source_lines

MAX_MODEL_CHARS = 24_000
SOURCE_FIELD = "source"


def text(finding: Finding) -> str:
    """For people: claims first, then what they are about."""
    return "\n".join([*_claims(finding), *_body(finding)])


def for_model(finding: Finding) -> str:
    """The same within bounds, after a line that says that all of it is data."""
    shown = text(finding)
    if len(shown) > MAX_MODEL_CHARS:
        shown = f"{shown[:MAX_MODEL_CHARS]}\n[{len(shown) - MAX_MODEL_CHARS} more characters left out for length]"
    return f"{PREFACE}\n\n{shown}"


def _claims(finding: Finding) -> list[str]:
    lines = [f"{one_line(c.text, 700)}{f' [{cited(c.steps)}]' if c.steps else ''}" for c in finding.claims]
    if isinstance(finding, Timeline):
        lines = [f"[{cited(c.steps)}] {one_line(c.text, 200)}" for c in finding.claims]
        if finding.total > len(lines):
            lines.insert(
                0, f"({finding.total - len(lines)} earlier steps left out; /timeline ROLLOUT shows one rollout)"
            )
        return lines or ["No step yet."]
    return lines


def cited(steps: tuple[str, ...]) -> str:
    return "] [".join(steps)


def _body(finding: Finding) -> list[str]:
    match finding:
        case StepShown():
            return step_lines(finding.step)
        case VariantShown():
            launch = finding.variant.launch.model_dump(mode="json", exclude_defaults=True)
            return [
                fenced(source_lines(finding.variant.source.rstrip()), "cuda"),
                f"launch spec, b_layout {finding.variant.b_layout}:",
                fenced(source_lines(json.dumps(launch, indent=1)), "json"),
            ]
        case Diff():
            knobs = [f"{name}: {old} → {new}" for name, old, new in finding.knobs]
            return [*knobs, *([fenced(source_lines("\n".join(finding.lines)), "diff")] if finding.lines else [])]
        case Profiles():
            return profile_lines(finding)
        case Rejection():
            return list(finding.log)
        case Best() | _:
            return []


def step_lines(step: TraceStep) -> list[str]:
    """A step as quotation: what the policy thought and said, what it sent, what it was answered."""
    lines: list[str] = []
    for name, said in (("reasoning", step.reasoning), ("said" if step.kind == "assistant" else "text", step.text)):
        if said and not (name == "text" and step.kind == "call"):
            lines += [f"{name}:", *barred(said)]
    if step.tool is not None:
        arguments = {k: v for k, v in step.arguments.items() if k != SOURCE_FIELD}
        if arguments:
            lines += ["arguments:", *barred(json.dumps(arguments))]
        source = step.arguments.get(SOURCE_FIELD)
        if isinstance(source, str):
            lines += ["source:", fenced(source_lines(source.rstrip()), "cuda")]
    if step.malformed:
        lines += [f"the call could not be read: {one_line(step.malformed)}"]
    if step.kind == "call":
        lines += ["answer:", *barred(pretty(step.text))] if step.text else ["no answer yet"]
    if step.kind == "finish" and step.detail:
        lines += barred(step.detail)
    return lines


def pretty(text_of_answer: str) -> str:
    """JSON with a line a field, anything else as it is."""
    found = fields(text_of_answer)
    if found is None:
        return text_of_answer
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in found.items()
    )


def fields(text_of_answer: str) -> dict[str, Any] | None:
    """Of an answer that is a JSON object; None for any other."""
    try:
        found: Any = json.loads(text_of_answer)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def profile_lines(found: Profiles) -> list[str]:
    if not found.rows:
        return []
    width = max(len(row.name) for row in found.rows)
    head = f"{'':<{width}}  {found.keys[0][:16]:>16}  {found.keys[1][:16]:>16}"
    return [head, *(f"{row.name:<{width}}  {number(row.a):>16}  {number(row.b):>16}" for row in found.rows)]


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
