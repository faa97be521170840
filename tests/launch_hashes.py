"""Hashes of what every plan launches, for tests/test_recorded_cubins.py.

``python -m tests.launch_hashes`` writes them anew: after a family's revision was bumped, and for no other reason.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tools.families import load_families, plans, render
from tools.hgemm import hgemm
from tools.launching import accepts, resolve
from tools.records import Variant, content_hash

PATH = Path(__file__).parent / "data" / "launch_hashes.json"
#: Every plan takes two of these: large, with tails in all dimensions, few rows, deep; tall ones, for RASTER_BLOCK; one
#: more of few rows that fill no tile, for RAGGED, and two for tiles of 192 rows.
SHAPES = tuple(
    hgemm(*dims)
    for dims in (
        *((4096, 4096, 4096), (200, 328, 1048), (64, 4096, 4096), (64, 128, 16384), (512, 512, 512)),
        *((904, 384, 648), (1032, 192, 2048), (904, 360, 1048), (904, 136, 1048), (904, 264, 1048), (1032, 288, 2048)),
        *((100, 520, 1048), (1544, 136, 648), (2048, 256, 648)),
    )
)
#: Of an H200; the occupancies are stand-ins, that of a cooperative launch what an H200 offers one without clusters.
SM_COUNT, OCCUPANCY, COOPERATIVE_OCCUPANCY = 132, (1, 66), (1, 132)


def launch_hash(variant: Variant) -> str:
    """Of the concrete launches at the first two of SHAPES that it takes: grid, blocks, arguments, maps, workspace."""
    taken = [task for task in SHAPES if accepts(variant, task, SM_COUNT) is None][:2]
    if len(taken) < 2:
        raise ValueError(f"{variant.label} takes only {len(taken)} of SHAPES")
    occupancy = COOPERATIVE_OCCUPANCY if variant.launch.cooperative else OCCUPANCY
    return content_hash([asdict(resolve(variant, task, SM_COUNT, lambda *_: occupancy)) for task in taken])


def of_all_plans() -> dict[str, str]:
    """By plan_id."""
    return {plan.plan_id: launch_hash(render(f, plan)) for f in load_families().values() for plan in plans(f)}


if __name__ == "__main__":
    PATH.write_text(json.dumps(of_all_plans(), indent=0, sort_keys=True) + "\n")
