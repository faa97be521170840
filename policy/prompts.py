"""The prompt of a rollout: values → text. Templates are Markdown files in configs/prompts/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template

from policy.base import Trial
from tools.hgemm import flops, min_bytes
from tools.paths import configs_dir
from tools.records import BaselineResult, DeviceInfo, Record, Step, Task


class Exemplar(Record):
    """An earlier variant of the same task with its score, and what the profiler said where it was asked."""

    trial: Trial
    detail: str = ""
    source: str | None = None
    sentences: tuple[str, ...] = ()


class Templates(Record):
    system: str
    task: str


def load_templates(folder: Path | None = None) -> Templates:
    folder = folder or configs_dir() / "prompts"
    return Templates(system=(folder / "system.md").read_text(), task=(folder / "task.md").read_text())


def prompt(
    templates: Templates,
    task: Task,
    device: DeviceInfo,
    references: Sequence[BaselineResult],
    exemplars: Sequence[Exemplar],
    evaluations: int,
    turns: int,
) -> tuple[Step, Step]:
    """System and user step of a rollout. Equal for every rollout of a group."""
    text = Template(templates.task).substitute(
        operation=operation_text(task),
        device=device_text(device),
        references=references_text(references),
        evaluations=evaluations,
        turns=turns,
        exemplars=exemplars_text(exemplars),
    )
    return Step(role="system", text=templates.system.strip()), Step(role="user", text=text.strip())


def operation_text(task: Task) -> str:
    dims = ", ".join(f"{name} = {value}" for name, value in task.dims.items())
    text = f"{task.op} with {dims}; accumulate in {task.accumulate}."
    if {"M", "N", "K"} <= set(task.dims):
        text += f" {flops(task) / 1e9:.4g} GFLOP; A, B and C together are {min_bytes(task) / 2**20:.4g} MiB."
    return text


def device_text(device: DeviceInfo) -> str:
    return (
        f"{device.label}: {device.sm_count} SMs, compute capability {device.compute_capability}, "
        f"{device.memory_bytes / 2**30:.0f} GiB memory, {device.l2_bytes / 2**20:.0f} MiB L2, "
        f"{device.smem_per_block_bytes} bytes of shared memory a block."
    )


def references_text(references: Sequence[BaselineResult]) -> str:
    lines = [
        f"- {r.mode}: {t.reference} ({t.b_layout}) {t.time_us:.3f} us" for r in references if r.ok for t in r.times
    ]
    return "\n".join(lines) or "Not known on this device."


def exemplars_text(exemplars: Sequence[Exemplar]) -> str:
    if not exemplars:
        return "None yet."
    parts = []
    for exemplar in exemplars:
        trial = exemplar.trial
        score = f"ratio {trial.ratio:.3f}" if trial.ratio is not None else f"rejected ({trial.reason or trial.status})"
        lines = [f"## {trial.label}", f"key {trial.key}: {score}"]
        if exemplar.detail:
            lines.append(exemplar.detail)
        lines += [f"- {sentence}" for sentence in exemplar.sentences]
        if exemplar.source:
            lines.append(f"```cuda\n{exemplar.source.rstrip()}\n```")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def choose_exemplars(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The best, then evenly spaced ones down the ranking, then the last rejected: a contrast, without randomness."""
    passed = sorted((t for t in trials if t.ratio is not None), key=lambda t: -(t.ratio or 0.0))
    rejected = [t for t in trials if t.ratio is None and t.reason is not None]
    if count < 1:
        return []
    room = count - 1 if rejected and count > 1 else count
    chosen = passed if len(passed) <= room else [passed[i * (len(passed) - 1) // max(1, room - 1)] for i in range(room)]
    return [*chosen, *rejected[-1:]][:count]
