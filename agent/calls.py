"""A policy's tool call → what it means, and what it answers. The gate's order is the Toolbox's business, not ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from agent.documents import Documents
from memory.duplicates import remark as duplicate_remark
from policy.rendering import family_text, result_text
from policy.tool_schemas import (
    Arguments,
    CallError,
    DocsArguments,
    KeyArguments,
    PlanArguments,
    ReadSourceArguments,
    SourceArguments,
    TimeArguments,
    VerifyArguments,
    parse_arguments,
)
from tools.families import ManifestError, accepted_plans, render, validate_plan
from tools.gate import Toolbox
from tools.records import Evaluation, Family, Outcome, Status, Task, ToolCall, Variant


@dataclass(frozen=True)
class Prepared:
    """A call that can be run. ``variant`` is what it is about; ``fresh`` marks one sent whole or as a plan. ``remark``
    says so where the variant is an earlier one that the sent one is a twin of."""

    name: str
    arguments: Arguments
    variant: Variant | None = None
    fresh: bool = False
    remark: str = ""

    @property
    def is_source(self) -> bool:
        return isinstance(self.arguments, SourceArguments)

    def instead(self, twin: Variant, same: str = "code") -> Prepared:
        return replace(self, variant=twin, remark=duplicate_remark(twin.key, same))


@dataclass(frozen=True)
class Ran:
    """``result`` is None for calls that only read; ``key`` is the variant's that the result is of; ``refused`` marks a
    call that was answered without being run."""

    text: str
    result: Outcome | None = None
    key: str | None = None
    refused: bool = False

    @classmethod
    def refusal(cls, sentence: str) -> Ran:
        return cls(json.dumps({"error": sentence}), refused=True)

    @property
    def status(self) -> Status:
        if self.result is not None:
            return self.result.status
        return Status.FAILED if self.refused else Status.OK

    @property
    def ratio(self) -> float | None:
        return self.result.ratio if isinstance(self.result, Evaluation) and self.result.ok else None

    @property
    def time_us(self) -> float | None:
        timing = self.result.timing if isinstance(self.result, Evaluation) and self.result.ok else None
        return timing.time_us if timing is not None else None


def prepare(
    call: ToolCall,
    families: Mapping[str, Family],
    variant_of: Callable[[str], Variant | None],
    known: Collection[str],
) -> Prepared:
    """Raises CallError with a sentence for the policy. ``known`` are the keys this session has tried."""
    arguments = parse_arguments(call)
    match arguments:
        case PlanArguments():
            if arguments.family not in families:
                raise CallError(f"there is no family '{arguments.family}'; there are {', '.join(families)}")
            family = families[arguments.family]
            try:
                plan = validate_plan(family, arguments.b_layout, arguments.knobs)
            except ManifestError as error:
                raise CallError(str(error)) from error
            return Prepared(call.name, arguments, render(family, plan), fresh=True)
        case SourceArguments():
            variant = Variant(source=arguments.source, launch=arguments.launch, b_layout=arguments.b_layout)
            return Prepared(call.name, arguments, variant, fresh=True)
        case KeyArguments(key=str(key)) | ReadSourceArguments(key=str(key)):
            # Reading is free of the budget, so what the prompt shows of earlier sessions can be read too.
            found = variant_of(key) if key in known or call.name == "read_source" else None
            if found is None:
                raise CallError(f"no variant with key {key} was tried in this session; evaluate it first")
            return Prepared(call.name, arguments, found)
        case _:
            return Prepared(call.name, arguments)


def run(prepared: Prepared, toolbox: Toolbox, task: Task, families: Mapping[str, Family]) -> Ran:
    """Runs a prepared call. Anything but ``submit``, which the loop handles."""
    arguments = prepared.arguments
    if prepared.name == "list_families":
        return Ran(_list_families(families, task, toolbox.info.sm_count))
    if isinstance(arguments, ReadSourceArguments):
        return Ran(_read_source(prepared, arguments, families))
    variant = prepared.variant
    if variant is None:  # pragma: no cover - every other tool has one
        raise CallError(f"{prepared.name} needs a variant")
    result: Outcome
    match prepared.name:
        case "compile_plan" | "compile_source":
            result = toolbox.compile(variant)
        case "evaluate_plan" | "evaluate_source":
            result = toolbox.evaluate(variant, task)
        case "verify" if isinstance(arguments, VerifyArguments):
            result = toolbox.verify(variant, task, arguments.depth)
        case "sanitize":
            result = toolbox.sanitize(variant, task)
        case "time" if isinstance(arguments, TimeArguments):
            result = toolbox.time(variant, task, arguments.mode, arguments.budget)
        case _:
            result = toolbox.profile(variant, task)
    return Ran(result_text(result, variant.key, variant.label, prepared.remark), result, variant.key)


def look_up(arguments: DocsArguments, documents: Documents | None) -> Ran:
    """Asks the documentation: no device, no lock, no evaluation."""
    if documents is None:
        raise CallError("there is no documentation index on this machine; go on without")
    return Ran(documents.answer(arguments))


def _list_families(families: Mapping[str, Family], task: Task, sm_count: int) -> str:
    found = [
        family_text(family, len(accepted_plans({name: family}, task, sm_count)))
        for name, family in families.items()
        if family.op == task.op
    ]
    return json.dumps(found)


def _read_source(prepared: Prepared, arguments: ReadSourceArguments, families: Mapping[str, Family]) -> str:
    if prepared.variant is not None:
        variant = prepared.variant
        launch = variant.launch.model_dump(mode="json", exclude_defaults=True)
        return f"{variant.source}\n\nlaunch spec, b_layout {variant.b_layout}:\n{json.dumps(launch)}"
    if arguments.family is None:
        raise CallError("read_source needs a key or a family")
    if arguments.family not in families:
        raise CallError(f"there is no family '{arguments.family}'; there are {', '.join(families)}")
    family = families[arguments.family]
    launch = family.launch.model_dump(mode="json", exclude_defaults=True)
    return (
        f"{family.source}\n\nThe knobs are macros defined before the source, and constants in the launch spec:\n"
        f"{json.dumps(launch)}"
    )
