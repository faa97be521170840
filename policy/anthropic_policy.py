"""A Claude model as policy: Messages API with tools, prompt caching, thinking blocks sent back as they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from policy.base import PolicyRequest, ToolSchema
from policy.hosted import HostedPolicy
from policy.pricing import usage
from policy.settings import PolicySettings
from policy.streaming import assembling, is_event_stream
from policy.tidying import BadAnswer, Garbled, arguments_of, count, decoded, kept, listed, name_of, text_of
from tools.records import Step, ToolCall

if TYPE_CHECKING:
    import anthropic

KEY_NAME = "ANTHROPIC_API_KEY"
_CACHE = {"type": "ephemeral"}
_CUT_OFF = ("max_tokens", "model_context_window_exceeded")


class AnthropicPolicy(HostedPolicy):
    kind = "anthropic"
    key_name = KEY_NAME
    default_url = "https://api.anthropic.com"
    provider = "Anthropic"
    without_key = "(or use --policy search)"

    _client: anthropic.Anthropic

    def _connect(self, key: str | None, url: str) -> None:
        import anthropic
        from httpx2 import RequestError

        self._errors = (anthropic.APIError,)
        self._connection_errors = (anthropic.APIConnectionError, RequestError)
        self._client = anthropic.Anthropic(
            api_key=key,
            base_url=url,
            max_retries=0,
            timeout=self._settings.timeout_s,
            http_client=anthropic.DefaultHttpxClient(**self._http_client_options()),
        )

    def _ask(self, body: dict[str, Any]) -> Mapping[str, Any]:
        if not self._settings.stream:
            response = self._client.messages.with_raw_response.create(**body)
            return decoded(response.http_response.read(), "message")
        stream = self._client.messages.create(**body, stream=True)
        with closing(stream):
            if not is_event_stream(stream.response.headers):
                return decoded(stream.response.read(), "message")
            with assembling(self._connection_errors):
                return self._assembled(stream)

    def _assembled(self, stream: Any) -> Mapping[str, Any]:
        from anthropic import NOT_GIVEN, APIStatusError
        from anthropic.lib.streaming import MessageStream

        message: MessageStream[None] = MessageStream(stream, NOT_GIVEN)
        seen = set()
        try:
            for event in message:
                seen.add(event.type)
        except APIStatusError as error:  # an error event; the status is that of the stream, 200
            raise Garbled(f"broke off with an error: {error.api_message or error.type}") from None
        if not {"message_start", "message_stop"} <= seen:
            raise Garbled("stopped in the middle of its answer")
        return message.current_message_snapshot.to_dict(mode="json", warnings=False)

    def _parse(self, answer: Mapping[str, Any]) -> Step:
        return parse_message(answer, self._model, self._settings)

    def _body(self, request: PolicyRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": self._settings.max_output_tokens,
            "messages": messages(request.steps),
            "tools": [tool(schema) for schema in request.tools],
        }
        system = "\n\n".join(s.text for s in request.steps if s.role == "system")
        if system:
            # Tools precede the system prompt in the cached prefix, so one marker covers both.
            body["system"] = [{"type": "text", "text": system, "cache_control": _CACHE}]
        if self._settings.temperature is not None:
            body["extra_body"] = {"temperature": self._settings.temperature}  # the SDK has no argument of that name
        if self._settings.thinking is not None:
            body["thinking"] = self._settings.thinking
        if self._settings.effort is not None:
            body["output_config"] = {"effort": self._settings.effort}
        return body


def tool(schema: ToolSchema) -> dict[str, Any]:
    return {"name": schema.name, "description": schema.description, "input_schema": schema.parameters}


def messages(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The conversation in Anthropic's form. Results of parallel calls share one user message, in call order; the last
    block carries the cache marker."""
    found: list[dict[str, Any]] = []
    for step in steps:
        if step.role == "system":
            continue
        if step.role == "assistant":
            found.append({"role": "assistant", "content": _sent_back(step)})
            continue
        block: dict[str, Any] = {"type": "text", "text": step.text}
        if step.role == "tool":
            block = {"type": "tool_result", "tool_use_id": step.call_id, "content": step.text}
        if found and found[-1]["role"] == "user":
            found[-1]["content"].append(block)
        else:
            found.append({"role": "user", "content": [block]})
    if found and found[-1]["role"] == "user":
        found[-1]["content"][-1] = {**found[-1]["content"][-1], "cache_control": _CACHE}
    return found


def _sent_back(step: Step) -> list[dict[str, Any]]:
    """What the model sent, unchanged — but calls have the ids that their results have, and names and arguments that the
    API takes back."""
    if not step.raw:
        return _blocks(step)
    calls = iter(step.tool_calls)
    blocks = []
    for block in step.raw:
        call = next(calls, None) if block.get("type") == "tool_use" else None
        blocks.append(block if call is None else _tool_use(call))
    return blocks


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name or "unknown", "input": call.arguments}


def _blocks(step: Step) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": step.text}] if step.text else []
    blocks += [_tool_use(call) for call in step.tool_calls]
    return blocks or [{"type": "text", "text": "(no answer)"}]


def parse_message(answer: Mapping[str, Any], model: str, settings: PolicySettings) -> Step:
    """Raises BadAnswer. A call that cannot be run is marked; the rest of the turn stands."""
    content = answer.get("content")
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise BadAnswer("answered with no message; check --base-url")
    reason = answer.get("stop_reason")
    calls = [_call(block) for block in listed([b for b in content if b.get("type") == "tool_use"], "tool calls")]
    if reason in _CUT_OFF and calls and content[-1].get("type") == "tool_use":
        why = f"the call was cut off at {settings.max_output_tokens} output tokens; send a shorter one"
        calls[-1] = calls[-1].model_copy(update={"malformed": why})
    counts = answer.get("usage")
    return Step(
        role="assistant",
        text="\n".join(text_of(b.get("text")) for b in content if b.get("type") == "text"),
        reasoning="\n".join(text_of(b.get("thinking")) for b in content if b.get("type") == "thinking"),
        tool_calls=tuple(calls),
        stop=_stop(reason, bool(calls)),
        usage=usage(
            model,
            settings.prices,
            fresh_tokens=count(counts, "input_tokens"),
            cache_read_tokens=count(counts, "cache_read_input_tokens"),
            cache_write_tokens=count(counts, "cache_creation_input_tokens"),
            output_tokens=count(counts, "output_tokens"),
        ),
        raw=_raw(content, calls),
    )


def _call(block: Mapping[str, Any]) -> ToolCall:
    name = name_of(block.get("name"))
    arguments, malformed = arguments_of(name, block.get("input"))
    return ToolCall(call_id=name_of(block.get("id")), name=name, arguments=arguments, malformed=malformed)


def _raw(content: Sequence[Mapping[str, Any]], calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """The blocks as they came. A call's arguments may be nested without end, so they are those of the parsed call."""
    rest = iter(calls)
    return [_tool_use(next(rest)) if b.get("type") == "tool_use" else kept(dict(b)) for b in content]


def _stop(reason: object, calls: bool) -> Any:
    if reason == "refusal":
        return "refusal"
    if reason in _CUT_OFF:
        return "length"
    return "tool_calls" if calls else "end"
