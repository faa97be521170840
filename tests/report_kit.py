"""A record file with wins, losses, rejects and gaps for the tests of reports. Its numbers are made up: a formula of the
shape, so that every test sees the same ones; the device says that it is scripted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from pathlib import Path

from tests.fakes import ScriptedDevice, toy_families
from tools.recording import record
from tools.records import (
    Budget,
    Clocks,
    Depth,
    Mode,
    Reason,
    Status,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
    content_hash,
)
from tools.shapes import Shape, spread

FAMILIES = toy_families()
#: Every candidate is wrong here, so the shape has no kernel.
HOPELESS = (128, 128, 64)
OFF_GRID = ((96, 33, 128), (96, 128, 128), (16, 4096, 8192))
SHAPES: tuple[Shape, ...] = (HOPELESS, *OFF_GRID, *[s for s in spread(40) if s != HOPELESS][:30])


class UnevenDevice(ScriptedDevice):
    """Wins at small shapes, loses at large ones, more or less by mode; errors grow with K."""

    def time_us(self, variant: Variant, task: Task, mode: Mode = "offline") -> float:
        size = math.log2(prod(task.dims.values()))
        luck = unit(f"{task.task_id}/{mode}") - 0.5
        factor = 0.82 + 0.025 * (size - 18) + 0.25 * luck + (0.05 if variant.b_layout == "kn" else 0.0)
        return super().time_us(variant, task, mode) * factor * {"offline": 1.0, "rotating": 1.02, "server": 0.9}[mode]

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
        timing = super().time(variant, task, mode, budget)
        if not timing.ok:
            return timing
        width = 0.002 + 0.03 * unit(f"{task.task_id}/{variant.key}/{mode}")
        rows = tuple(
            row.model_copy(update={"ratio_lo": row.ratio * (1 - width), "ratio_hi": row.ratio * (1 + width)})
            for row in timing.rows
        )
        hot = unit(f"hot {task.task_id}/{mode}") > 0.9
        clocks = Clocks(
            sm_mhz_min=1700,
            sm_mhz_median=1700 + int(250 * unit(task.task_id)),
            sm_mhz_max=1980,
            power_w_max=650.0,
            temperature_c_max=61,
        )
        clocks = clocks.model_copy(update={"throttle_reasons": ("power",)} if hot else {})
        return timing.model_copy(update={"rows": rows, "clocks": clocks, "throttled": hot, "noisy": width > 0.03})

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult:
        verified = super().verify(variant, task, depth)
        own = 2.0 ** round(math.log2(task.dims["K"]) / 2 - 8)
        error = own * (1 + 0.5 * unit(f"error {task.task_id}/{variant.key}"))
        return (
            verified.model_copy(update={"max_abs_error": error, "cublas_max_abs_error": 1.2 * own})
            if verified.ok
            else verified
        )


def unit(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int(content_hash(text), 16) / 16**16


def script(tool: str, variant: Variant, task: Task | None) -> Reason | Status | None:
    """Some plans do not build, some are wrong somewhere, one races."""
    plan = variant.plan
    if plan is None:
        return None
    if tool == "compile" and plan.knobs.get("SPLIT") == 4 and plan.knobs["BM"] == 64 and plan.knobs["BN"] == 64:
        return Reason.REGISTER_SPILL
    if tool == "verify" and task is not None:
        if tuple(task.dims.values()) == HOPELESS:
            return Reason.WRONG_RESULT
        if unit(f"wrong {variant.key}/{task.task_id}") > 0.93:
            return Reason.UNWRITTEN_OUTPUT if unit(variant.key) > 0.7 else Reason.WRONG_RESULT
    if tool == "sanitize" and unit(f"races {variant.key}") > 0.85:
        return Reason.RACE
    if tool == "profile" and task is not None and unit(f"profile {task.task_id}") > 0.9:
        return Status.UNAVAILABLE
    return None


def make_record(path: Path, shapes: Sequence[Shape] = SHAPES, name: str = "NVIDIA H200") -> Path:
    device = UnevenDevice(script, name=name)
    record(device, FAMILIES, shapes, path, deadline_s=120, commit="0123abc", echo=lambda _: None)
    return path
