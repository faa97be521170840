"""Answers that no server should give: each ends in a step whose bad calls are marked, or in one sentence."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from loop_kit import ScriptedPolicy, call, make_deps, plan_call, run, tool_texts, turn
from policy_kit import PROVIDERS, at, base_url, fails, failure, make, message, request, serve
from pytest_httpserver import HTTPServer
from records_kit import agent, make_record
from werkzeug import Response

from policy.base import PolicyError
from policy.settings import PolicySettings
from tools.records import Step, ToolCall

DEEP = "[" * 100_000 + "]" * 100_000


def said(provider: str, **changes: Any) -> dict[str, Any]:
    """An answer whose content is exchanged: the message's fields for OpenAI, the answer's for Anthropic."""
    body = message(provider, "x")
    if provider == "openai":
        body["choices"][0]["message"] |= changes
    else:
        body |= changes
    return body


def usage(provider: str, value: Any) -> dict[str, Any]:
    return message(provider, "x", usage={"input_tokens" if provider == "anthropic" else "prompt_tokens": value})


#: What is answered, and words of the sentence.
BROKEN: dict[str, tuple[Callable[[str], Any], str]] = {
    "bad JSON": (lambda p: json.dumps(message(p, "x"))[:-9], "broken JSON; check --base-url (2 attempts)"),
    "no UTF-8": (lambda p: b'{"id": "\xff"}', "broken JSON"),
    "empty body": (lambda p: b"", "broken JSON"),
    "HTML": (lambda p: Response("\n<!doctype html><p>Welcome", content_type="text/html"), "a web page"),
    "JSON text": (lambda p: b'"hello"', "but with str; check --base-url"),
    "JSON null": (lambda p: b"null", "but with NoneType"),
    "an empty object": (lambda p: b"{}", "check --base-url"),
    "an error in a 200": (
        lambda p: {"error": {"message": "out of cheese"}},
        "an error and no",
    ),
    "nested without end": (lambda p: f'{{"content": {DEEP}}}', "nested without end"),
    "usage is text": (lambda p: usage(p, "many"), "token usage that cannot be"),
    "usage is negative": (lambda p: usage(p, -1), "token usage that cannot be"),
    "usage is huge": (lambda p: usage(p, 10**30), "token usage that cannot be"),
    "usage is a list": (lambda p: message(p, "x", usage=[1]), "token usage that is no object"),
    "20 MB": (lambda p: message(p, "x" * 20_000_000), "more than 8 MiB"),
    "content is a number": (lambda p: said(p, content=5), "answered with"),
    "100 calls": (lambda p: message(p, "", [("submit", {})] * 100), "answered with 100 tool calls in one turn"),
}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("what", BROKEN)
def test_broken_answers_are_one_sentence(httpserver: HTTPServer, provider: str, what: str) -> None:
    reply, words = BROKEN[what]
    serve(httpserver, provider, reply(provider))
    sentence = fails(make(httpserver, provider))
    assert words in sentence, sentence
    assert f"at localhost:{httpserver.port} " in sentence


@pytest.mark.parametrize(
    "body",
    [
        {"choices": []},
        {"choices": {}},
        {"choices": [5]},
        {"choices": [{"message": None}]},
        {"choices": [{"index": 0}]},
        {"choices": None},
    ],
)
def test_completions_without_a_message(httpserver: HTTPServer, body: dict[str, Any]) -> None:
    serve(httpserver, "openai", message("openai", "x", **body))
    assert "no chat completion" in fails(make(httpserver, "openai"))


@pytest.mark.parametrize("content", [None, {}, "text", ["text"], [None]])
def test_messages_without_blocks(httpserver: HTTPServer, content: Any) -> None:
    serve(httpserver, "anthropic", message("anthropic", "x", content=content))
    assert "answered with no message" in fails(make(httpserver, "anthropic"))


def test_calls_that_are_no_list(httpserver: HTTPServer) -> None:
    serve(httpserver, "openai", said("openai", tool_calls={"id": "x"}))
    assert "tool calls that are no list" in fails(make(httpserver, "openai"))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_after_garbage_another_attempt(httpserver: HTTPServer, provider: str) -> None:
    bodies = serve(httpserver, provider, '{"id": "cut of', message(provider, "Here."))
    assert make(httpserver, provider).step(request()).text == "Here." and len(bodies) == 2


@pytest.mark.parametrize("provider", PROVIDERS)
def test_usage_that_is_missing_or_harmless(httpserver: HTTPServer, provider: str) -> None:
    for value, tokens in ((None, 0), ("12", 12), (12.0, 12)):
        httpserver.clear()
        serve(httpserver, provider, usage(provider, value))
        step = make(httpserver, provider).step(request())
        assert step.usage is not None and step.usage.input_tokens == tokens
    httpserver.clear()
    serve(httpserver, provider, message(provider, "x", usage=None))
    assert make(httpserver, provider).step(request()).text == "x"


def test_content_in_parts(httpserver: HTTPServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "url": "b"}, {"type": "text", "text": "c"}]
    serve(httpserver, "openai", said("openai", content=parts))
    assert make(httpserver, "openai").step(request()).text == "ac"


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


#: A call's arguments, and words of what the model is told.
BAD_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "list": ([1], "must be a JSON object, not list"),
    "number": (5, "must be a JSON object, not int"),
    "text": ("text", "are not JSON"),
    "deep": (nested(200), "nested more than 64 levels deep"),
    "surrogate": ({"key": "\ud800"}, "half a surrogate pair"),
    "NUL": ({"key": "a\x00b"}, "NUL character"),
    "NUL in a name": ({"k\x00": 1}, "NUL character"),
    "infinite": ({"key": float("inf")}, "not finite"),
    "huge": ({"key": 10**100}, "more than 64 bits"),
}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("what", BAD_ARGUMENTS)
def test_bad_arguments_spoil_only_their_call(httpserver: HTTPServer, provider: str, what: str) -> None:
    given, words = BAD_ARGUMENTS[what]
    if provider == "openai" and what == "text":
        answer = message(provider, "x", [("verify", {}), ("submit", {"key": "k"})])
        answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = given
    else:
        answer = message(provider, "x", [("verify", given), ("submit", {"key": "k"})])
    bodies = serve(httpserver, provider, answer, message(provider, "Sorry."))
    policy = make(httpserver, provider)
    step = policy.step(request())
    bad, good = step.tool_calls
    assert words in (bad.malformed or "") and good.malformed is None and good.arguments == {"key": "k"}
    # It can be stored, read back and sent on.
    again = Step.from_json(step.to_json())
    assert again == step
    results = [Step(role="tool", text="no", call_id=c.call_id, tool=c.name) for c in again.tool_calls]
    assert policy.step(request(Step(role="user", text="Go."), again, *results)).text == "Sorry."
    assert "verify" in json.dumps(bodies[1]["messages"])


@pytest.mark.parametrize("given", [{"key": "k"}, '{"key": "k"}'])
def test_arguments_as_an_object_or_as_text_of_one(httpserver: HTTPServer, given: Any) -> None:
    answer = message("openai", "", [("submit", {})])
    answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = given
    serve(httpserver, "openai", answer)
    (submit,) = make(httpserver, "openai").step(request()).tool_calls
    assert submit.arguments == {"key": "k"} and submit.malformed is None


def test_arguments_of_json_text_nested_without_end(httpserver: HTTPServer) -> None:
    answer = message("openai", "", [("submit", {})])
    answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = DEEP
    serve(httpserver, "openai", answer)
    (submit,) = make(httpserver, "openai").step(request()).tool_calls
    assert "nested too deeply" in (submit.malformed or "") and len(submit.arguments["malformed"]) == 2000


@pytest.mark.parametrize("entry", [None, 5, {}, {"function": None}, {"id": 7, "function": {"name": 3}}])
def test_calls_that_are_none(httpserver: HTTPServer, entry: Any) -> None:
    serve(httpserver, "openai", said("openai", tool_calls=[entry]))
    (found,) = make(httpserver, "openai").step(request()).tool_calls
    assert (found.name, found.call_id, found.arguments) == ("", "", {})


@pytest.mark.parametrize("provider", PROVIDERS)
def test_text_that_cannot_be_stored(httpserver: HTTPServer, provider: str) -> None:
    serve(httpserver, provider, message(provider, "a\ud800b\x00c"))
    step = make(httpserver, provider).step(request())
    assert step.text == "a\ufffdb\ufffdc" and Step.from_json(step.to_json()) == step
    assert make(httpserver, provider).step(request(Step(role="user", text="Go."), step)).text == step.text


@pytest.mark.parametrize("provider", PROVIDERS)
def test_odd_names_of_tools(httpserver: HTTPServer, provider: str) -> None:
    serve(httpserver, provider, message(provider, "", [("x" * 5000, {}), ("a b", {}), ("", {})]))
    calls = make(httpserver, provider).step(request()).tool_calls
    assert [c.name for c in calls] == ["", "", ""]


def test_ids_that_repeat_are_renamed_on_both_sides(httpserver: HTTPServer, tmp_path: Path) -> None:
    """Anthropic refuses a result whose id is not that of a call."""
    first = message("anthropic", "x", [("list_families", {}), ("list_families", {})])
    for block in first["content"][1:]:
        block["id"] = "same"
    bodies = serve(httpserver, "anthropic", first, message("anthropic", "That is all.", stop_reason="refusal"))
    run(make_deps(tmp_path, make(httpserver, "anthropic"), session__group_size=1, session__rounds=1))
    asked, told = bodies[1]["messages"][1]["content"][1:], bodies[1]["messages"][2]["content"]
    ids = [block["id"] for block in asked]
    assert len(set(ids)) == 2 and ids == [block["tool_use_id"] for block in told]


@pytest.mark.parametrize(
    "bad",
    [ToolCall(call_id="x", name="submit", arguments={}, malformed="no"), call("fly"), call("verify", key=5)],
    ids=["malformed", "unknown", "invalid"],
)
def test_calls_that_cannot_be_run_end_a_rollout_after_three_repairs(tmp_path: Path, bad: ToolCall) -> None:
    policy = ScriptedPolicy(*[turn(bad) for _ in range(20)])
    deps = make_deps(tmp_path, policy, session__group_size=1, session__rounds=1)
    run(deps)
    trajectory = deps.trajectory(0)
    assert trajectory.ended_by == "repairs" and len(policy.requests) == 4
    assert all("error" in text for text in tool_texts(trajectory.steps))
    assert any("After 1 more failed repairs" in step.text for step in trajectory.steps)


def test_a_good_call_begins_the_count_anew(tmp_path: Path) -> None:
    bad, good = turn(call("fly")), turn(plan_call(32, 32))
    policy = ScriptedPolicy(bad, bad, bad, good, bad, bad, bad, turn(call("fly")))
    deps = make_deps(tmp_path, policy, session__group_size=1, session__rounds=1)
    run(deps)
    assert deps.trajectory(0).ended_by == "repairs" and len(policy.requests) == 8


# --- no answer -------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def raw_server(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """Accepts, reads the request and does with the connection what it is told."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def work() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    try:
                        connection.recv(1 << 16)
                        behave(connection)
                    except OSError:
                        continue

        threading.Thread(target=work, daemon=True).start()
        yield int(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_refused_connection(provider: str) -> None:
    port = free_port()
    sentence = fails(at(provider, f"http://127.0.0.1:{port}/v1"))
    assert f"at 127.0.0.1:{port} gave no answer in 2 attempts: the connection was refused; start the server" in sentence


@pytest.mark.parametrize("provider", PROVIDERS)
def test_unknown_name(provider: str) -> None:
    assert "no-such-host.invalid:80 gave no answer in 2 attempts: its name is not known (DNS)" in fails(
        at(provider, "http://no-such-host.invalid/v1")
    )


@pytest.mark.parametrize("provider", PROVIDERS)
def test_no_tls_there(httpserver: HTTPServer, provider: str) -> None:
    sentence = fails(at(provider, base_url(httpserver, provider).replace("http:", "https:")))
    assert f":{httpserver.port} gave no answer in 2 attempts: TLS failed (" in sentence and "http://" in sentence


def test_certificate_of_nobody(tmp_path: Path) -> None:
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("no openssl to make a certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with HTTPServer(ssl_context=context) as server:
        sentence = fails(at("openai", f"https://localhost:{server.port}/v1"))
    assert "certificate is not trusted (self-signed certificate)" in sentence and "SSL_CERT_FILE" in sentence


@pytest.mark.parametrize("provider", PROVIDERS)
def test_silence_and_dripping_end_in_time(provider: str) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n")
        for _ in range(600):
            connection.sendall(b" ")
            time.sleep(0.1)

    settings = PolicySettings(max_attempts=1, max_wait_s=0.01, timeout_s=0.4)
    with raw_server(lambda connection: time.sleep(2)) as port:
        assert "it timed out; raise policy.timeout_s" in fails(at(provider, f"http://127.0.0.1:{port}", settings))
    began = time.monotonic()
    with raw_server(drip) as port:
        assert "was not done with its answer after 0.4 s" in fails(at(provider, f"http://127.0.0.1:{port}", settings))
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_connection_lost_in_the_middle(provider: str, sent: bytes) -> None:
    with raw_server(lambda connection: connection.sendall(sent)) as port:
        sentence = fails(at(provider, f"http://127.0.0.1:{port}"))
    assert f"127.0.0.1:{port} gave no answer in 2 attempts: the connection was lost" in sentence


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (402, "no credit left"),
        (403, "refused the key in"),
        (404, "does not know the model 'some-model', or not the path of --base-url"),
        (413, "rejected the request (HTTP 413"),
        (429, "wait until the rate limit has passed"),
        (500, "try again later"),
        (529, "gave no answer in 2 attempts (HTTP 529"),
        (304, "redirects elsewhere (HTTP 304)"),
    ],
)
def test_every_status_is_a_sentence(httpserver: HTTPServer, provider: str, status: int, words: str) -> None:
    serve(httpserver, provider, failure(provider, status, "it went\nwrong", {"retry-after": "nan"}))
    assert words in fails(make(httpserver, provider))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("body", [b"", b"null", b"[1]", b'{"error": 5}', b'{"error": {"message": {}}}', b"\xff<html>"])
def test_odd_bodies_of_errors(httpserver: HTTPServer, provider: str, body: bytes) -> None:
    serve(httpserver, provider, Response(body, status=400, content_type="application/json"))
    assert "rejected the request (HTTP 400" in fails(make(httpserver, provider))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_what_keeps_a_client_from_being_made(provider: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "nonsense://proxy")
    monkeypatch.setenv("HTTP_PROXY", "nonsense://proxy")
    with pytest.raises(PolicyError) as caught:
        at(provider, "http://example.test/v1").step(request())
    assert "\n" not in str(caught.value) and "example.test:80" in str(caught.value)


def test_a_surprise_names_the_provider_and_the_kind_of_error(httpserver: HTTPServer) -> None:
    policy = make(httpserver, "openai")
    unsendable = Step(role="user", text="\ud800")  # no server's fault: the request itself cannot be encoded
    with pytest.raises(PolicyError, match=r"OpenAI endpoint at localhost.*UnicodeEncodeError") as caught:
        policy.step(request(unsendable))
    assert caught.value.__context__ is None and "\n" not in str(caught.value)


# --- a whole session -------------------------------------------------------------------------------------------------


def test_a_session_stops_with_a_sentence_and_goes_on(httpserver: HTTPServer, tmp_path: Path) -> None:
    record = make_record(tmp_path / "h.sqlite", (64, 64, 64))
    serve(httpserver, "openai", message("openai", "x", usage={"prompt_tokens": -5}))
    flags = ["--shape", "64,64,64", "--device", f"replay:{record}", "--session", "s", "--policy", "openai"]
    model = ["--model", "m", "--base-url", base_url(httpserver, "openai"), "--set", "session.group_size=1"]
    home = tmp_path / "home"
    done = agent(home, "optimize", *flags, *model)
    assert done.returncode == 1 and "token usage that cannot be" in done.stderr and "agent resume s" in done.stderr
    assert "Traceback" not in done.stderr
    httpserver.clear()
    good = message("openai", "", [("evaluate_plan", {"family": "plain_tiled", "b_layout": "nk", "knobs": {}})])
    bodies = serve(httpserver, "openai", good, message("openai", "I give up.", refusal=None))
    done = agent(home, "resume", "s", "-q")
    assert done.returncode == 2 and "Traceback" not in done.stderr and len(bodies) >= 3
