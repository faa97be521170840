"""What rows cost that are not there, from a record file: the same plan at M rows and at whole tiles of them, and with
RAGGED and without at the same shapes.

    python scripts/ragged_rows.py [RECORD_FILE] [--rows 33] [--whole 64]

For each way of fetching A: a plan's time at M = --rows over its time at M = --whole, least, median and most, at the
shapes with the same N and K that it was timed at both (offline, screen budget). More rows are more work, so below 1 is
what one expects. Then, by N and K, that of the plan that is quickest at --whole.

The last table is over all recorded shapes that the knob is for, whatever --rows: the time without it over that with it,
and by least squares what rows that are not there add, as a part of the time for their part of the tiles' rows. Pairs
count by the cube of how near the better one comes to the best of its shape: tools/model_terms.py, MISSING_ROWS_….
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.device import DeviceBroken
from tools.families import accepted_plans, load_families
from tools.hgemm import hgemm
from tools.model_terms import FEW_ROWS
from tools.records import Family, Plan, Task
from tools.replay import ReplayDevice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", help="default: the packaged H200's")
    parser.add_argument("--rows", type=int, default=33, help="M that fills no tile (default 33)")
    parser.add_argument("--whole", type=int, default=64, help="M that does (default 64)")
    given = parser.parse_args()
    if given.rows < 1 or given.whole <= given.rows:
        sys.exit("error: --rows is 1 or more, and --whole is more than that")
    device = ReplayDevice(given.record)
    families = load_families()
    known = {task.task_id: task for task in device.records.tasks()}
    ratios: dict[str, list[float]] = defaultdict(list)
    rows = []
    for task in known.values():
        whole = hgemm(given.whole, task.dims["N"], task.dims["K"])
        if task.dims["M"] != given.rows or whole.task_id not in known:
            continue
        few, many = times_us(device, families, task), times_us(device, families, whole)
        both = [plan for plan in few if plan in many]
        for plan in both:
            ratios[fetched(few[plan][0])].append(few[plan][1] / many[plan][1])
        if both:
            best = min(both, key=lambda plan: many[plan][1])
            ratio = few[best][1] / many[best][1]
            rows.append((ratio, f"| {task.dims['N']}x{task.dims['K']} | {few[best][1]:.2f} | {many[best][1]:.2f} "
                                f"| {ratio:.2f} | {many[best][0].label} |"))  # fmt: skip
    if rows:
        print_rows(ratios, rows, given.rows, given.whole)
    else:
        print(f"no N and K are recorded at both M = {given.rows} and M = {given.whole}")
    print_pairs(device, families, known.values())


def print_rows(ratios: Mapping[str, list[float]], rows: list[tuple[float, str]], few: int, whole: int) -> None:
    """The same plans at ``few`` rows and at ``whole``."""
    print(f"| A is fetched by | plans | {few} rows / {whole} rows: least, median, most |\n|---|---|---|")
    for name, found in sorted(ratios.items()):
        print(f"| {name} | {len(found)} | {min(found):.2f}, {statistics.median(found):.2f}, {max(found):.2f} |")
    print(f"\n| N x K | us at {few} | us at {whole} | ratio | the quickest plan at {whole} |")
    print("|---|---|---|---|---|")
    print("\n".join(line for _, line in sorted(rows, reverse=True)))


def print_pairs(device: ReplayDevice, families: Mapping[str, Family], tasks: Iterable[Task]) -> None:
    """Plans with RAGGED against the same without, where both were timed."""
    pairs: dict[str, list[tuple[float, float, float]]] = defaultdict(list)  # missing part, ratio, weight
    for task in tasks:
        timed = times_us(device, families, task) if task.dims["M"] % 64 and task.dims["M"] <= FEW_ROWS else {}
        best_us = min((time_us for _, time_us in timed.values()), default=0.0)
        for plan, with_us in timed.values():
            twin = plan.model_copy(update={"knobs": {k: v for k, v in plan.knobs.items() if k != "RAGGED"}})
            if plan.knob("RAGGED") and twin.plan_id in timed:
                rows, without_us = plan.knobs["BM"], timed[twin.plan_id][1]
                part = 1 - task.dims["M"] / (-(-task.dims["M"] // rows) * rows)
                weight = (best_us / min(with_us, without_us)) ** 3
                pairs[fetched(plan)].append((part, without_us / with_us, weight))
    if pairs:
        print("\n| A is fetched by | pairs | without / with RAGGED: least, median, most | cost of missing rows |")
        print("|---|---|---|---|")
    for name, found in sorted(pairs.items()):
        ratios = [ratio for _, ratio, _ in found]
        cost = sum(w * part * (r - 1) for part, r, w in found) / sum(w * part * part for part, _, w in found)
        spread = f"{min(ratios):.2f}, {statistics.median(ratios):.2f}, {max(ratios):.2f}"
        print(f"| {name} | {len(found)} | {spread} | {cost:.2f} |")


def times_us(device: ReplayDevice, families: Mapping[str, Family], task: Task) -> dict[str, tuple[Plan, float]]:
    found = {}
    for variant in accepted_plans(families, task, device.info.sm_count):
        row = device.time(variant, task, "offline", "screen").row()
        if row is not None and variant.plan is not None:
            found[variant.key] = (variant.plan, row.time_us)
    return found


def fetched(plan: Plan) -> str:
    if plan.family in ("mma_ldg", "plain_tiled"):
        return f"loads ({plan.family})"
    by_copies = plan.family == "mma_cpasync" or plan.knobs.get("LOADER") == 0
    return f"{'cp.async' if by_copies else 'TMA'} ({plan.family})"


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # of `| head`; what is left of it goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (DeviceBroken, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
