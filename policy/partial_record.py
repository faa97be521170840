"""Which plans a record is likely to hold that lacks some of a shape, without asking it: each question costs a search
one of its evaluations. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memory.shortlist import Measured
from policy.base import Trial
from tools.records import Family, Plan, Status

#: Of so many nearest shapes so many hold what is likely to be recorded at this one too.
NEAREST, HELD = 6, 4


def likely_recorded(
    plans: Sequence[Plan],
    first: Sequence[Plan],
    trials: Sequence[Trial],
    near: Sequence[Measured],
    families: Mapping[str, Family],
) -> list[Plan]:
    """``first``, which the model ranks first and the recording took; then what most of the ``near`` shapes (closest
    first) hold; and of a kernel that is recorded here the other launches, whose estimates differ little. The two add
    what a recording by an earlier model, or of fewer plans, took in ``first``'s place."""
    kernels = {_kernel(t.plan, families) for t in trials if t.plan is not None and t.status is not Status.NOT_RECORDED}
    known = {plan.plan_id for plan in first}
    closest = near[:NEAREST]
    return [
        *first,
        *(
            plan
            for plan in plans
            if plan.plan_id not in known
            and (sum(plan.plan_id in shape.times_us for shape in closest) >= HELD or _kernel(plan, families) in kernels)
        ),
    ]


def _kernel(plan: Plan, families: Mapping[str, Family]) -> tuple[object, ...]:
    """What tells its machine code apart: all but the knobs that only change launch arguments."""
    knobs = families[plan.family].knobs
    return plan.family, plan.b_layout, *((name, value) for name, value in plan.knobs.items() if not knobs[name].runtime)
