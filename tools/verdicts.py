"""What the gate demands of a candidate's outputs, as values: the tiers, and the verdict on what they counted. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tools.numerics import binary_density, integer_bound
from tools.records import Depth, Reason, Task, TierResult

Kind = Literal["binary", "integer", "normal", "uniform", "subnormal", "pair_a", "pair_b", "bits", "wide"]
KINDS: tuple[Kind, ...] = ("binary", "integer", "normal", "uniform", "subnormal", "pair_a", "pair_b", "bits", "wide")
CompareMode = Literal["exact", "interval", "clause"]
COMPARE_MODES: tuple[CompareMode, ...] = ("exact", "interval", "clause")


class Rejected(Exception):
    """The candidate failed; becomes the FAILED record with this reason and sentence."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Stats:
    """Counted over one comparison. ``max_abs_error`` is over finite entries; ``first_bad`` a flat index."""

    mismatches: int
    unwritten: int
    max_abs_error: float
    first_bad: int | None


@dataclass(frozen=True)
class SideEffects:
    """Words that should not have changed: guard bands, the operands, the declared workspace state."""

    guard_words: int = 0
    inputs_changed: bool = False
    state_words: int = 0


@dataclass(frozen=True)
class Tier:
    """How the operands are drawn and which bounds the outputs must keep. ``special`` adds infinities and NaN."""

    name: str
    a: tuple[Kind, float]
    b: tuple[Kind, float]
    modes: tuple[CompareMode, ...]
    special: bool = False


def tiers(k: int, depth: Depth) -> list[Tier]:
    """quick: integer and normal. full: every tier, the paper's binary one first."""
    v = float(integer_bound(k))
    integer = Tier("integer", ("integer", v), ("integer", v), ("exact",))
    normal = Tier("normal", ("normal", 1.0), ("normal", 1.0), ("interval", "clause"))
    if depth == "quick":
        return [integer, normal]
    density = binary_density(k)
    # Outputs of about sqrt(K) scale^2 = 50,000 straddle FP16's largest number, so that overflow is exercised too.
    large = math.sqrt(50_000 / math.sqrt(k))
    return [
        Tier("binary", ("binary", density), ("binary", density), ("exact",)),
        integer,
        normal,
        Tier("uniform", ("uniform", 1.0), ("uniform", 1.0), ("interval", "clause")),
        Tier("large", ("normal", large), ("normal", large), ("interval",)),
        Tier("cancellation", ("pair_a", 1.0), ("pair_b", 1.0), ("interval",)),
        Tier("subnormal_a", ("subnormal", 1.0), ("normal", 1024.0), ("interval",)),
        Tier("subnormal_b", ("normal", 1024.0), ("subnormal", 1.0), ("interval",)),
        # At most four terms of 11 bits times 3: exact, and operands rounded to BF16 or FP8 on the way give them away,
        # which at long K neither the integers (small by then) nor the interval (wide by then) do.
        Tier("wide_a", ("wide", 2047.0), ("integer", 3.0), ("exact",)),
        Tier("wide_b", ("integer", 3.0), ("wide", 2047.0), ("exact",)),
        Tier("special", ("normal", 1.0), ("normal", 1.0), ("interval",), special=True),
    ]


def judge(
    tier: Tier,
    stats: Sequence[Stats],
    repeat: Stats,
    repeat_loose: Stats,
    side: SideEffects,
    task: Task,
    deterministic: bool,
) -> TierResult:
    """One tier's verdict: ``stats`` against the reference, one per mode; ``repeat`` the second run against the first,
    bitwise, and ``repeat_loose`` by the reviewers' clause. Raises Rejected with the named reason.

    Side effects come first: a kernel that writes outside C is reported as that, whatever its outputs are.
    """
    outputs = task.dims["M"] * task.dims["N"]
    if side.guard_words:
        raise Rejected(
            Reason.WROTE_OUT_OF_BOUNDS, f"{side.guard_words} guard words beside C or the workspace were overwritten"
        )
    if side.inputs_changed:
        raise Rejected(Reason.MODIFIED_INPUT, "A or B changed while the kernel ran")
    unwritten = max(s.unwritten for s in (*stats, repeat))
    if unwritten:
        raise Rejected(
            Reason.UNWRITTEN_OUTPUT, f"{unwritten} of {outputs} outputs still hold the poison pattern ({tier.name})"
        )
    if side.state_words:
        raise Rejected(Reason.WORKSPACE_STATE, "the declared workspace state was not left as it was found")
    for mode, s in zip(tier.modes, stats, strict=True):
        if s.mismatches:
            row, column = divmod(s.first_bad or 0, task.dims["N"])
            raise Rejected(
                Reason.WRONG_RESULT,
                f"{s.mismatches} of {outputs} outputs are wrong on {tier.name} inputs ({mode} bound), "
                f"the first at row {row}, column {column}; largest error {s.max_abs_error:.4g}",
            )
    # Without the promise of determinism two runs need only agree as well as a correct result must.
    if repeat.mismatches and (deterministic or (repeat_loose.mismatches and tier.name == "normal")):
        raise Rejected(
            Reason.NOT_DETERMINISTIC, f"two runs on the same {tier.name} inputs differ in {repeat.mismatches} outputs"
        )
    return TierResult(tier=tier.name, ok=True, checked=outputs, max_abs_error=stats[0].max_abs_error)


def baseline_bounded(spread: float, error: float, task: Task) -> TierResult:
    """The paper's second tier, reported but never rejecting: cuBLAS's variants can agree to the last bit."""
    within = "within" if error <= spread else "beyond"
    return TierResult(
        tier="baseline_bounded",
        ok=True,
        checked=task.dims["M"] * task.dims["N"],
        max_abs_error=error,
        detail=f"error {error:.4g} is {within} the largest difference {spread:.4g} between cuBLAS variants and FP64",
    )
