"""The reward of one rollout, after CUDA-L2 (arXiv 2512.02551): pure, and logged with its parts.

    r = mean_i(t_ref_i / t_i) - alpha * diff - beta * L

t_ref is auto-tuned cuBLASLt, offline; diff the largest deviation from FP64, clipped to 1; L the source's length in
characters. The paper leaves alpha and beta open: ours are in configs/reward.yaml. What a replay device has no record
of has no reward (None), and is masked in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from tools.records import Evaluation, Reason, Status

#: The candidate never ran: it did not compile, or could not be launched as declared.
NOT_EXECUTABLE = frozenset(
    {
        Reason.FORBIDDEN_INCLUDE,
        Reason.HOST_CODE,
        Reason.COMPILE_ERROR,
        Reason.COMPILE_TIMEOUT,
        Reason.COMPILE_MEMORY,
        Reason.MISSING_ENTRY,
        Reason.MUTABLE_GLOBAL,
        Reason.UNRESOLVED_SYMBOL,
        Reason.PTXAS_WARNING,
        Reason.REGISTER_SPILL,
        Reason.FP16_ACCUMULATE,
        Reason.PRECISION_DOWNGRADE,
        Reason.BAD_LAUNCH_SPEC,
        Reason.NOT_ACCEPTED,
        Reason.TOO_MUCH_SHARED_MEMORY,
        Reason.NOT_CO_RESIDENT,
    }
)


class RewardSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    alpha: float = Field(default=0.5, ge=0, le=1e6, description="Weight of the largest deviation (clipped to 1).")
    beta: float = Field(default=1e-6, ge=0, le=1, description="Cost per character of source.")
    compile_failure: float = Field(default=-1.0, ge=-1e6, le=0)
    clip: float = Field(default=1.5, gt=0, le=1e6, description="Group-normalised rewards are clipped to +- this.")
    min_std: float = Field(default=1e-6, gt=0, le=1, description="A group whose rewards spread less gets 0.")


class Reward(BaseModel):
    """``value`` = speed - deviation - length, or the flat value of a candidate that did not compile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    parts: dict[str, float]


def clipped_deviation(deviation: float | None) -> float:
    """[0, 1]; NaN counts 1, an unmeasured deviation 0."""
    if deviation is None:
        return 0.0
    return 1.0 if math.isnan(deviation) else min(1.0, abs(deviation))


def correct_reward(
    ratios: Sequence[float], deviations: Sequence[float | None], code_length: int, settings: RewardSettings
) -> Reward:
    """Of a candidate whose results are right. ``ratios`` are t_ref / t of the repeats, at least one."""
    speed = sum(ratios) / len(ratios)
    diff = sum(map(clipped_deviation, deviations)) / len(deviations) if deviations else 0.0
    return _sum(speed, settings.alpha * diff, settings.beta * code_length)


def wrong_reward(code_length: int, settings: RewardSettings) -> Reward:
    """Of a candidate that ran and was wrong, crashed or hung: no speed term, the full deviation penalty."""
    return _sum(0.0, settings.alpha, settings.beta * code_length)


def compile_failure_reward(settings: RewardSettings) -> Reward:
    return Reward(value=settings.compile_failure, parts={"compile_failure": settings.compile_failure})


def _sum(speed: float, deviation: float, length: float) -> Reward:
    parts = {"speed": speed, "deviation": -deviation, "length": -length}
    return Reward(value=speed - deviation - length, parts=parts)


def reward(evaluation: Evaluation, code_length: int, settings: RewardSettings) -> Reward | None:
    """None if no reward is due: not recorded, refused by the gate, or a tool is missing on this machine."""
    if evaluation.status is Status.FAILED:
        failed = evaluation.reason
        return compile_failure_reward(settings) if failed in NOT_EXECUTABLE else wrong_reward(code_length, settings)
    if not evaluation.ok or evaluation.ratio is None or evaluation.verify is None:
        return None
    return correct_reward([evaluation.ratio], [evaluation.verify.max_abs_error], code_length, settings)


def smooth(rewards: Sequence[float | None], settings: RewardSettings) -> list[float | None]:
    """Group-normalised: clip((r - mean) / std, +-clip) with the population's std; 0 where std < min_std. None stays
    None and does not count."""
    known = [r for r in rewards if r is not None]
    if not known:
        return [None] * len(rewards)
    mean, std = spread(known)
    if std < settings.min_std:
        return [None if r is None else 0.0 for r in rewards]
    return [None if r is None else clipped((r - mean) / std, settings) for r in rewards]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and the population's standard deviation; of one value at least."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def clipped(advantage: float, settings: RewardSettings) -> float:
    return max(-settings.clip, min(settings.clip, advantage))
