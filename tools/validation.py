"""What pydantic complains of, as one sentence for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

#: What a value should have been, by the type of the error (https://docs.pydantic.dev/latest/errors/validation_errors/).
_WANTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("string_type", "string_sub_type"), "a text"),
    "string_unicode": "valid Unicode text",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type", "set_type", "frozen_set_type", "iterable_type"), "a list"),
    **dict.fromkeys(
        ("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"), "a mapping of fields"
    ),
    "path_type": "a path",
    "none_required": "left out",
    "is_instance_of": "of another kind",
}
_LIMITS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
}
#: Labels that pydantic puts into the location of an error in one branch of a union.
_BRANCHES = frozenset({"int", "str", "float", "bool", "none", "constrained-int", "constrained-str"})


def first_error(error: ValidationError) -> str:
    """``field: sentence``, of the first complaint, and how many more there are. No trace of Python."""
    where, message = first_problem(error)
    return f"{where}: {message}" if where else message


def first_problem(error: ValidationError) -> tuple[str, str]:
    """The field (dotted, empty for the whole) and the sentence apart."""
    errors = error.errors(include_url=False)
    place = _place(errors[0])
    here = [e for e in errors if _place(e) == place]
    # A list that is short because an entry of it is bad says nothing new.
    others = {_place(e) for e in errors} - {place[:n] for n in range(len(place) + 1)}
    more = f" (and {len(others)} more)" if others else ""
    return ".".join(str(part) for part in place), _message(here) + more


def _place(error: ErrorDetails) -> tuple[int | str, ...]:
    place = error["loc"]
    return place[:-1] if place and place[-1] in _BRANCHES else place


def _message(errors: Sequence[ErrorDetails]) -> str:
    """What one place should have held; several errors are the branches of a union."""
    first = errors[0]
    wanted = list(dict.fromkeys(word for e in errors if (word := _wanted(e)) is not None))
    if len(wanted) == len(errors) or (wanted and _wanted(first) is not None):
        return f"must be {' or '.join(wanted)}{_not(first.get('input'))}"
    context = first.get("ctx", {})
    match first["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return "there is no such field"
        case "too_short":
            return f"needs at least {context.get('min_length')}, has {context.get('actual_length')}"
        case "too_long":
            return f"has more than {context.get('max_length')} entries"
        case "string_too_short":
            return "must not be empty" if context.get("min_length") == 1 else "is too short"
        case "string_too_long":
            return f"is longer than {context.get('max_length')} characters"
        case "string_pattern_mismatch":
            return f"must match {context.get('pattern')}{_not(first.get('input'))}"
        case "json_invalid":
            return "is not JSON"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message.replace("Input should be", "must be").replace("Input should", "must")
    return message[:1].lower() + message[1:] if message[1:2].islower() else message


def _wanted(error: ErrorDetails) -> str | None:
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("literal_error", "enum"):
        return str(context.get("expected"))
    if kind in _LIMITS:
        return _LIMITS[kind].format(**context)
    return _WANTED.get(kind)


def _not(value: Any) -> str:
    """The value that was given, where it is short and plain."""
    if value is None or isinstance(value, bool):
        return ", not " + {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 128:
        return ", not a number of so many digits"
    if isinstance(value, int | float | str) and len(text := repr(value)) <= 40:
        return f", not {text}"
    return ""
