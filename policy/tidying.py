"""A server's answer, taken apart without trust: what cannot be stored or run is said in a sentence. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_DEPTH = 64
MAX_CALLS = 64
MAX_COUNT = 10**9
_SHOWN = 2000
#: Neither SQLite's tools nor UTF-8 can hold these.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


class BadAnswer(ValueError):
    """The whole answer is of no use; goes on from the provider's name: "answered with …"."""


class Arguments(NamedTuple):
    values: dict[str, Any]
    malformed: str | None = None


def text_of(value: object) -> str:
    """A storable string; empty for anything else."""
    return _UNSTORABLE.sub("\ufffd", value) if isinstance(value, str) else ""


def name_of(value: object) -> str:
    """A tool's name or a call's id as the providers allow them to be sent back; empty for anything else."""
    return value if isinstance(value, str) and _NAME.fullmatch(value) else ""


def flaw(value: object) -> str | None:
    """What keeps a JSON value from being stored, as the end of a sentence. Not recursive: it may be nested without
    end."""
    rest: list[tuple[object, int]] = [(value, 1)]
    while rest:
        one, depth = rest.pop()
        if depth > MAX_DEPTH:
            return f"are nested more than {MAX_DEPTH} levels deep"
        match one:
            case str() if _UNSTORABLE.search(one):
                return "hold a NUL character or half a surrogate pair"
            case float() if not math.isfinite(one):
                return "hold a number that is not finite"
            case int() if abs(one) >= 2**63:
                return "hold an integer of more than 64 bits"
            case list():
                rest += [(item, depth + 1) for item in one]
            case dict():
                rest += [(item, depth + 1) for pair in one.items() for item in pair]
    return None


def kept(value: Any, depth: int = 1) -> Any:
    """A provider's own block, fit to be stored and sent back. Raises BadAnswer if it is nested too deeply."""
    if depth > MAX_DEPTH:
        raise BadAnswer(f"answered with a message that is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [kept(one, depth + 1) for one in value]
    if isinstance(value, dict):
        return {text_of(name): kept(one, depth + 1) for name, one in value.items()}
    return value


def arguments_of(name: str, given: object) -> Arguments:
    """A call's arguments: an object, or JSON text of one. Otherwise what is wrong, as a sentence for the model."""
    values = given
    if isinstance(given, str):
        try:
            values = json.loads(given or "{}")
        except RecursionError:
            return _malformed(name, "are nested too deeply", given)
        except ValueError as error:
            return _malformed(name, f"are not JSON ({error})", given)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        return _malformed(name, f"must be a JSON object, not {type(values).__name__}", given)
    wrong = flaw(values)
    return _malformed(name, wrong, "") if wrong else Arguments(values)


def _malformed(name: str, what: str, given: object) -> Arguments:
    shown = {"malformed": text_of(given)[:_SHOWN]} if isinstance(given, str) and given else {}
    return Arguments(shown, f"the arguments of {name or 'a call'} {what}; send the call again")


def listed(value: object, what: str) -> list[Any]:
    """Tool calls of a turn: few enough to be run one by one."""
    found = value or []
    if not isinstance(found, list):
        raise BadAnswer(f"answered with {what} that are no list")
    if len(found) > MAX_CALLS:
        raise BadAnswer(f"answered with {len(found)} {what} in one turn, more than {MAX_CALLS}")
    return found


def mapping_of(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def count(counts: object, name: str) -> int:
    """A token count; 0 if it is not stated. Nonsense would make nonsense of every budget."""
    if counts is not None and not isinstance(counts, dict):
        raise BadAnswer("answered with a token usage that is no object")
    value = mapping_of(counts).get(name)
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise BadAnswer(f"answered with a token usage that cannot be ({name} is no count from 0 to {MAX_COUNT})")
    return value


def decoded(content: bytes, kind: str) -> Mapping[str, Any]:
    """An answer's body as a JSON object. Raises BadAnswer, or Garbled where asking again may help."""
    if content.lstrip()[:1] == b"<":
        raise BadAnswer(f"answered with a web page, which is no {kind}; check --base-url")
    try:
        found = json.loads(content)
    except RecursionError:
        raise BadAnswer(f"answered with no {kind}, but with JSON nested without end") from None
    except ValueError:
        raise Garbled(f"answered with no {kind}, but with broken JSON; check --base-url") from None
    if not isinstance(found, dict):
        raise BadAnswer(f"answered with no {kind}, but with {type(found).__name__}; check --base-url")
    if (error := found.get("error")) and "choices" not in found and "content" not in found:
        said = mapping_of(error).get("message") or error
        raise BadAnswer(f"answered with an error and no {kind}: {said}")
    return found


class Garbled(BadAnswer):
    """As after a cut connection: worth another attempt."""
