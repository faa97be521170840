"""Who may come in to `agent ui`: hosts, tokens, addresses and ports. No browser, no component library."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from agent.errors import UsageError
from agent.ui.guard import COOKIE, Guard, is_loopback
from agent.ui_cli import address, check_access, listen

TOKEN = "a-token-of-some-length"


async def _inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


def visit(
    guard: Guard, query: str = "", path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    sent: list[dict[str, Any]] = []

    async def send(event: Any) -> None:
        sent.append(event)

    given = {"host": "127.0.0.1:7860", **headers}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": raw}
    asyncio.run(guard(scope, None, send))
    return sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}, sent[1]["body"].decode()


def test_a_token_opens_once_and_then_a_cookie_does() -> None:
    guard = Guard(_inner, TOKEN, local=False)
    status, headers, body = visit(guard)
    assert status == 401 and "a token is needed" in body and body.count("\n") == 1
    assert "not the right one" in visit(guard, "token=wrong-token-of-length")[2]
    assert visit(guard, "token=" + TOKEN[:-1] + "é")[0] == 401
    status, headers, _ = visit(guard, f"session=s&token={TOKEN}")
    assert status == 303 and headers["location"] == "./?session=s" and "HttpOnly" in headers["set-cookie"]
    cookie = headers["set-cookie"].partition(";")[0]
    assert visit(guard, cookie=cookie)[2] == "inside"
    assert visit(guard, authorization=f"Bearer {TOKEN}")[2] == "inside"
    for wrong in (f"{COOKIE}=x", "nonsense", f'{COOKIE}="', "\xff=\xff"):
        assert visit(guard, cookie=wrong)[0] == 401
    assert visit(guard, host="any.name.example", cookie=cookie)[2] == "inside", "of another machine's choice"


@pytest.mark.parametrize(("host", "status"), [("localhost:1", 200), ("[::1]:1", 200), ("evil.example", 403), ("", 403)])
def test_without_a_token_only_this_machine_s_own_names_lead_here(host: str, status: int) -> None:
    assert visit(Guard(_inner, None, local=True), host=host)[0] == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://127.0.0.1:7860", 200), ("http://attacker.example", 403), ("null", 403), ("http://127.0.0.1:9999", 403)],
)
def test_another_site_s_page_cannot_send_anything(origin: str, status: int) -> None:
    """Not even a question, which would cost money."""
    guard = Guard(_inner, None, local=True)
    assert visit(guard, method="POST", path="/gradio_api/queue/join", origin=origin)[0] == status
    assert visit(guard, method="POST", path="/gradio_api/upload", origin="http://127.0.0.1:7860")[0] == 403
    assert visit(guard, method="POST")[0] == 200, "no browser"


@pytest.mark.parametrize(
    ("host", "token", "says"),
    [
        ("0.0.0.0", None, "a token is needed"),
        ("::", None, "a token is needed"),
        ("192.168.1.5", None, "a token is needed"),
        ("example.org", None, "a token is needed"),
        ("127.0.0.1", "short", "at least"),
        ("0.0.0.0", "with spaces and ünicode", "at least"),
    ],
)
def test_access_is_refused_in_one_sentence(host: str, token: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        check_access(host, token)
    assert "\n" not in str(caught.value)


def test_access_that_is_fine() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        assert is_loopback(host)
        check_access(host, None)
    check_access("0.0.0.0", TOKEN)
    assert address("0.0.0.0", 7860, TOKEN) == f"http://127.0.0.1:7860/?token={TOKEN}"
    assert address("::1", 1, None) == "http://[::1]:1/"


def test_a_port_in_use_and_an_address_of_nobody() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UsageError, match="is in use: choose another"):
            listen("127.0.0.1", other.getsockname()[1])
    for host in ("203.0.113.7", "no.such.host.invalid", "x" * 300):
        with pytest.raises(UsageError, match="no address of this machine"):
            listen(host, 0)
