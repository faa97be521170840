"""Recorded conversations with hosted models: what a policy sent, what the server answered, what the policy made of it.

A cassette is a JSON file in tests/data/cassettes, recorded by tests/record_cassettes.py from servers of our own. When
it is played, a server gives the recorded answers in turn to the real policy, and all that it sends is compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policy_kit import KEY, PATHS, base_url, request
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from policy.anthropic_policy import AnthropicPolicy
from policy.openai_policy import OpenAIPolicy
from policy.settings import PolicySettings
from policy.tool_schemas import tool_schemas
from tools.records import Step

FOLDER = Path(__file__).resolve().parent / "data" / "cassettes"
MODEL = "test-model-1"
AGAIN = "record anew with `python tests/record_cassettes.py`, and look at what differs"
#: Headers that say how the model is asked; everything else is the SDK's own.
HEADERS = ("anthropic-version", "authorization", "content-type", "x-api-key")
#: Of the base settings of every cassette.
BASE: dict[str, Any] = {
    "max_attempts": 4,
    "max_wait_s": 0.01,
    "timeout_s": 30,
    "max_output_tokens": 4096,
    "prices": {MODEL: {"input": 3, "output": 15, "cache_read": 0.3, "cache_write": 3.75}},
}

#: An answer of the server: a body, or the events of a stream, with its status and headers.
Reply = dict[str, Any]
#: A turn: the results of the calls before it, in their order, or what the user says; and the replies to its requests.
Turn = tuple[Sequence[str], Sequence[Reply]]


@dataclass(frozen=True)
class Conversation:
    """What a cassette is recorded from."""

    about: str
    provider: str
    turns: Sequence[Turn]
    tools: tuple[str, ...] = ("evaluate_plan", "verify", "profile", "submit")
    settings: dict[str, Any] = field(default_factory=dict)
    keyless: bool = False


def record(conversation: Conversation) -> dict[str, Any]:
    """Plays the conversation with the real policy and gives the cassette of it."""
    cassette: dict[str, Any] = {
        "about": conversation.about,
        "provider": conversation.provider,
        "keyless": conversation.keyless,
        "settings": conversation.settings,
        "tools": list(conversation.tools),
    }
    replies = [reply for _, replies in conversation.turns for reply in replies]
    with HTTPServer(port=0) as server:
        sent = serve(server, conversation.provider, replies)
        turns = []
        for told, step in take(server, cassette, [told for told, _ in conversation.turns]):
            exchanges = [{"request": one, "response": replies.pop(0)} for one in sent]
            sent.clear()
            kept = step.model_dump(mode="json", exclude_none=True)
            turns.append({"told": told, "exchanges": exchanges, "step": kept})
    if replies:
        raise ValueError(f"{len(replies)} replies were never asked for")
    return {**cassette, "turns": turns}


def play(server: HTTPServer, cassette: dict[str, Any]) -> list[tuple[Step, list[dict[str, Any]]]]:
    """Each turn of the real policy against the recorded answers, with the requests that it sent."""
    replies = [one["response"] for turn in cassette["turns"] for one in turn["exchanges"]]
    sent = serve(server, cassette["provider"], replies)
    found = []
    for _, step in take(server, cassette, [turn["told"] for turn in cassette["turns"]]):
        found.append((step, list(sent)))
        sent.clear()
    return found


def take(server: HTTPServer, cassette: dict[str, Any], tellings: Sequence[Sequence[str]]) -> Iterator[tuple[Any, Step]]:
    """The policy's turns, one after the other, each told what came of the one before it."""
    settings = PolicySettings.model_validate({**BASE, **cassette["settings"]})
    kind = {"anthropic": AnthropicPolicy, "openai": OpenAIPolicy}[cassette["provider"]]
    key = None if cassette["keyless"] else KEY
    policy = kind(settings, MODEL, key, base_url(server, cassette["provider"]))
    steps: list[Step] = [Step(role="system", text="You write CUDA kernels. Call one of the tools.")]
    tools = tuple(schema for schema in tool_schemas() if schema.name in cassette["tools"])
    try:
        for told in tellings:
            calls = steps[-1].tool_calls
            if calls:
                steps += [
                    Step(role="tool", text=text, call_id=call.call_id, tool=call.name)
                    for call, text in zip(calls, told, strict=True)
                ]
            else:
                steps += [Step(role="user", text=text) for text in told]
            asked = request(*steps).model_copy(update={"tools": tools})
            # As from the store: what a session keeps of a turn has to be enough for the next one.
            step = Step.from_json(policy.step(asked).to_json())
            steps.append(step)
            yield list(told), step
    finally:
        policy.close()


def serve(server: HTTPServer, provider: str, replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """Answers with the replies in turn. The list fills with what was sent, as a cassette holds it."""
    sent: list[dict[str, Any]] = []
    waiting = list(replies)
    tools: list[Any] = []

    def handle(incoming: Request) -> Response:
        sent.append(normalised(incoming, tools))
        return response(waiting.pop(0)) if waiting else Response("nothing more was recorded", status=500)

    server.expect_request(PATHS[provider], method="POST").respond_with_handler(handle)
    return sent


def normalised(incoming: Request, tools: list[Any]) -> dict[str, Any]:
    """Body and telling headers, without the key. Tools that were sent before, in ``tools``, are not written again."""
    body = json.loads(incoming.get_data())
    for name, value in ((name, incoming.headers.get(name)) for name in HEADERS):
        if value is not None:
            body.setdefault("_headers", {})[name] = value.replace(KEY, "[key]")
    if "tools" in body:
        known = body["tools"] in tools
        tools.append(body["tools"])
        body["tools"] = "as before" if known else body["tools"]
    return {**body, "_path": incoming.path}


def response(reply: Reply) -> Response:
    status, headers = reply.get("status", 200), reply.get("headers")
    if "events" in reply:
        return Response(reply["events"], status, headers, content_type="text/event-stream; charset=utf-8")
    return Response(json.dumps(reply["body"]), status, headers, content_type="application/json")


def text_of(cassette: dict[str, Any]) -> str:
    """As it stands in its file."""
    return json.dumps(cassette, indent=1, ensure_ascii=False) + "\n"


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
