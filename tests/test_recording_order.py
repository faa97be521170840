"""Which plans a recording takes of a shape, in which order it hands shapes out, and when it will have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import ScriptedDevice
from tools.families import accepted_plans, load_families
from tools.hgemm import hgemm
from tools.model import rank
from tools.record_writer import RecordWriter
from tools.recording_cost import Pace, Queue, job_seconds
from tools.recording_scope import Job, Scope, jobs
from tools.records import Task, Variant
from tools.shapes import Regime, regime, spread

WHOLE = Scope()


def plain(task: Task, count: int, timed: set[str]) -> list[str]:
    """The definition: the first of the ranking among those that take the shape, and the first of each family."""
    variants = {v.key: v for v in accepted_plans(load_families(), task)}
    ranking = [
        ranked.plan for ranked in rank([v.plan for v in variants.values() if v.plan], task, ScriptedDevice().info)
    ]
    leaders = {plan.family: plan for plan in reversed(ranking)}
    chosen = {plan.plan_id for plan in (*ranking[:count], *leaders.values())}
    return [key for key in variants if key in chosen or key in timed]


@pytest.mark.parametrize("count", [1, 24, 9999])
def test_the_plans_of_a_shape(tmp_path: Path, count: int) -> None:
    device, families = ScriptedDevice(), load_families()
    tasks = [hgemm(*shape) for shape in (*spread(1000)[::250], (7, 4096, 4096), (1, 8, 24))]
    beyond = accepted_plans(families, tasks[1])[-1]
    with RecordWriter(tmp_path / "r.sqlite", device.info) as writer:
        writer.put_timing(beyond, tasks[1], device.time(beyond, tasks[1], "offline", "screen"))
        found = jobs(writer, families, tasks, Scope(plans=count), device.info)
    for task, job in zip(tasks, found, strict=True):
        timed = {beyond.key} if task is tasks[1] else set()
        keys = [variant.key for variant in job.variants]
        assert keys == plain(task, count, timed)
        assert {variant.key for variant in job.missing} == {*keys} - timed


def test_a_grid_cut_anywhere_holds_all_regimes() -> None:
    wanted: set[Regime] = {"tiny", "launch-bound", "few-tiles", "memory-bound", "compute-short", "compute-long"}
    shapes = spread(1000)
    assert len(set(shapes)) == 1000
    for start in range(0, 150, 10):
        assert {regime(hgemm(*shape)) for shape in shapes[start : start + 10]} >= wanted - {"compute-long"}


def simulate(seconds: list[float], takers: int) -> tuple[list[float], list[int]]:
    """When each of ``takers`` ends, and the order in which things were taken."""
    work, free, order = Queue(range(len(seconds)), dict(enumerate(seconds))), [0.0] * takers, []
    while (taken := work.take(takers)) is not None:
        item, cost = taken
        free[free.index(min(free))] += cost
        order.append(item)
    return free, order


@pytest.mark.parametrize("takers", [1, 2, 8])
def test_all_end_together_though_the_longest_come_last(takers: int) -> None:
    seconds = [1.0 + (i % 7) / 10 for i in range(300)] + [60.0, 40.0, 50.0, 30.0]
    ends, order = simulate(seconds, takers)
    assert sorted(order) == list(range(304))
    assert max(ends) - min(ends) <= 2.0
    assert order[:60] == list(range(60)), "in the order given, until the rest is short"


def test_one_taker_keeps_the_order() -> None:
    assert simulate([5.0, 50.0, 1.0], 1)[1] == [0, 1, 2]


def test_the_pace_is_learned() -> None:
    pace = Pace()
    assert pace.of(100.0, 2) is None
    pace.saw(2.0, 3.0)
    pace.saw(2.0, 5.0)
    assert pace.of(100.0, 2) == pytest.approx(100.0)


def test_large_shapes_and_many_plans_cost_more() -> None:
    def seconds(shape: tuple[int, int, int], plans: int, scope: Scope = WHOLE) -> float:
        variants: tuple[Variant, ...] = tuple(accepted_plans(load_families(), hgemm(*shape))[:plans])
        return job_seconds(Job(hgemm(*shape), variants, "", variants), scope)

    small, large = (64, 64, 64), (8192, 8192, 8192)
    assert seconds(small, 4) < seconds(small, 100) < seconds(large, 100)
    assert seconds(small, 4, Scope(top=9)) > seconds(small, 4, Scope(top=1))
    assert seconds(small, 4, Scope(modes=("offline",))) < seconds(small, 4)
