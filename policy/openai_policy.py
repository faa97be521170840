"""Any OpenAI-compatible chat endpoint as policy (OpenAI, vLLM, llama.cpp, …): Chat Completions with tools.

Chat Completions and not Responses, because that is what compatible servers have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from policy.base import PolicyError, PolicyRequest, ToolSchema
from policy.pricing import usage
from policy.retrying import describe, is_local, with_retries
from policy.settings import PolicySettings
from tools.records import Step, ToolCall

if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletion

KEY_NAME = "OPENAI_API_KEY"
DEFAULT_URL = "https://api.openai.com/v1"
#: Where servers put the reasoning of a turn: vLLM and DeepSeek the first, OpenRouter and newer vLLM the second.
_REASONING_FIELDS = ("reasoning_content", "reasoning")


class OpenAIPolicy:
    """Raises PolicyError at construction if there is no key and the server is not local."""

    is_search = False

    def __init__(self, settings: PolicySettings, model: str, api_key: str | None, base_url: str | None) -> None:
        if not api_key and not is_local(base_url):
            raise PolicyError(
                f"the policy 'openai' needs a key: export {KEY_NAME}=... "
                "(a server of your own needs none: --base-url http://localhost:8000/v1)"
            )
        import openai

        self._settings = settings
        self._model = model
        self._hosted = not is_local(base_url)
        self._errors: tuple[type[Exception], ...] = (openai.APIConnectionError,)
        self._error = openai.APIError
        self._client: openai.OpenAI = openai.OpenAI(
            api_key=api_key or "none", base_url=base_url or DEFAULT_URL, max_retries=0, timeout=settings.timeout_s
        )

    @property
    def name(self) -> str:
        return f"openai:{self._model}"

    def close(self) -> None:
        self._client.close()

    def step(self, request: PolicyRequest) -> Step:
        body = self._body(request)
        try:
            completion = with_retries(lambda: self._create(body), self._settings, self._errors)
        except self._error as error:
            what = describe("the OpenAI endpoint", KEY_NAME, self._model, error, self._settings.max_attempts)
            raise PolicyError(what) from error
        # A server of something else: the SDK hands its page back as text, or a completion without choices.
        if not getattr(completion, "choices", None):
            raise PolicyError(f"{self._client.base_url} answered with no chat completion; check --base-url")
        return parse_completion(completion, self._model, self._settings)

    def _create(self, body: dict[str, Any]) -> ChatCompletion:
        return cast("ChatCompletion", self._client.chat.completions.create(**body))

    def _body(self, request: PolicyRequest) -> dict[str, Any]:
        # OpenAI's reasoning models take only the new name of the limit; older compatible servers only the old one.
        limit = "max_completion_tokens" if self._hosted else "max_tokens"
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
            {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in step.tool_calls
        ]
    return message


def parse_completion(completion: ChatCompletion, model: str, settings: PolicySettings) -> Step:
    choice = completion.choices[0]
    message = cast("dict[str, Any]", choice.message.to_dict(mode="json", warnings=False))
    cut_off = choice.finish_reason == "length"
    calls = tuple(_call(c, cut_off, settings) for c in message.get("tool_calls") or [])
    refusal = message.get("refusal")
    counts = completion.usage
    details = counts.prompt_tokens_details if counts else None
    cached = (details.cached_tokens or 0) if details else 0
    return Step(
        role="assistant",
        text=message.get("content") or refusal or "",
        reasoning=next((str(message[f]) for f in _REASONING_FIELDS if message.get(f)), ""),
        tool_calls=calls,
        stop=_stop(choice.finish_reason, bool(refusal), bool(calls)),
        usage=usage(
            model,
            settings.prices,
            fresh_tokens=(counts.prompt_tokens - cached) if counts else 0,
            cache_read_tokens=cached,
            output_tokens=counts.completion_tokens if counts else 0,
        ),
        raw=[{k: v for k, v in message.items() if k != "tool_calls"}],
    )


def _call(call: dict[str, Any], cut_off: bool, settings: PolicySettings) -> ToolCall:
    function = call.get("function") or {}
    name = str(function.get("name") or "")
    text = function.get("arguments") or "{}"
    arguments: Any = {}
    malformed = None
    try:
        arguments = json.loads(text)
        if not isinstance(arguments, dict):
            malformed = f"the arguments of {name} must be a JSON object, not {type(arguments).__name__}"
    except ValueError as error:
        malformed = f"the arguments of {name} are not JSON ({error}); send the call again"
        if cut_off:
            malformed = f"the call was cut off at {settings.max_output_tokens} output tokens; send a shorter one"
    if malformed:
        arguments = {"malformed": str(text)[:2000]}
    return ToolCall(call_id=str(call.get("id") or ""), name=name, arguments=arguments, malformed=malformed)


def _stop(reason: str | None, refusal: bool, calls: bool) -> Any:
    if refusal or reason == "content_filter":
        return "refusal"
    if reason == "length":
        return "length"
    return "tool_calls" if calls else "end"
