"""The prompt of a rollout: values → text. Templates are Markdown files in configs/prompts/; what earlier variants say
is made by memory/contrast.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from tools.hgemm import flops, min_bytes
from tools.paths import configs_dir
from tools.records import BaselineResult, DeviceInfo, Record, Step, Task
from tools.shapes import floor_us, regime

#: The system prompt's parts, in this order: equal for every task, so that providers can cache it.
SYSTEM_PARTS = ("system", "abi", "method")
_SECTION = re.compile(r"^## +(\S+)[ \t]*$", re.MULTILINE)


class Templates(Record):
    """``regimes`` and ``notes`` are sections by heading."""

    system: str
    task: str
    regimes: dict[str, str]
    notes: dict[str, str]

    def note(self, name: str, **values: object) -> str:
        return Template(self.notes[name]).substitute(values)


def load_templates(folder: Path | None = None) -> Templates:
    folder = folder or configs_dir() / "prompts"
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return Templates(
        system="\n\n".join(texts[name].strip() for name in SYSTEM_PARTS),
        task=texts["task"],
        regimes=sections(texts["regimes"]),
        notes=sections(texts["notes"]),
    )


def sections(text: str) -> dict[str, str]:
    """Second-level headings of one word → the text under each; what stands before the first is for editors only."""
    _, *parts = _SECTION.split(text)
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


def prompt(
    templates: Templates,
    task: Task,
    device: DeviceInfo,
    references: Sequence[BaselineResult],
    memory: str,
    evaluations: int,
    turns: int,
) -> tuple[Step, Step]:
    """System and user step of a rollout. Equal for all rollouts of a group. ``memory`` is empty if nothing is known."""
    text = Template(templates.task).substitute(
        operation=operation_text(task),
        device=device_text(device),
        regime=regime_text(task, device, templates.regimes),
        references=references_text(references),
        evaluations=evaluations,
        turns=turns,
        memory=memory or templates.note("no-memory"),
    )
    return Step(role="system", text=templates.system), Step(role="user", text=text.strip())


def operation_text(task: Task) -> str:
    dims = ", ".join(f"{name} = {value}" for name, value in task.dims.items())
    text = f"{task.op} with {dims}; accumulate in {task.accumulate}."
    if is_hgemm(task):
        text += f" {flops(task) / 1e9:.4g} GFLOP; A, B and C together are {min_bytes(task) / 2**20:.4g} MiB."
    return text


def device_text(device: DeviceInfo) -> str:
    return (
        f"{device.label}: {device.sm_count} SMs, compute capability {device.compute_capability}, "
        f"{device.memory_bytes / 2**30:.0f} GiB memory, {device.l2_bytes / 2**20:.0f} MiB L2, "
        f"{device.smem_per_block_bytes} bytes of shared memory a block."
    )


def regime_text(task: Task, device: DeviceInfo, regimes: Mapping[str, str]) -> str:
    """The task's regime with its hints, and the analytical floor where it is known."""
    if not is_hgemm(task):
        return "Not known for this operation."
    name, floor = regime(task), analytical_floor_us(task, device)
    text = f"Regime `{name}`, at {flops(task) / min_bytes(task):.3g} FLOP a byte."
    if floor is not None:
        text += f" Arithmetic, memory traffic and one launch put the floor at {floor:.3g} us."
    return f"{text} {regimes.get(name, '')}".strip()


def analytical_floor_us(task: Task, device: DeviceInfo) -> float | None:
    """The least time a kernel can need; None for an operation or a device that it was not made for."""
    known = is_hgemm(task) and device.name.startswith("NVIDIA H200")
    return floor_us(task) if known else None


def is_hgemm(task: Task) -> bool:
    return {"M", "N", "K"} <= set(task.dims)


def references_text(references: Sequence[BaselineResult]) -> str:
    lines = [
        f"- {r.mode}: {t.reference} ({t.b_layout}) {t.time_us:.3f} us" for r in references if r.ok for t in r.times
    ]
    return "\n".join(lines) or "Not known on this device."
