"""The OpenAI policy against a server of our own that speaks Chat Completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from policy_kit import request
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from policy.base import PolicyError
from policy.endpoints import is_local
from policy.openai_policy import OpenAIPolicy
from policy.settings import PolicySettings, Price
from tools.records import Step

MODEL = "test-model"
SETTINGS = PolicySettings(max_attempts=3, max_wait_s=0.01, prices={MODEL: Price(input=2, output=10, cache_read=0.2)})


def answer(
    content: str | None = None, calls: list[dict[str, Any]] | None = None, finish: str = "", **message: Any
) -> dict[str, Any]:
    body: dict[str, Any] = {"role": "assistant", "content": content, **message}
    if calls:
        body["tool_calls"] = calls
    return {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": body, "finish_reason": finish or ("tool_calls" if calls else "stop")}],
        "usage": {
            "prompt_tokens": 1000,
            "completion_tokens": 200,
            "total_tokens": 1200,
            "prompt_tokens_details": {"cached_tokens": 600},
        },
    }


def tool_call(name: str, call_id: str | None, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def serve(server: HTTPServer, *replies: dict[str, Any] | tuple[int, dict[str, Any]] | str) -> list[dict[str, Any]]:
    """Answers with the replies in turn, the last one for ever: a body, a status with an error, or text that is none."""
    bodies: list[dict[str, Any]] = []
    queue = list(replies)

    def handle(incoming: Request) -> Response:
        bodies.append({**json.loads(incoming.get_data()), "_headers": dict(incoming.headers)})
        reply = queue.pop(0) if len(queue) > 1 else queue[0]
        if isinstance(reply, str):
            return Response(reply, content_type="text/html")
        if isinstance(reply, tuple):
            status, error = reply
            return Response(json.dumps({"error": error}), status=status, content_type="application/json")
        return Response(json.dumps(reply), content_type="application/json")

    server.expect_request("/v1/chat/completions", method="POST").respond_with_handler(handle)
    return bodies


def make(server: HTTPServer, key: str | None = "sk-secret", settings: PolicySettings = SETTINGS) -> OpenAIPolicy:
    return OpenAIPolicy(settings, MODEL, key, server.url_for("/v1"))


def test_plain_answer(httpserver: HTTPServer) -> None:
    bodies = serve(httpserver, answer("I think."))
    step = make(httpserver).step(request())
    assert (step.text, step.tool_calls, step.stop) == ("I think.", (), "end")
    sent = bodies[0]
    assert sent["messages"] == [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Go."}]
    assert sent["_headers"]["Authorization"] == "Bearer sk-secret"
    assert sent["max_tokens"] == SETTINGS.max_output_tokens and "temperature" not in sent
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sent["tools"]}
    assert functions["evaluate_source"]["properties"]["launch"]["type"] == "object"
    assert "$defs" not in json.dumps(functions) and "$ref" not in json.dumps(functions)


def test_local_server_needs_no_key(httpserver: HTTPServer) -> None:
    bodies = serve(httpserver, answer("Hello."))
    assert make(httpserver, key=None).step(request()).text == "Hello."
    assert bodies[0]["_headers"]["Authorization"] == "Bearer none"


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://localhost:8000/v1", True),
        ("http://127.0.0.1:8000", True),
        ("http://10.1.2.3/v1", True),
        ("http://gpu-node:8000/v1", True),
        ("http://vllm.local/v1", True),
        ("http://[::1]:8000/v1", True),
        ("https://api.openai.com/v1", False),
        ("https://8.8.8.8/v1", False),
        (None, False),
    ],
)
def test_what_is_local(url: str | None, local: bool) -> None:
    assert is_local(url) is local


def test_missing_key_names_the_variable_and_the_way_out() -> None:
    with pytest.raises(PolicyError, match="export OPENAI_API_KEY=") as caught:
        OpenAIPolicy(SETTINGS, MODEL, None, None)
    assert "--base-url http://localhost:8000/v1" in str(caught.value)


def test_parallel_tool_calls_and_the_way_back(httpserver: HTTPServer) -> None:
    calls = [tool_call("verify", "a", '{"key": "k"}'), tool_call("profile", "b", '{"key": "k"}')]
    bodies = serve(httpserver, answer("Both.", calls, reasoning_content="Hmm."), answer("Done."))
    policy = make(httpserver)
    first = policy.step(request())
    assert [(c.call_id, c.name, c.arguments) for c in first.tool_calls] == [
        ("a", "verify", {"key": "k"}),
        ("b", "profile", {"key": "k"}),
    ]
    assert first.reasoning == "Hmm." and first.stop == "tool_calls"
    first = Step.from_json(first.to_json())
    results = [Step(role="tool", text=f"result {c.call_id}", call_id=c.call_id) for c in first.tool_calls]
    policy.step(request(Step(role="system", text="R"), Step(role="user", text="Go."), first, *results))
    sent = bodies[1]["messages"]
    assert sent[2]["reasoning_content"] == "Hmm." and sent[2]["content"] == "Both."
    assert [c["id"] for c in sent[2]["tool_calls"]] == ["a", "b"]
    assert [(m["tool_call_id"], m["content"]) for m in sent[3:]] == [("a", "result a"), ("b", "result b")]


def test_malformed_arguments_are_answered_and_go_back_as_json(httpserver: HTTPServer) -> None:
    calls = [tool_call("verify", "a", '{"key": '), tool_call("profile", "b", "[1]"), tool_call("submit", "c", "")]
    bodies = serve(httpserver, answer(None, calls), answer("Sorry."))
    policy = make(httpserver)
    step = policy.step(request())
    broken, listed, empty = step.tool_calls
    assert "are not JSON" in (broken.malformed or "") and broken.arguments == {"malformed": '{"key": '}
    assert "must be a JSON object, not list" in (listed.malformed or "")
    assert empty.malformed is None and empty.arguments == {}
    policy.step(request(Step(role="user", text="Go."), step, Step(role="tool", text="no", call_id="a")))
    for sent in bodies[1]["messages"][1]["tool_calls"]:
        json.loads(sent["function"]["arguments"])


def test_call_cut_off_at_the_limit(httpserver: HTTPServer) -> None:
    serve(httpserver, answer(None, [tool_call("evaluate_source", "a", '{"source": "half')], finish="length"))
    step = make(httpserver).step(request())
    assert step.stop == "length" and "cut off" in (step.tool_calls[0].malformed or "")


@pytest.mark.parametrize(
    "reply", [answer(None, refusal="I cannot."), answer("", finish="content_filter")], ids=["refusal", "filter"]
)
def test_refusal(httpserver: HTTPServer, reply: dict[str, Any]) -> None:
    serve(httpserver, reply)
    step = make(httpserver).step(request())
    assert step.stop == "refusal" and step.tool_calls == ()


def test_rate_limit_then_success(httpserver: HTTPServer) -> None:
    bodies = serve(httpserver, (429, {"message": "slow down"}), (503, {"message": "busy"}), answer("Here."))
    assert make(httpserver).step(request()).text == "Here."
    assert len(bodies) == 3


def fails(policy: OpenAIPolicy) -> str:
    with pytest.raises(PolicyError) as caught:
        policy.step(request())
    words = str(caught.value)
    assert "\n" not in words and "sk-secret" not in words
    return words


def test_errors_to_the_end_are_one_sentence(httpserver: HTTPServer) -> None:
    bodies = serve(httpserver, (500, {"message": "boom"}))
    assert "gave no answer in 3 attempts (HTTP 500" in fails(make(httpserver))
    assert len(bodies) == 3


def test_refused_key_and_empty_account_are_not_retried(httpserver: HTTPServer) -> None:
    bodies = serve(httpserver, (401, {"message": "bad key"}))
    assert "refused the key in OPENAI_API_KEY (HTTP 401)" in fails(make(httpserver))
    assert len(bodies) == 1
    httpserver.clear()
    bodies = serve(httpserver, (429, {"message": "pay", "code": "insufficient_quota"}))
    assert "no credit left" in fails(make(httpserver))
    assert len(bodies) == 1


def test_something_that_is_no_such_server(httpserver: HTTPServer) -> None:
    serve(httpserver, "<html>welcome</html>")
    assert "no chat completion" in fails(make(httpserver))
    httpserver.clear()
    serve(httpserver, {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": []})
    assert "no chat completion" in fails(make(httpserver))


def test_tokens_and_cost(httpserver: HTTPServer) -> None:
    serve(httpserver, answer("x"))
    usage = make(httpserver).step(request()).usage
    assert usage is not None
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (1000, 600, 200)
    assert usage.cost_usd == pytest.approx((400 * 2 + 600 * 0.2 + 200 * 10) / 1e6)


def test_server_without_usage(httpserver: HTTPServer) -> None:
    reply = answer("x")
    del reply["usage"]
    serve(httpserver, reply)
    usage = make(httpserver).step(request()).usage
    assert usage is not None and usage.input_tokens == 0 and usage.cost_usd == 0.0
