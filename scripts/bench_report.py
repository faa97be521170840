"""How long `agent report` takes for the 1,000 shapes of the grid in three modes. Prints a table.

    python scripts/bench_report.py                 # 1,000 shapes, 3 candidates each, all modes
    python scripts/bench_report.py --shapes 100 --keep /tmp/synthetic.sqlite

The rows are synthetic: made by a formula, named so in the file, and never kept unless --keep says where. They say how
long a report takes and nothing about any kernel.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET_S = 20.0
#: Candidates timed at the final budget, and all that were screened, per shape.
FINALISTS, SCREENED = 3, 24
NAME = "SYNTHETIC DEVICE (no measurement)"


def make_synthetic(path: Path, count: int) -> None:
    """``count`` grid shapes with ``FINALISTS`` finals in every mode, of plans of the packaged families."""
    from tools.families import load_families, plans, render
    from tools.hgemm import grid, hgemm
    from tools.record_writer import RecordWriter
    from tools.records import (
        MODES,
        REFERENCES,
        CompileResult,
        DeviceInfo,
        ProfileResult,
        SanitizeCheck,
        SanitizeResult,
        Status,
        TierResult,
        TimingResult,
        TimingRow,
        VerifyResult,
        content_hash,
    )

    def unit(text: str) -> float:
        return int(content_hash(text), 16) / 16**16

    info = DeviceInfo(
        name=NAME,
        label=NAME,
        kind="fake",
        sm_count=132,
        compute_capability="9.0",
        memory_bytes=141 << 30,
        l2_bytes=60 << 20,
        smem_per_block_bytes=232_448,
        driver="synthetic",
        cuda_runtime="synthetic",
    )
    variants = [render(family, plan) for family in load_families().values() for plan in plans(family)]
    ok, stamp = Status.OK, "2026-01-01T00:00:00+00:00"
    shapes = grid()[:: max(1, 1000 // count)][:count]
    with RecordWriter(path, info) as writer:
        for variant in variants:
            digest = content_hash(variant.key)
            writer.put_compile(
                variant,
                CompileResult(
                    status=ok,
                    variant_id=variant.variant_id,
                    build_id=digest,
                    cubin_sha256=digest,
                    registers=128,
                    spill_bytes=0,
                    mma={"HGMMA.64x128x16.F32": 4},
                ),
            )
            check = SanitizeCheck(tool="memcheck", dims={"M": 64, "N": 64, "K": 64}, ok=True, errors=0)
            writer.put_sanitize(variant, SanitizeResult(status=ok, variant_key=variant.key, checks=(check,)))
        for number, shape in enumerate(shapes):
            task = hgemm(*shape)
            start = number * 7 % len(variants)
            chosen = [variants[(start + i) % len(variants)] for i in range(SCREENED)]
            for place, variant in enumerate(chosen):
                for depth in ("quick", "full") if place < FINALISTS else ("quick",):
                    verified = VerifyResult(
                        status=ok,
                        variant_key=variant.key,
                        task_id=task.task_id,
                        depth=depth,
                        tiers=(TierResult(tier="synthetic", ok=True, checked=1),),
                        max_abs_error=0.01 * (1 + unit(variant.key)),
                        cublas_max_abs_error=0.015,
                    )
                    writer.put_verify(variant, task, verified)
            for variant in chosen[:FINALISTS]:
                for mode in MODES:
                    time_us = 2.0 + prod(shape) / 4e8
                    rows = []
                    for reference in REFERENCES:
                        ratio = 0.8 + 0.5 * unit(f"{variant.key}{shape}{mode}{reference}")
                        rows.append(
                            TimingRow(
                                task_id=task.task_id,
                                dims=task.dims,
                                b_layout=variant.b_layout,
                                mode=mode,
                                budget="final",
                                reference=reference,
                                ratio=ratio,
                                ratio_lo=0.99 * ratio,
                                ratio_hi=1.01 * ratio,
                                time_us=time_us,
                                ref_us=ratio * time_us,
                                samples=100,
                                key=variant.key,
                                device=info.name,
                                driver=info.driver,
                                measured_at=stamp,
                            )
                        )
                    same = {"variant_key": variant.key, "task_id": task.task_id, "mode": mode, "budget": "final"}
                    writer.put_timing(variant, task, TimingResult(status=ok, **same, rows=tuple(rows), spread=0.02))
            for variant in chosen[:FINALISTS]:
                metrics = {"time_us": 2.0, "tensor_pipe_pct": 50.0, "dram_pct": 20.0, "occupancy_pct": 25.0}
                words = ("Synthetic sentence one.", "Synthetic sentence two.", "Synthetic sentence three.")
                profile = ProfileResult(
                    status=ok,
                    variant_key=variant.key,
                    task_id=task.task_id,
                    metrics=metrics,
                    stalls={"long_scoreboard": 1.0},
                    sentences=words,
                )
                writer.put_profile(variant, task, profile)


def child(path: Path, out: Path) -> None:
    """In a process of its own, as the command would: one JSON line of seconds and peak memory."""
    started = time.perf_counter()
    from agent.report_cli import build_report, write_report

    report = build_report(path)
    built = time.perf_counter()
    write_report(report, out)
    print(
        json.dumps(
            {
                "shapes": report.shapes_with_kernel,
                "read and compute s": built - started,
                "render and write s": time.perf_counter() - built,
                "peak RSS MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "page MB": (out / "report.html").stat().st_size / 1e6,
                "JSON MB": (out / "report.json").stat().st_size / 1e6,
            }
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", type=int, default=1000)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the synthetic record file there")
    parser.add_argument("--child", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.child:
        child(*options.child)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "synthetic.sqlite"
        make_synthetic(path, options.shapes)
        started = time.perf_counter()
        command = [sys.executable, __file__, "--child", str(path), str(Path(folder) / "out")]
        result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        total = time.perf_counter() - started
    for name, value in json.loads(result.stdout.splitlines()[-1]).items():
        print(f"{name:<20} {value:>9.1f}")
    print(f"{'total s':<20} {total:>9.1f}   target {TARGET_S:.0f}")
    return 0 if total <= TARGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
