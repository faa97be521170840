"""What must not leave this machine with a trajectory: keys, and where files lie on it. Pure."""

from __future__ import annotations

import re
from typing import Any

from policy.redacting import REDACTED, Secrets

#: What keys of well-known providers look like, whosever they are.
_KEYS = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{16,}|gh[opsu]_\w{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|xox[abprs]-[\w-]{10,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
    r"|(?<=Bearer )[\w.~+/-]{12,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
#: Two parts at least, so that a division is none.
_POSIX = re.compile(r"(?<![\w/.\])}])/[\w.+@~-]+(?:/[\w.+@~-]+)+/?")
_HOME = re.compile(r"(?<![\w/])~[\w.-]*(?:/[\w.+@-]+)+/?")
_WINDOWS = re.compile(r"(?<!\w)[A-Za-z]:(?:\\[^\\\s:*?\"<>|]+)+\\?")
#: The name of a file may stay, for compilers name it in messages; that of a folder may be a person's.
_FILE = re.compile(r"[\w+@~-][\w.+@~-]*\.\w{1,8}$")
_FILE_URL = re.compile(r"file://[^\s\"'<>]+")
PLACE = "[path]"


def scrub(value: Any, secrets: Secrets) -> Any:
    """A JSON value without keys and absolute paths, the names of its objects included."""
    if isinstance(value, str):
        return scrub_text(value, secrets)
    if isinstance(value, list | tuple):
        return [scrub(one, secrets) for one in value]
    if isinstance(value, dict):
        return {scrub(name, secrets): scrub(one, secrets) for name, one in value.items()}
    return value


def scrub_text(text: str, secrets: Secrets) -> str:
    if "/" not in text and "\\" not in text:
        return _KEYS.sub(REDACTED, secrets.message(text))
    text = _FILE_URL.sub(PLACE, _KEYS.sub(REDACTED, secrets.message(text)))
    for pattern in (_POSIX, _HOME, _WINDOWS):
        text = pattern.sub(_placeless, text)
    return text


def _placeless(found: re.Match[str]) -> str:
    name = _FILE.search(re.split(r"[/\\]", found.group())[-1])
    return f"{PLACE}/{name.group()}" if name is not None else PLACE
