"""A thin layer over the CUDA driver API: load a cubin, encode tensor maps, launch, capture graphs.

The primary context is used, so that CuPy and torch see the same memory. Every call's return code is checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from cuda.bindings import driver as cu

from tools.launching import ConcreteSpec, ConcreteTensorMap, LaunchError
from tools.records import Reason


class CudaError(RuntimeError):
    """A driver call failed. ``sticky`` errors leave the context unusable: the process must end."""

    def __init__(self, call: str, code: Any) -> None:
        name = getattr(code, "name", str(code))
        super().__init__(f"{call} failed with {name}")
        self.name = name
        self.sticky = name in _STICKY

    @property
    def reason(self) -> Reason:
        if self.name in _ILLEGAL:
            return Reason.ILLEGAL_ACCESS
        return Reason.OUT_OF_MEMORY if self.name == "CUDA_ERROR_OUT_OF_MEMORY" else Reason.LAUNCH_FAILED


_ILLEGAL = {"CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_INVALID_ADDRESS_SPACE"}
_STICKY = {
    *_ILLEGAL,
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_UNKNOWN",
}


def check(result: tuple[Any, ...], call: str) -> Any:
    """Unpack a cuda-bindings reply; raises CudaError."""
    code, *values = result
    if code != cu.CUresult.CUDA_SUCCESS:
        raise CudaError(call, code)
    return values[0] if len(values) == 1 else tuple(values) if values else None


class Gpu:
    """Device ``ordinal`` with its primary context current in this thread."""

    def __init__(self, ordinal: int = 0) -> None:
        check(cu.cuInit(0), "cuInit")
        self.ordinal = ordinal
        self.device = check(cu.cuDeviceGet(ordinal), "cuDeviceGet")
        self.context = check(cu.cuDevicePrimaryCtxRetain(self.device), "cuDevicePrimaryCtxRetain")
        check(cu.cuCtxSetCurrent(self.context), "cuCtxSetCurrent")
        attribute = cu.CUdevice_attribute
        self.sm_count = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.l2_bytes = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
        self.smem_bytes = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        major = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.compute_capability = f"{major}.{minor}"
        raw_name = check(cu.cuDeviceGetName(128, self.device), "cuDeviceGetName")
        self.name = raw_name.split(b"\0")[0].decode()
        self.memory_bytes = int(check(cu.cuDeviceTotalMem(self.device), "cuDeviceTotalMem"))

    def _attribute(self, attribute: Any) -> int:
        return int(check(cu.cuDeviceGetAttribute(attribute, self.device), "cuDeviceGetAttribute"))

    def synchronize(self) -> None:
        check(cu.cuCtxSynchronize(), "cuCtxSynchronize")


class Module:
    """A loaded cubin."""

    def __init__(self, gpu: Gpu, cubin: bytes) -> None:
        self.gpu = gpu
        self.handle = check(cu.cuModuleLoadData(cubin), "cuModuleLoadData")
        self._functions: dict[str, Any] = {}
        self._dynamic_smem: dict[str, int] = {}

    def function(self, entry: str) -> Any:
        if entry not in self._functions:
            try:
                self._functions[entry] = check(cu.cuModuleGetFunction(self.handle, entry.encode()), entry)
            except CudaError as error:
                raise LaunchError(f"the cubin has no kernel named '{entry}'", Reason.MISSING_ENTRY) from error
        return self._functions[entry]

    def static_smem(self, entry: str) -> int:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        return int(check(cu.cuFuncGetAttribute(attribute, self.function(entry)), "cuFuncGetAttribute"))

    def occupancy(
        self, entry: str, block: tuple[int, int, int], cluster: tuple[int, int, int], smem_bytes: int
    ) -> tuple[int, int]:
        """(CTAs per SM, clusters that can be resident at once). Raises LaunchError when not even one CTA fits."""
        function = self.function(entry)
        static = self.static_smem(entry)
        if static + smem_bytes > self.gpu.smem_bytes:
            raise LaunchError(
                f"{entry} needs {static} + {smem_bytes} bytes of shared memory; a block has {self.gpu.smem_bytes}",
                Reason.TOO_MUCH_SHARED_MEMORY,
            )
        if smem_bytes > self._dynamic_smem.get(entry, -1):  # never lowered: launches bound earlier still need theirs
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(function, attribute, smem_bytes), "cuFuncSetAttribute")
            self._dynamic_smem[entry] = smem_bytes
        ctas = int(
            check(
                cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, prod(block), smem_bytes),
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            )
        )
        if ctas < 1:
            raise LaunchError(f"not one block of {entry} with {prod(block)} threads fits on an SM: too many registers")
        if prod(cluster) == 1:
            return ctas, ctas * self.gpu.sm_count
        config = _config((prod(cluster) * self.gpu.sm_count, 1, 1), block, (prod(cluster), 1, 1), smem_bytes, False, 0)
        return ctas, int(check(cu.cuOccupancyMaxActiveClusters(function, config), "cuOccupancyMaxActiveClusters"))

    def unload(self) -> None:
        check(cu.cuModuleUnload(self.handle), "cuModuleUnload")


def _config(
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int],
    smem_bytes: int,
    cooperative: bool,
    stream: int,
) -> Any:
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = smem_bytes
    config.hStream = stream
    attributes = []
    if prod(cluster) > 1:
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster
        attributes.append(attribute)
    if cooperative:
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


_SWIZZLE = {
    0: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}
_PROMOTION = {
    0: cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
    64: cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
    128: cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    256: cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
}
_OOB = {
    "zero": cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    "nan": cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA,
}


def encode_tensor_map(spec: ConcreteTensorMap, address: int) -> bytes:
    """The 128 bytes of a CUtensorMap for FP16 data at ``address``. Raises LaunchError if the driver rejects it."""
    try:
        encoded = check(
            cu.cuTensorMapEncodeTiled(
                cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                len(spec.dims),
                address,
                [cu.cuuint64_t(d) for d in spec.dims],
                [cu.cuuint64_t(s) for s in spec.stride_bytes],
                [cu.cuuint32_t(b) for b in spec.box],
                [cu.cuuint32_t(1) for _ in spec.dims],
                cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                _SWIZZLE[spec.swizzle],
                _PROMOTION[spec.l2_promotion],
                _OOB[spec.oob_fill],
            ),
            "cuTensorMapEncodeTiled",
        )
    except CudaError as error:
        raise LaunchError(f"the driver rejects the tensor map of {spec.tensor}: {error}") from error
    return ctypes.string_at(int(encoded.getPtr()), 128)


class Launcher:
    """A spec on a module. Tensor maps and launch configurations are made once and shared by all that is bound: a replay
    binds one map of A to dozens of outputs."""

    def __init__(self, module: Module, spec: ConcreteSpec) -> None:
        self.spec = spec
        self._functions = [module.function(launch.entry) for launch in spec.launches]
        self._configs: dict[tuple[int, int], Any] = {}
        self._maps: dict[tuple[int, int, int], Any] = {}

    def bind(self, buffers: dict[str, int], workspace: int) -> BoundLaunch:
        """``buffers`` are addresses by role, in bytes."""
        return BoundLaunch(self, [self._arguments(i, buffers, workspace) for i in range(len(self.spec.launches))])

    def launch(self, index: int, pointers: Any, stream: int) -> None:
        launch = self.spec.launches[index]
        config = self._configs.get((index, stream))
        if config is None:
            config = _config(launch.grid, launch.block, launch.cluster, launch.smem_bytes, launch.cooperative, stream)
            self._configs[index, stream] = config
        check(
            cu.cuLaunchKernelEx(config, self._functions[index], ctypes.addressof(pointers), 0),
            f"the launch of {launch.entry}",
        )

    def _arguments(self, index: int, buffers: dict[str, int], workspace: int) -> _Arguments:
        values: list[Any] = []
        for number, arg in enumerate(self.spec.launches[index].args):
            if arg.kind == "tensor":
                values.append(ctypes.c_uint64(buffers[str(arg.value)]))
            elif arg.kind == "workspace":
                values.append(ctypes.c_uint64(workspace))
            elif arg.kind == "i32":
                values.append(ctypes.c_int32(int(arg.value)))  # type: ignore[arg-type]
            elif arg.kind == "i64":
                values.append(ctypes.c_int64(int(arg.value)))  # type: ignore[arg-type]
            else:
                assert isinstance(arg.value, ConcreteTensorMap)
                values.append(self._map(index, number, arg.value, buffers[arg.value.tensor]))
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(v) for v in values))
        return _Arguments(pointers, tuple(values))

    def _map(self, index: int, number: int, spec: ConcreteTensorMap, address: int) -> Any:
        key = (index, number, address)
        if key not in self._maps:
            self._maps[key] = ctypes.create_string_buffer(encode_tensor_map(spec, address), 128)
        return self._maps[key]


@dataclass(frozen=True)
class _Arguments:
    pointers: Any  # void*[]: what cuLaunchKernelEx reads
    keep_alive: tuple[Any, ...]


class BoundLaunch:
    """A spec bound to buffers: parameters and tensor maps were made outside any clock."""

    def __init__(self, launcher: Launcher, arguments: list[_Arguments]) -> None:
        self._launcher, self._arguments = launcher, arguments

    def enqueue(self, stream: int) -> None:
        for index, arguments in enumerate(self._arguments):
            self._launcher.launch(index, arguments.pointers, stream)


class Graph:
    """An instantiated CUDA graph, replayed on ``stream``."""

    def __init__(self, stream: int, record: Callable[[], None]) -> None:
        self.stream = stream
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        check(cu.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
        try:
            record()
        except BaseException:
            cu.cuStreamEndCapture(stream)
            raise
        graph = check(cu.cuStreamEndCapture(stream), "cuStreamEndCapture")
        try:
            self.handle = check(cu.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        finally:
            cu.cuGraphDestroy(graph)

    def replay(self) -> None:
        check(cu.cuGraphLaunch(self.handle, self.stream), "cuGraphLaunch")

    def destroy(self) -> None:
        cu.cuGraphExecDestroy(self.handle)


class Event:
    def __init__(self) -> None:
        self.handle = check(cu.cuEventCreate(0), "cuEventCreate")

    def record(self, stream: int, external: bool = False) -> None:
        """``external`` makes an event-record *node* under capture, which can be read after each replay."""
        flag = cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL if external else 0
        check(cu.cuEventRecordWithFlags(self.handle, stream, int(flag)), "cuEventRecordWithFlags")

    def done(self) -> bool:
        code = cu.cuEventQuery(self.handle)[0]
        if code == cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check((code,), "cuEventQuery")
        return True

    def elapsed_us_since(self, start: Event) -> float:
        return float(check(cu.cuEventElapsedTime(start.handle, self.handle), "cuEventElapsedTime")) * 1e3

    def destroy(self) -> None:
        cu.cuEventDestroy(self.handle)


def memset16(address: int, value: int, count: int, stream: int) -> None:
    """Fill ``count`` 2-byte words; a memset node under capture."""
    if count:
        check(cu.cuMemsetD16Async(address, value, count, stream), "cuMemsetD16Async")


def memset8(address: int, value: int, count: int, stream: int) -> None:
    if count:
        check(cu.cuMemsetD8Async(address, value, count, stream), "cuMemsetD8Async")
