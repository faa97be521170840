"""Tool results as a language model reads them: short JSON, no noise. Pure."""

from __future__ import annotations

import json
from typing import Any

from tools.compile_errors import relevant_lines
from tools.records import (
    HEADLINE_REFERENCE,
    CompileResult,
    Evaluation,
    Family,
    Outcome,
    ProfileResult,
    SanitizeResult,
    TimingResult,
    VerifyResult,
)


def result_text(result: Outcome, key: str, label: str, remark: str = "") -> str:
    """One JSON object: the variant, the verdict, what the tool found, and a remark about it if there is one."""
    body: dict[str, Any] = {"key": key, "variant": label, "status": result.status.value}
    if result.reason is not None:
        body["reason"] = result.reason.value
    if result.detail:
        body["detail"] = result.detail
    if remark:
        body["remark"] = remark
    match result:
        case Evaluation():
            for part in (result.compile, result.verify, result.timing):
                if part is not None:
                    body.update(_found(part))
        case _:
            body.update(_found(result))
    return json.dumps(body)


def _found(result: Outcome) -> dict[str, Any]:
    match result:
        case CompileResult():
            return _compiled(result)
        case VerifyResult():
            return _verified(result)
        case SanitizeResult():
            return {"checks": [{"tool": c.tool, "dims": c.dims, "errors": c.errors} for c in result.checks]}
        case TimingResult():
            return _timed(result)
        case ProfileResult():
            return {"limits": list(result.sentences), "metrics": result.metrics, "stalls": result.stalls}
        case _:
            return {}


def _compiled(result: CompileResult) -> dict[str, Any]:
    if not result.ok:
        return {"errors": relevant_lines(result.log)} if result.log else {}
    found: dict[str, Any] = {"registers": result.registers, "spill_bytes": result.spill_bytes, "mma": result.mma}
    if result.warnings:
        found["warnings"] = list(result.warnings)
    return found


def _verified(result: VerifyResult) -> dict[str, Any]:
    found: dict[str, Any] = {"verify": result.depth}
    if result.max_abs_error is not None:
        found["max_abs_error"] = result.max_abs_error
    if failed := [t for t in result.tiers if not t.ok]:
        found["failed_tiers"] = [{"tier": t.tier, "mismatches": t.mismatches, "of": t.checked} for t in failed]
    return found


def _timed(result: TimingResult) -> dict[str, Any]:
    row = result.row() or (result.rows[0] if result.rows else None)
    if row is None:
        return {}
    found: dict[str, Any] = {
        "mode": result.mode,
        "ratio": round(row.ratio, 4),
        "interval_95": [round(row.ratio_lo, 4), round(row.ratio_hi, 4)],
        "reference": row.reference,
        "time_us": round(row.time_us, 3),
        "reference_us": round(row.ref_us, 3),
    }
    same_layout = HEADLINE_REFERENCE.removesuffix("_max")
    if (other := result.row(same_layout)) is not None:
        found["ratio_same_layout"] = round(other.ratio, 4)
    if result.noisy or result.throttled:
        found["caution"] = "the run was noisy or throttled"
    return found


def family_text(family: Family, accepted: int) -> dict[str, Any]:
    return {
        "family": family.name,
        "summary": family.summary,
        "b_layouts": list(family.b_layouts),
        "knobs": {
            name: {"values": list(k.values), "doc": k.doc, **({"may_be_left_out": "0"} if k.optional else {})}
            for name, k in family.knobs.items()
        },
        "constraints": list(family.constraints),
        "accepts": list(family.accepts),
        "plans_that_accept_this_shape": accepted,
    }
