"""Keys never leave a policy: whatever a server echoes of them becomes [redacted], in errors, answers and tool calls."""

from __future__ import annotations

import base64
import html
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

from policy.tidying import MAX_DEPTH
from tools.records import Step

REDACTED = "[redacted]"
#: A shorter key cannot be told from a word of a source ("EMPTY", "none"). Hosted providers issue none; a server of the
#: user's own may ask for one, and it is replaced in messages only, where it stands as a word.
MIN_LENGTH = 8
_MIN_WORD = 4
_KEY_VARIABLE = re.compile(r"_(API_KEY|ADMIN_KEY|ACCESS_KEY|SECRET_KEY|SECRET|TOKEN|PASSWORD)$")
_USERINFO = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")
_NOTHING = re.compile(r"(?!)")


class Secrets:
    """Of one process: the values of its key variables, in the spellings that servers and logs echo them in. What takes
    a key apart (reversed, in halves) is not found."""

    def __init__(self, values: Iterable[str | None] = ()) -> None:
        known = {stripped for value in values if value and (stripped := value.strip())}
        forms = {form for value in known if len(value) >= MIN_LENGTH for form in spellings(value)}
        longest_first = sorted(forms, key=lambda form: (-len(form), form))
        words = sorted(value for value in known if _MIN_WORD <= len(value) < MIN_LENGTH)
        # In either case: a server may shout, and %2f is %2F.
        self._anywhere = re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE) if forms else _NOTHING
        self._words = (
            re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, words)) + r")(?![\w-])") if words else _NOTHING
        )

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Secrets:
        return cls(value for name, value in environ.items() if _KEY_VARIABLE.search(name))

    def found_in(self, text: str) -> bool:
        return self._anywhere.search(text) is not None

    def message(self, text: str) -> str:
        """For a sentence to the user. Also without the user name and password of any URL in it."""
        return self._words.sub(REDACTED, self.text(_USERINFO.sub(REDACTED, text)))

    def text(self, text: str) -> str:
        return self._anywhere.sub(REDACTED, text)

    def value(self, value: Any, depth: int = 0) -> Any:
        """A JSON value, its object's names included. What is nested deeper than an answer may be stays as it is, for
        nothing of it is kept (policy/tidying.py)."""
        if isinstance(value, str):
            return self.text(value)
        if depth > MAX_DEPTH:
            return value
        if isinstance(value, list):
            return [self.value(one, depth + 1) for one in value]
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.value(one, depth + 1) for name, one in value.items()}
        return value

    def step(self, step: Step) -> Step:
        """All that a model's turn consists of, its provider's own blocks included."""
        if self._anywhere is _NOTHING:
            return step
        # A turn's blocks lie a few levels deep in it, and their depth is bounded already.
        return Step.model_validate({**self.value(step.model_dump(mode="json"), -MAX_DEPTH), "usage": step.usage})


def watch_logs(secrets: Secrets) -> Callable[[], None]:
    """With ANTHROPIC_LOG or OPENAI_LOG the SDKs log what servers send. Redacts it on its way to the handlers there are;
    the answer undoes that."""

    def redact(record: logging.LogRecord) -> bool:
        record.msg, record.args = secrets.message(record.getMessage()), ()
        if record.exc_info:
            record.exc_text = secrets.message(logging.Formatter().formatException(record.exc_info))
        return True

    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(redact)

    def undo() -> None:
        for handler in handlers:
            handler.removeFilter(redact)

    return undo


def spellings(value: str) -> Iterator[str]:
    """As it is; in hexadecimal; escaped in JSON, Python, HTML and URLs; what base64 makes of it wherever it begins."""
    yield value
    yield value.encode().hex()
    yield json.dumps(value)[1:-1]
    yield repr(value)[1:-1]
    yield html.escape(value)
    yield from (quote(value), quote(value, safe=""), quote_plus(value))
    for skipped in range(3):
        encoded = base64.b64encode(b"\0" * skipped + value.encode()).decode()
        # The first and the last digits also depend on the neighbours.
        core = encoded.rstrip("=")[(0, 2, 3)[skipped] :]
        core = core[:-1] if encoded.endswith("=") else core
        if len(core) >= MIN_LENGTH:
            yield core
            yield core.replace("+", "-").replace("/", "_")
