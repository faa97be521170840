"""The four references as timed subjects: torch.matmul, cublasGemmEx, cuBLASLt's first suggestion and its tuned best."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import cupy as cp

from tools.gpu.blas import WORKSPACE_BYTES, BlasError, Cublas, CublasLt, LtAlgorithm, library_version
from tools.gpu.data import Kernels
from tools.gpu.driver import Event
from tools.gpu.nvml import ClockLog
from tools.gpu.timing import Enqueue, Operands, Prepared, Subject, launches_for, run_interleaved
from tools.records import BLayout, Budget, Mode, Task

LAYOUTS: tuple[BLayout, ...] = ("kn", "nk")
RETIMED = 5  # candidates of the first pass that are timed again, with more rounds and in the mode asked for


class Library:
    """Handles and the workspace that all cuBLAS calls of a worker share."""

    def __init__(self) -> None:
        self.workspace = cp.empty(WORKSPACE_BYTES, cp.uint8)
        self.cublas = Cublas(self.workspace_address)

    @property
    def workspace_address(self) -> int:
        return int(self.workspace.data.ptr)


class References:
    """Prepared reference subjects of one task, tuned on demand and kept while the task is worked on."""

    def __init__(self, library: Library, kernels: Kernels, operands: Operands, task: Task, clocks: ClockLog) -> None:
        self.library, self.kernels, self.operands, self.task, self.clocks = library, kernels, operands, task, clocks
        self.m, self.n, self.k = task.dims["M"], task.dims["N"], task.dims["K"]
        self.lt = {layout: CublasLt(self.m, self.n, self.k, layout) for layout in LAYOUTS}
        self._candidates = {layout: self._usable(layout) for layout in LAYOUTS}
        self._ranking: dict[BLayout, list[LtAlgorithm | None]] = {}
        self._tuned: dict[tuple[BLayout, Mode], LtAlgorithm | None] = {}
        self._prepared: dict[tuple[str, BLayout, Mode], Prepared] = {}
        self._estimate_us: dict[tuple[str, BLayout], float] = {}
        self._torch_views: dict[tuple[BLayout, int, int], tuple[Any, Any, Any]] = {}
        self._torch = _import_torch()

    def names(self) -> list[str]:
        present = ["cublas", "cublaslt_heuristic", "cublaslt_auto"]
        return ["torch", *present] if self._torch else present

    def _usable(self, layout: BLayout) -> list[LtAlgorithm]:
        """Candidates that really launch (some suggestions are refused at call time)."""
        usable = []
        for algorithm in self.lt[layout].candidates():
            try:
                self._enqueue_lt(layout, algorithm, 0, self.operands.slot(0), self.kernels.stream.ptr)
            except BlasError:
                continue
            usable.append(algorithm)
        self.kernels.stream.synchronize()
        if not usable:
            raise BlasError(f"no cublasLt algorithm runs for {self.task.label} ({layout})")
        return usable

    def _enqueue_lt(self, layout: BLayout, algorithm: LtAlgorithm | None, index: int, c: int, stream: int) -> None:
        a, b = self.operands.addresses(index)
        if algorithm is None:
            self.library.cublas.enqueue(self.m, self.n, self.k, layout, a, b, c, stream)
        else:
            self.lt[layout].enqueue(algorithm, a, b, c, self.library.workspace_address, stream)

    def lt_enqueue(self, layout: BLayout, algorithm: LtAlgorithm | None) -> Enqueue:
        """``None`` stands for cublasGemmEx, which competes as one more candidate."""
        return lambda index, c, stream: self._enqueue_lt(layout, algorithm, index, c, stream)

    def _enqueue_torch(self, layout: BLayout, index: int, c: int, stream: int) -> None:
        torch = self._torch
        key = (layout, index, c)
        if key not in self._torch_views:
            a, b = self.operands.addresses(index)
            b_view = (
                _half_view(torch, b, (self.n, self.k)).T if layout == "nk" else _half_view(torch, b, (self.k, self.n))
            )
            views = (_half_view(torch, a, (self.m, self.k)), b_view, _half_view(torch, c, (self.m, self.n)))
            self._torch_views[key] = views
        a_view, b_view, c_view = self._torch_views[key]
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            torch.matmul(a_view, b_view, out=c_view)

    def heuristic(self, layout: BLayout) -> LtAlgorithm:
        """The first suggestion at the largest workspace limit."""
        return self._candidates[layout][0]

    def tuned(self, layout: BLayout, mode: Mode) -> LtAlgorithm | None:
        """The fastest candidate in this mode, by median, re-timed among the best RETIMED of an offline first pass."""
        if (layout, mode) not in self._tuned:
            if layout not in self._ranking:
                everyone: list[LtAlgorithm | None] = [*self._candidates[layout], None]
                self._ranking[layout] = self._rank(layout, everyone, "offline", "screen", 1.5e-3)
            # What is fastest hot need not be so cold; a server round costs a millisecond a candidate, so there only the
            # best are tried, with the two that other references stand for.
            if mode == "rotating":
                best = self._ranking[layout]
            else:
                favourites = [*self._ranking[layout][:RETIMED], self.heuristic(layout), None]
                best = list(dict.fromkeys(favourites))
            self._tuned[layout, mode] = self._rank(layout, best, mode, "final", 5e-3)[0]
        return self._tuned[layout, mode]

    def _rank(
        self, layout: BLayout, algorithms: Sequence[LtAlgorithm | None], mode: Mode, budget: Budget, aim_s: float
    ) -> list[LtAlgorithm | None]:
        if len(algorithms) == 1:
            return list(algorithms)
        prepared, total = [], 0.0
        for i, algorithm in enumerate(algorithms):
            enqueue = self.lt_enqueue(layout, algorithm)
            time_us = self._time_once(enqueue)
            launches = launches_for(time_us, mode, 2 * self.operands.outputs)
            total += time_us * launches * 1e-6
            prepared.append(Prepared(Subject(str(i), enqueue), self.operands, mode, launches, self.kernels.stream.ptr))
        # The rounds of the final budget: a noisy choice among equals would make the baseline look slower than it is.
        samples = run_interleaved(prepared, self.kernels, mode, budget, total, self.clocks, aim_s=aim_s, warm_s=0.0)
        for p in prepared:
            p.destroy()
        medians = {i: statistics.median(samples.us[str(i)]) for i in range(len(algorithms))}
        return [algorithms[i] for i in sorted(medians, key=medians.__getitem__)]

    def _time_once(self, enqueue: Enqueue) -> float:
        stream = self.kernels.stream.ptr
        enqueue(0, self.operands.slot(0), stream)
        start, end = Event(), Event()
        start.record(stream)
        enqueue(0, self.operands.slot(0), stream)
        end.record(stream)
        self.kernels.stream.synchronize()
        time_us = end.elapsed_us_since(start)
        start.destroy()
        end.destroy()
        return time_us

    def prepared(self, name: str, layout: BLayout, mode: Mode) -> Prepared:
        """The graphs of one reference; the subject's name is ``<reference>/<layout>``."""
        key = (name, layout, mode)
        if key not in self._prepared:
            enqueue = self.enqueue_of(name, layout, mode)
            time_us = self.estimate_us(name, layout, mode)
            launches = launches_for(time_us, mode, 2 * self.operands.outputs)
            subject = Subject(f"{name}/{layout}", enqueue)
            self._prepared[key] = Prepared(subject, self.operands, mode, launches, self.kernels.stream.ptr)
        return self._prepared[key]

    def estimate_us(self, name: str, layout: BLayout, mode: Mode) -> float:
        key = (name, layout)
        if key not in self._estimate_us:
            self._estimate_us[key] = self._time_once(self.enqueue_of(name, layout, mode))
        return self._estimate_us[key]

    def enqueue_of(self, name: str, layout: BLayout, mode: Mode) -> Enqueue:
        if name == "torch":
            return lambda index, c, stream: self._enqueue_torch(layout, index, c, stream)
        if name == "cublas":
            return self.lt_enqueue(layout, None)
        if name == "cublaslt_heuristic":
            return self.lt_enqueue(layout, self.heuristic(layout))
        return self.lt_enqueue(layout, self.tuned(layout, mode))

    def describe(self, name: str, layout: BLayout, mode: Mode) -> str:
        """Which algorithm a cuBLASLt reference is."""
        if name not in ("cublaslt_heuristic", "cublaslt_auto"):
            return ""
        algorithm = self.heuristic(layout) if name == "cublaslt_heuristic" else self.tuned(layout, mode)
        of = f"of {len(self._candidates[layout])} candidates"
        return f"cublasGemmEx, faster than each {of}" if algorithm is None else f"{algorithm.label}, {of}"

    def versions(self) -> str:
        """Library versions, for provenance."""
        return f"cuBLASLt {library_version()}" + (f", torch {self._torch.__version__}" if self._torch else "")

    def close(self) -> None:
        for prepared in self._prepared.values():
            prepared.destroy()
        for lt in self.lt.values():
            lt.close()


def _import_torch() -> Any:
    """torch, or None: it is one reference among four, not a condition of measuring."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _half_view(torch: Any, address: int, shape: tuple[int, int]) -> Any:
    """A torch tensor over memory that the operands own."""
    size = 2 * shape[0] * shape[1]
    memory = cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(address, size, None), 0)
    return torch.as_tensor(cp.ndarray(shape, cp.float16, memory), device="cuda")
