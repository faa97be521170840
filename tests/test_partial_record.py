"""What a record that lacks some plans of a shape is likely to hold: policy/partial_record.py."""

from __future__ import annotations

from fakes import toy_families

from memory.shortlist import Measured
from policy.base import Trial
from policy.partial_record import HELD, NEAREST, likely_recorded
from tools.families import plans_taking
from tools.hgemm import hgemm
from tools.records import Family, Knob, Plan, Status

TASK = hgemm(512, 512, 512)


def family_with_orders() -> dict[str, Family]:
    """Two kernels a layout at least, each in two orders."""
    (name, family), *_ = toy_families().items()
    knobs = {**family.knobs, "ORDER": Knob(values=(0, 1), doc="the order of tiles", runtime=True)}
    return {name: family.model_copy(update={"knobs": knobs})}


FAMILIES = family_with_orders()
PLANS = plans_taking(FAMILIES, TASK, 132)


def trial(plan: Plan, status: Status) -> Trial:
    ratio = 1.0 if status is Status.OK else None
    return Trial(key=plan.plan_id, label=plan.label, plan=plan, status=status, ratio=ratio)


def shape(*held: Plan) -> Measured:
    return Measured(hgemm(256, 256, 256), {plan.plan_id: 1.0 for plan in held})


def kernel(plan: Plan) -> object:
    return plan.b_layout, {k: v for k, v in plan.knobs.items() if k != "ORDER"}


def test_what_the_model_ranks_first_comes_first_and_nothing_comes_twice() -> None:
    first = PLANS[:3]
    found = likely_recorded(PLANS, first, [], [shape(*PLANS)] * NEAREST, FAMILIES)
    assert found[:3] == first and len({p.plan_id for p in found}) == len(found) == len(PLANS)
    assert likely_recorded(PLANS, first, [], [], FAMILIES) == first


def test_what_most_of_the_nearest_shapes_hold_is_likely_to_be_recorded() -> None:
    common, rare = PLANS[5], PLANS[6]
    near = [shape(common)] * HELD + [shape(rare)] * (NEAREST - HELD) + [shape(rare)] * 10
    assert likely_recorded(PLANS, PLANS[:1], [], near, FAMILIES) == [PLANS[0], common], "farther ones do not count"


def test_of_a_kernel_that_is_recorded_the_other_orders_are_too() -> None:
    tried = PLANS[0]
    orders = [plan for plan in PLANS if kernel(plan) == kernel(tried)]
    assert len(orders) == 2
    assert likely_recorded(PLANS, [], [trial(tried, Status.OK)], [], FAMILIES) == orders
    assert likely_recorded(PLANS, [], [trial(tried, Status.FAILED)], [], FAMILIES) == orders
    assert likely_recorded(PLANS, [], [trial(tried, Status.NOT_RECORDED)], [], FAMILIES) == []
