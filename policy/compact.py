"""The short prompt of a trained local policy: values → text. A few hundred tokens where others take thousands.

Families and knobs are not described: the adapter has learned them. What it is told must stay as it was in training, so
this text belongs to the trained adapters (``PROMPT_VERSION``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from string import Template
from typing import Any

from memory.exemplars_read import Selection, Tried
from memory.shortlist import Expected
from policy.base import ToolSchema
from policy.prompts import analytical_floor_us, is_hgemm, sections
from policy.tool_schemas import tool_schemas
from tools.expr import ceil_div
from tools.hgemm import flops, min_bytes
from tools.paths import configs_dir
from tools.records import DeviceInfo, Plan, Step, Task
from tools.shapes import regime

#: Bumped whenever the same values give another text.
PROMPT_VERSION = 2
TOOLS = ("evaluate_plan", "submit")
MAX_DETAIL = 160
_EXPECTED = "expected here:"
_LINE = re.compile(r"#(\d+) \d+\.\d\d (\S.*)")
#: Of an answer, what a small model is told.
_KEPT = ("key", "status", "reason", "ratio", "error", "submitted", "remark")


@cache
def compact_tools() -> tuple[ToolSchema, ...]:
    return tuple(schema for schema in tool_schemas() if schema.name in TOOLS)


def compact_prompt(
    task: Task,
    device: DeviceInfo,
    reference_us: float | None,
    known: Selection,
    evaluations: int,
    listed: Sequence[Expected] = (),
) -> tuple[Step, Step]:
    """System and user step. ``reference_us`` is auto-tuned cuBLASLt, offline; ``listed`` what should do well here, by
    memory/shortlist.py, numbered from 1."""
    texts = _texts()
    floor = analytical_floor_us(task, device)
    dims = {name.lower(): task.dims.get(name, 0) for name in "MNK"}
    user = Template(texts["user"]).substitute(
        **dims,
        device=device.name,
        sms=device.sm_count,
        regime=regime(task) if is_hgemm(task) else "unknown",
        intensity=f"{flops(task) / min_bytes(task):.3g}" if is_hgemm(task) else "?",
        tiles=ceil_div(dims["m"], 128) * ceil_div(dims["n"], 128),
        floor=f"{floor:.3g}" if floor is not None else "?",
        reference=f"{reference_us:.4g}" if reference_us is not None else "?",
        evaluations=evaluations,
        known="\n".join([*_known(known, task), *_listed(listed, reference_us)]) or "nothing is measured yet",
    )
    return Step(role="system", text=texts["system"]), Step(role="user", text=user)


def plan_arguments(plan: Plan) -> dict[str, Any]:
    """Of the call ``evaluate_plan``."""
    return {"family": plan.family, "b_layout": plan.b_layout, "knobs": dict(plan.knobs)}


def compact_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same conversation with its tools' answers as the local policy reads them."""
    return tuple(s.model_copy(update={"text": compact_answer(s.text)}) if s.role == "tool" else s for s in steps)


def compact_answer(text: str) -> str:
    """An answer of a tool (policy/rendering.py), cut to its verdict. What is no JSON object is cut short."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:MAX_DETAIL]
    if not isinstance(body, dict):
        return text[:MAX_DETAIL]
    kept = {name: _short(body[name]) for name in _KEPT if name in body}
    if "ratio" not in kept and "detail" in body:
        kept["detail"] = _short(body["detail"])
    return json.dumps(kept, separators=(",", ":"))


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value[:MAX_DETAIL]
    return round(value, 3) if isinstance(value, float) else value


def _known(known: Selection, task: Task) -> Iterator[str]:
    if known.exemplars:
        yield f"measured at {known.exemplars[0].task.label}:"
        yield from map(_exemplar, known.exemplars)
        best = known.exemplars[0].profile
        if best is not None and best.sentences:
            yield f"limit of the best: {best.sentences[0]}"
    if known.own:
        yield f"measured at {task.label}:"
        yield from map(_exemplar, known.own)
    for one in known.failures:
        if one.failure is not None and one.failure.reason is not None:
            yield f"rejected: {_what(one)} {one.failure.reason.value}"


def _exemplar(one: Tried) -> str:
    return f"{one.score or 0.0:.3f} {_what(one)}"


def _what(one: Tried) -> str:
    return one.variant.label


def _listed(listed: Sequence[Expected], reference_us: float | None) -> Iterator[str]:
    """Ratios, as what is measured has; against the first where no reference is known."""
    if listed:
        yield _EXPECTED
    for number, one in enumerate(listed, 1):
        yield f"#{number} {(reference_us or listed[0].time_us) / one.time_us:.2f} {one.plan.label}"


def listed_labels(steps: Sequence[Step]) -> dict[int, str]:
    """What a prompt lists, by number; empty where it lists nothing."""
    prompt = next((step.text for step in steps if step.role == "user"), "")
    lines = prompt.partition(f"\n{_EXPECTED}\n")[2].splitlines()
    found = (_LINE.fullmatch(line) for line in lines)
    return {int(match[1]): match[2] for match in found if match is not None}


@cache
def _texts() -> dict[str, str]:
    return sections((configs_dir() / "prompts" / "compact.md").read_text(encoding="utf-8"))
