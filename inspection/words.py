"""One line about a step, for people and for models; safe for a terminal. Pure."""

from __future__ import annotations

from inspection.trace import PENDING, Trace, TraceStep
from memory.contrast_budget import one_line
from tools.records import Status

MAX_LINE = 160
_WORDS = {Status.NOT_RECORDED.value: "not recorded", Status.FAILED.value: "rejected", PENDING: "running, no answer yet"}


def title(step: TraceStep) -> str:
    """What happened in this step."""
    match step.kind:
        case "system":
            return "system prompt"
        case "user":
            return "prompt" if step.step_id.endswith(".1") or step.step_id.endswith(".0") else "note of the loop"
        case "assistant":
            return _turn(step)
        case "call":
            return _call(step)
        case _:
            what = f"finish: {step.tool} {step.mode or ''}".strip()
            return f"{what} {named(step)} → {outcome(step)}"


def _turn(step: TraceStep) -> str:
    words = "policy's turn"
    if step.stop in ("refusal", "length"):
        words += {"refusal": " (refused)", "length": " (cut off at its limit)"}[step.stop]
    said = one_line(step.text or step.reasoning, MAX_LINE)
    return f"{words}: {said}" if said else words


def _call(step: TraceStep) -> str:
    about = f" {named(step)}" if step.key else ""
    return f"{one_line(step.tool or '(no name)', 60)}{about} → {outcome(step)}"


def named(step: TraceStep) -> str:
    """The label, and the key where that does not hold it."""
    if not step.label or step.key is None:
        return str(step.key)
    return one_line(step.label, 240) if step.key in step.label else f"{one_line(step.label, 240)} ({step.key})"


def outcome(step: TraceStep) -> str:
    """The verdict, with the ratio or the reason."""
    if step.ratio is not None:
        return f"{step.ratio:.3f}x of cuBLASLt{', best so far' if step.rose else ''}"
    if step.refused:
        return f"not run: {one_line(step.detail, MAX_LINE)}" if step.detail else "not run"
    word = _WORDS.get(step.status or "", step.status or "")
    if step.reason:
        word = f"{word}: {step.reason}"
    return f"{word} ({one_line(step.detail, MAX_LINE)})" if step.detail and not step.reason else word


def heading(trace: Trace) -> list[str]:
    """What a reader wants to know first."""
    lines = [
        f"{trace.session_id}: {trace.task.op} {trace.task.label} by {trace.policy}, {trace.state}",
        ", ".join(filter(None, (trace.device.label, trace.device.protocol_remark))),
    ]
    evaluated = max((s.evaluated for s in trace.steps), default=0)
    best = next((s for s in reversed(trace.steps) if s.rose), None)
    lines.append(f"{evaluated} variants evaluated; best of the screen {f'{best.ratio:.3f}x' if best else 'none yet'}")
    if trace.tokens:
        lines[-1] += f"; {trace.tokens} tokens, ${trace.cost_usd:.2f}"
    if trace.activity and trace.state != "finished":
        lines.append(f"last: {one_line(trace.activity)}")
    return [*lines, *trace.remarks]
