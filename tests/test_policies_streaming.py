"""Answers as streams: put together as if they had come whole; broken ones are asked for again, or end in a sentence."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loop_kit import make_deps, run
from policy_kit import KEY, PROVIDERS, at, events, fails, failure, make, message, request, serve, streamed
from pytest_httpserver import HTTPServer
from werkzeug import Response

from policy.redacting import REDACTED
from policy.settings import PolicySettings
from tools.records import Step

CALLS = [("verify", {"key": "k\u00e9y", "depth": "full"}), ("evaluate_plan", {"knobs": {"BM": 64}}), ("submit", {})]
THINKING = {"type": "thinking", "thinking": "K is short, so split it.", "signature": "c2lnbmVk"}
REDACTED_THINKING = {"type": "redacted_thinking", "data": "b3BhcXVl"}


def full(provider: str, text: str = "First, a look at what limits it. \u00e4\U0001f600") -> dict[str, Any]:
    answer = message(provider, text, CALLS)
    if provider == "anthropic":
        answer["content"][:0] = [THINKING, REDACTED_THINKING]
        answer["usage"] |= {"cache_read_input_tokens": 30, "cache_creation_input_tokens": 7, "output_tokens": 55}
    else:
        answer["choices"][0]["message"]["reasoning_content"] = THINKING["thinking"]
        answer["usage"] |= {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 60}}
    return answer


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_a_stream_says_what_the_whole_would(httpserver: HTTPServer, provider: str, piece: int) -> None:
    answer = full(provider)
    bodies = serve(httpserver, provider, streamed(events(provider, answer, piece)), message(provider, "Good."))
    policy = make(httpserver, provider)
    step = policy.step(request())
    whole = policy._parse(answer)
    assert step.model_dump(exclude={"raw"}) == whole.model_dump(exclude={"raw"})
    assert step.reasoning == THINKING["thinking"] and [c.name for c in step.tool_calls] == [name for name, _ in CALLS]
    assert bodies[0]["stream"] is True
    # Thinking goes back as it came, through the store and a stream or not.
    results = [Step(role="tool", text="r", call_id=c.call_id, tool=c.name) for c in step.tool_calls]
    policy.step(request(Step(role="user", text="Go."), Step.from_json(step.to_json()), *results))
    back = bodies[1]["messages"]
    if provider == "anthropic":
        assert back[1]["content"] == answer["content"]
    else:
        assert bodies[0]["stream_options"] == {"include_usage": True}
        assert back[1]["reasoning_content"] == THINKING["thinking"] and "parsed" not in back[1]
        assert [c["function"]["name"] for c in back[1]["tool_calls"]] == [name for name, _ in CALLS]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_streams_can_be_turned_off(httpserver: HTTPServer, provider: str) -> None:
    bodies = serve(httpserver, provider, message(provider, "Whole."))
    settings = PolicySettings(stream=False, max_attempts=1)
    assert make(httpserver, provider, settings).step(request()).text == "Whole."
    assert "stream" not in bodies[0] and "stream_options" not in bodies[0]


def cut(parts: list[str]) -> list[str]:
    return parts[: len(parts) // 2]


def with_garbage(parts: list[str]) -> list[str]:
    return [*cut(parts), "event: content_block_delta\ndata: {not json\n\n", *parts[len(parts) // 2 :]]


def with_nonsense(parts: list[str]) -> list[str]:
    odd = {"type": "content_block_delta", "index": 99, "delta": {"type": "text_delta", "text": 5}}
    odd |= {"object": "chat.completion.chunk", "choices": [{"index": 99, "delta": {"tool_calls": [{}]}}]}
    return [*cut(parts), f"event: content_block_delta\ndata: {json.dumps(odd)}\n\n", *parts[len(parts) // 2 :]]


def with_an_error(parts: list[str]) -> list[str]:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": f"too many of {KEY}"}}
    return [*cut(parts), f"event: error\ndata: {json.dumps(error)}\n\n"]


BROKEN: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "cut": (cut, "stopped in the middle of its answer (2 attempts)"),
    "empty": (lambda parts: [], "stopped in the middle"),
    "only the end": (lambda parts: parts[-1:], "stopped in the middle"),
    "garbage": (with_garbage, "sent a stream that cannot be put together (JSONDecodeError)"),
    "nonsense": (with_nonsense, "sent a stream that cannot be put together ("),
    "an error": (with_an_error, f"broke off with an error: too many of {REDACTED}"),
}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_stream_is_asked_for_again(httpserver: HTTPServer, provider: str, what: str) -> None:
    damage, words = BROKEN[what]
    parts = events(provider, full(provider))
    good = streamed(events(provider, message(provider, "Here.")))
    bodies = serve(httpserver, provider, streamed(damage(parts)), good)
    assert make(httpserver, provider).step(request()).text == "Here." and len(bodies) == 2
    httpserver.clear()
    serve(httpserver, provider, lambda _: streamed(damage(parts)))
    assert words in fails(make(httpserver, provider))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_connection_is_lost_in_a_stream(provider: str) -> None:
    from test_policies_malformed import raw_server

    half = "".join(cut(events(provider, full(provider)))).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    def behave(connection: socket.socket) -> None:
        connection.sendall(head + f"{len(half):x}\r\n".encode() + half + b"\r\n")

    with raw_server(behave) as port:
        sentence = fails(at(provider, f"http://127.0.0.1:{port}"))
    assert f"127.0.0.1:{port} gave no answer in 2 attempts: the connection was lost" in sentence


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rate_limit_then_a_stream(httpserver: HTTPServer, provider: str) -> None:
    limited = failure(provider, 429, "slow down", {"retry-after": "0"})
    bodies = serve(httpserver, provider, limited, streamed(events(provider, message(provider, "Here."))))
    assert make(httpserver, provider).step(request()).text == "Here." and len(bodies) == 2


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_key_in_pieces_is_redacted(httpserver: HTTPServer, provider: str) -> None:
    answer = full(provider, f"My key is {KEY}.")
    if provider == "anthropic":
        answer["content"][0] = {**THINKING, "thinking": f"hm, {KEY}"}
    else:
        answer["choices"][0]["message"]["reasoning_content"] = f"hm, {KEY}"
    serve(httpserver, provider, streamed(events(provider, answer, 3)))
    step = make(httpserver, provider).step(request())
    assert step.text == f"My key is {REDACTED}." and step.reasoning == f"hm, {REDACTED}"
    assert "Wv9k" not in step.to_json()


def test_a_call_cut_off_at_the_limit(httpserver: HTTPServer) -> None:
    answer = message("anthropic", "x", [("evaluate_source", '{"source": "half')], stop_reason="max_tokens")
    serve(httpserver, "anthropic", streamed(events("anthropic", answer)))
    step = make(httpserver, "anthropic").step(request())
    assert step.stop == "length" and "cut off" in (step.tool_calls[0].malformed or "")
    answer = message("openai", "x", [("evaluate_source", {"source": "whole"})])
    answer["choices"][0]["finish_reason"] = "length"
    answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = '{"source": "half'
    httpserver.clear()
    serve(httpserver, "openai", streamed(events("openai", answer)))
    step = make(httpserver, "openai").step(request())
    assert step.stop == "length" and "cut off" in (step.tool_calls[0].malformed or "")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_streams_without_end_are_ended(httpserver: HTTPServer, provider: str) -> None:
    parts = events(provider, message(provider, "x" * 500_000), 500_000)
    largest = max(parts, key=len)

    def huge() -> Iterator[str]:
        yield from parts[: parts.index(largest)]
        for _ in range(1000):
            yield largest

    def slow() -> Iterator[str]:
        yield from parts[:2]
        for _ in range(1200):
            yield ": ping\n\n"
            time.sleep(0.05)

    serve(httpserver, provider, lambda _: Response(huge(), content_type="text/event-stream"))
    assert "sent an answer of more than 8 MiB" in fails(make(httpserver, provider))
    httpserver.clear()
    serve(httpserver, provider, lambda _: Response(slow(), content_type="text/event-stream"))
    began = time.monotonic()
    settings = PolicySettings(max_attempts=2, timeout_s=0.5, max_wait_s=0.01)
    assert "was not done with its answer after 0.5 s" in fails(make(httpserver, provider, settings))
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("provider", PROVIDERS)
def test_usage_of_a_stream_counts_towards_the_budget(httpserver: HTTPServer, tmp_path: Any, provider: str) -> None:
    looking = message(provider, "Let me see.", [("list_families", {})])
    bodies = serve(httpserver, provider, lambda _: streamed(events(provider, looking)))
    deps = make_deps(tmp_path, make(httpserver, provider), session__group_size=1, session__rounds=1, budget__tokens=40)
    state, _ = run(deps)
    assert len(bodies) == 3 and state["stopped_by"] == "tokens", "15 tokens a turn"
