"""Where the seconds of a recording go: by stage, from a record file; and what the grid would take, by extrapolation.

    python scripts/recording_seconds.py [RECORD_FILE] [--plans 24] [--top 5] [--server-top 3]

First what each call took in the worker, as recorded. Then seconds for all 1000 shapes: each stage's time is fitted as
a + b * floor_us of the shape (weighted, so that small shapes count) and summed. "together" is an estimate: a run of n
candidates and 8 references takes (8 + n) / 9 of a run of one, the FP64 reference of verify is computed once for up to 8
candidates of a layout, and the references need no run of their own. Nothing of it is a measurement of the grid.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np

from tools.device import DeviceBroken
from tools.hgemm import grid, hgemm
from tools.record_file import RecordReader
from tools.records import MODES, Task
from tools.replay import default_path
from tools.shapes import floor_us

#: Of a request, outside the worker: measured from end to end on the H200's host (README, "How long the gate takes").
CLIENT_MS = {"screen": 3.5, "verify": 1.9}
GROUP = 8
Fit = tuple[float, float]
Row = tuple[str, float, float]


def samples(db: sqlite3.Connection) -> dict[str, list[tuple[int, float]]]:
    """(task, ms) by stage. The first final timing of a shape in a mode tunes cuBLASLt for it; what it took more than
    the shortest is that."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for task, budget, mode, us in db.execute("SELECT task, budget, mode, elapsed_us FROM timings WHERE status = 'ok'"):
        found["screen" if budget == 0 else f"{MODES[mode]} final"].append((task, us / 1e3))
    for task, depth, us in db.execute("SELECT task, depth, elapsed_us FROM verifies"):
        found["verify full" if depth else "verify quick"].append((task, us / 1e3))
    for task, mode, budget, data in db.execute("SELECT task, mode, budget, data FROM baselines"):
        name = "set-up" if budget == 0 else f"{MODES[mode]} baselines"
        found[name].append((task, 1e3 * json.loads(zlib.decompress(data))["elapsed_s"]))
    for mode_name in MODES:
        by_task: dict[int, list[float]] = defaultdict(list)
        for task, ms in found[f"{mode_name} final"]:
            by_task[task].append(ms)
        several = {task: ms for task, ms in by_task.items() if len(ms) > 1}
        found[f"{mode_name} tuning"] = [(task, max(ms) - min(ms)) for task, ms in several.items()]
        found[f"{mode_name} final"] = [(task, min(ms)) for task, ms in by_task.items()]
    return found


def fit(rows: list[tuple[int, float]], floors: dict[int, float]) -> Fit:
    x = np.array([[1.0, floors[task]] for task, _ in rows])
    y = np.array([max(ms, 0.1) for _, ms in rows])
    a, b = np.linalg.lstsq(x / y[:, None], np.ones_like(y), rcond=None)[0]
    return float(a), float(b)


def seconds(fits: dict[str, Fit], floors: list[float], plans: int, top: int, server_top: int) -> list[Row]:
    """Rows of stage, seconds of all ``floors`` one by one, and together."""

    def total(name: str, per_shape: float = 1.0, part_of_floor: float = 1.0, extra_ms: float = 0.0) -> float:
        a, b = fits[name]
        return 1e-3 * sum(per_shape * (a + extra_ms + part_of_floor * b * floor) for floor in floors)

    groups = -(-plans // GROUP) + 1  # of two layouts
    rows: list[Row] = [
        ("set-up (operands, tuning offline)", total("set-up"), total("set-up")),
        (
            f"verify quick of {plans} plans",
            total("verify quick", plans, 1.0, CLIENT_MS["verify"]),
            total("verify quick", plans, groups / plans, CLIENT_MS["verify"] / GROUP),
        ),
        (
            f"screening of {plans} plans",
            total("screen", plans, 1.0, CLIENT_MS["screen"]),
            total("screen", plans * (2 + GROUP) / (3 * GROUP), 1.0, CLIENT_MS["screen"] / GROUP),
        ),
        (f"verify full of {top}", total("verify full", top), total("verify full", top, 2 / top)),
    ]
    for mode, count in zip(MODES, (top, top, server_top), strict=True):
        alone, tuning = total(f"{mode} final", count), total(f"{mode} tuning") if mode != "offline" else 0.0
        together = total(f"{mode} final", (8 + count) / 9)
        rows.append((f"{mode}, final, of {count}", alone + tuning, together + tuning))
        rows.append((f"{mode}, final, references alone", total(f"{mode} baselines"), 0.0))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("record", type=Path, nargs="?", default=default_path())
    parser.add_argument("--plans", type=int, default=26, help="plans a shape, leaders of families included")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--server-top", type=int, default=3)
    options = parser.parse_args()
    try:
        RecordReader(options.record).close()
    except DeviceBroken as error:
        sys.exit(f"error: {error}")
    db = sqlite3.connect(f"file:{options.record}?mode=ro&immutable=1", uri=True)
    floors = {number: floor_us(Task.from_json(text)) for number, text in db.execute("SELECT id, task FROM tasks")}
    found = samples(db)
    print(f"{'ms in the worker':<24} {'calls':>6} {'mean':>8} {'median':>8}   fitted: ms + us a floor-us")
    fits = {}
    for name, rows in sorted(found.items()):
        if rows:
            fits[name] = fit(rows, floors)
            ms = [value for _, value in rows]
            a, b = fits[name]
            print(f"{name:<24} {len(ms):>6} {np.mean(ms):8.1f} {np.median(ms):8.1f}   {a:8.1f} + {1e3 * b:.0f}")
    every = [floor_us(hgemm(*shape)) for shape in grid()]
    scope = (options.plans, options.top, options.server_top)
    print(f"\n{'s for the 1000 shapes, one GPU':<36} {'one by one':>11} {'together':>9}   (estimates)")
    stages = seconds(fits, every, *scope)
    everything = ("all", sum(row[1] for row in stages), sum(row[2] for row in stages))
    for stage, alone, together in (*stages, everything):
        print(f"{stage:<36} {alone:>11.0f} {together:>9.0f}")


if __name__ == "__main__":
    main()
