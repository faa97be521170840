"""Keys never leave a policy: not by errors, answers, tool calls, addresses, nor by a session's files."""

from __future__ import annotations

import base64
import html
import json
import sqlite3
import zlib
from pathlib import Path
from urllib.parse import quote

import pytest
from policy_kit import KEY, PROVIDERS, at, base_url, fails, failure, make, message, request, serve
from pytest_httpserver import HTTPServer
from records_kit import agent, make_record
from werkzeug import Response

from policy.base import PolicyError
from policy.endpoints import address, check_key, check_url
from policy.factory import make_policy
from policy.redacting import REDACTED, Secrets
from policy.settings import PolicySettings

ECHOES = {
    "plain": KEY,
    "quoted": json.dumps({"key": KEY}),
    "url": quote(KEY, safe=""),
    "url, lower case": quote(KEY, safe="").replace("%2F", "%2f").replace("%2B", "%2b"),
    "path": quote(KEY),
    "bearer": f"Authorization: Bearer {KEY}",
    "base64": base64.b64encode(KEY.encode()).decode(),
    "basic": base64.b64encode(f"user:{KEY}".encode()).decode(),
    "basic, url-safe": base64.urlsafe_b64encode(f"u:{KEY}:".encode()).decode(),
    "html": html.escape(f"<{KEY}>"),
    "far into the text": "x" * 290 + KEY,
    "upper case": KEY.upper(),
    "hexadecimal": KEY.encode().hex(),
    "hexadecimal, upper case": KEY.encode().hex().upper(),
}


def traces(text: str) -> bool:
    """Whether a recognisable part of the key is in it, base64 included."""
    forms = [KEY, quote(KEY, safe=""), "Qz7x", "Wv9k", "Jy3", KEY.encode().hex()]
    forms += [base64.b64encode(b"\0" * n + KEY.encode()).decode()[4:-4] for n in range(3)]
    return any(form.lower() in text.lower() for form in forms)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("status", "echo"),
    [*((400, echo) for echo in ECHOES), *((status, "plain") for status in (401, 404, 409, 429, 500))],
)
def test_echo_in_an_error(httpserver: HTTPServer, provider: str, status: int, echo: str) -> None:
    serve(httpserver, provider, failure(provider, status, f"bad request: {ECHOES[echo]}"))
    sentence = fails(make(httpserver, provider))
    assert not traces(sentence)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_echo_in_an_answer(httpserver: HTTPServer, provider: str) -> None:
    arguments = {"source": f"// {KEY}", "launch": {KEY: [ECHOES["basic"]]}}
    answer = message(provider, f"My key is {KEY}.", [("evaluate_source", arguments), (KEY, {})])
    if provider == "anthropic":
        answer["content"].insert(0, {"type": "thinking", "thinking": f"hm, {KEY}", "signature": "c2ln"})
    else:
        answer["choices"][0]["message"]["reasoning_content"] = f"hm, {KEY}"
    serve(httpserver, provider, answer)
    step = make(httpserver, provider).step(request())
    assert step.text == f"My key is {REDACTED}." and step.reasoning == f"hm, {REDACTED}"
    assert step.tool_calls[0].arguments["source"] == f"// {REDACTED}"
    assert not traces(step.to_json())
    assert step.usage is not None and step.usage.input_tokens == 10


@pytest.mark.parametrize("provider", PROVIDERS)
def test_redirects_are_not_followed_and_name_only_the_host(httpserver: HTTPServer, provider: str) -> None:
    target = f"http://user:{quote(KEY, safe='')}@elsewhere.test:81/?key={quote(KEY)}"
    seen: list[str] = []
    httpserver.expect_request("/stolen").respond_with_handler(lambda r: seen.append("!") or Response("{}"))
    serve(httpserver, provider, Response("", status=307, headers={"location": httpserver.url_for("/stolen")}))
    assert "redirects elsewhere (HTTP 307" in fails(make(httpserver, provider)) and not seen
    httpserver.clear()
    serve(httpserver, provider, Response("", status=302, headers={"location": target}))
    sentence = fails(make(httpserver, provider))
    assert "to elsewhere.test:81" in sentence and not traces(sentence)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_logs_of_an_sdk(httpserver: HTTPServer, tmp_path: Path, record_path: Path, provider: str) -> None:
    """ANTHROPIC_LOG=debug shows all that a server sends, headers included."""
    serve(httpserver, provider, failure(provider, 400, f"bad {KEY}", {"x-echo": KEY}))
    variable = "ANTHROPIC" if provider == "anthropic" else "OPENAI"
    flags = ["--shape", "64,64,64", "--device", f"replay:{record_path}", "--policy", provider, "--model", "m"]
    environ = {f"{variable}_API_KEY": KEY, f"{variable}_LOG": "debug"}
    done = agent(tmp_path, "optimize", *flags, "--base-url", base_url(httpserver, provider), **environ)
    assert done.returncode == 1 and "DEBUG" in done.stderr and REDACTED in done.stderr
    assert not traces(done.stderr)


def test_short_keys_are_words_and_only_of_messages() -> None:
    secrets = Secrets(["EMPTY", "abc"])
    assert (
        secrets.message("the key EMPTY is wrong, NON-EMPTY is not") == f"the key {REDACTED} is wrong, NON-EMPTY is not"
    )
    assert secrets.text("barrier EMPTY") == "barrier EMPTY" and secrets.message("abc") == "abc"


def test_which_variables_are_keys() -> None:
    environ = {"OPENAI_API_KEY": "first-key", "ANTHROPIC_AUTH_TOKEN": "second-key", "PATH": "/usr/bin-and-more"}
    assert (
        Secrets.of(environ).text("first-key second-key /usr/bin-and-more") == f"{REDACTED} {REDACTED} /usr/bin-and-more"
    )
    for name in ("AWS_SECRET_ACCESS_KEY", "HGEMM_AGENT_UI_TOKEN", "HF_TOKEN", "AZURE_CLIENT_SECRET"):
        assert Secrets.of({name: "value-of-it"}).text("a value-of-it b") == f"a {REDACTED} b", name
    others = {"HGEMM_AGENT_POLICY__DOCS_TOKENS": "value-of-it", "KEYBOARD": "value-of-it"}
    assert Secrets.of(others).text("value-of-it") == "value-of-it"
    assert Secrets.of({}).text("all") == "all" and not Secrets.of({"OPENAI_API_KEY": " "}).found_in(" ")


def test_userinfo_in_a_message() -> None:
    assert Secrets().message("proxy http://me:pass@host:1/x failed") == f"proxy http://{REDACTED}@host:1/x failed"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:hunter22@host/v1", "no user name or password"),
        ("http://hunter22@host/v1", "no user name or password"),
        ("https://host/v1?api_key=hunter22", "no key or token"),
        ("https://host/v1?x=1&Access-Token=hunter22", "no key or token"),
        ("https://host/v1?sig=", "no key or token"),
        ("https://host/v1#hunter22", "no key or token"),
        ("ftp://host/hunter22", "must begin with http:// or https://"),
        ("localhost:8000/hunter22", "must begin with http:// or https://"),
        ("file:///hunter22", "must begin with http:// or https://"),
        ("http://[::1/hunter22", "not a valid address"),
        ("http://host:99999/hunter22", "not a valid address"),
        ("http://host:port/hunter22", "not a valid address"),
        ("http:///hunter22", "names no host"),
        ("http://ho st/hunter22", "holds spaces"),
        ("http://host/\x00hunter22", "holds spaces or control"),
        (" ", "is empty"),
        ("http://" + "h" * 3000, "too long"),
    ],
)
def test_addresses_that_are_refused(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        check_url(url)
    assert "hunter22" not in str(caught.value)
    with pytest.raises(PolicyError, match=words):
        make_policy(PolicySettings(name="openai", model="m"), {}, {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY})


@pytest.mark.parametrize("url", ["http://localhost:8000/v1", "https://h/v1?api-version=2", " http://[::1]:8000 "])
def test_addresses_that_are_taken(url: str) -> None:
    assert check_url(url) == url.strip()
    assert address("http://[::1]:8000/v1") == "[::1]:8000" and address("https://h/v1") == "h:443"


def test_keys() -> None:
    assert check_key("sk-123456\n", "K", False) == "sk-123456"
    assert check_key("EMPTY", "K", True) == "EMPTY" and check_key(" \n", "K", False) is None
    for bad, words in (("sk-1é3456", "at position 5"), ("sk-12 456", "position 6"), ("k-12", "too short")):
        with pytest.raises(ValueError, match=words) as caught:
            check_key(bad, "SOME_KEY", False)
        assert "SOME_KEY" in str(caught.value) and bad not in str(caught.value)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_key_with_a_newline_works_and_is_redacted_without(httpserver: HTTPServer, provider: str) -> None:
    serve(httpserver, provider, message(provider, f"Hello {KEY}"))
    policy = at(provider, base_url(httpserver, provider), key=f"{KEY}\n")
    assert policy.step(request()).text == f"Hello {REDACTED}"


def test_key_in_a_setting_is_refused() -> None:
    environ = {"OPENAI_API_KEY": KEY}
    for settings in (
        PolicySettings(name="openai", model=KEY),
        PolicySettings(name="openai", model="m", base_url=f"http://h/{quote(KEY)}/v1"),
        PolicySettings(name="search", thinking={"x": KEY}),
    ):
        with pytest.raises(PolicyError, match="keys come from the environment only") as caught:
            make_policy(settings, {}, environ)
        assert not traces(str(caught.value))


# --- a whole session --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("record") / "h.sqlite", (64, 64, 64))


def everything(home: Path) -> str:
    """All that a session left on disk, what the store compresses included."""
    found = [path.read_bytes().decode(errors="replace") for path in home.rglob("*") if path.is_file()]
    with sqlite3.connect(home / "store.sqlite") as db:
        for table in ("trajectories", "variants"):
            column = "payload" if table == "trajectories" else "source"
            found += [zlib.decompress(row[0]).decode() for row in db.execute(f"SELECT {column} FROM {table}")]
    return "\n".join(found)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_no_key_in_a_sessions_files(httpserver: HTTPServer, tmp_path: Path, record_path: Path, provider: str) -> None:
    source = f'// {KEY} {ECHOES["basic"]}\nextern "C" __global__ void gemm() {{}}'
    launch = {"launches": [{"entry": "gemm", "grid": [1, 1, 1], "block": [32, 1, 1], "args": []}]}
    first = message(provider, f"With {KEY}:", [("evaluate_source", {"source": source, "launch": launch})])
    refused = failure(provider, 400, f"you sent {KEY}, or {ECHOES['url']}, or {ECHOES['basic']}")
    serve(httpserver, provider, first, refused)
    variable = "ANTHROPIC_API_KEY" if provider == "anthropic" else "OPENAI_API_KEY"
    flags = ["--shape", "64,64,64", "--device", f"replay:{record_path}", "--session", "s", "--policy", provider]
    model = ["--model", "m", "--base-url", base_url(httpserver, provider), "--set", "session.group_size=1"]
    home = tmp_path / "home"
    done = agent(home, "optimize", *flags, *model, **{variable: KEY, "HGEMM_AGENT_DEBUG": "1"})
    assert done.returncode == 1 and "rejected the request (HTTP 400" in done.stderr, done.stderr
    assert "agent resume s" in done.stderr
    written = everything(home)
    assert "rejected the request" in written and f"With {REDACTED}:" in written, "the echo was stored, redacted"
    for text in (done.stdout, done.stderr, written, agent(home, "show", "s", "--json").stdout):
        assert not traces(text)


def test_password_in_the_base_url_is_found_before_a_session(tmp_path: Path, record_path: Path) -> None:
    flags = ["--shape", "64,64,64", "--device", f"replay:{record_path}", "--policy", "openai", "--model", "m"]
    done = agent(tmp_path, "optimize", *flags, "--base-url", "http://user:hunter22@localhost:9/v1")
    assert done.returncode == 1 and "no user name or password" in done.stderr
    assert "hunter22" not in done.stderr + done.stdout and not (tmp_path / "sessions").exists()
