"""Both hosted policies behind one face: what a server of theirs answers with, and the policy that asks it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
