"""What a local model may say in one turn, as a grammar: a few words, then one of the calls that would be run.

The calls are listed one by one: a task has some 150 plans that keep their family's constraints and are accepted at the
shape, so "valid" is a finite set and no constraint has to be said again. Words may end with the number of a plan in the
prompt's list, "#3": then its call follows as it stands, so that what is said is what is called. Pure text; the sampler
hands it to llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from policy.base import PolicyRequest
from policy.chat import CLOSE, OPEN, ChatError, Message, Tokenizer, call_message, segments
from policy.compact import listed_labels, plan_arguments
from tools.records import Plan

#: Before the number of a plan in the prompt's list.
NUMBER = "#"
#: Keys that may be submitted, the best ones.
MAX_KEYS = 16
#: What words are made of.
_SAID = rf"[^<\n{NUMBER}]"
#: Groups of tokens that llguidance decides on at once. Without one of the words' own it looks at every token of the
#: vocabulary at every step, which takes twenty times as long; the masks are the same.
SLICES = [f"{_SAID}{{1,10}}", f"{_SAID}{{1,30}}"]


class Frame(NamedTuple):
    """How a chat template writes a call: after nothing, after words, and behind it."""

    alone: str
    after_words: str
    end: str


def frame_of(tokenizer: Tokenizer, template: str | None) -> Frame:
    """Raises ChatError for a template whose calls are not JSON between the tags of policy/chat.py."""
    eos = tokenizer.eos_token or ""
    alone, end = _around(tokenizer, template, "")
    after, end_after = _around(tokenizer, template, _WORDS)
    parts = (alone, after.removeprefix(_WORDS), end.removesuffix(eos))
    if end != end_after or not after.startswith(_WORDS) or any(OPEN not in part for part in parts[:2]):
        raise ChatError(_OTHER_FORM)
    if CLOSE not in end or not end.endswith(eos) or "<" in after.removeprefix(_WORDS).partition(OPEN)[0]:
        raise ChatError(_OTHER_FORM)
    return Frame(*parts)


_WORDS = "some words"
_OTHER_FORM = (
    "the base's chat template writes calls in a form of its own: set policy.local.base.chat_template to a file like "
    "configs/chat/tools.jinja"
)


def _around(tokenizer: Tokenizer, template: str | None, words: str) -> tuple[str, str]:
    """What stands before and behind a call's JSON in a turn of the model."""
    arguments = {"probe": {"A": 1}}
    said: Message = {"role": "assistant", "content": words, "tool_calls": [call_message("call-0", "probe", arguments)]}
    told: Message = {"role": "user", "content": "probe"}
    found = segments(tokenizer, [told, said], [], template)
    turn = next(segment.text for segment in found if segment.own)
    before, json_text, behind = turn.partition(call_text("probe", arguments))
    if not json_text:
        raise ChatError(_OTHER_FORM)
    return before, behind


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """As chat templates write it with their filter ``tojson``."""
    return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)


class Option(NamedTuple):
    """A plan by its key and label, and the call that evaluates it: made once for a shape, asked for at every turn."""

    key: str
    label: str
    call: str


class Allowed(NamedTuple):
    """``lead``: what the turn begins with, so that a small model need not count. ``numbered``: those of the calls that
    a number of the prompt's list stands for."""

    lead: str
    calls: list[str]
    numbered: dict[int, str]


def lead_of(evaluations_left: int) -> str:
    return f"{evaluations_left} left."


def options(plans: Iterable[Plan]) -> list[Option]:
    return [Option(p.plan_id, p.label, call_text("evaluate_plan", plan_arguments(p))) for p in plans]


def allowed_calls(request: PolicyRequest, options: Sequence[Option]) -> Allowed:
    """Every call that the loop would run for this request: plans not tried yet while evaluations are left, which a
    rollout spends to the last, and then a submit of what passed: of its own, which it is rewarded for, if there is any.
    Empty if there is none. ``options`` are the plans that accept the task's shape."""
    lead = lead_of(request.evaluations_left)
    if request.evaluations_left > 0 and request.turns_left > 1:
        tried = {trial.key for trial in request.trials}
        if left := {option.label: option.call for option in options if option.key not in tried}:
            labels = listed_labels(request.steps)
            return Allowed(lead, list(left.values()), {n: left[label] for n, label in labels.items() if label in left})
    told = "\n".join(step.text for step in request.steps if step.role == "tool")
    passed = sorted((t for t in request.trials if t.ratio is not None), key=lambda trial: -(trial.ratio or 0.0))
    keys = dict.fromkeys([t.key for t in passed if t.key in told] or [t.key for t in passed])
    return Allowed(lead, [call_text("submit", {"key": key}) for key in list(keys)[:MAX_KEYS]], {})


def turn_grammar(allowed: Allowed, frame: Frame, words: int) -> str:
    """In llguidance's Lark: the lead and at most ``words`` characters more that open no tag and name no number, then
    exactly one of the calls; or a number, and its call. Without words, a call alone."""
    listed = " | ".join(_quoted(call + frame.end) for call in allowed.calls)
    if not words:
        return f"start: BEFORE CALL\nBEFORE: {_quoted(frame.alone)}\nCALL: {listed}\n"
    ways, ends = ["LEAD WORDS? BEFORE CALL"], ""
    for number, call in allowed.numbered.items():
        ways.append(f'LEAD WORDS? "{NUMBER}{number}" BEFORE CALL{number}')
        ends += f"CALL{number}: {_quoted(call + frame.end)}\n"
    return (
        f"start: {' | '.join(ways)}\n"
        f"LEAD: {_quoted(allowed.lead)}\n"
        f"WORDS: /{_SAID}{{1,{words}}}/\n"
        f"BEFORE: {_quoted(frame.after_words)}\n"
        f"CALL: {listed}\n{ends}"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
