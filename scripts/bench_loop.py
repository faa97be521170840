"""Overhead of the agent itself: evaluations a second, memory, `agent --help`. Prints a table.

    python scripts/bench_loop.py                          # the packaged H200 record
    python scripts/bench_loop.py --device replay:FILE --shape 512,512,512

Nothing is measured on a GPU: a replay device answers in microseconds, so what is left is the loop.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HELP_RUNS = 5


def child(device: str, shape: str, evaluations: int, policy: str) -> None:
    """In a process of its own: one session, then one JSON line."""
    started = time.perf_counter()
    from agent import session as sessions
    from agent.config import load_settings
    from agent.devices import open_device, resolve
    from agent.progress import Event

    marks: dict[str, float] = {}

    def watch(event: Event) -> None:
        marks.setdefault(event.kind, time.perf_counter())
        if event.kind == "told":
            marks["told"] = time.perf_counter()

    overrides = {
        "session.shape": shape,
        "session.device": device,
        "budget.evaluations": evaluations,
        "policy.name": policy,
    }
    settings = load_settings(None, {}, overrides)
    name = resolve(device)
    opened = open_device(name)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        config = sessions.create(home, settings, "bench", name, opened.info)
        begun = time.perf_counter()
        summary = sessions.run(home, config, {}, watch, device=opened)
        ended = time.perf_counter()
        checkpoints = (home / "sessions" / "bench" / "checkpoints.sqlite").stat().st_size
    opened.close()
    print(
        json.dumps(
            {
                "evaluations": summary.evaluations,
                "import_s": begun - started,
                "search_s": marks["told"] - marks["opened"],
                "finish_s": ended - marks.get("finish", ended),
                "session_s": ended - begun,
                "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "checkpoints_mb": checkpoints / 1e6,
                "ratio": summary.best.final_ratio if summary.best else None,
            }
        )
    )


def run_child(device: str, shape: str, evaluations: int, policy: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", policy, "--device", device, "--shape", shape]
    command += ["--evaluations", str(evaluations)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the benchmark's session failed")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def help_s() -> float:
    """The fastest of some runs of `agent --help`."""
    times = []
    for _ in range(HELP_RUNS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "agent.cli", "--help"], capture_output=True, check=True, cwd=ROOT)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="replay:h200")
    parser.add_argument("--shape", default="4096,4096,4096")
    parser.add_argument("--evaluations", type=int, default=96)
    parser.add_argument("--child", metavar="POLICY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.child:
        child(options.device, options.shape, options.evaluations, options.child)
        return
    print(f"device {options.device}, shape {options.shape}, budget {options.evaluations} evaluations\n")
    print(f"{'policy':<10} {'evaluations/s':>14} {'search s':>9} {'finish s':>9} {'peak RSS MB':>12} {'best':>7}")
    for policy in ("random", "search"):
        found = run_child(options.device, options.shape, options.evaluations, policy)
        rate = found["evaluations"] / found["search_s"]
        best = f"{found['ratio']:.3f}" if found["ratio"] else "-"
        print(
            f"{policy:<10} {rate:>14.0f} {found['search_s']:>9.2f} {found['finish_s']:>9.2f} "
            f"{found['rss_mb']:>12.0f} {best:>7}"
        )
    print(f"\nagent --help: {help_s():.2f} s (limits: >= 100 evaluations/s, < 600 MB, < 0.5 s)")


if __name__ == "__main__":
    main()
