"""One retry layer for the hosted policies (the SDKs' own is off): tenacity, honouring ``retry-after``."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from policy.settings import PolicySettings

T = TypeVar("T")

#: Besides every 5xx: timeout, conflict, rate limit.
RETRYABLE_STATUS = frozenset({408, 409, 429})


def with_retries(
    call: Callable[[], T],
    settings: PolicySettings,
    connection_errors: tuple[type[Exception], ...],
) -> T:
    """``call()``, repeated on connection errors, 408, 409, 429 and 5xx. The last error is raised as it is."""
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
    if isinstance(error, connection_errors):
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
        return max(0.0, float(response.headers.get("retry-after", "")))
    except ValueError:
        return None


def describe(provider: str, key_name: str, model: str, error: Exception, attempts: int) -> str:
    """One sentence for a failed request: what happened and what to change."""
    status = getattr(error, "status_code", None)
    text = " ".join(str(getattr(error, "message", "") or error).split())[:300]
    if status in (401, 403):
        return f"{provider} refused the key in {key_name} (HTTP {status}); check that it is current and may use {model}"
    if status == 404:
        return f"{provider} does not know the model '{model}' (HTTP 404); choose another with --model"
    if getattr(error, "code", None) == "insufficient_quota":
        return f"{provider} says that the account of {key_name} has no credit left"
    if is_retryable(error, ()) or not isinstance(status, int):
        what = f"HTTP {status}" if isinstance(status, int) else type(error).__name__
        return f"{provider} gave no answer in {attempts} attempts ({what}: {text})"
    return f"{provider} rejected the request (HTTP {status}: {text})"


def is_local(base_url: str | None) -> bool:
    """True for a server on this machine or in a private network, which may run without a key."""
    host = (urlsplit(base_url).hostname or "") if base_url else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return bool(host) and ("." not in host or host.endswith((".local", ".internal", ".lan")))
    return address.is_loopback or address.is_private
