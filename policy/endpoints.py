"""Where a model is served and with which key: what can be said against an address or a key before anything is sent."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import parse_qsl, urlsplit

from policy.redacting import MIN_LENGTH

_KEY_LIKE = re.compile(r"key|token|secret|passw|pwd|auth|credential|signature|^sig$|^code$", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}
MAX_URL = 2000


def check_url(url: str) -> str:
    """The address without spaces around it. Raises ValueError with one sentence, which does not repeat the address:
    it may hold a password."""
    url = url.strip()
    example = "write it like http://localhost:8000/v1"
    if not url or len(url) > MAX_URL or not url.isprintable() or " " in url:
        raise ValueError(f"the base URL is empty, too long, or holds spaces or control characters; {example}")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"the base URL is not a valid address (check its brackets and port); {example}") from None
    if parts.scheme not in _PORTS:
        raise ValueError(f"the base URL must begin with http:// or https://; {example}")
    if not host:
        raise ValueError(f"the base URL names no host; {example}")
    if "@" in parts.netloc:
        raise ValueError("the base URL must hold no user name or password; keys come from the environment only")
    if parts.fragment or any(_KEY_LIKE.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        raise ValueError("the base URL must hold no key or token; keys come from the environment only")
    return url


def check_key(key: str | None, variable: str, local: bool) -> str | None:
    """The key without white space around it (files end in a newline); None if there is none. Raises ValueError with one
    sentence, which does not repeat it."""
    key = (key or "").strip()
    if not key:
        return None
    odd = next((at for at, char in enumerate(key, 1) if not "!" <= char <= "~"), None)
    if odd is not None:
        raise ValueError(f"the key in {variable} holds a character that no key has, at position {odd}; copy it again")
    if not local and len(key) < MIN_LENGTH:
        raise ValueError(f"the key in {variable} is too short to be one ({len(key)} characters); copy it again")
    return key


def is_local(base_url: str | None) -> bool:
    """True for a server on this machine or in a private network, which may run without a key."""
    host = (urlsplit(base_url).hostname or "") if base_url else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return bool(host) and ("." not in host or host.endswith((".local", ".internal", ".lan")))
    return address.is_loopback or address.is_private


def address(base_url: str) -> str:
    """host:port, and nothing else of it."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    return f"{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS.get(parts.scheme, 0)}"
