"""How fast the gate itself is on a GPU: screening, verify quick and full, compile throughput against nvcc by hand.

    python scripts/bench_gpu.py                     # about 65 s on one H200
    python scripts/bench_gpu.py --json bench.json

Every figure is wall time seen by the caller, the pipe to the worker included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

from tools.build_cache import CompileCache
from tools.compiling import compile_many, nvcc_command
from tools.cuda_device import CudaDevice
from tools.device import DeviceBroken
from tools.families import accepted_plans, load_families
from tools.hgemm import hgemm
from tools.proc import run
from tools.recording_device import TOGETHER
from tools.records import Family, Task, Variant
from tools.shapes import spread
from tools.toolchain import find_toolchain

SMALL_MNK = 2**33


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0, help="GPU ordinal")
    parser.add_argument("--shapes", type=int, default=24, help="grid shapes of the spread to screen on")
    parser.add_argument("--plans", type=int, default=16, help="plans per shape")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if min(args.shapes, args.plans) < 1:
        parser.error("--shapes and --plans are 1 or more")
    try:
        figures = measured(args)
    except DeviceBroken as error:
        sys.exit(f"error: {error}")
    for name, value in figures.items():
        print(f"{name:36s} {value:10.3f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def measured(args: argparse.Namespace) -> dict[str, float]:
    """Raises DeviceBroken where there is no GPU, before anything is compiled."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, CudaDevice(args.device, Path(folder) / "cubins") as device:
        print(f"{device.info.label}, {os.cpu_count()} cores", flush=True)
        families = load_families()
        rng = random.Random(1)
        work: list[tuple[Variant, Task]] = []
        for shape in spread(args.shapes):
            task = hgemm(*shape)
            plans = quick_plans(families, task, device)
            work += [(v, task) for v in rng.sample(plans, min(args.plans, len(plans)))]
        distinct = list({v.source: v for v, _ in work}.values())
        figures["compile_variants"] = len(distinct)
        figures["nvcc_by_hand_s"] = nvcc_by_hand_s(distinct)
        started = time.monotonic()
        toolchain = find_toolchain()
        cache = CompileCache(Path(folder) / "second")
        for _ in compile_many(distinct, toolchain=toolchain, cache=cache):
            pass
        figures["compile_s"] = time.monotonic() - started
        figures["compile_ratio"] = figures["compile_s"] / figures["nvcc_by_hand_s"]
        device.compile_many(distinct)
        figures |= screening(device, work)
        figures |= full(device, families, [(2048, 2048, 2048), (4096, 1024, 2048), (64, 64, 64)], "up_to_2_33")
        figures |= full(device, families, [(16384, 16384, 16384)], "16384_cubed")
        figures |= screening_together(device, work)  # last: what the pool keeps of it would count as verify's
    return figures


def quick_plans(families: dict[str, Family], task: Task, device: CudaDevice) -> list[Variant]:
    found = accepted_plans(families, task, device.info.sm_count)
    return [v for v in found if v.plan and v.plan.family != "plain_tiled"]


def nvcc_by_hand_s(variants: list[Variant]) -> float:
    """The same commands from a thread pool of as many cores, without checks or a cache."""
    toolchain = find_toolchain()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        started = time.monotonic()

        def build(item: tuple[int, Variant]) -> None:
            number, variant = item
            place = Path(folder) / str(number)
            place.mkdir()
            (place / "kernel.cu").write_text(variant.source)
            done = run(nvcc_command(variant, toolchain), deadline_s=120, cwd=place)
            assert done.returncode == 0, done.text()

        list(pool.map(build, enumerate(variants)))
        return time.monotonic() - started


def screening(device: CudaDevice, work: list[tuple[Variant, Task]]) -> dict[str, float]:
    """Mean over the spread. Operands and the tuning of cuBLASLt come once a shape, as ``shape_setup_ms``; the first
    candidate of the first shape, which loads libraries, is not counted."""
    screen_ms: list[float] = []
    verify_ms: list[float] = []
    setup_ms: list[float] = []
    device.time(*work[0], "offline", "screen")
    device.verify(*work[0], "quick")
    ready: Task | None = None
    for variant, task in work:
        if task != ready:
            started = time.monotonic()
            device.baselines(task, "offline", "screen")
            setup_ms.append((time.monotonic() - started) * 1e3)
            ready = task
        started = time.monotonic()
        verified = device.verify(variant, task, "quick")
        middle = time.monotonic()
        timed = device.time(variant, task, "offline", "screen")
        ended = time.monotonic()
        assert verified.ok, verified.detail
        assert timed.ok, timed.detail
        screen_ms.append((ended - middle) * 1e3)
        if prod(task.dims.values()) <= SMALL_MNK:
            verify_ms.append((middle - started) * 1e3)
    return {
        "screened_candidates": len(work),
        "shape_setup_ms_mean": statistics.mean(setup_ms),
        "screen_ms_mean": statistics.mean(screen_ms),
        "screen_ms_median": statistics.median(screen_ms),
        "verify_quick_ms_mean_to_2_33": statistics.mean(verify_ms or [math.nan]),
        "verify_quick_ms_median_to_2_33": statistics.median(verify_ms or [math.nan]),
    }


def screening_together(device: CudaDevice, work: list[tuple[Variant, Task]]) -> dict[str, float]:
    """As a recording does it: up to ``TOGETHER`` candidates of a shape share a run, and those of a layout a reference.
    Mean per candidate, over the same work; shapes are set up once more, because their operands have been dropped."""
    screen_s, verify_s, verified = 0.0, 0.0, 0
    for task, pairs in itertools.groupby(work, key=lambda pair: pair[1]):
        variants = [variant for variant, _ in pairs]
        device.baselines(task, "offline", "screen")
        for layout in ("kn", "nk"):
            for group in _groups([variant for variant in variants if variant.b_layout == layout]):
                started = time.monotonic()
                found = device.verify_many(group, task, "quick")
                if prod(task.dims.values()) <= SMALL_MNK:
                    verify_s += time.monotonic() - started
                    verified += len(group)
                assert found is not None and all(result.ok for result in found)
        for group in _groups(variants):
            started = time.monotonic()
            timed = device.time_many(group, task, "offline", "screen")
            screen_s += time.monotonic() - started
            assert timed is not None and all(result.ok for result in timed[0])
    figures = {"together_screen_ms_mean": 1e3 * screen_s / len(work)}
    if verified:
        figures["together_verify_quick_ms_mean_to_2_33"] = 1e3 * verify_s / verified
    return figures


def _groups(variants: list[Variant]) -> list[list[Variant]]:
    return [variants[i : i + TOGETHER] for i in range(0, len(variants), TOGETHER)]


def full(
    device: CudaDevice, families: dict[str, Family], shapes: list[tuple[int, int, int]], label: str
) -> dict[str, float]:
    """The slowest of three repeats over ``shapes``, after one that pays for libraries and the tuning of cuBLASLt."""
    slowest, memory = 0.0, 0
    for shape in shapes:
        task = hgemm(*shape)
        variant = quick_plans(families, task, device)[0]
        device.baselines(task, "offline", "screen")
        if prod(shape) <= SMALL_MNK:
            device.verify(variant, task, "full")
        for _ in range(3 if prod(shape) <= SMALL_MNK else 1):
            started = time.monotonic()
            result = device.verify(variant, task, "full")
            slowest = max(slowest, time.monotonic() - started)
            assert result.ok, result.detail
            memory = max(memory, result.peak_memory_bytes or 0)
    return {f"verify_full_s_{label}": slowest, f"verify_full_peak_gib_{label}": memory / 2**30}


if __name__ == "__main__":
    main()
