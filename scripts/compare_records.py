"""How far two record files agree on what both measured: two runs, two hosts, or candidates one by one and together.

    python scripts/compare_records.py h200 B.sqlite [--json]      # h200: the packaged record

By mode and budget, over every candidate at every shape that both timed: B's ratio against auto-tuned cuBLASLt (the
better of NN and TN) over A's, less 1. And the libraries' own times, B's over A's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from tools.device import DeviceBroken
from tools.record_file import RecordReader
from tools.records import BUDGETS, MODES
from tools.replay import path_of

Off = dict[str, list[tuple[float, str]]]


def compare(a: RecordReader, b: RecordReader) -> Off:
    found: Off = defaultdict(list)
    for budget in BUDGETS:
        for task_id, key, mode in sorted(set(a.timed_keys(budget)) & set(b.timed_keys(budget))):
            one, other = a.timed(key, task_id, mode, budget), b.timed(key, task_id, mode, budget)
            rows = (one and one.row(), other and other.row())
            if rows[0] and rows[1]:
                found[f"{mode}/{budget}"].append((rows[1].ratio / rows[0].ratio - 1, f"{task_id} {key}"))
    for task in a.tasks():
        for mode in MODES:
            first, second = (r.baselines(task.task_id, mode, "final") for r in (a, b))
            if first and second and (us := (first.best_us(), second.best_us())) and us[0] and us[1]:
                found[f"{mode}/cuBLASLt us"].append((us[1] / us[0] - 1, task.task_id))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", type=Path, nargs=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        a, b = (RecordReader(path_of(path)) for path in options.files)
        if (a.device.name, a.protocol_version) != (b.device.name, b.protocol_version):
            sys.exit(
                f"error: {a.device.name}, protocol {a.protocol_version} and {b.device.name}, protocol "
                f"{b.protocol_version} do not compare"
            )
        found = compare(a, b)
    except DeviceBroken as error:
        sys.exit(f"error: {error}")
    summary = {}
    for name, values in found.items():
        off = sorted(value for value, _ in values)
        worst = max(values, key=lambda pair: abs(pair[0]))
        summary[name] = {
            "common": len(off),
            "median": statistics.median(off),
            "within_1": sum(abs(x) <= 0.01 for x in off) / len(off),
            "within_2": sum(abs(x) <= 0.02 for x in off) / len(off),
            "within_5": sum(abs(x) <= 0.05 for x in off) / len(off),
            "worst": worst[0],
            "worst_at": worst[1],
        }
    if options.json:
        print(json.dumps(summary))
        return
    print(f"{'':<22} {'common':>7} {'median':>9} {'<= 1 %':>8} {'<= 2 %':>8} {'<= 5 %':>8}   worst")
    for name, row in summary.items():
        parts = " ".join(f"{100 * row[f'within_{n}']:6.1f} %" for n in (1, 2, 5))  # type: ignore[operator]
        worst_at = f"{100 * row['worst']:+.1f} % at {row['worst_at']}"  # type: ignore[operator]
        print(f"{name:<22} {row['common']:>7} {100 * row['median']:+8.2f} % {parts}   {worst_at}")  # type: ignore[operator]


if __name__ == "__main__":
    main()
