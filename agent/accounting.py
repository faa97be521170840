"""What turns and calls cost and come to: pure helpers of agent/nodes.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agent.calls import Ran
from agent.config import BudgetSettings
from agent.state import Answer, Rollout, Spent, TrialRow
from policy.reward import Reward
from tools.records import Status, Step, Trajectory, Usage


def with_call_ids(step: Step, position: int) -> Step:
    """Servers that name no call, or two calls alike, get names from us."""
    ids = [call.call_id for call in step.tool_calls]
    if all(ids) and len(set(ids)) == len(ids):
        return step
    calls = tuple(call.model_copy(update={"call_id": f"call-{position}-{i}"}) for i, call in enumerate(step.tool_calls))
    return step.model_copy(update={"tool_calls": calls})


def answer_payload(ran: Ran) -> dict[str, Any]:
    result = ran.result
    return {
        "text": ran.text,
        "status": ran.status.value,
        "reason": result.reason.value if result and result.reason else None,
        "ratio": ran.ratio,
        "key": ran.key,
        "time_us": ran.time_us,
    }


def trial_row(answer: Answer) -> TrialRow | None:
    """None for calls that evaluate nothing, and for those that were answered without being run."""
    if answer["key"] is None or _refused(answer) or not _evaluates(answer):
        return None
    return TrialRow(
        rollout=answer["rollout"],
        key=answer["key"],
        status=answer["status"],
        reason=answer["reason"],
        ratio=answer["ratio"],
    )


def failures_in_a_row(before: int, answers: Sequence[Answer]) -> int:
    """Turns in a row whose candidates were all rejected, or whose calls could not be run at all, after one more turn. A
    compile that passes proves nothing yet, so only an evaluation or a timing begins the count anew; a turn without a
    verdict leaves it."""
    passed = any(a["status"] == Status.OK and (a["tool"] == "time" or _evaluates(a)) for a in answers)
    failed = any(a["status"] == Status.FAILED and a["reason"] is not None for a in answers)
    refused = bool(answers) and all(_refused(a) for a in answers)
    return 0 if passed else before + (failed or refused)


def _refused(answer: Answer) -> bool:
    """Answered without being run."""
    return answer["status"] == Status.FAILED and answer["reason"] is None


def _evaluates(answer: Answer) -> bool:
    return answer["tool"].startswith("evaluate")


def search_refused(rollout: Rollout, limit: int) -> str:
    """Counts one search of the documentation; a sentence if there was none left."""
    used = rollout.get("searches", 0)
    if used >= limit:
        return f"the {limit} searches of this attempt are used up; go on with what you know"
    rollout["searches"] = used + 1
    return ""


def near_floor(answers: Sequence[Answer], floor_us: float | None, percent: float | None) -> bool:
    """Whether a candidate came within ``percent`` of the least time there can be."""
    if floor_us is None or percent is None:
        return False
    times = [a["time_us"] for a in answers if a["time_us"] is not None]
    return min(times, default=math.inf) <= floor_us * (1 + percent / 100)


def exhausted(spent: Spent, budget: BudgetSettings) -> str:
    """Which budget is spent, if any; evaluations are counted call by call."""
    if budget.wall_s is not None and spent["wall_s"] >= budget.wall_s:
        return "wall_s"
    if budget.tokens is not None and tokens(spent) >= budget.tokens:
        return "tokens"
    if budget.usd is not None and spent["usd"] >= budget.usd:
        return "usd"
    return ""


def tokens(spent: Spent) -> int:
    return spent["input_tokens"] + spent["output_tokens"]


def plus(spent: Spent, usage: Usage | None) -> Spent:
    if usage is None:
        return spent
    return Spent(
        evaluations=spent["evaluations"],
        input_tokens=spent["input_tokens"] + usage.input_tokens,
        output_tokens=spent["output_tokens"] + usage.output_tokens,
        cached_tokens=spent["cached_tokens"] + usage.cached_tokens,
        usd=spent["usd"] + usage.cost_usd,
        wall_s=spent["wall_s"],
    )


def ended(trajectory: Trajectory, rollout: Rollout, own: Reward | None, parts: dict[str, float]) -> Trajectory:
    return trajectory.model_copy(
        update={
            "submitted_key": rollout["submitted"],
            "reward": own.value if own else None,
            "reward_parts": parts,
            "ended_by": rollout["ended_by"] or "policy",
        }
    )
