"""Both hosted policies behind one face: what a server of theirs answers with, and the policy that asks it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from fakes import ScriptedDevice
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from policy.anthropic_policy import AnthropicPolicy
from policy.base import PolicyError, PolicyRequest
from policy.hosted import HostedPolicy
from policy.openai_policy import OpenAIPolicy
from policy.settings import PolicySettings
from policy.tool_schemas import tool_schemas
from tools.hgemm import hgemm
from tools.records import Step

PROVIDERS = ("anthropic", "openai")
PATHS = {"anthropic": "/v1/messages", "openai": "/v1/chat/completions"}
KEY = "sk-Qz7x/Wv9k+Jy3=42"
SETTINGS = PolicySettings(max_attempts=2, max_wait_s=0.01, timeout_s=5, thinking=None)

Reply = dict[str, Any] | bytes | str | Response


def message(
    provider: str, text: str = "", calls: list[tuple[str, Any]] | None = None, **changes: Any
) -> dict[str, Any]:
    """A well-formed answer; ``changes`` replace fields of it. Arguments go as the provider sends them."""
    if provider == "anthropic":
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        content += [
            {"type": "tool_use", "id": f"t{i}", "name": name, "input": arguments}
            for i, (name, arguments) in enumerate(calls or [])
        ]
        body: dict[str, Any] = {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": content,
            "stop_reason": "tool_use" if calls else "end_turn",
            "usage": {"input_tokens": 10, "output_tokens": 5},
        }
    else:
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            said["tool_calls"] = [
                {
                    "id": f"t{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(calls)
            ]
        body = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "message": said, "finish_reason": "tool_calls" if calls else "stop"}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5},
        }
    return {**body, **changes}


def serve(server: HTTPServer, provider: str, *replies: Reply | Callable[[Request], Response]) -> list[dict[str, Any]]:
    """Answers with the replies in turn, the last one for ever. Returns the list of the requests' bodies."""
    bodies: list[dict[str, Any]] = []
    queue = list(replies)

    def handle(incoming: Request) -> Response:
        bodies.append(json.loads(incoming.get_data()))
        reply = queue.pop(0) if len(queue) > 1 else queue[0]
        if callable(reply) and not isinstance(reply, Response):
            return reply(incoming)
        if isinstance(reply, dict):
            return Response(json.dumps(reply), content_type="application/json")
        if isinstance(reply, (str, bytes)):
            return Response(reply, content_type="application/json")
        return reply

    server.expect_request(PATHS[provider], method="POST").respond_with_handler(handle)
    return bodies


def events(provider: str, answer: dict[str, Any], piece: int = 7) -> list[str]:
    """A well-formed answer as the provider streams it: texts, reasoning and arguments in pieces of a few characters."""

    def pieces(text: str) -> list[str]:
        return [text[at : at + piece] for at in range(0, len(text), piece)]

    def event(data: dict[str, Any]) -> str:
        named = f"event: {data['type']}\n" if provider == "anthropic" else ""
        return f"{named}data: {json.dumps(data)}\n\n"

    if provider == "anthropic":
        usage = answer["usage"]
        start = {**answer, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
        found = [{"type": "message_start", "message": start}, {"type": "ping"}]
        for index, block in enumerate(answer["content"]):
            empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
            begun = {**block, **empty.get(block["type"], {})}
            found.append({"type": "content_block_start", "index": index, "content_block": begun})
            deltas: list[dict[str, Any]] = []
            if block["type"] == "text":
                deltas = [{"type": "text_delta", "text": one} for one in pieces(block["text"])]
            if block["type"] == "thinking":
                deltas = [{"type": "thinking_delta", "thinking": one} for one in pieces(block["thinking"])]
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            if block["type"] == "tool_use":
                text = block["input"] if isinstance(block["input"], str) else json.dumps(block["input"])
                deltas = [{"type": "input_json_delta", "partial_json": one} for one in pieces(text)]
            found += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            found.append({"type": "content_block_stop", "index": index})
        end = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
        found += [{"type": "message_delta", "delta": end, "usage": {"output_tokens": usage["output_tokens"]}}]
        return [event(one) for one in [*found, {"type": "message_stop"}]]
    choice = answer["choices"][0]
    said = choice["message"]
    deltas = [{"role": "assistant", "content": ""}]
    for field in ("reasoning_content", "content"):
        deltas += [{field: one} for one in pieces(said.get(field) or "")]
    for index, call in enumerate(said.get("tool_calls") or []):
        function = call["function"]
        deltas.append({"tool_calls": [{**call, "index": index, "function": {**function, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": one}}]} for one in pieces(function["arguments"])
        ]
    common = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunks = [{**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**common, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    chunks.append({**common, "choices": [], "usage": answer["usage"]})
    return [*(event(one) for one in chunks), "data: [DONE]\n\n"]


def streamed(parts: Sequence[str]) -> Response:
    return Response(list(parts), content_type="text/event-stream; charset=utf-8")


def failure(provider: str, status: int, said: str, headers: Mapping[str, str] | None = None) -> Response:
    error = {"type": "error", "error": {"type": "some_error", "message": said}}
    return Response(json.dumps(error), status=status, headers=headers, content_type="application/json")


def at(provider: str, url: str, settings: PolicySettings = SETTINGS, key: str | None = KEY) -> HostedPolicy:
    kind: type[HostedPolicy] = AnthropicPolicy if provider == "anthropic" else OpenAIPolicy
    return kind(settings, "some-model", key, url)


def make(server: HTTPServer, provider: str, settings: PolicySettings = SETTINGS) -> HostedPolicy:
    return at(provider, base_url(server, provider), settings)


def base_url(server: HTTPServer, provider: str) -> str:
    return server.url_for("/v1" if provider == "openai" else "").rstrip("/")


def request(*steps: Step) -> PolicyRequest:
    return PolicyRequest(
        task=hgemm(64, 64, 64),
        device=ScriptedDevice().info,
        tools=tool_schemas(),
        steps=steps or (Step(role="system", text="Rules."), Step(role="user", text="Go.")),
        evaluations_left=8,
        turns_left=8,
    )


def fails(policy: HostedPolicy) -> str:
    """The one sentence of a turn that fails, without a trace of the key or of the error behind it."""
    with pytest.raises(PolicyError) as caught:
        policy.step(request())
    policy.close()
    sentence = str(caught.value)
    assert "\n" not in sentence and "Traceback" not in sentence and 10 < len(sentence) < 700
    assert "Wv9k" not in sentence
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    return sentence
