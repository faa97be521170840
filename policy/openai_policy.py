"""Any OpenAI-compatible chat endpoint as policy (OpenAI, vLLM, llama.cpp, …): Chat Completions with tools.

Chat Completions and not Responses, because that is what compatible servers have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

from policy.base import PolicyRequest, ToolSchema
from policy.hosted import HostedPolicy
from policy.pricing import usage
from policy.settings import PolicySettings
from policy.streaming import assembling, is_event_stream
from policy.tidying import (
    BadAnswer,
    Garbled,
    arguments_of,
    count,
    decoded,
    kept,
    listed,
    mapping_of,
    name_of,
    text_of,
)
from tools.records import Step, ToolCall

if TYPE_CHECKING:
    import openai

KEY_NAME = "OPENAI_API_KEY"
#: Where servers put the reasoning of a turn: vLLM and DeepSeek the first, OpenRouter and newer vLLM the second.
_REASONING_FIELDS = ("reasoning_content", "reasoning")


class OpenAIPolicy(HostedPolicy):
    kind = "openai"
    key_name = KEY_NAME
    default_url = "https://api.openai.com/v1"
    provider = "the OpenAI endpoint"
    without_key = "(a server of your own needs none: --base-url http://localhost:8000/v1)"

    _client: openai.OpenAI

    @property
    def _keyless(self) -> bool:
        return self._local

    def _connect(self, key: str | None, url: str) -> None:
        import openai
        from httpx2 import RequestError

        self._errors = (openai.APIError,)
        self._connection_errors = (openai.APIConnectionError, RequestError)
        self._client = openai.OpenAI(
            api_key=key or "none",
            base_url=url,
            max_retries=0,
            timeout=self._settings.timeout_s,
            http_client=openai.DefaultHttpxClient(**self._http_client_options()),
        )

    def _ask(self, body: dict[str, Any]) -> Mapping[str, Any]:
        if not self._settings.stream:
            response = self._client.chat.completions.with_raw_response.create(**body)
            return decoded(response.http_response.read(), "chat completion")
        stream = self._client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        with closing(stream):
            if not is_event_stream(stream.response.headers):
                return decoded(stream.response.read(), "chat completion")
            with assembling(self._connection_errors):
                return self._assembled(stream)

    def _assembled(self, stream: Any) -> Mapping[str, Any]:
        from openai import APIConnectionError, APIError
        from openai.lib.streaming.chat import ChatCompletionStreamState

        state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
        usage, finished = None, False
        try:
            for chunk in stream:
                state.handle_chunk(chunk)
                usage = chunk.usage or usage  # the helper keeps the last chunk's, which may state none
                finished = finished or any(choice.finish_reason for choice in chunk.choices)
        except APIConnectionError:
            raise
        except APIError as error:
            raise Garbled(f"broke off with an error: {error.message}") from None
        if not finished:
            raise Garbled("stopped in the middle of its answer")
        # Not the helper's final completion: that raises where the answer was cut off at the limit.
        found = state.current_completion_snapshot.to_dict(mode="json", warnings=False)
        for choice in cast("list[dict[str, Any]]", found["choices"]):
            choice["message"].pop("parsed", None)
        return {**found, "usage": usage.to_dict(mode="json", warnings=False) if usage else None}

    def _parse(self, answer: Mapping[str, Any]) -> Step:
        return parse_completion(answer, self._model, self._settings)

    def _body(self, request: PolicyRequest) -> dict[str, Any]:
        # OpenAI's reasoning models take only the new name of the limit; older compatible servers only the old one.
        limit = "max_tokens" if self._local else "max_completion_tokens"
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages(request.steps),
            limit: self._settings.max_output_tokens,
        }
        if request.tools:
            body["tools"] = [tool(schema) for schema in request.tools]
        if self._settings.temperature is not None:
            body["temperature"] = self._settings.temperature
        if self._settings.effort is not None:
            body["reasoning_effort"] = self._settings.effort
        return body


def tool(schema: ToolSchema) -> dict[str, Any]:
    function = {"name": schema.name, "description": schema.description, "parameters": schema.parameters}
    return {"type": "function", "function": function}


def messages(steps: Sequence[Step]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for step in steps:
        if step.role == "tool":
            found.append({"role": "tool", "tool_call_id": step.call_id, "content": step.text})
        elif step.role == "assistant":
            found.append(_assistant(step))
        else:
            found.append({"role": step.role, "content": step.text})
    return found


def _assistant(step: Step) -> dict[str, Any]:
    """What the model sent, unchanged — but for calls that were no JSON, which servers (vLLM) refuse to read back."""
    message: dict[str, Any] = dict(step.raw[0]) if step.raw else {"role": "assistant", "content": step.text}
    if step.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name or "unknown", "arguments": json.dumps(call.arguments)},
            }
            for call in step.tool_calls
        ]
    elif not message.get("content"):
        message["content"] = "(no answer)"  # a message of nothing is refused
    return message


def parse_completion(answer: Mapping[str, Any], model: str, settings: PolicySettings) -> Step:
    """Raises BadAnswer. A call that cannot be run is marked; the rest of the turn stands."""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = mapping_of(choice).get("message")
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise BadAnswer("answered with no chat completion; check --base-url")
    reason = choice.get("finish_reason")
    given = listed(message.get("tool_calls"), "tool calls")
    calls = tuple(_call(mapping_of(one), reason == "length", settings) for one in given)
    refusal = text_of(message.get("refusal"))
    counts = answer.get("usage")
    prompt_tokens = count(counts, "prompt_tokens")
    cached = min(prompt_tokens, count(mapping_of(counts).get("prompt_tokens_details"), "cached_tokens"))
    return Step(
        role="assistant",
        text=_content(message.get("content")) or refusal,
        reasoning=next((text for f in _REASONING_FIELDS if (text := text_of(message.get(f)))), ""),
        tool_calls=calls,
        stop=_stop(reason, bool(refusal), bool(calls)),
        usage=usage(
            model,
            settings.prices,
            fresh_tokens=prompt_tokens - cached,
            cache_read_tokens=cached,
            output_tokens=count(counts, "completion_tokens"),
        ),
        raw=[{**kept({k: v for k, v in message.items() if k != "tool_calls"}), "role": "assistant"}],
    )


def _content(content: object) -> str:
    """Some servers answer with a list of parts."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "".join(text_of(part.get("text")) for part in content)
    if content is not None and not isinstance(content, str):
        raise BadAnswer(f"answered with content that is no text, but {type(content).__name__}")
    return text_of(content)


def _call(call: Mapping[str, Any], cut_off: bool, settings: PolicySettings) -> ToolCall:
    function = mapping_of(call.get("function"))
    name = name_of(function.get("name"))
    arguments, malformed = arguments_of(name, function.get("arguments"))
    if malformed and cut_off:
        malformed = f"the call was cut off at {settings.max_output_tokens} output tokens; send a shorter one"
    return ToolCall(call_id=name_of(call.get("id")), name=name, arguments=arguments, malformed=malformed)


def _stop(reason: object, refusal: bool, calls: bool) -> Any:
    if refusal or reason == "content_filter":
        return "refusal"
    if reason == "length":
        return "length"
    return "tool_calls" if calls else "end"
