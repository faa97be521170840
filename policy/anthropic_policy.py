"""A Claude model as policy: Messages API with tools, prompt caching, thinking blocks sent back as they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from policy.base import PolicyError, PolicyRequest, ToolSchema
from policy.pricing import usage
from policy.retrying import describe, with_retries
from policy.settings import PolicySettings
from tools.records import Step, ToolCall

if TYPE_CHECKING:
    import anthropic
    from anthropic.types import Message

KEY_NAME = "ANTHROPIC_API_KEY"
DEFAULT_URL = "https://api.anthropic.com"
_CACHE = {"type": "ephemeral"}


class AnthropicPolicy:
    """Raises PolicyError at construction if there is no key."""

    is_search = False

    def __init__(self, settings: PolicySettings, model: str, api_key: str | None, base_url: str | None) -> None:
        if not api_key:
            raise PolicyError(f"the policy 'anthropic' needs a key: export {KEY_NAME}=... (or use --policy search)")
        import anthropic

        self._settings = settings
        self._model = model
        self._errors: tuple[type[Exception], ...] = (anthropic.APIConnectionError,)
        self._error = anthropic.APIError
        self._client: anthropic.Anthropic = anthropic.Anthropic(
            api_key=api_key, base_url=base_url or DEFAULT_URL, max_retries=0, timeout=settings.timeout_s
        )

    @property
    def name(self) -> str:
        return f"anthropic:{self._model}"

    def close(self) -> None:
        self._client.close()

    def step(self, request: PolicyRequest) -> Step:
        body = self._body(request)
        try:
            message = with_retries(lambda: self._create(body), self._settings, self._errors)
        except self._error as error:
            what = describe("Anthropic", KEY_NAME, self._model, error, self._settings.max_attempts)
            raise PolicyError(what) from error
        if not hasattr(message, "content"):  # a server of something else: the SDK hands its page back as text
            raise PolicyError(f"{self._client.base_url} answered with no message; check --base-url")
        return parse_message(message, self._model, self._settings)

    def _create(self, body: dict[str, Any]) -> Message:
        return cast("Message", self._client.messages.create(**body))

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
            body["temperature"] = self._settings.temperature
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
            found.append({"role": "assistant", "content": step.raw or _blocks(step)})
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


def _blocks(step: Step) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": step.text}] if step.text else []
    blocks += [{"type": "tool_use", "id": c.call_id, "name": c.name, "input": c.arguments} for c in step.tool_calls]
    return blocks or [{"type": "text", "text": "(no answer)"}]


def parse_message(message: Message, model: str, settings: PolicySettings) -> Step:
    raw = [cast("dict[str, Any]", block.to_dict(mode="json", warnings=False)) for block in message.content]
    cut_off = message.stop_reason in ("max_tokens", "model_context_window_exceeded")
    calls: list[ToolCall] = []
    for block in raw:
        if block.get("type") != "tool_use":
            continue
        arguments = block.get("input")
        malformed = None
        if not isinstance(arguments, dict):
            malformed = f"the arguments of {block['name']} must be a JSON object"
        calls.append(
            ToolCall(
                call_id=block["id"],
                name=block["name"],
                arguments=arguments if isinstance(arguments, dict) else {},
                malformed=malformed,
            )
        )
    if cut_off and calls and raw[-1].get("type") == "tool_use":
        why = f"the call was cut off at {settings.max_output_tokens} output tokens; send a shorter one"
        calls[-1] = calls[-1].model_copy(update={"malformed": why})
    counts = message.usage
    return Step(
        role="assistant",
        text="\n".join(b["text"] for b in raw if b.get("type") == "text"),
        reasoning="\n".join(b.get("thinking", "") for b in raw if b.get("type") == "thinking"),
        tool_calls=tuple(calls),
        stop=_stop(message.stop_reason, bool(calls)),
        usage=usage(
            model,
            settings.prices,
            fresh_tokens=counts.input_tokens,
            cache_read_tokens=counts.cache_read_input_tokens or 0,
            cache_write_tokens=counts.cache_creation_input_tokens or 0,
            output_tokens=counts.output_tokens,
        ),
        raw=raw,
    )


def _stop(reason: str | None, calls: bool) -> Any:
    if reason == "refusal":
        return "refusal"
    if reason in ("max_tokens", "model_context_window_exceeded"):
        return "length"
    return "tool_calls" if calls else "end"
