"""The same tools under two faces: commands that people type, and schemas that a model calls. Pure.

A command is ``/why 1f2e3d``; a tool call is ``why_rejected {"key": "1f2e3d"}``. Both end in ``run``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inspection import answers
from inspection.answers import Finding, NotFound, View
from policy.base import ToolSchema
from tools.records import ToolCall
from tools.validation import first_error

Key = Annotated[str, Field(min_length=1, max_length=200, description="A variant's key, a step's id, or `best`.")]


class _Arguments(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


class _None(_Arguments):
    pass


class _Rollout(_Arguments):
    rollout: int | None = Field(default=None, ge=0, description="Only the steps of this rollout.")


class _Step(_Arguments):
    step_id: str = Field(min_length=1, max_length=200, description="A step's id, for example 0.4.1.")


class _One(_Arguments):
    key: Key


class _Two(_Arguments):
    a: Key
    b: Key


@dataclass(frozen=True)
class Tool:
    name: str
    command: str
    usage: str
    arguments: type[_Arguments]
    run: Callable[[View, Any], Finding]
    about: str


TOOLS: tuple[Tool, ...] = (
    Tool(
        "timeline",
        "/timeline",
        "[ROLLOUT]",
        _Rollout,
        lambda view, a: answers.timeline(view, a.rollout),
        "The steps in order: prompts, turns, tool calls with their outcome, the finish.",
    ),
    Tool(
        "show_step",
        "/step",
        "ID",
        _Step,
        lambda view, a: answers.show_step(view, a.step_id),
        "All of one step: reasoning, what was said, arguments, answer.",
    ),
    Tool(
        "get_variant",
        "/variant",
        "KEY",
        _One,
        lambda view, a: answers.get_variant(view, a.key),
        "Source and launch spec of a variant, and what became of it.",
    ),
    Tool(
        "diff",
        "/diff",
        "A B",
        _Two,
        lambda view, a: answers.diff(view, a.a, a.b),
        "What leads from variant A to variant B: knobs and source, and which is faster.",
    ),
    Tool(
        "compare_profiles",
        "/profiles",
        "A B",
        _Two,
        lambda view, a: answers.compare_profiles(view, a.a, a.b),
        "ncu's metrics of two variants side by side, and what sets them apart.",
    ),
    Tool(
        "why_rejected",
        "/why",
        "KEY",
        _One,
        lambda view, a: answers.why_rejected(view, a.key),
        "Which verdict went against a variant, at which step, and what came next.",
    ),
    Tool(
        "best_so_far",
        "/best",
        "",
        _None,
        lambda view, a: answers.best_so_far(view),
        "Every rise of the best ratio, and what passed the whole gate.",
    ),
)
_BY_NAME: Mapping[str, Tool] = {tool.name: tool for tool in TOOLS}
_BY_COMMAND: Mapping[str, Tool] = {tool.command: tool for tool in TOOLS}


def help_lines() -> list[str]:
    lines = [f"{f'{tool.command} {tool.usage}':<20} {tool.about}" for tool in TOOLS]
    return [*lines, f"{'/help':<20} This list.", "KEY, A and B: a key, a beginning of one, a step's id, or `best`."]


def schemas() -> tuple[ToolSchema, ...]:
    return tuple(
        ToolSchema(name=tool.name, description=tool.about, parameters=_schema(tool.arguments)) for tool in TOOLS
    )


def run_call(view: View, call: ToolCall) -> Finding:
    """Raises NotFound for anything that cannot be answered."""
    if call.malformed:
        raise NotFound(call.malformed)
    tool = _BY_NAME.get(call.name)
    if tool is None:
        raise NotFound(f"there is no tool '{call.name[:60]}'; the tools are {', '.join(_BY_NAME)}")
    return _run(view, tool, call.arguments)


def run_command(view: View, line: str) -> Finding:
    """Of a line that begins with ``/``. Raises NotFound."""
    try:
        words = shlex.split(line)
    except ValueError:  # an open quotation mark
        words = line.split()
    tool = _BY_COMMAND.get(words[0]) if words else None
    if tool is None:
        raise NotFound(f"there is no command {(words or [''])[0][:60]}; there are {', '.join(_BY_COMMAND)} and /help")
    names = list(tool.arguments.model_fields)
    given = words[1:]
    needed = [name for name, one in tool.arguments.model_fields.items() if one.is_required()]
    if not len(needed) <= len(given) <= len(names):
        raise NotFound(f"write it as {tool.command} {tool.usage}".rstrip())
    return _run(view, tool, dict(zip(names, given, strict=False)))


def _run(view: View, tool: Tool, arguments: Mapping[str, Any]) -> Finding:
    try:
        parsed = tool.arguments.model_validate(arguments)
    except ValidationError as error:
        raise NotFound(f"{tool.command}: {first_error(error)}; write it as {tool.command} {tool.usage}") from error
    return tool.run(view, parsed)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    schema.pop("title", None)
    for one in schema.get("properties", {}).values():
        one.pop("title", None)
    return {**schema, "properties": schema.get("properties", {})}
