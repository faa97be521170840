"""Generated code may not change under its records: the pinned nvcc must give the recorded cubins, plan by plan.

If this fails, a family's source, knobs or launch changed: bump its ``revision`` and record it anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.build_cache import CompileCache
from tools.compiling import compile_many
from tools.families import load_families, plans, render
from tools.paths import records_dir
from tools.replay import ReplayDevice
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
