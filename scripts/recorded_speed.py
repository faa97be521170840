"""How long the gate took on the GPU whose measurements are recorded: mean, median and worst, from the record file.

    python scripts/recorded_speed.py [RECORD_FILE]

Times are those of the worker, as every result carries them (``elapsed_s``); the pipe to it adds about 0.3 ms a call.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import sys
from math import prod
from pathlib import Path

from tools.device import DeviceBroken
from tools.record_file import RecordReader
from tools.records import Task
from tools.replay import default_path

SMALL_MNK = 2**33


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?", default=default_path())
    path = parser.parse_args().record
    try:
        RecordReader(path).close()
    except DeviceBroken as error:
        sys.exit(f"error: {error}")
    db = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    mnk = {
        number: prod(Task.from_json(text).dims.values()) for number, text in db.execute("SELECT id, task FROM tasks")
    }
    screened = db.execute(
        "SELECT task, elapsed_us FROM timings WHERE mode = 0 AND budget = 0 AND status = 'ok'"
    ).fetchall()
    verified = {
        depth: db.execute("SELECT task, elapsed_us FROM verifies WHERE depth = ? AND status = 'ok'", (d,)).fetchall()
        for d, depth in enumerate(("quick", "full"))
    }
    groups = {
        "screen, offline": screened,
        "verify quick, MNK <= 2^33": [(t, us) for t, us in verified["quick"] if mnk[t] <= SMALL_MNK],
        "verify quick, MNK > 2^33": [(t, us) for t, us in verified["quick"] if mnk[t] > SMALL_MNK],
        "verify full, MNK <= 2^33": [(t, us) for t, us in verified["full"] if mnk[t] <= SMALL_MNK],
        "verify full, MNK > 2^33": [(t, us) for t, us in verified["full"] if mnk[t] > SMALL_MNK],
    }
    print(f"{'ms':28s} {'calls':>7s} {'mean':>9s} {'median':>9s} {'p99':>9s} {'worst':>10s}")
    for name, rows in groups.items():
        ms = sorted(us / 1e3 for _, us in rows)
        if ms:
            p99 = ms[min(len(ms) - 1, int(0.99 * len(ms)))]
            figures = f"{statistics.mean(ms):9.2f} {statistics.median(ms):9.2f} {p99:9.2f} {ms[-1]:10.1f}"
            print(f"{name:28s} {len(ms):7d} {figures}")


if __name__ == "__main__":
    main()
