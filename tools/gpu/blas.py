"""The reference libraries, through their C API: cublasGemmEx and cublasLt with every candidate it suggests.

All use COMPUTE_32F with scale type R_32F and FP16 in and out. Row-major C = A·B is asked for as column-major
Cᵀ = Bᵀ·Aᵀ, so ``kn`` is NN and ``nk`` is TN. Constants: cublas_api.h and cublasLt.h (cuBLAS documentation).
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

from tools.records import BLayout

_R_32F, _R_16F, _COMPUTE_32F = 0, 2, 68
_OP_N, _OP_T = 0, 1
_DESC_TRANSA, _DESC_TRANSB, _PREF_MAX_WORKSPACE = 3, 4, 1
_NOT_SUPPORTED = 15

#: Candidates are the union over these limits (bytes): a larger limit can hide a faster algorithm that needs none.
WORKSPACE_LIMITS = (0, 32 << 20, 256 << 20)
WORKSPACE_BYTES = max(WORKSPACE_LIMITS)
REQUESTED_CANDIDATES = 100


class BlasError(RuntimeError):
    """A cuBLAS call failed."""


class _Algo(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algo", _Algo),
        ("workspace_bytes", c_size_t),
        ("state", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    )


@cache
def _library(name: str) -> ctypes.CDLL:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)


def _ok(status: int, call: str) -> None:
    if status:
        raise BlasError(f"{call} failed with status {status}")


@dataclass(frozen=True)
class LtAlgorithm:
    """One suggestion of cublasLtMatmulAlgoGetHeuristic; ``rank`` is its place in the first list that held it."""

    data: bytes
    workspace_bytes: int
    workspace_limit: int
    rank: int

    @property
    def label(self) -> str:
        return f"#{self.rank} at limit {self.workspace_limit >> 20} MiB"


class CublasLt:
    """One GEMM problem: descriptors, its candidates, and launches of any of them."""

    def __init__(self, m: int, n: int, k: int, b_layout: BLayout) -> None:
        self._lib = _library("cublasLt")
        self._handle, self._desc = c_void_p(), c_void_p()
        _ok(self._lib.cublasLtCreate(ctypes.byref(self._handle)), "cublasLtCreate")
        _ok(
            self._lib.cublasLtMatmulDescCreate(ctypes.byref(self._desc), _COMPUTE_32F, _R_32F),
            "cublasLtMatmulDescCreate",
        )
        for attribute, value in ((_DESC_TRANSA, _OP_T if b_layout == "nk" else _OP_N), (_DESC_TRANSB, _OP_N)):
            op = c_int32(value)
            _ok(
                self._lib.cublasLtMatmulDescSetAttribute(self._desc, attribute, ctypes.byref(op), c_size_t(4)),
                "cublasLtMatmulDescSetAttribute",
            )
        self._b = self._layout(k, n, k) if b_layout == "nk" else self._layout(n, k, n)
        self._a = self._layout(k, m, k)
        self._c = self._layout(n, m, n)
        self._alpha, self._beta = c_float(1.0), c_float(0.0)

    def _layout(self, rows: int, cols: int, ld: int) -> c_void_p:
        layout = c_void_p()
        _ok(
            self._lib.cublasLtMatrixLayoutCreate(
                ctypes.byref(layout), _R_16F, c_uint64(rows), c_uint64(cols), ctypes.c_int64(ld)
            ),
            "cublasLtMatrixLayoutCreate",
        )
        return layout

    def candidates(self) -> list[LtAlgorithm]:
        """The union over WORKSPACE_LIMITS, first heuristic of the largest limit first, without duplicates."""
        found: dict[bytes, LtAlgorithm] = {}
        for limit in sorted(WORKSPACE_LIMITS, reverse=True):
            for rank, algorithm in enumerate(self._suggest(limit)):
                data = bytes(algorithm.algo)
                if algorithm.state == 0 and data not in found:
                    found[data] = LtAlgorithm(data, algorithm.workspace_bytes, limit, rank)
        if not found:
            raise BlasError("cublasLt suggests no algorithm for this problem")
        return list(found.values())

    def _suggest(self, limit: int) -> list[_Heuristic]:
        preference, returned = c_void_p(), c_int()
        results = (_Heuristic * REQUESTED_CANDIDATES)()
        _ok(self._lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "cublasLtMatmulPreferenceCreate")
        try:
            size = c_uint64(limit)
            _ok(
                self._lib.cublasLtMatmulPreferenceSetAttribute(
                    preference, _PREF_MAX_WORKSPACE, ctypes.byref(size), c_size_t(8)
                ),
                "cublasLtMatmulPreferenceSetAttribute",
            )
            status = self._lib.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._desc, self._b, self._a, self._c, self._c, preference,
                REQUESTED_CANDIDATES, results, ctypes.byref(returned),
            )  # fmt: skip
            if status == _NOT_SUPPORTED:
                return []
            _ok(status, "cublasLtMatmulAlgoGetHeuristic")
        finally:
            self._lib.cublasLtMatmulPreferenceDestroy(preference)
        return list(results[: returned.value])

    def enqueue(self, algorithm: LtAlgorithm, a: int, b: int, c: int, workspace: int, stream: int) -> None:
        algo = _Algo.from_buffer_copy(algorithm.data)
        _ok(
            self._lib.cublasLtMatmul(
                self._handle, self._desc, ctypes.byref(self._alpha), c_void_p(b), self._b, c_void_p(a), self._a,
                ctypes.byref(self._beta), c_void_p(c), self._c, c_void_p(c), self._c, ctypes.byref(algo),
                c_void_p(workspace), c_size_t(algorithm.workspace_limit), c_void_p(stream),
            ),
            "cublasLtMatmul",
        )  # fmt: skip

    def close(self) -> None:
        for layout in (self._a, self._b, self._c):
            self._lib.cublasLtMatrixLayoutDestroy(layout)
        self._lib.cublasLtMatmulDescDestroy(self._desc)
        self._lib.cublasLtDestroy(self._handle)


class Cublas:
    """cublasGemmEx with the default algorithm and an own workspace, so that it can be captured."""

    def __init__(self, workspace: int) -> None:
        self._lib = _library("cublas")
        self._handle = c_void_p()
        _ok(self._lib.cublasCreate_v2(ctypes.byref(self._handle)), "cublasCreate")
        self._workspace = workspace
        self._stream: int | None = None
        self._alpha, self._beta = c_float(1.0), c_float(0.0)

    def enqueue(self, m: int, n: int, k: int, b_layout: BLayout, a: int, b: int, c: int, stream: int) -> None:
        if stream != self._stream:
            _ok(self._lib.cublasSetStream_v2(self._handle, c_void_p(stream)), "cublasSetStream")
            _ok(
                self._lib.cublasSetWorkspace_v2(self._handle, c_void_p(self._workspace), c_size_t(WORKSPACE_BYTES)),
                "cublasSetWorkspace",
            )
            self._stream = stream
        op_b, ld_b = (_OP_T, k) if b_layout == "nk" else (_OP_N, n)
        _ok(
            self._lib.cublasGemmEx(
                self._handle, op_b, _OP_N, n, m, k, ctypes.byref(self._alpha), c_void_p(b), _R_16F, ld_b,
                c_void_p(a), _R_16F, k, ctypes.byref(self._beta), c_void_p(c), _R_16F, n, _COMPUTE_32F, -1,
            ),
            "cublasGemmEx",
        )  # fmt: skip


def library_version() -> str:
    """The cuBLASLt version as ``13.1.0``-like text."""
    lib = _library("cublasLt")
    lib.cublasLtGetVersion.restype = c_size_t
    version = int(lib.cublasLtGetVersion())
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
