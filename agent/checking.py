"""``agent check``: a user's own kernel through the gate, one stage after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from agent.errors import EXIT_ERROR, EXIT_OK, EXIT_REJECTED, UsageError
from agent.files import read_json, read_text
from tools.device import Device
from tools.gate import MemoryResults, Toolbox
from tools.launching import unlaunchable
from tools.records import (
    BLayout,
    CompileResult,
    LaunchSpec,
    Mode,
    Outcome,
    ProfileResult,
    Record,
    SanitizeResult,
    Status,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)
from tools.sourcecheck import MAX_SOURCE_BYTES
from tools.validation import first_error

#: No launch spec comes near; more is another file, taken for one.
MAX_LAUNCH_BYTES = 256 << 10

Verdict = Literal["passed", "rejected", "incomplete"]


class Stage(Record):
    """One line of the report. ``sentence`` says what was found, also when all is well."""

    name: str
    status: Status
    reason: str | None = None
    sentence: str
    result: dict[str, object]


class CheckReport(Record):
    """``incomplete``: nothing was wrong, but a stage that decides could not run here."""

    variant_id: str
    task: Task
    device: str
    verdict: Verdict
    stages: tuple[Stage, ...]

    @property
    def exit_code(self) -> int:
        return {"passed": EXIT_OK, "rejected": EXIT_REJECTED, "incomplete": EXIT_ERROR}[self.verdict]

    @property
    def conclusion(self) -> str:
        """The verdict for people, with what would complete it."""
        if any(stage.status is Status.NOT_RECORDED for stage in self.stages):
            return f"{self.verdict}: a kernel of your own is measured on a GPU; where there is one, add --device cuda:0"
        if any(stage.status is Status.UNAVAILABLE for stage in self.stages):
            return f"{self.verdict}: `agent doctor` says what this machine lacks"
        return self.verdict


def load_variant(source: Path, launch: Path, b_layout: BLayout) -> Variant:
    """Raises UsageError for files that cannot be read or a launch spec that is none."""
    text = read_text(source, "the kernel", MAX_SOURCE_BYTES)
    data = read_json(launch, "the launch spec", MAX_LAUNCH_BYTES)
    try:
        spec = LaunchSpec.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{launch} is not a launch spec: {first_error(error)}") from error
    return Variant(source=text, launch=spec, b_layout=b_layout)


def check(
    device: Device,
    variant: Variant,
    task: Task,
    *,
    full: bool,
    modes: tuple[Mode, ...],
    show: Callable[[Stage], None] = lambda stage: None,
) -> CheckReport:
    """Stops at the first stage that rejects the kernel, or without which no other can run.

    ``full``: every tier of verify, sanitize, final timings and a profile; else compile, verify quick, a screen timing.
    """
    toolbox = Toolbox(device, MemoryResults())
    stages: list[Stage] = []
    for name, outcome in _stages(toolbox, variant, task, full, modes):
        stage = Stage(
            name=name,
            status=outcome.status,
            reason=outcome.reason.value if outcome.reason else None,
            sentence=sentence(outcome),
            result=outcome.model_dump(mode="json", exclude_none=True),
        )
        stages.append(stage)
        show(stage)
        if outcome.status is Status.FAILED or (name in ("compile", "verify") and not outcome.ok):
            break  # without them the gate refuses the rest
    return CheckReport(
        variant_id=variant.variant_id,
        task=task,
        device=device.info.label,
        verdict=verdict(stages),
        stages=tuple(stages),
    )


def _stages(
    toolbox: Toolbox, variant: Variant, task: Task, full: bool, modes: tuple[Mode, ...]
) -> Iterator[tuple[str, Outcome]]:
    if (hindrance := unlaunchable(variant, task, toolbox.info.sm_count)) is not None:
        # Found here so that it is found without a GPU, and before a compiler is started.
        yield "launch", Outcome(status=Status.FAILED, reason=hindrance.reason, detail=str(hindrance))
    yield "compile", toolbox.compile(variant)
    yield "verify", toolbox.verify(variant, task, "full" if full else "quick")
    if full:
        yield "sanitize", toolbox.sanitize(variant, task)
    for mode in modes if full else modes[:1]:
        yield f"time {mode}", toolbox.time(variant, task, mode, "final" if full else "screen")
    if full:
        yield "profile", toolbox.profile(variant, task)


def verdict(stages: list[Stage]) -> Verdict:
    """A profile informs and never decides."""
    deciding = [stage.status for stage in stages if stage.name != "profile"]
    if any(stage.status is Status.FAILED for stage in stages):
        return "rejected"
    return "passed" if all(status is Status.OK for status in deciding) else "incomplete"


def sentence(outcome: Outcome) -> str:
    if not outcome.ok:
        return outcome.detail
    match outcome:
        case CompileResult():
            mma = ", ".join(f"{count} {name}" for name, count in outcome.mma.items()) or "no tensor-core instructions"
            return f"{outcome.registers} registers, {outcome.spill_bytes or 0} bytes spilled, {mma}"
        case VerifyResult():
            error = f", largest error {outcome.max_abs_error:.3g}" if outcome.max_abs_error is not None else ""
            ours = outcome.cublas_max_abs_error
            cublas = f" (cuBLAS {ours:.3g})" if ours is not None else ""
            remark = f"; {outcome.detail}" if outcome.detail else ""
            return f"{outcome.depth}: {len(outcome.tiers)} tiers passed{error}{cublas}{remark}"
        case SanitizeResult():
            return f"{len(outcome.checks)} runs of compute-sanitizer without an error"
        case TimingResult():
            row = outcome.row() or outcome.rows[0]
            return (
                f"{row.time_us:.3f} us against {row.ref_us:.3f} us of {row.reference}: ratio {row.ratio:.3f} "
                f"({row.ratio_lo:.3f} … {row.ratio_hi:.3f})"
            )
        case ProfileResult():
            return " ".join(outcome.sentences) or "profiled"
        case _:
            return outcome.detail or "ok"
