"""One retry layer for the hosted policies (the SDKs' own is off): tenacity, honouring ``retry-after``; and what a
failed request means, as one sentence."""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from policy.endpoints import address
from policy.settings import PolicySettings
from policy.tidying import Garbled
from policy.transport import Overrun

T = TypeVar("T")

#: Besides every 5xx: timeout, conflict, rate limit.
RETRYABLE_STATUS = frozenset({408, 409, 429})
_SHOWN = 300


class Who(NamedTuple):
    """Whom a request goes to, in the words of an error."""

    provider: str
    key_name: str
    model: str
    base_url: str

    @property
    def label(self) -> str:
        return f"{self.provider} at {address(self.base_url)}"


def with_retries(
    call: Callable[[], T],
    settings: PolicySettings,
    connection_errors: tuple[type[Exception], ...],
) -> T:
    """``call()``, repeated on connection errors, garbled answers, 408, 409, 429 and 5xx. The last error is raised as it
    is."""
    import tenacity

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        hint = _retry_after_s(error)
        backoff = tenacity.wait_random_exponential(multiplier=1, max=settings.max_wait_s)(state)
        return min(settings.max_wait_s, backoff if hint is None else hint)

    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(settings.max_attempts),
        wait=wait,
        retry=tenacity.retry_if_exception(lambda e: is_retryable(e, connection_errors)),
        reraise=True,
    )
    return retrying(call)


def is_retryable(error: BaseException, connection_errors: tuple[type[Exception], ...]) -> bool:
    if any(isinstance(one, Overrun) for one in causes(error)):
        return False  # the next answer would be as long
    if isinstance(error, (Garbled, *connection_errors)):
        return True
    status = getattr(error, "status_code", None)
    if not isinstance(status, int):
        return False
    if status == 429 and getattr(error, "code", None) == "insufficient_quota":
        return False  # an empty account does not fill up while we wait
    return status in RETRYABLE_STATUS or status >= 500


def _retry_after_s(error: BaseException | None) -> float | None:
    response: Any = getattr(error, "response", None)
    if response is None:
        return None
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def describe(who: Who, error: Exception, attempts: int, redact: Callable[[str], str]) -> str:
    """One sentence for a failed request: what happened and what to change."""
    status = getattr(error, "status_code", None)
    if not isinstance(status, int):
        return _no_answer(who, error, attempts)
    # Shortened after redacting: half a key would not be known as one.
    text = redact(" ".join(_said(error).split()))[:_SHOWN]
    if 300 <= status < 400:
        return f"{who.label} redirects elsewhere (HTTP {status}{_target(error)}); give the final address as --base-url"
    if status in (401, 403):
        return (
            f"{who.label} refused the key in {who.key_name} (HTTP {status}); check that it is current and may use "
            f"{who.model}"
        )
    if status == 404:
        return (
            f"{who.label} does not know the model '{who.model}', or not the path of --base-url (HTTP 404); choose "
            "another with --model"
        )
    if status == 402 or getattr(error, "code", None) == "insufficient_quota":
        return f"{who.label} says that the account of {who.key_name} has no credit left"
    if is_retryable(error, ()):
        advice = "wait until the rate limit has passed" if status == 429 else "try again later"
        return f"{who.label} gave no answer in {attempts} attempts (HTTP {status}: {text}); {advice}"
    return f"{who.label} rejected the request (HTTP {status}: {text})"


def _said(error: Exception) -> str:
    """The server's own words, where its error has the usual form."""
    body: Any = getattr(error, "body", None)
    inner = body.get("error", body) if isinstance(body, dict) else None
    words = inner.get("message") if isinstance(inner, dict) else None
    return words if isinstance(words, str) and words else str(getattr(error, "message", "") or error)


def _target(error: Exception) -> str:
    """Where a redirect leads to: its host only, the rest may hold a secret."""
    response: Any = getattr(error, "response", None)
    location = response.headers.get("location", "") if response is not None else ""
    try:
        host = urlsplit(location).netloc.rpartition("@")[2]
    except ValueError:
        return ""
    return f", to {host[:100]}" if host else ""


def _no_answer(who: Who, error: Exception, attempts: int) -> str:
    cause = next((words for one in causes(error) if (words := _cause(who, one))), None)
    if cause is None:
        return f"{who.label} gave no answer in {attempts} attempts ({type(error).__name__}); check --base-url"
    if any(isinstance(one, Overrun) for one in causes(error)):
        return f"{who.label} {cause}"
    return f"{who.label} gave no answer in {attempts} attempts: {cause}"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, innermost last."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _cause(who: Who, error: BaseException) -> str | None:
    """What one link of the chain says of a lost connection; None if it says nothing."""
    kind = type(error).__name__
    match error:
        case Overrun():
            return str(error)
        case ssl.SSLCertVerificationError():
            return (
                f"its TLS certificate is not trusted ({error.verify_message}); name its authority in SSL_CERT_FILE, or "
                "use http:// for a server of your own"
            )
        case ssl.SSLError():
            return f"TLS failed ({error.reason or kind}); a server without TLS wants http:// in --base-url"
        case socket.gaierror():
            return "its name is not known (DNS); check --base-url and the network"
        case ConnectionRefusedError():
            return "the connection was refused; start the server there, or check --base-url"
        case TimeoutError():
            return "it timed out; raise policy.timeout_s, or look after the server and the network"
        case ConnectionError():
            return "the connection was lost before the answer was complete; look after the server and the network"
        case OSError() if error.strerror:
            return f"it cannot be reached ({error.strerror}); check --base-url and the network"
    if kind in ("RemoteProtocolError", "ReadError", "WriteError", "LocalProtocolError", "DecodingError"):
        lost = "the connection was lost before the answer was complete, or no HTTP is spoken there"
        return f"{lost}; check --base-url and the server" if error.__cause__ is None else None
    if kind == "ProxyError":
        return "the proxy of the environment (HTTPS_PROXY) refused the connection"
    if kind == "UnicodeEncodeError":
        return "its address or a header cannot be sent as ASCII; check --base-url"
    return None
