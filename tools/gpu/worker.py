"""The process that owns a GPU: answers one framed JSON request after another on a private pipe.

``python -m tools.gpu.worker --ordinal 0 --in-fd N --out-fd M``. A candidate that hangs or breaks the context costs
this process and nothing else: the reply says ``"restart": true`` and the client starts a fresh one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
import traceback
from collections import OrderedDict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import cupy as cp

from tools.frames import exit_on_hangup, read_frame, write_frame
from tools.gpu.blas import BlasError
from tools.gpu.candidate import Candidate
from tools.gpu.data import Kernels
from tools.gpu.driver import CudaError, Gpu, Module, check
from tools.gpu.lock import GpuLock
from tools.gpu.nvml import ClockLog
from tools.gpu.operands import Operands
from tools.gpu.references import LAYOUTS, Library, References, versions
from tools.gpu.replays import Prepared, Subject, run_interleaved, time_of
from tools.gpu.verify import Verifier, fits, verify
from tools.launching import LaunchError, accepts, resolve
from tools.records import (
    BaselineResult,
    BaselineTime,
    Budget,
    Clocks,
    DeviceInfo,
    Mode,
    Outcome,
    Reason,
    Status,
    Task,
    TimingResult,
    TimingRow,
    Variant,
    VerifyResult,
)
from tools.stats import paired_ratio, relative_iqr, strongest
from tools.timing_plan import launches_per_replay, sets_in_use
from tools.verdicts import Rejected

MODULES_KEPT = 64
NOISY_SPREAD = 0.05
THROTTLE_SLACK = 0.03


class Bench:
    """What is kept for the task at hand: operands and references. One at a time; the next task frees it."""

    def __init__(self, worker: Worker, task: Task) -> None:
        self.task = task
        self.operands = Operands(worker.kernels, task, worker.gpu.l2_bytes)
        self.references = References(worker.library, worker.kernels, self.operands, task, worker.clocks)


class Worker:
    def __init__(self, ordinal: int) -> None:
        self.gpu = Gpu(ordinal)
        cp.cuda.Device(ordinal).use()
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.kernels = Kernels(self.stream)
        self.library = Library()
        self.uuid = _uuid(self.gpu)
        self.clocks = ClockLog(self.uuid)
        self._modules: OrderedDict[str, Module] = OrderedDict()
        self._bench: Bench | None = None

    # --- requests --------------------------------------------------------------------------------------------------

    def info(self) -> DeviceInfo:
        from cuda.bindings import driver as cu

        driver, name = _driver_version(), self.gpu.name
        runtime = int(check(cu.cuDriverGetVersion(), "cuDriverGetVersion"))
        return DeviceInfo(
            name=name,
            label=f"{name}, driver {driver}",
            kind="cuda",
            sm_count=self.gpu.sm_count,
            compute_capability=self.gpu.compute_capability,
            memory_bytes=self.gpu.memory_bytes,
            l2_bytes=self.gpu.l2_bytes,
            smem_per_block_bytes=self.gpu.smem_bytes,
            driver=driver,
            cuda_runtime=f"{runtime // 1000}.{runtime % 1000 // 10}",
            library=versions(),
        )

    def verify(self, request: dict[str, Any]) -> VerifyResult:
        variant, task = Variant.model_validate(request["variant"]), Task.model_validate(request["task"])
        module = self._module(request["cubin"])
        if (too_large := fits(task, self.gpu)) is not None:
            return VerifyResult(
                status=Status.UNAVAILABLE, detail=too_large, variant_key=variant.key, task_id=task.task_id,
                depth=request["depth"],
            )  # fmt: skip
        spec = resolve(variant, task, self.gpu.sm_count, module.occupancy)
        spread = self._baseline_spread if request["depth"] == "full" else None
        result = verify(
            self.gpu, self.kernels, module, variant, task, spec, request["depth"], self.library.cublas, spread
        )
        if _large(task):
            cp.get_default_memory_pool().free_all_blocks()
        return result

    def time(self, request: dict[str, Any]) -> TimingResult:
        started = time.monotonic()
        variant, task = Variant.model_validate(request["variant"]), Task.model_validate(request["task"])
        mode, budget = request["mode"], request["budget"]
        if (too_large := fits(task, self.gpu)) is not None:
            return TimingResult(
                status=Status.UNAVAILABLE, detail=too_large, variant_key=variant.key, task_id=task.task_id,
                mode=mode, budget=budget,
            )  # fmt: skip
        module = self._module(request["cubin"])
        spec = resolve(variant, task, self.gpu.sm_count, module.occupancy)
        bench = self._bench_for(task)
        operands, references = bench.operands, bench.references
        candidate = Candidate(self.gpu, self.kernels, module, variant, spec, operands, task)
        before = operands.checksum() if budget != "screen" else 0
        candidate.first_launch()
        own_us = time_of(candidate.enqueue, operands, self.stream)
        launches = launches_per_replay(references.fastest_us(), own_us, mode, 2 * operands.outputs, operands.slots)
        sets = sets_in_use(mode, launches, operands.sets)
        subject = candidate.subject(range(sets), references.enqueue_of("cublas", variant.b_layout), budget)
        names = ["cublaslt_auto"] if budget == "screen" else references.names()
        keys = [(name, layout) for name in names for layout in LAYOUTS]
        prepared = [references.prepared(name, layout, mode, launches) for name, layout in keys]
        round_s = launches * 1e-6 * (own_us + sum(references.estimate_us(name, layout) for name, layout in keys))
        mine: list[Prepared] = []
        try:
            mine.append(Prepared(subject, operands, mode, launches, self.stream.ptr))
            if mode == "server":
                mine.append(self._empty(bench))
            samples = run_interleaved(
                [*prepared, *mine], self.kernels, mode, budget, round_s, self.clocks,
                aim_s=request.get("aim_s"), warm_s=request.get("warm_s"),
            )  # fmt: skip
        finally:
            for p in mine:
                p.destroy()
        candidate.check_after()
        if budget != "screen" and operands.checksum() != before:
            raise Rejected(Reason.MODIFIED_INPUT, "A or B changed while the kernel was timed")
        result = self._timing_result(variant, task, mode, budget, names, samples, time.monotonic() - started)
        candidate.refuse_impossible(result.time_us or 0.0)
        return result

    def _timing_result(
        self,
        variant: Variant,
        task: Task,
        mode: Mode,
        budget: Budget,
        names: list[str],
        samples: dict[str, Any],
        took_s: float,
    ) -> TimingResult:
        own = samples["candidate"]
        now = datetime.now(UTC).isoformat(timespec="seconds")
        rows = []
        for name in names:
            by_layout = {layout: samples[strongest(samples, name, layout)] for layout in LAYOUTS}
            medians = {layout: _median(times) for layout, times in by_layout.items()}
            best = min(LAYOUTS, key=medians.__getitem__)
            against = {layout: paired_ratio(own, by_layout[layout]) for layout in {variant.b_layout, best}}
            for reference, layout in ((name, variant.b_layout), (f"{name}_max", best)):
                r = against[layout]
                rows.append(
                    TimingRow(
                        task_id=task.task_id, dims=task.dims, b_layout=variant.b_layout, mode=mode, budget=budget,
                        reference=reference, ratio=r.ratio, ratio_lo=r.lo, ratio_hi=r.hi, time_us=r.time_us,
                        ref_us=r.ref_us, samples=int(own.size), key=variant.key, device=self.gpu.name,
                        driver=_driver_version(), measured_at=now,
                    )
                )  # fmt: skip
        clocks = self.clocks.summary()
        spread = relative_iqr(own)
        headline = rows[-1]
        return TimingResult(
            status=Status.OK,
            variant_key=variant.key,
            task_id=task.task_id,
            mode=mode,
            budget=budget,
            rows=tuple(rows),
            spread=spread,
            empty_kernel_us=_median(samples["empty"]) if "empty" in samples else None,
            clocks=clocks,
            noisy=spread > NOISY_SPREAD or (headline.ratio_hi - headline.ratio_lo) / headline.ratio > NOISY_SPREAD,
            throttled=_throttled(clocks),
            elapsed_s=took_s,
        )

    def baselines(self, request: dict[str, Any]) -> BaselineResult:
        started = time.monotonic()
        task, mode, budget = Task.model_validate(request["task"]), request["mode"], request["budget"]
        if (too_large := fits(task, self.gpu)) is not None:
            return BaselineResult(
                status=Status.UNAVAILABLE, detail=too_large, task_id=task.task_id, mode=mode, budget=budget
            )
        bench = self._bench_for(task)
        references = bench.references
        fastest = references.fastest_us()
        size, slots = 2 * bench.operands.outputs, bench.operands.slots
        launches = launches_per_replay(fastest, fastest, mode, size, slots)
        keys = [(name, layout) for name in references.names() for layout in LAYOUTS]
        prepared = [references.prepared(name, layout, mode, launches) for name, layout in keys]
        round_s = launches * 1e-6 * sum(references.estimate_us(name, layout) for name, layout in keys)
        samples = run_interleaved(prepared, self.kernels, mode, budget, round_s, self.clocks)
        stands_for = {(name, layout): strongest(samples, name, layout) for name, layout in keys}
        times = tuple(
            BaselineTime(
                reference=name,
                b_layout=layout,
                time_us=_median(samples[subject]),
                algorithm=references.describe(subject.split("/")[0], layout, mode, launches),
            )
            for (name, layout), subject in stands_for.items()
        )
        return BaselineResult(
            status=Status.OK, task_id=task.task_id, mode=mode, budget=budget, times=times,
            library=versions(), elapsed_s=time.monotonic() - started,
        )  # fmt: skip

    # --- pieces ----------------------------------------------------------------------------------------------------

    def _module(self, path: str) -> Module:
        if path in self._modules:
            self._modules.move_to_end(path)
            return self._modules[path]
        module = Module(self.gpu, Path(path).read_bytes())
        self._modules[path] = module
        if len(self._modules) > MODULES_KEPT:
            self._modules.popitem(last=False)[1].unload()
        return module

    def _bench_for(self, task: Task) -> Bench:
        if self._bench is None or self._bench.task != task:
            if self._bench is not None:
                self._bench.references.close()
                self._bench = None
                cp.get_default_memory_pool().free_all_blocks()
            self._bench = Bench(self, task)
        return self._bench

    def _empty(self, bench: Bench) -> Prepared:
        subject = Subject("empty", lambda _set, _c, _stream: self.kernels.empty())
        return Prepared(subject, bench.operands, "server", 1, self.stream.ptr)

    def _baseline_spread(self, verifier: Verifier) -> float:
        """Largest difference between any two of {cuBLAS, Lt first, Lt tuned} x {NN, TN} on the operands in place."""
        from tools.gpu.spread import baseline_spread

        return baseline_spread(self._bench_for(verifier.task).references, verifier, self.library)


def _large(task: Task) -> bool:
    return task.dims["N"] * task.dims["K"] >= 1 << 26


def _median(samples: Any) -> float:
    return float(statistics.median(samples))


def _throttled(clocks: Clocks | None) -> bool:
    """A thermal or hardware limit, or a power cap that took more than THROTTLE_SLACK off the clock."""
    if clocks is None or not clocks.throttle_reasons:
        return False
    capped = clocks.sm_mhz_limit is not None and clocks.sm_mhz_median < (1 - THROTTLE_SLACK) * clocks.sm_mhz_limit
    return capped or any(reason != "sw_power_cap" for reason in clocks.throttle_reasons)


def _uuid(gpu: Gpu) -> str:
    from cuda.bindings import driver as cu

    raw = bytes(check(cu.cuDeviceGetUuid(gpu.device), "cuDeviceGetUuid").bytes)
    h = raw.hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


@cache
def _driver_version() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # NVML is an accessory; the version is then read where the kernel module publishes it
        with contextlib.suppress(OSError):
            return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("Module")[1].split()[0]
        return "unknown"


def _failed(request: dict[str, Any], reason: Reason, detail: str) -> Outcome:
    """The FAILED record of the kind this request would have got."""
    variant, task = Variant.model_validate(request["variant"]), Task.model_validate(request["task"])
    common: dict[str, Any] = {
        "status": Status.FAILED,
        "reason": reason,
        "detail": detail,
        "variant_key": variant.key,
        "task_id": task.task_id,
    }
    if request["op"] == "verify":
        return VerifyResult(depth=request["depth"], **common)
    return TimingResult(mode=request["mode"], budget=request["budget"], **common)


def answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    """One reply: ``{"record": …, "restart": bool}`` or ``{"broken": sentence, "restart": bool}``."""
    op = request["op"]
    handler = {"verify": worker.verify, "time": worker.time, "baselines": worker.baselines}.get(op)
    try:
        if op == "info":
            return {"record": worker.info().model_dump(mode="json"), "restart": False}
        if handler is None:
            return {"broken": f"the worker does not know the request '{op}'", "restart": False}
        if "variant" in request:
            refusal = accepts(Variant.model_validate(request["variant"]), Task.model_validate(request["task"]))
            if refusal is not None:
                failed = _failed(request, Reason.NOT_ACCEPTED, refusal)
                return {"record": failed.model_dump(mode="json"), "restart": False}
        reply: dict[str, Any] = {"record": handler(request).model_dump(mode="json"), "restart": False}
        if request.get("trace") and (trace := worker.clocks.trace()) is not None:
            reply["trace"] = trace.model_dump(mode="json")
        return reply
    except (Rejected, LaunchError) as error:
        failed = _failed(request, error.reason, str(error))
        return {"record": failed.model_dump(mode="json"), "restart": error.reason is Reason.HANG}
    except CudaError as error:
        if "variant" not in request or error.reason is Reason.OUT_OF_MEMORY:
            return {"broken": str(error), "restart": True}
        failed = _failed(request, error.reason, f"{error}: the kernel faulted")
        return {"record": failed.model_dump(mode="json"), "restart": True}
    except (cp.cuda.memory.OutOfMemoryError, MemoryError) as error:
        return {"broken": f"out of GPU memory: {error}", "restart": True}
    except (cp.cuda.runtime.CUDARuntimeError, cp.cuda.driver.CUDADriverError, BlasError) as error:
        # A kernel's fault often surfaces in the next runtime call: it is the candidate's if one was running.
        if "variant" in request and not isinstance(error, BlasError):
            illegal = "illegal" in str(error).lower() or "misaligned" in str(error).lower()
            reason = Reason.ILLEGAL_ACCESS if illegal else Reason.LAUNCH_FAILED
            failed = _failed(request, reason, f"the kernel faulted: {error}")
            return {"record": failed.model_dump(mode="json"), "restart": True}
        return {"broken": str(error), "restart": True}
    except Exception as error:  # ours, not the candidate's: it must not be recorded as if it were
        traceback.print_exc()
        return {"broken": f"the worker failed: {type(error).__name__}: {error}", "restart": True}


#: What is timed has the GPU alone; whatever else runs kernels may share it.
_EXCLUSIVE = {"time": True, "baselines": True, "verify": False}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ordinal", type=int, default=0)
    parser.add_argument("--in-fd", type=int, required=True)
    parser.add_argument("--out-fd", type=int, required=True)
    args = parser.parse_args()
    # A device printf or a library's chatter must not reach the protocol, whose pipes no kernel knows.
    try:
        worker = Worker(args.ordinal)
    except (CudaError, cp.cuda.runtime.CUDARuntimeError) as error:
        write_frame(args.out_fd, json.dumps({"broken": str(error), "restart": False}).encode())
        return
    exit_on_hangup(args.out_fd)
    lock = GpuLock(worker.uuid)
    write_frame(args.out_fd, json.dumps({"ready": True}).encode())
    while (frame := read_frame(args.in_fd)) is not None:
        request = json.loads(frame)
        exclusive = _EXCLUSIVE.get(request["op"])
        with contextlib.nullcontext() if exclusive is None else lock.held(exclusive):
            # The client's deadline runs from here: waiting for somebody else's timing is nobody's fault.
            write_frame(args.out_fd, json.dumps({"started": True}).encode())
            reply = answer(worker, request)
        write_frame(args.out_fd, json.dumps(reply).encode())
        if reply["restart"]:
            os._exit(0)  # the context may hang in its own teardown


if __name__ == "__main__":
    main()
