"""Generated code and launches may not change under their records, plan by plan: the pinned nvcc must give the recorded
cubins, and every plan must be launched as it was.

If this fails, a family's source, knobs or launch changed: bump its ``revision``, record it anew, and write the new
launches down with ``python -m tests.launch_hashes``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import launch_hashes
from tools.build_cache import CompileCache
from tools.compiling import compile_many
from tools.families import load_families, plans, render
from tools.paths import records_dir
from tools.records import KernelLaunch
from tools.replay import ReplayDevice
from tools.shapes import regime
from tools.toolchain import find_toolchain

RECORD = records_dir() / "h200.sqlite"
SAMPLES_PER_FAMILY = 3


@pytest.fixture(scope="module")
def replay() -> ReplayDevice:
    return ReplayDevice(RECORD)


def test_every_plan_of_every_family_is_recorded(replay: ReplayDevice) -> None:
    recorded = {plan.plan_id for plan in replay.records.plans()}
    for family in load_families().values():
        missing = [plan.label for plan in plans(family) if plan.plan_id not in recorded]
        assert not missing, f"{len(missing)} plans of {family.name} are not recorded, {missing[0]} for one"


def test_every_recorded_source_is_the_shipped_one(replay: ReplayDevice) -> None:
    """Otherwise replay answers "of another source" instead of the numbers."""
    for family in load_families().values():
        changed = [plan.label for plan in plans(family) if not replay.records.is_of(render(family, plan))]
        assert not changed, (
            f"{len(changed)} plans of {family.name} changed since they were recorded, {changed[0]} for one"
        )


def test_the_grid_is_recorded_and_90_winners_have_a_profile(replay: ReplayDevice) -> None:
    winners = [(best, task) for task in replay.records.tasks() if (best := replay.records.best_of(task.task_id))]
    assert len(winners) >= 1000
    profiled = [task for best, task in winners if replay.records.profiled(best, task.task_id)]
    assert len(profiled) >= 90
    assert {regime(task) for task in profiled} == {regime(task) for _, task in winners}


def test_the_pinned_compiler_gives_the_recorded_cubins(replay: ReplayDevice, tmp_path: Path) -> None:
    toolchain = find_toolchain()
    recorded_with = replay.records.meta("compiler")
    if toolchain.compiler != recorded_with:
        pytest.skip(f"recorded with {recorded_with}; here is {toolchain.compiler}")
    chosen = []
    for family in load_families().values():
        every = list(plans(family))
        step = max(1, len(every) // SAMPLES_PER_FAMILY)
        chosen += [render(family, plan) for plan in every[::step][:SAMPLES_PER_FAMILY]]
    for variant, built in compile_many(chosen, 2, toolchain=toolchain, cache=CompileCache(tmp_path)):
        recorded = replay.compile(variant)
        assert built.ok, built.detail
        assert built.cubin_sha256 == recorded.cubin_sha256, f"{variant.label} compiles to other code than was measured"


def test_every_plan_is_launched_as_it_was_recorded() -> None:
    written = json.loads(launch_hashes.PATH.read_text())
    found = launch_hashes.of_all_plans()
    changed = [plan_id for plan_id, digest in found.items() if written.get(plan_id, digest) != digest]
    assert not changed, f"{len(changed)} plans are launched otherwise than they were measured, {changed[0]} for one"
    assert found.keys() == written.keys(), "run: python -m tests.launch_hashes"


@pytest.mark.parametrize("change", [{"smem_bytes": 1024}, {"grid": (7, 1, 1)}, {"block": (96, 1, 1)}, {"args": ("A",)}])
def test_another_launch_has_another_hash(change: dict[str, object]) -> None:
    family = next(iter(load_families().values()))
    variant = render(family, next(iter(plans(family))))
    launch = KernelLaunch.model_validate(variant.launch.launches[0].model_dump() | change)
    other = variant.model_copy(update={"launch": variant.launch.model_copy(update={"launches": (launch,)})})
    assert launch_hashes.launch_hash(other) != launch_hashes.launch_hash(variant)
