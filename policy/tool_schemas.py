"""The tools a policy may call: one pydantic model of arguments each, from which the JSON schemas are made.

Pure: parsing only. ``agent/calls.py`` runs them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from policy.base import ToolSchema
from tools.records import BLayout, Depth, LaunchSpec, Mode, ToolCall
from tools.validation import first_error

#: Models often quote the key they were shown, so whitespace is stripped.
Key = Annotated[str, Field(min_length=1, description="The key that compile or evaluate answered with.")]


class Arguments(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


class PlanArguments(Arguments):
    family: str = Field(description="A family's name from list_families.")
    b_layout: BLayout = Field(description="How B is stored: kn is row-major K x N, nk is transposed N x K.")
    knobs: dict[str, int] = Field(description="Every knob of the family with one of its listed values.")


class SourceArguments(Arguments):
    source: str = Field(min_length=1, description="Complete CUDA C++ device code: no host code, no main.")
    launch: LaunchSpec = Field(description="The launch spec, as described in the system prompt.")
    b_layout: BLayout = "nk"

    # Stripping would change the source's hash for nothing.
    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=False)

    @field_validator("launch", mode="before")
    @classmethod
    def _json_text(cls, value: Any) -> Any:
        """Some models send the object as JSON text."""
        if isinstance(value, str):
            try:
                return json.loads(value)
            except ValueError as error:
                raise ValueError(f"launch is not JSON: {error}") from error
        return value


class KeyArguments(Arguments):
    key: Key


class VerifyArguments(KeyArguments):
    depth: Depth = Field(default="quick", description="full runs every tier and is needed before the final timing.")


class TimeArguments(KeyArguments):
    mode: Mode = "offline"
    budget: Literal["screen", "final"] = "screen"


class ReadSourceArguments(Arguments):
    key: str | None = Field(default=None, description="Key of a variant tried in this session.")
    family: str | None = Field(default=None, description="Or the name of a family.")


class DocsArguments(Arguments):
    query: str = Field(min_length=1, max_length=500, description="A question, or a name as it is written in code.")
    arch: Literal["sm80", "sm90", "sm100"] | None = Field(default=None, description="Only what is written for it.")
    limit: int = Field(default=4, ge=1, le=8, description="Passages.")


class NoArguments(Arguments):
    pass


SEARCH_DOCS = "search_docs"

_TOOLS: dict[str, tuple[type[Arguments], str]] = {
    "list_families": (NoArguments, "The kernel families, their knobs, values and constraints."),
    "read_source": (ReadSourceArguments, "CUDA source and launch spec of a tried variant or of a family."),
    "compile_plan": (PlanArguments, "Compile a plan: registers, spills, tensor-core instructions, or the error."),
    "compile_source": (SourceArguments, "Compile your own source: registers, spills, instructions, or the error."),
    "evaluate_plan": (
        PlanArguments,
        "Compile, verify (quick) and time (screen, offline) a plan in one call. Costs one evaluation if it is new.",
    ),
    "evaluate_source": (
        SourceArguments,
        "Compile, verify (quick) and time (screen, offline) your own source. Costs one evaluation if it is new.",
    ),
    "verify": (VerifyArguments, "Check a compiled variant's results; time refuses what has not passed."),
    "sanitize": (KeyArguments, "compute-sanitizer: memcheck, racecheck, initcheck, synccheck."),
    "time": (TimeArguments, "Time a verified variant against cuBLASLt in one mode."),
    "profile": (KeyArguments, "Nsight Compute metrics of a verified variant and what limits it."),
    SEARCH_DOCS: (
        DocsArguments,
        "Look something up in CuTe, CUTLASS and PTX documentation and headers: passages with file and lines, as "
        "quotations. Costs no evaluation, but an attempt has only so many searches.",
    ),
    "submit": (KeyArguments, "End this attempt with the variant of this key as your answer."),
}

#: Tools whose first use on a new variant costs one evaluation.
EVALUATING = frozenset({"compile_plan", "compile_source", "evaluate_plan", "evaluate_source"})


def tool_schemas(docs: bool = False) -> tuple[ToolSchema, ...]:
    """``docs``: whether there is documentation to search."""
    return tuple(
        ToolSchema(name=name, description=text, parameters=_schema(model))
        for name, (model, text) in _TOOLS.items()
        if docs or name != SEARCH_DOCS
    )


def _schema(model: type[Arguments]) -> dict[str, Any]:
    schema = model.model_json_schema()
    if model is SourceArguments:
        # The full schema of a launch spec is long and uses $ref, which some servers do not resolve. The system prompt
        # explains the format with an example; parse_arguments checks it.
        schema.pop("$defs", None)
        schema["properties"]["launch"] = {
            "type": "object",
            "description": SourceArguments.model_fields["launch"].description,
        }
    return _without_titles(schema)


def _without_titles(value: dict[str, Any]) -> dict[str, Any]:
    cleaned: dict[str, Any] = {}
    for key, item in value.items():
        if key == "title" and isinstance(item, str):
            continue
        cleaned[key] = _without_titles(item) if isinstance(item, dict) else item
    return cleaned


class CallError(ValueError):
    """The call cannot be run; the message is one sentence for the policy."""


def parse_arguments(call: ToolCall) -> Arguments:
    """The call's arguments as values. Raises CallError."""
    if call.malformed:
        raise CallError(call.malformed)
    if call.name not in _TOOLS:
        raise CallError(f"there is no tool '{call.name}'; the tools are {', '.join(_TOOLS)}")
    try:
        return _TOOLS[call.name][0].model_validate(call.arguments)
    except ValidationError as error:
        raise CallError(f"{call.name}: {first_error(error)}") from error
