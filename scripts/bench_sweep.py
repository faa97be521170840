"""Speed of `agent sweep` itself: a replayed sweep of 1000 shapes, the driver's share of it, two workers against one.

    python scripts/bench_sweep.py                      # everything; the recording is made of a scripted device
    python scripts/bench_sweep.py --shapes 100         # quicker
    python scripts/bench_sweep.py --device replay:FILE # a real recording: its shapes

Nothing is measured on a GPU. Limits: 1000 shapes x 24 evaluations in 300 s on 2 cores, driver <= 2 ms a result, two
workers >= 1.9 x one.
"""

from __future__ import annotations

import argparse
import resource
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

EVALUATIONS = 24
#: Recorded for real; the other shapes of the grid are copies of these, since only the answers' number matters here.
BASE = (128, 1024, 8192)


def make_recording(path: Path, count: int) -> None:
    """``count`` shapes of the paper's grid with every plan of every family, from a scripted device."""
    from fakes import ScriptedDevice

    from tools.families import load_families
    from tools.hgemm import grid, hgemm
    from tools.recording import record
    from tools.shapes import spread

    base = [(m, n, k) for m in BASE for n in BASE for k in BASE]
    record(ScriptedDevice(), load_families(), base, path, deadline_s=1e6, echo=lambda line: None)
    wanted = grid() if count == len(grid()) else spread(count)
    with sqlite3.connect(path) as db:
        numbers = dict(db.execute("SELECT task_id, id FROM tasks"))
        next_number = max(numbers.values()) + 1
        for shape in wanted:
            task = hgemm(*shape)
            if task.task_id in numbers:
                continue
            like = hgemm(*(min(BASE, key=lambda b: abs(b.bit_length() - dim.bit_length())) for dim in shape))
            source = numbers[like.task_id]
            db.execute("INSERT INTO tasks SELECT ?, ?, ?, done, best FROM tasks WHERE id = ?",
                       (next_number, task.task_id, task.to_json(), source))  # fmt: skip
            for table in ("verifies", "timings", "profiles", "baselines"):
                columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")][1:]
                names = ", ".join(columns)
                db.execute(f"INSERT INTO {table} SELECT ?, {names} FROM {table} WHERE task = ?", (next_number, source))
            next_number += 1
    wal = path.with_name(path.name + "-wal")
    if wal.exists() and wal.stat().st_size:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def replayed(device: str, folder: Path, count: int | None, policy: str, workers: int) -> None:
    from agent.config import load_settings
    from agent.devices import open_device, recorded_tasks
    from agent.sweep import Sweep, run
    from agent.sweep_cli import make_policy
    from agent.sweep_farm import Place
    from agent.sweep_progress import Progress
    from agent.sweep_table import means
    from agent.sweep_worker import Tools
    from tools.families import load_families

    settings = load_settings(None, {}, {"policy.name": policy, "budget.evaluations": EVALUATIONS})
    opened = open_device(device)
    tasks = recorded_tasks(opened)[:count]
    opened.close()
    place = Place((device,) * workers)
    tools = Tools(open_device, load_families, make_policy)
    db = folder / f"{policy}.sqlite"
    cpu, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with Progress() as progress:
        outcome = run(Sweep(tasks, settings, db, place, tools), progress)
    wall_s = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
    evaluations = sum(row.evaluations for row in outcome.rows)
    offline = means(outcome.rows, "offline")
    print(f"\n{policy}, {workers} workers: {len(outcome.rows)} shapes, {evaluations} evaluations in {wall_s:.1f} s")
    print(f"  {outcome.results} results; the database has {db.stat().st_size / 1e6:.0f} MB")
    print(
        f"  driver, Dask's scheduler included: {cpu_s:.1f} s of CPU, {1e3 * cpu_s / outcome.results:.2f} ms a result,"
    )
    print(f"  {1e3 * cpu_s / evaluations:.2f} ms an evaluation; {used.ru_maxrss / 1024:.0f} MB of memory")
    if offline:
        print(f"  mean {offline.mean.value:.3f}x over {offline.shapes} shapes with a kernel")
    started = time.perf_counter()
    with Progress(quiet=True) as progress:
        run(Sweep(tasks, settings, db, place, tools), progress)
    print(f"  the same command again: {time.perf_counter() - started:.1f} s")


def scaling(folder: Path) -> None:
    """Cells a second with a device that sleeps 50 ms a call, from the first row to the last."""
    from sweep_kit import Options, run_options, shapes

    from agent.sweep_progress import Progress
    from agent.sweep_rows import SweepRow

    class Clock(Progress):
        def __init__(self) -> None:
            super().__init__(quiet=True)
            self.started = 0.0
            self.busy_s = 0.0

        def begin(self, total: int, rows: list[SweepRow]) -> None:  # type: ignore[override]
            self.started = time.perf_counter()

        def done(self, row: SweepRow) -> None:
            self.busy_s = time.perf_counter() - self.started

    rates = {}
    for workers in (1, 2):
        # The same plans everywhere: compiles, which one worker makes for all, are then a small part.
        options = Options(
            str(folder / f"{workers}.sqlite"), str(folder / f"{workers}.log"), shapes(24), ("fake",) * workers,
            sleep_s=0.05,
        )  # fmt: skip
        clock = Clock()
        run_options(options, clock)
        rates[workers] = 24 / clock.busy_s
        print(f"{workers} workers: {rates[workers]:.2f} shapes/s")
    print(f"two workers have {rates[2] / rates[1]:.2f} times the throughput of one")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", help="default: a recording made of a scripted device")
    parser.add_argument("--shapes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--policy", action="append", help="default: search")
    parser.add_argument("--only", choices=["replay", "scaling"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only != "scaling":
            device = options.device
            if device is None:
                recording = folder / "recording.sqlite"
                make_recording(recording, options.shapes)
                print(f"recording: {recording.stat().st_size / 1e6:.0f} MB", file=sys.stderr)
                device = f"replay:{recording}"
            for policy in options.policy or ["search"]:
                replayed(device, folder, options.shapes, policy, options.workers)
        if options.only != "replay":
            scaling(folder)


if __name__ == "__main__":
    main()
