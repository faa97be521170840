"""A conversation as the tokens of a chat model, and a model's text as a turn. What trains and what samples share.

Tokens are made segment by segment (what the model was told, what it said, what it was told, …), so that the boundaries
of a trained turn are exactly those of a sampled one. Knows a tokenizer by its methods; imports nothing heavy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from policy.base import ToolSchema
from tools.paths import configs_dir
from tools.records import Step, ToolCall

Message = dict[str, Any]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)


class ChatError(ValueError):
    """A conversation that the template cannot render as training needs it; one sentence."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    eos_token: str | None
    chat_template: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...


class Encoded(NamedTuple):
    """``mask`` is 1 on what the model itself said, its end token included."""

    ids: list[int]
    mask: list[int]

    @property
    def prompt_length(self) -> int:
        """Tokens before the model first speaks."""
        return self.mask.index(1) if 1 in self.mask else len(self.mask)


class Segment(NamedTuple):
    text: str
    own: bool  # said by the model


# --- values → messages ------------------------------------------------------------------------------------------------


def messages_of(steps: Iterable[Step]) -> list[Message]:
    """In the form that chat templates read. Reasoning and a provider's own blocks are left out."""
    return [_message(step) for step in steps]


def _message(step: Step) -> Message:
    message: Message = {"role": step.role, "content": step.text}
    if step.tool_calls:
        message["tool_calls"] = [call_message(c.call_id, c.name, c.arguments) for c in step.tool_calls]
    if step.role == "tool":
        message |= {"tool_call_id": step.call_id or "", "name": step.tool or ""}
    return message


def call_message(call_id: str, name: str, arguments: Mapping[str, Any]) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def tool_messages(schemas: Iterable[ToolSchema]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": schema.model_dump(mode="json")} for schema in schemas]


# --- messages → tokens ------------------------------------------------------------------------------------------------


@cache
def own_template() -> str:
    return (configs_dir() / "chat" / "tools.jinja").read_text(encoding="utf-8")


def template_for(tokenizer: Tokenizer) -> str | None:
    """None where the base's own chat template shows tools and calls; ours otherwise."""
    if not tokenizer.chat_template:
        return own_template()
    tools = tool_messages(
        [ToolSchema(name="probe_tool", description="d", parameters={"type": "object", "properties": {}})]
    )
    call = call_message("call-0", "probe_call", {"probe_argument": 1})
    told = [{"role": "user", "content": "probe"}]
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        text = tokenizer.apply_chat_template([*told, said], tools=tools, tokenize=False)
    except Exception:  # whatever a template raises: it cannot do it
        return own_template()
    return None if all(word in text for word in ("probe_tool", "probe_call", "probe_argument")) else own_template()


def encode(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    template: str | None,
    trained: Sequence[bool] | None = None,
) -> Encoded:
    """A whole conversation. ``trained``: of each of the model's turns, whether its ``mask`` is 1. Raises ChatError."""
    found = segments(tokenizer, messages, tools, template)
    if trained is not None:
        keep = iter(trained)
        found = [Segment(s.text, next(keep)) if s.own else s for s in found]
    return _tokens(tokenizer, found)


def segments(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    template: str | None,
    next_turn: bool = False,
) -> list[Segment]:
    """Alternately what the model was told and what it said."""

    def render(count: int, opened: bool) -> str:
        given: dict[str, Any] = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": opened}
        if template is not None:
            given["chat_template"] = template
        try:
            return str(tokenizer.apply_chat_template(list(messages[:count]), **given))
        except Exception as error:
            raise ChatError(f"the chat template cannot render this conversation: {_line(error)}") from error

    found: list[Segment] = []
    done = ""
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        told, said = render(place, True), render(place + 1, False)
        if not (told.startswith(done) and said.startswith(told)):
            raise ChatError(
                "the chat template writes earlier turns anew when later ones come, so their tokens cannot be told "
                "apart: set base.chat_template to a file like configs/chat/tools.jinja"
            )
        end = _turn_end(said, len(told), tokenizer.eos_token)
        found += [Segment(told[len(done) :], False), Segment(said[len(told) : end], True)]
        done = said[:end]
    rest = render(len(messages), next_turn)
    if not rest.startswith(done):
        raise ChatError("the chat template changes what was said before when a turn is added; use another template")
    return [*found, Segment(rest[len(done) :], False)] if rest != done else found


def _turn_end(text: str, begin: int, eos: str | None) -> int:
    """After the end token: what the template puts behind it was not said by the model."""
    place = text.rfind(eos, begin) if eos else -1
    return place + len(eos or "") if place >= begin else len(text)


def _tokens(tokenizer: Tokenizer, found: Sequence[Segment]) -> Encoded:
    ids: list[int] = []
    mask: list[int] = []
    for segment in found:
        new = tokenizer.encode(segment.text, add_special_tokens=False)
        ids += new
        mask += [int(segment.own)] * len(new)
    return Encoded(ids, mask)


# --- a model's text → a turn ------------------------------------------------------------------------------------------


def parse_turn(text: str) -> Step:
    """Every call that the text holds. One that is cut off or is no JSON becomes a malformed call, which the loop
    answers with the sentence."""
    calls = tuple(_calls(text))
    said = _CALL.sub("", text).strip()
    return Step(role="assistant", text=said, tool_calls=calls, stop="tool_calls" if calls else "end")


def _calls(text: str) -> Iterator[ToolCall]:
    for number, found in enumerate(_CALL.finditer(text)):
        yield _call(found.group(1), f"call-{number}")


def _call(body: str, call_id: str) -> ToolCall:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        why = f"the call is not JSON ({_line(error)[:100]})"
        return ToolCall(call_id=call_id, name="unreadable", arguments={}, malformed=why)
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", {}) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        why = 'a call is an object with "name" and "arguments"'
        return ToolCall(call_id=call_id, name="unreadable", arguments={}, malformed=why)
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
