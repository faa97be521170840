"""What stands before every request to the UI: host, token, what may be sent, and what a page of ours may load."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

COOKIE = "hgemm_agent_ui"
MIN_TOKEN = 12
#: Nothing from elsewhere, whatever a text of the trace, or the component library, would load. The library's own page
#: has inline scripts and compiles templates.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
_LOCAL_NAMES = {"localhost", "127.0.0.1", "[::1]", "::1"}


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """An ASGI app around another. ``token`` None lets everybody in who reaches a loopback address by its own name: a
    page elsewhere whose name was pointed at this machine does not."""

    def __init__(self, app: App, token: str | None, local: bool) -> None:
        self._app = app
        self._token = token
        self._local = local

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # nothing of ours speaks over WebSockets
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if self._local and _name(headers.get("host", "")) not in _LOCAL_NAMES:
            await _refuse(send, 403, "this server answers to localhost and 127.0.0.1 only")
            return
        if self._token is not None and not self._known(headers):
            await self._enter(scope, send)
            return
        if scope["method"] not in ("GET", "HEAD") and not _same_origin(headers):
            await _refuse(send, 403, "this request comes from another site's page")
            return
        if scope["path"].rstrip("/").endswith("/upload"):
            await _refuse(send, 403, "nothing can be uploaded here: sessions are only read")
            return

        async def answer(event: Any) -> None:
            if event["type"] == "http.response.start":
                replaced = {name for name, _ in _HEADERS}
                kept = [(n, v) for n, v in event.get("headers", []) if n.lower() not in replaced]
                event = {**event, "headers": [*kept, *_HEADERS]}
            await send(event)

        await self._app(scope, receive, answer)

    def _known(self, headers: dict[str, str]) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._same(given.strip()):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and self._same(cookie.value)

    def _same(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self._token or "").encode())

    async def _enter(self, scope: Scope, send: Any) -> None:
        """With ``?token=`` in the address: once, and then by a cookie, so that it does not stay in the address."""
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == "token"), None)
        if given is None or not self._same(given):
            wrong = "this token is not the right one" if given is not None else "a token is needed"
            await _refuse(send, 401, f"{wrong}: open the address that `agent ui` printed, with ?token=...")
            return
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        cookie = f"{COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        place = f"./?{rest}" if rest else "./"
        await _answer(send, 303, "", [(b"location", place.encode("latin-1")), (b"set-cookie", cookie.encode())])


def _same_origin(headers: dict[str, str]) -> bool:
    """Browsers say where a page that sends something is from; a page elsewhere could ask questions on our key."""
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host", "")


def _name(host: str) -> str:
    """Without the port."""
    return host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]


async def _refuse(send: Any, status: int, sentence: str) -> None:
    await _answer(send, status, f"{sentence}\n", [])


async def _answer(send: Any, status: int, text: str, headers: list[tuple[bytes, bytes]]) -> None:
    body = text.encode()
    fixed = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers, *_HEADERS]})
    await send({"type": "http.response.body", "body": body})
