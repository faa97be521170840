"""The Anthropic policy against a server of our own that speaks the Messages API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from policy_kit import request
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from policy.anthropic_policy import AnthropicPolicy, messages
from policy.base import PolicyError
from policy.settings import PolicySettings, Price
from tools.records import Step, ToolCall

MODEL = "claude-test-1"
SETTINGS = PolicySettings(
    max_attempts=3,
    max_wait_s=0.01,
    thinking={"type": "adaptive"},
    prices={MODEL: Price(input=4, output=20, cache_read=0.4, cache_write=5)},
)
THINKING = {"type": "thinking", "thinking": "K is short, so …", "signature": "c2lnbmVk"}
REDACTED = {"type": "redacted_thinking", "data": "b3BhcXVl"}


def answer(*content: dict[str, Any], stop: str = "tool_use", **usage: int) -> dict[str, Any]:
    counts = {"input_tokens": 100, "output_tokens": 50, **usage}
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": list(content),
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": counts,
    }


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def tool_use(name: str, call_id: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def make(server: HTTPServer, settings: PolicySettings = SETTINGS, model: str = MODEL) -> AnthropicPolicy:
    return AnthropicPolicy(settings, model, "sk-secret", server.url_for("/").rstrip("/"))


def serve(server: HTTPServer, *replies: dict[str, Any] | int | tuple[int, dict[str, str]]) -> list[dict[str, Any]]:
    """Answers with the replies in turn, the last one for ever: a body, a status, or a status with headers. Returns the
    list that the requests' bodies are put into."""
    bodies: list[dict[str, Any]] = []
    queue = list(replies)

    def handle(incoming: Request) -> Response:
        bodies.append({**json.loads(incoming.get_data()), "_headers": dict(incoming.headers)})
        reply = queue.pop(0) if len(queue) > 1 else queue[0]
        if isinstance(reply, dict):
            return Response(json.dumps(reply), content_type="application/json")
        status, headers = reply if isinstance(reply, tuple) else (reply, {})
        error = {"type": "error", "error": {"type": "some_error", "message": "it went wrong"}}
        return Response(json.dumps(error), status=status, headers=headers, content_type="application/json")

    server.expect_request("/v1/messages", method="POST").respond_with_handler(handle)
    return bodies


def test_plain_answer(httpserver: HTTPServer) -> None:
    bodies = serve(httpserver, answer(text("I think."), stop="end_turn"))
    step = make(httpserver).step(request())
    assert (step.role, step.text, step.tool_calls, step.stop) == ("assistant", "I think.", (), "end")
    sent = bodies[0]
    assert sent["model"] == MODEL and sent["thinking"] == {"type": "adaptive"} and "temperature" not in sent
    assert sent["system"] == [{"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}}]
    assert sent["messages"][0]["content"][-1]["cache_control"] == {"type": "ephemeral"}
    assert sent["_headers"]["Authorization"] == "Bearer sk-secret"
    schemas = {tool["name"]: tool["input_schema"] for tool in sent["tools"]}
    assert {"evaluate_plan", "evaluate_source", "verify", "time", "profile", "sanitize", "submit"} <= set(schemas)
    assert schemas["verify"]["properties"]["depth"]["enum"] == ["quick", "full"]
    assert schemas["evaluate_plan"]["required"] == ["family", "b_layout", "knobs"]


def test_a_temperature_is_sent_although_the_sdk_has_no_argument_of_that_name(httpserver: HTTPServer) -> None:
    bodies = serve(httpserver, answer(text("Cool."), stop="end_turn"))
    make(httpserver, SETTINGS.model_copy(update={"temperature": 0.5})).step(request())
    assert bodies[0]["temperature"] == 0.5


def test_parallel_tool_calls(httpserver: HTTPServer) -> None:
    plan = {"family": "toy", "b_layout": "nk", "knobs": {"BM": 32, "BN": 32}}
    serve(httpserver, answer(text("Two."), tool_use("evaluate_plan", "t1", plan), tool_use("list_families", "t2", {})))
    step = make(httpserver).step(request())
    assert [(c.call_id, c.name, c.malformed) for c in step.tool_calls] == [
        ("t1", "evaluate_plan", None),
        ("t2", "list_families", None),
    ]
    assert step.tool_calls[0].arguments == plan and step.stop == "tool_calls"


def test_thinking_goes_back_unchanged_and_results_share_a_message(httpserver: HTTPServer) -> None:
    content = [THINKING, REDACTED, text("Now."), tool_use("verify", "t1", {"key": "k"}), tool_use("profile", "t2", {})]
    bodies = serve(httpserver, answer(*content), answer(text("Done."), stop="end_turn"))
    policy = make(httpserver)
    first = policy.step(request())
    assert first.reasoning == "K is short, so …" and first.text == "Now." and first.raw == content
    # Through the store and back, as the loop keeps it.
    first = Step.from_json(first.to_json())
    results = [
        Step(role="tool", text=f"result {i}", call_id=c.call_id, tool=c.name) for i, c in enumerate(first.tool_calls)
    ]
    policy.step(request(Step(role="system", text="R"), Step(role="user", text="Go."), first, *results))
    sent = bodies[1]["messages"]
    assert [m["role"] for m in sent] == ["user", "assistant", "user"]
    assert sent[1]["content"] == content
    assert [(b["tool_use_id"], b["content"]) for b in sent[2]["content"]] == [("t1", "result 0"), ("t2", "result 1")]
    # The cache marker moves to the end; the prefix itself must stay as it was.
    assert "cache_control" in sent[2]["content"][-1] and "cache_control" not in sent[0]["content"][-1]


def test_steps_of_another_provider_are_rebuilt() -> None:
    call = ToolCall(call_id="a", name="submit", arguments={"key": "k"})
    sent = messages([Step(role="user", text="Go."), Step(role="assistant", text="So.", tool_calls=(call,))])
    assert sent[1]["content"] == [text("So."), tool_use("submit", "a", {"key": "k"})]


def test_malformed_arguments_are_marked(httpserver: HTTPServer) -> None:
    serve(httpserver, answer(tool_use("verify", "t1", "{not an object")))
    (call,) = make(httpserver).step(request()).tool_calls
    assert (call.malformed or "").startswith("the arguments of verify are not JSON (")
    assert call.arguments == {"malformed": "{not an object"}


def test_call_cut_off_at_the_limit_is_marked(httpserver: HTTPServer) -> None:
    serve(httpserver, answer(tool_use("evaluate_source", "t1", {"source": "half"}), stop="max_tokens"))
    step = make(httpserver).step(request())
    assert step.stop == "length" and "cut off" in (step.tool_calls[0].malformed or "")


def test_refusal(httpserver: HTTPServer) -> None:
    serve(httpserver, answer(text("No."), stop="refusal"))
    step = make(httpserver).step(request())
    assert step.stop == "refusal" and step.tool_calls == ()


@pytest.mark.parametrize("status", [408, 429, 500, 529])
def test_trouble_then_success(httpserver: HTTPServer, status: int) -> None:
    bodies = serve(httpserver, (status, {"retry-after": "0"}), status, answer(text("Here."), stop="end_turn"))
    assert make(httpserver).step(request()).text == "Here."
    assert len(bodies) == 3


def test_retry_after_is_capped_by_the_longest_pause(httpserver: HTTPServer) -> None:
    serve(httpserver, (429, {"retry-after": "3600"}), answer(text("Here."), stop="end_turn"))
    assert make(httpserver).step(request()).text == "Here."


def fails(make_call: Callable[[], Any]) -> str:
    with pytest.raises(PolicyError) as caught:
        make_call()
    words = str(caught.value)
    assert "\n" not in words and "sk-secret" not in words
    return words


def test_errors_to_the_end_are_one_sentence(httpserver: HTTPServer) -> None:
    bodies = serve(httpserver, 500)
    words = fails(lambda: make(httpserver).step(request()))
    assert "gave no answer in 3 attempts (HTTP 500" in words
    assert len(bodies) == 3, "one layer of retries, not two"


def test_refused_key_is_not_retried(httpserver: HTTPServer) -> None:
    bodies = serve(httpserver, 401)
    words = fails(lambda: make(httpserver).step(request()))
    assert "refused the key in ANTHROPIC_API_KEY (HTTP 401)" in words and len(bodies) == 1


def test_unknown_model_and_bad_request(httpserver: HTTPServer) -> None:
    serve(httpserver, 404)
    assert "does not know the model 'claude-test-1'" in fails(lambda: make(httpserver).step(request()))
    httpserver.clear()
    serve(httpserver, 400)
    assert "rejected the request (HTTP 400" in fails(lambda: make(httpserver).step(request()))


def test_something_that_is_no_such_server(httpserver: HTTPServer) -> None:
    httpserver.expect_request("/v1/messages").respond_with_data("<html>welcome</html>", content_type="text/html")
    assert "no message" in fails(lambda: make(httpserver).step(request()))


def test_no_server() -> None:
    policy = AnthropicPolicy(SETTINGS, MODEL, "sk-secret", "http://127.0.0.1:9")
    assert "gave no answer in 3 attempts" in fails(lambda: policy.step(request()))


def test_missing_key_names_the_variable() -> None:
    assert "export ANTHROPIC_API_KEY=" in fails(lambda: AnthropicPolicy(SETTINGS, MODEL, None, None))


def test_tokens_and_cost(httpserver: HTTPServer) -> None:
    counts = {"input_tokens": 1000, "output_tokens": 500}
    cache = {"cache_read_input_tokens": 20_000, "cache_creation_input_tokens": 3000}
    serve(httpserver, answer(text("x"), stop="end_turn", **counts, **cache))
    usage = make(httpserver).step(request()).usage
    assert usage is not None
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (24_000, 20_000, 500)
    assert usage.cost_usd == pytest.approx((1000 * 4 + 20_000 * 0.4 + 3000 * 5 + 500 * 20) / 1e6)
    free = make(httpserver, model="claude-unknown").step(request()).usage
    assert free is not None and free.cost_usd == 0.0 and free.output_tokens == 500
