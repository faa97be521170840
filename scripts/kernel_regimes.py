"""Which family wins where, by how much, and what its profile says: the tables of docs/kernels.md, from a record file.

    python scripts/kernel_regimes.py [RECORD_FILE]               # of the paper's grid
    python scripts/kernel_regimes.py --off-grid                  # of the other shapes

"alone" is the mean speedup if only that family existed, by screen timings; "winner" is by final timings, gate passed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path

from tools.device import DeviceBroken
from tools.families import accepted_plans, load_families
from tools.hgemm import grid, hgemm
from tools.records import HEADLINE_REFERENCE, ProfileResult, Task, Variant
from tools.replay import ReplayDevice
from tools.shapes import regime

REGIMES = ("tiny", "launch-bound", "few-tiles", "memory-bound", "compute-short", "compute-long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", help="default: the packaged H200's")
    parser.add_argument("--off-grid", action="store_true", help="shapes with a dimension that the grid has not")
    given = parser.parse_args()
    try:
        device = ReplayDevice(given.record)
    except DeviceBroken as error:
        sys.exit(f"error: {error}")
    families = load_families()
    alone: dict[tuple[str, str], list[float]] = defaultdict(list)
    shapes: Counter[str] = Counter()
    winners: dict[str, list[tuple[float, Variant, Task]]] = defaultdict(list)
    limits: dict[str, Counter[str]] = defaultdict(Counter)
    of_grid = {hgemm(*dims).task_id for dims in grid()}
    for task in device.records.tasks():
        if (task.task_id in of_grid) == given.off_grid:
            continue
        name = regime(task)
        shapes[name] += 1
        best: dict[str, float] = {}
        final: list[tuple[float, Variant, Task]] = []
        for variant in accepted_plans(families, task, device.info.sm_count):
            assert variant.plan is not None
            screened = device.time(variant, task, "offline", "screen").row(HEADLINE_REFERENCE)
            if screened is not None:
                best[variant.plan.family] = max(best.get(variant.plan.family, 0.0), screened.ratio)
            timed = device.time(variant, task, "offline", "final").row(HEADLINE_REFERENCE)
            if timed is not None:
                final.append((timed.ratio, variant, task))
        for family, ratio in best.items():
            alone[name, family].append(ratio)
        if final:
            winner = max(final, key=lambda found: found[0])
            winners[name].append(winner)
            profile = device.profile(winner[1], task)
            if profile.ok:
                limits[name][limit(profile)] += 1
    if not shapes:
        sys.exit(f"error: no shape {'off' if given.off_grid else 'of'} the grid is recorded on {device.info.label}")
    print(f"{device.info.label}: {sum(shapes.values())} shapes\n")
    print("| regime | shapes | family | wins | mean speedup where it wins | shapes it takes | alone: mean speedup |")
    print("|---|---|---|---|---|---|---|")
    for name in REGIMES:
        for family in families:
            ratios = alone[name, family]
            won = [ratio for ratio, variant, _ in winners[name] if variant.plan and variant.plan.family == family]
            if ratios:
                mean = f"{100 * (statistics.mean(won) - 1):+.1f} %" if won else "-"
                by_itself = f"{100 * (statistics.mean(ratios) - 1):+.1f} %"
                print(f"| {name} | {shapes[name]} | {family} | {len(won)} | {mean} | {len(ratios)} | {by_itself} |")
    print("\n| regime | mean speedup | worst | limited by, as ncu sees the winners |")
    print("|---|---|---|---|")
    for name in REGIMES:
        if winners[name]:
            ratio, _, task = min(winners[name], key=lambda found: found[0])
            mean = 100 * (statistics.mean(r for r, _, _ in winners[name]) - 1)
            seen = ", ".join(f"{what} {count}" for what, count in limits[name].most_common())
            print(f"| {name} | {mean:+.1f} % | {ratio:.3f} at {task.label} | {seen} |")


def limit(profile: ProfileResult) -> str:
    """The first words of the first sentence: "It is compute-bound: …" → compute-bound."""
    first = profile.sentences[0] if profile.sentences else "unknown"
    return first.removeprefix("It is ").split(":")[0] if first.startswith("It is ") else "no one unit"


if __name__ == "__main__":
    main()
