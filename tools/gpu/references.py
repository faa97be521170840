"""The four references as timed subjects: torch.matmul, cublasGemmEx, cuBLASLt's first suggestion and its tuned best."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import cupy as cp

from tools.gpu.blas import WORKSPACE_BYTES, BlasError, Cublas, CublasLt, LtAlgorithm, library_version
from tools.gpu.data import Kernels
from tools.gpu.nvml import ClockLog
from tools.gpu.operands import Operands
from tools.gpu.replays import Enqueue, Prepared, Subject, run_interleaved, time_of
from tools.records import BLayout, Budget, Mode, Task
from tools.timing_plan import launches_per_replay
from tools.toolchain import package_version

LAYOUTS: tuple[BLayout, ...] = ("kn", "nk")
RETIMED = 5  # candidates of the first pass that are timed again, with more rounds and in the mode asked for
#: None stands for cublasGemmEx, which competes with cuBLASLt's algorithms.
Algorithm = LtAlgorithm | None


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
        self._ranking: dict[BLayout, list[Algorithm]] = {}
        self._tuned: dict[tuple[BLayout, Mode, int], Algorithm] = {}
        self._prepared: dict[tuple[str, BLayout, Mode, int], Prepared] = {}
        self._estimates_us: dict[tuple[str, BLayout], float] = {}
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

    def _enqueue_lt(self, layout: BLayout, algorithm: Algorithm, index: int, c: int, stream: int) -> None:
        a, b = self.operands.addresses(index)
        if algorithm is None:
            self.library.cublas.enqueue(self.m, self.n, self.k, layout, a, b, c, stream)
        else:
            self.lt[layout].enqueue(algorithm, a, b, c, self.library.workspace_address, stream)

    def lt_enqueue(self, layout: BLayout, algorithm: Algorithm) -> Enqueue:
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

    def fastest_us(self) -> float:
        """Roughly, of the untuned references: what decides how much is timed, the same for all candidates."""
        names = ("cublas", "cublaslt_heuristic")
        return min(self.estimate_us(name, layout) for name in names for layout in LAYOUTS)

    def estimate_us(self, name: str, layout: BLayout) -> float:
        """Roughly, from a small graph; the tuned reference is taken for as fast as the first suggestion."""
        name = "cublaslt_heuristic" if name == "cublaslt_auto" else name
        if (name, layout) not in self._estimates_us:
            enqueue = self.enqueue_of(name, layout)
            self._estimates_us[name, layout] = time_of(enqueue, self.operands, self.kernels.stream)
        return self._estimates_us[name, layout]

    def _ranked(self, layout: BLayout) -> list[Algorithm]:
        """Every candidate, by an offline pass."""
        if layout not in self._ranking:
            everyone: list[Algorithm] = [*self._candidates[layout], None]
            size = 2 * self.operands.outputs
            fastest = self.fastest_us()
            launches = launches_per_replay(fastest, fastest, "offline", size, self.operands.slots)
            ranked = self._rank(layout, everyone, "offline", launches, "screen", 1.5e-3)
            self._ranking[layout] = [algorithm for algorithm, _ in ranked]
            for _, prepared in ranked:
                prepared.destroy()
        return self._ranking[layout]

    def _tune(self, layout: BLayout, mode: Mode, launches: int) -> Prepared:
        """The fastest candidate in this mode, by median of a final run.

        The very graphs that won are kept: two graphs of one algorithm can differ by 2 %, and what was chosen is what is
        to be compared with.
        """
        # What is fastest hot need not be so cold; a server round costs a millisecond a candidate, so there only the
        # best are tried, with the two that other references stand for.
        tried = self._ranked(layout)
        if mode != "rotating":
            tried = list(dict.fromkeys([*tried[:RETIMED], self.heuristic(layout), None]))
        (best, kept), *others = self._rank(layout, tried, mode, launches, "final", 5e-3)
        for _, prepared in others:
            prepared.destroy()
        self._tuned[layout, mode, launches] = best
        return kept

    def _rank(
        self, layout: BLayout, algorithms: Sequence[Algorithm], mode: Mode, launches: int, budget: Budget, aim_s: float
    ) -> list[tuple[Algorithm, Prepared]]:
        """Fastest first, each with the graphs it was timed by."""
        prepared = [
            Prepared(
                Subject(str(i), self.lt_enqueue(layout, a)), self.operands, mode, launches, self.kernels.stream.ptr
            )
            for i, a in enumerate(algorithms)
        ]
        round_s = len(prepared) * self.fastest_us() * launches * 1e-6
        us = run_interleaved(prepared, self.kernels, mode, budget, round_s, self.clocks, aim_s=aim_s, warm_s=0.0)
        order = sorted(range(len(prepared)), key=lambda i: statistics.median(us[str(i)]))
        return [(algorithms[i], prepared[i]) for i in order]

    def prepared(self, name: str, layout: BLayout, mode: Mode, launches: int) -> Prepared:
        """The graphs of one reference; the subject's name is ``<reference>/<layout>``."""
        key = (name, layout, mode, launches)
        if key not in self._prepared:
            if name == "cublaslt_auto":
                prepared = self._tune(layout, mode, launches)
                prepared.subject.name = f"{name}/{layout}"
            else:
                subject = Subject(f"{name}/{layout}", self.enqueue_of(name, layout))
                prepared = Prepared(subject, self.operands, mode, launches, self.kernels.stream.ptr)
            self._prepared[key] = prepared
        return self._prepared[key]

    def enqueue_of(self, name: str, layout: BLayout) -> Enqueue:
        """torch, cublas or cublaslt_heuristic."""
        if name == "torch":
            return lambda index, c, stream: self._enqueue_torch(layout, index, c, stream)
        return self.lt_enqueue(layout, None if name == "cublas" else self.heuristic(layout))

    def tuned(self, layout: BLayout) -> Algorithm:
        """The best of the offline pass."""
        return self._ranked(layout)[0]

    def describe(self, name: str, layout: BLayout, mode: Mode, launches: int) -> str:
        """Which algorithm a subject is."""
        if name not in ("cublaslt_heuristic", "cublaslt_auto"):
            return "cublasGemmEx" if name == "cublas" else ""
        algorithm: Algorithm = self.heuristic(layout)
        if name == "cublaslt_auto":
            self.prepared(name, layout, mode, launches)
            algorithm = self._tuned[layout, mode, launches]
        of = f"of {len(self._candidates[layout])} candidates"
        return f"cublasGemmEx, faster than each {of}" if algorithm is None else f"{algorithm.label}, {of}"

    def close(self) -> None:
        for prepared in self._prepared.values():
            prepared.destroy()
        for lt in self.lt.values():
            lt.close()


def versions() -> str:
    """Of the libraries that references come from: part of what a measurement is keyed on."""
    torch = package_version("torch")
    return f"cuBLASLt {library_version()}" + (f", torch {torch}" if torch else "")


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
