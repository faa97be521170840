"""A GPU of NumPy: enough of CuPy and of the driver layer to run verify and time on a machine without one.

Kernels are Python functions over the memory they are bound to; a launch advances a simulated clock. So the gate's own
logic (graphs, rings, poison, stale answers, statistics) is tested everywhere; what a real GPU does is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from tools.numerics import POISON, fl16
from tools.records import KernelLaunch, LaunchSpec, Reason, Variant

#: What is being captured, if anything: operations to be run at each replay.
_capture: list[Callable[[], None]] | None = None
_now_us = 0.0


def _do(operation: Callable[[], None]) -> None:
    operation() if _capture is None else _capture.append(operation)


def _spend(us: float) -> None:
    global _now_us
    _now_us += us


class Array(np.ndarray):  # type: ignore[type-arg]
    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


def _array(shape: Any, dtype: Any = np.float64) -> Array:
    return np.full(shape, 0x33, np.uint8 if dtype is np.uint8 else dtype).view(Array)


def words(address: int, count: int) -> np.ndarray:  # type: ignore[type-arg]
    """FP16 words at an address, as uint16."""
    return np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(address))


class Stream:
    ptr = 1

    def synchronize(self) -> None: ...


def _matmul(a: Any, b: Any) -> Any:
    with np.errstate(invalid="ignore"):  # infinities and NaN are among the inputs
        return np.matmul(a, b)


def _cupy() -> ModuleType:
    cp = ModuleType("cupy")
    error = type("Error", (Exception,), {})
    for name in ("uint8", "uint16", "uint64", "float16", "float64", "ascontiguousarray"):
        setattr(cp, name, getattr(np, name))
    cp.matmul = _matmul  # type: ignore[attr-defined]
    cp.empty = _array  # type: ignore[attr-defined]
    cp.zeros = lambda shape, dtype: np.zeros(shape, dtype).view(Array)  # type: ignore[attr-defined]
    cp.abs = lambda x, out=None: np.abs(x, out=out)  # type: ignore[attr-defined]
    cp.asnumpy = np.asarray  # type: ignore[attr-defined]
    cp.get_default_memory_pool = lambda: SimpleNamespace(total_bytes=lambda: 0, free_all_blocks=lambda: None)  # type: ignore[attr-defined]
    cp.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        memory=SimpleNamespace(OutOfMemoryError=error),
        runtime=SimpleNamespace(CUDARuntimeError=error),
        driver=SimpleNamespace(CUDADriverError=error),
    )
    return cp


class Gpu:
    name, sm_count, l2_bytes, memory_bytes, smem_bytes = "simulated", 4, 1 << 16, 1 << 40, 232_448


class SimulatedModule:
    """``kernel(a, b, c, workspace, dims)`` over FP16 words; ``cost_us`` is what a launch takes."""

    def __init__(self, kernel: Callable[..., None], cost_us: float, dims: dict[str, int]) -> None:
        self.kernel, self.cost_us, self.dims = kernel, cost_us, dims

    def occupancy(self, *_: Any) -> tuple[int, int]:
        return 1, 4


class Launcher:
    def __init__(self, module: SimulatedModule, spec: Any) -> None:
        self.module = module

    def bind(self, buffers: dict[str, int], workspace: int) -> BoundLaunch:
        return BoundLaunch(self.module, buffers, workspace)


class BoundLaunch:
    def __init__(self, module: SimulatedModule, buffers: dict[str, int], workspace: int) -> None:
        self.module, self.buffers, self.workspace = module, buffers, workspace

    def enqueue(self, stream: int) -> None:
        def run() -> None:
            self.module.kernel(self.buffers, self.workspace, self.module.dims)
            _spend(self.module.cost_us)

        _do(run)


class Event:
    at = 0.0

    def record(self, stream: int, external: bool = False) -> None:
        def note() -> None:
            self.at = _now_us

        _do(note)

    def done(self) -> bool:
        return True

    def elapsed_us_since(self, start: Event) -> float:
        return self.at - start.at

    def destroy(self) -> None: ...


class Graph:
    def __init__(self, stream: int, record: Callable[[], None]) -> None:
        global _capture
        assert _capture is None, "a capture inside a capture"
        _capture = []
        try:
            record()
            self.operations = _capture
        finally:
            _capture = None

    def replay(self) -> None:
        _spend(3.0)
        for operation in self.operations:
            operation()

    def destroy(self) -> None: ...


def _memset16(address: int, value: int, count: int, stream: int) -> None:
    _do(lambda: words(address, count).fill(value) if count else None)


def _memset8(address: int, value: int, count: int, stream: int) -> None:
    def run() -> None:
        if count:
            ctypes.memset(address, value, count)

    _do(run)


class Kernels:
    """tools.gpu.data.Kernels, in NumPy."""

    def __init__(self) -> None:
        self.stream = Stream()

    def fill(self, out: Any, kind: str, p: float, seed: int, inner: int = 1, k_inner: bool = True, k: int = 1) -> None:
        def run() -> None:
            rng = np.random.default_rng(seed)
            if kind == "bits":
                out[...] = rng.integers(0, 0x7000, out.size)
            elif kind in ("integer", "wide"):
                out[...] = rng.integers(-int(p), int(p) + 1, out.size).astype(np.float16).view(np.uint16)
            elif kind == "binary":
                out[...] = (rng.random(out.size) < p).astype(np.float16).view(np.uint16)
            elif kind == "subnormal":
                out[...] = rng.integers(1, 0x400, out.size) | (rng.integers(0, 2, out.size) << 15)
            else:
                out[...] = (rng.standard_normal(out.size) * p).astype(np.float16).view(np.uint16)

        _do(run)

    def hash_into(self, x: Any, counter: Any) -> None:
        counter += np.uint64(
            int(np.frombuffer(x.tobytes(), np.uint16).astype(np.uint64) @ np.arange(1, x.size + 1, dtype=np.uint64))
        )

    def count_not(self, x: Any, pattern: int, counter: Any) -> None:
        counter += np.uint64(np.count_nonzero(np.asarray(x) != pattern))

    def count_gaps(self, ring: Any, n: int, stride: int, slots: int, counter: Any) -> None:
        counter += np.uint64(
            np.count_nonzero(np.asarray(ring[: slots * stride]).reshape(slots, stride)[:, n:] != POISON)
        )

    def compare(self, c: Any, ref: Any, bound: Any, offset: int, mode: str, gamma: float, stats: Any) -> None:
        x = np.asarray(c).view(np.float16).astype(np.float64)
        ref, bound = np.asarray(ref).ravel(), np.asarray(bound).ravel()
        with np.errstate(invalid="ignore"):
            if mode == "exact":
                ok = x == fl16(ref)
            elif mode == "interval":
                ok = (fl16(ref - gamma * bound) <= x) & (x <= fl16(ref + gamma * bound))
                ok |= (np.isnan(ref) & np.isnan(x)) | (np.isinf(ref) & (x == ref))
            else:
                ok = np.abs(x - ref) <= np.maximum(1.0, 0.01 * np.abs(ref))
        stats[0] += np.uint64(np.count_nonzero(~ok))
        stats[1] += np.uint64(np.count_nonzero(np.asarray(c) == POISON))

    def compare_copies(self, ring: Any, golden: Any, slots: int, stride: int, loose: bool, stats: Any) -> None:
        n = golden.size
        copies = np.stack([np.asarray(ring[i * stride : i * stride + n]) for i in range(slots)])
        same = copies == np.asarray(golden)
        if loose:
            a, b = (np.asarray(v).view(np.float16).astype(np.float32) for v in (copies, golden))
            with np.errstate(invalid="ignore"):
                same |= np.abs(a - b) <= np.maximum(1.0, 0.01 * np.abs(b))
        stats[0] += np.uint64(np.count_nonzero(~same))
        stats[1] += np.uint64(np.count_nonzero(copies == POISON))

    def empty(self) -> None:
        _do(lambda: _spend(0.5))


def multiply(buffers: dict[str, int], dims: dict[str, int]) -> np.ndarray:  # type: ignore[type-arg]
    """C as FP16 words, FP32 accumulation, B stored N x K."""
    m, n, k = dims["M"], dims["N"], dims["K"]
    a = words(buffers["A"], m * k).view(np.float16).reshape(m, k).astype(np.float32)
    b = words(buffers["B"], n * k).view(np.float16).reshape(n, k).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return (a @ b.T).astype(np.float16).view(np.uint16).ravel()


def store(buffers: dict[str, int], c: np.ndarray) -> None:  # type: ignore[type-arg]
    words(buffers["C"], c.size)[...] = c


def honest(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
    store(buffers, multiply(buffers, dims))


def _blas(dims: dict[str, int], costs: dict[str, float]) -> ModuleType:
    """One cuBLASLt algorithm slower than the other, and cublasGemmEx between them."""
    blas = ModuleType("tools.gpu.blas")

    def run(layout: str, a: int, b: int, c: int, us: float) -> None:
        def go() -> None:
            if layout == "nk":
                honest({"A": a, "B": b, "C": c}, 0, dims)
            _spend(us)

        _do(go)

    class LtAlgorithm:
        def __init__(self, name: str) -> None:
            self.label, self.name = name, name

    class CublasLt:
        def __init__(self, m: int, n: int, k: int, layout: str) -> None:
            self.layout = layout

        def candidates(self) -> list[LtAlgorithm]:
            return [LtAlgorithm("first"), LtAlgorithm("second")]

        def enqueue(self, algorithm: LtAlgorithm, a: int, b: int, c: int, workspace: int, stream: int) -> None:
            run(self.layout, a, b, c, costs[algorithm.name])

        def close(self) -> None: ...

    class Cublas:
        def __init__(self, workspace: int) -> None: ...

        def enqueue(self, m: int, n: int, k: int, layout: str, a: int, b: int, c: int, stream: int) -> None:
            run(layout, a, b, c, costs["gemmex"])

    for item in (LtAlgorithm, CublasLt, Cublas):
        setattr(blas, item.__name__, item)
    blas.BlasError = type("BlasError", (RuntimeError,), {})  # type: ignore[attr-defined]
    blas.WORKSPACE_BYTES = 1024  # type: ignore[attr-defined]
    blas.library_version = lambda: "simulated"  # type: ignore[attr-defined]
    return blas


@contextlib.contextmanager
def simulated_worker(
    kernel: Callable[..., None], cost_us: float, dims: dict[str, int], costs: dict[str, float]
) -> Iterator[Any]:
    """tools.gpu.worker.Worker on this GPU, with ``kernel`` as whatever cubin is asked for."""
    driver = ModuleType("tools.gpu.driver")
    driver.CudaError = type("CudaError", (RuntimeError,), {"reason": Reason.LAUNCH_FAILED})  # type: ignore[attr-defined]
    for name, item in {
        "Gpu": Gpu, "Module": SimulatedModule, "BoundLaunch": BoundLaunch, "Launcher": Launcher, "Event": Event,
        "Graph": Graph, "memset8": _memset8, "memset16": _memset16, "check": lambda *_: None,
    }.items():  # fmt: skip
        setattr(driver, name, item)
    fresh = [name for name in sys.modules if name.startswith("tools.gpu.")]
    fakes = {"cupy": _cupy(), "tools.gpu.driver": driver, "tools.gpu.blas": _blas(dims, costs), "torch": None}
    with mock.patch.dict(sys.modules, fakes):
        for name in fresh:
            if name not in fakes:
                del sys.modules[name]
        # Not `from tools.gpu import worker`: a package that is there already gives the worker of the simulation before.
        module = importlib.import_module("tools.gpu.worker")
        from tools.gpu.nvml import ClockLog
        from tools.gpu.references import Library

        worker = object.__new__(module.Worker)
        worker.gpu, worker.kernels, worker.stream, worker.library = Gpu(), Kernels(), Stream(), Library()
        worker.uuid, worker.clocks, worker._bench = "GPU-simulated", ClockLog("GPU-simulated"), None
        worker.module = lambda _: SimulatedModule(kernel, cost_us, dims)
        yield SimpleNamespace(ask=lambda request: module.answer(worker, request), worker=worker)


def variant(workspace_bytes: int = 0, deterministic: bool = True) -> Variant:
    """A stand-in for whatever ``kernel`` the simulated worker runs."""
    launch = KernelLaunch(entry="gemm", grid=(1, 1, 1), block=(32, 1, 1), args=("A", "B", "C", "workspace"))  # type: ignore[arg-type]
    spec = LaunchSpec(launches=(launch,), workspace_bytes=workspace_bytes, deterministic=deterministic)
    return Variant(source="simulated", launch=spec, b_layout="nk")
