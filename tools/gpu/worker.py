"""The process that owns a GPU: answers one framed JSON request after another on a private pipe.

``python -m tools.gpu.worker --ordinal 0 --in-fd N --out-fd M``. A candidate that hangs or breaks the context costs
this process and nothing else: the reply says ``"restart": true`` and the client starts a fresh one.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cupy as cp

from tools.frames import exit_on_hangup, read_frame, worker_parser, write_frame
from tools.gpu.blas import BlasError
from tools.gpu.data import Kernels
from tools.gpu.driver import CudaError, Gpu, Module, check
from tools.gpu.lock import GpuLock
from tools.gpu.nvml import ClockLog, driver_version
from tools.gpu.operands import Operands
from tools.gpu.references import Library, References, versions
from tools.gpu.timing import time_candidates, time_references
from tools.gpu.together import TOGETHER, answer_together
from tools.gpu.verify import Verifier, fits, verify
from tools.launching import LaunchError, accepts, resolve
from tools.records import (
    BaselineResult,
    Depth,
    DeviceInfo,
    Outcome,
    Reason,
    Status,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)
from tools.verdicts import Rejected

MODULES_KEPT = 64


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

        driver, name = driver_version(), self.gpu.name
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
        if (too_large := fits(task, self.gpu)) is not None:
            return VerifyResult(
                status=Status.UNAVAILABLE, detail=too_large, variant_key=variant.key, task_id=task.task_id,
                depth=request["depth"],
            )  # fmt: skip
        return self.verify_candidates([(variant, request["cubin"])], task, request["depth"])[0]

    def verify_candidates(self, asked: Sequence[tuple[Variant, str]], task: Task, depth: Depth) -> list[VerifyResult]:
        """``asked``: variants of one layout of B, and the path of the cubin of each."""
        candidates = []
        for variant, cubin in asked:
            module = self.module(cubin)
            candidates.append((module, variant, resolve(variant, task, self.gpu.sm_count, module.occupancy)))
        spread = self._baseline_spread if depth == "full" else None
        result = verify(self.gpu, self.kernels, candidates, task, depth, self.library.cublas, spread)
        if _large(task):
            cp.get_default_memory_pool().free_all_blocks()
        return result

    def time(self, request: dict[str, Any]) -> TimingResult:
        variant, task = Variant.model_validate(request["variant"]), Task.model_validate(request["task"])
        mode, budget = request["mode"], request["budget"]
        if (too_large := fits(task, self.gpu)) is not None:
            return TimingResult(
                status=Status.UNAVAILABLE, detail=too_large, variant_key=variant.key, task_id=task.task_id,
                mode=mode, budget=budget,
            )  # fmt: skip
        asked = [(variant, request["cubin"])]
        aims = (request.get("aim_s"), request.get("warm_s"))
        return time_candidates(self, asked, task, mode, budget, *aims).results[0]

    def baselines(self, request: dict[str, Any]) -> BaselineResult:
        task, mode, budget = Task.model_validate(request["task"]), request["mode"], request["budget"]
        if (too_large := fits(task, self.gpu)) is not None:
            return BaselineResult(
                status=Status.UNAVAILABLE, detail=too_large, task_id=task.task_id, mode=mode, budget=budget
            )
        return time_references(self, task, mode, budget)

    # --- pieces ----------------------------------------------------------------------------------------------------

    def module(self, path: str) -> Module:
        if path in self._modules:
            self._modules.move_to_end(path)
            return self._modules[path]
        module = Module(self.gpu, Path(path).read_bytes())
        self._modules[path] = module
        if len(self._modules) > MODULES_KEPT:
            self._modules.popitem(last=False)[1].unload()
        return module

    def bench_for(self, task: Task) -> Bench:
        if self._bench is None or self._bench.task != task:
            if self._bench is not None:
                self._bench.references.close()
                self._bench = None
                cp.get_default_memory_pool().free_all_blocks()
            self._bench = Bench(self, task)
        return self._bench

    def _baseline_spread(self, verifier: Verifier) -> float:
        """Largest difference between any two of {cuBLAS, Lt first, Lt tuned} x {NN, TN} on the operands in place."""
        from tools.gpu.spread import baseline_spread

        return baseline_spread(self.bench_for(verifier.task).references, verifier, self.library)


def _large(task: Task) -> bool:
    return task.dims["N"] * task.dims["K"] >= 1 << 26


def _uuid(gpu: Gpu) -> str:
    from cuda.bindings import driver as cu

    raw = bytes(check(cu.cuDeviceGetUuid(gpu.device), "cuDeviceGetUuid").bytes)
    h = raw.hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


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
    if op in TOGETHER:
        return answer_together(worker, request)
    handler = {"verify": worker.verify, "time": worker.time, "baselines": worker.baselines}.get(op)
    try:
        if op == "info":
            return {"record": worker.info().model_dump(mode="json"), "restart": False}
        if handler is None:
            return {"broken": f"the worker does not know the request '{op}'", "restart": False}
        if "variant" in request:
            variant, task = Variant.model_validate(request["variant"]), Task.model_validate(request["task"])
            refusal = accepts(variant, task, worker.gpu.sm_count)
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
_EXCLUSIVE = {"time": True, "time_many": True, "baselines": True, "verify": False, "verify_many": False}


def main() -> None:
    parser = worker_parser()
    parser.add_argument("--ordinal", type=int, default=0)
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
