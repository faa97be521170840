"""LaunchSpec + dims → concrete integers: what the worker launches and what an export writes. Pure.

Limits are those of compute capability 9.0 (CUDA C++ Programming Guide, "Compute Capabilities") and of
cuTensorMapEncodeTiled (CUDA Driver API, "Tensor Map Object Management").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from tools.expr import ExprError, evaluate
from tools.records import KernelLaunch, LaunchSpec, Reason, Task, TensorMapSpec, Variant

MAX_SMEM_BYTES = 232_448
MAX_CLUSTER = 8  # portable; 16 needs an opt-in that strands SMs
MAX_WORKSPACE_BYTES = 8 << 30

#: entry, block, cluster, smem_bytes -> (ctas_per_sm, max_active_clusters)
Occupancy = Callable[[str, tuple[int, int, int], tuple[int, int, int], int], tuple[int, int]]


class LaunchError(ValueError):
    """The spec cannot be launched at this shape; ``reason`` is the record's reason."""

    def __init__(self, detail: str, reason: Reason = Reason.BAD_LAUNCH_SPEC) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class ConcreteTensorMap:
    tensor: str
    dims: tuple[int, ...]
    stride_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    l2_promotion: int
    oob_fill: str


@dataclass(frozen=True)
class ConcreteArg:
    """``kind``: tensor, workspace, i32, i64 or tensor_map; ``value`` is a role, None, an int or a map."""

    kind: str
    value: str | int | ConcreteTensorMap | None


@dataclass(frozen=True)
class ConcreteLaunch:
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    args: tuple[ConcreteArg, ...]
    cooperative: bool


@dataclass(frozen=True)
class ConcreteSpec:
    launches: tuple[ConcreteLaunch, ...]
    workspace_bytes: int
    state_bytes: int
    state_fill: int
    deterministic: bool


def tensor_dims(task: Task, role: str, b_layout: str) -> tuple[int, ...]:
    """Stored dims of an operand, outermost first: B is N x K when ``nk``."""
    spec = next((t for t in task.tensors if t.role == role), None)
    if spec is None:
        known = ", ".join(t.role for t in task.tensors)
        raise LaunchError(f"the launch spec names tensor '{role}'; this task has {known}")
    dims = tuple(task.dims[d] for d in spec.dims)
    return dims[::-1] if b_layout in spec.layouts and b_layout == "nk" else dims


def environment(spec: LaunchSpec, dims: Mapping[str, int], b_layout: str, sm_count: int) -> dict[str, int]:
    """Dims, ``sm_count``, ``B_NK`` and the spec's constants, evaluated in order."""
    env = {**dims, "sm_count": sm_count, "B_NK": int(b_layout == "nk")}
    reserved = {*env, "ctas_per_sm", "max_active_clusters"}
    for name, expr in spec.constants.items():
        if name in reserved:
            raise LaunchError(f"the constant '{name}' would hide the dimension or reserved value of that name")
        env[name] = evaluate(expr, env)
    return env


def accepts(variant: Variant, task: Task, sm_count: int = 132) -> str | None:
    """None if the variant takes this shape, else the sentence that says which demand does not hold."""
    try:
        env = environment(variant.launch, task.dims, variant.b_layout, sm_count)
        for demand in variant.accepts:
            if not evaluate(demand, env):
                return f"{variant.label} does not take {task.label}: it demands {demand}"
    except (ExprError, LaunchError) as error:
        return str(error)
    return None


def resolve(variant: Variant, task: Task, sm_count: int, occupancy: Occupancy) -> ConcreteSpec:
    """Every expression of the variant's spec as an integer, limits checked. Raises LaunchError."""
    spec = variant.launch
    try:
        env = environment(spec, task.dims, variant.b_layout, sm_count)
        launches = tuple(_launch(launch, spec, task, variant.b_layout, env, occupancy) for launch in spec.launches)
        workspace = evaluate(spec.workspace_bytes, env)
        state = evaluate(spec.workspace_state.bytes, env)
    except ExprError as error:
        raise LaunchError(str(error)) from error
    if not 0 <= state <= workspace <= MAX_WORKSPACE_BYTES:
        raise LaunchError(
            f"workspace of {workspace} bytes with {state} bytes of state: need 0 <= state <= workspace <= 8 GiB"
        )
    return ConcreteSpec(launches, workspace, state, spec.workspace_state.fill, spec.deterministic)


#: (CTAs per SM, clusters on the device) where no device can be asked: few, some, as many as there could be.
_STAND_INS = ((1, 132), (2, 264), (32, 4224))


def unlaunchable(variant: Variant, task: Task, sm_count: int) -> LaunchError | None:
    """Why the variant cannot be launched at this task on any device of this size, or None if it may be; asks none."""
    found: LaunchError | None = None
    for stand_in in _STAND_INS:
        try:
            resolve(variant, task, sm_count, lambda *_, stand_in=stand_in: stand_in)
        except LaunchError as error:
            found = error
        else:
            return None
    return found


def _launch(
    launch: KernelLaunch, spec: LaunchSpec, task: Task, b_layout: str, base: dict[str, int], occupancy: Occupancy
) -> ConcreteLaunch:
    def triple(exprs: tuple[int | str, int | str, int | str], env: dict[str, int], what: str) -> tuple[int, int, int]:
        x, y, z = (evaluate(e, env) for e in exprs)
        if min(x, y, z) < 1:
            raise LaunchError(f"{what} of {launch.entry} is {x} x {y} x {z}; every size must be at least 1")
        return x, y, z

    block = triple(launch.block, base, "block")
    cluster = triple(launch.cluster, base, "cluster")
    smem = evaluate(launch.smem_bytes, base)
    if prod(block) > 1024 or block[2] > 64:
        raise LaunchError(
            f"block of {launch.entry} is {block[0]} x {block[1]} x {block[2]}: {prod(block)} threads; "
            "the limits are 1024 threads, 64 of them along z"
        )
    if prod(cluster) > MAX_CLUSTER:
        raise LaunchError(f"cluster of {launch.entry} has {prod(cluster)} CTAs; the portable limit is {MAX_CLUSTER}")
    if not 0 <= smem <= MAX_SMEM_BYTES:
        raise LaunchError(
            f"{launch.entry} asks for {smem} bytes of shared memory; a block has at most {MAX_SMEM_BYTES}",
            Reason.TOO_MUCH_SHARED_MEMORY if smem > 0 else Reason.BAD_LAUNCH_SPEC,
        )
    ctas_per_sm, active_clusters = occupancy(launch.entry, block, cluster, smem)
    env = {**base, "ctas_per_sm": ctas_per_sm, "max_active_clusters": active_clusters}
    grid = triple(launch.grid, env, "grid")
    if grid[0] > 2**31 - 1 or grid[1] > 65535 or grid[2] > 65535:
        raise LaunchError(f"grid of {launch.entry} is {grid}; the limits are 2^31-1, 65535, 65535")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise LaunchError(f"grid {grid} of {launch.entry} is not a multiple of its cluster {cluster}")
    if spec.cooperative and prod(grid) > active_clusters * prod(cluster):
        raise LaunchError(
            f"{launch.entry} is cooperative with {prod(grid)} CTAs but only "
            f"{active_clusters * prod(cluster)} fit on the device at once",
            Reason.NOT_CO_RESIDENT,
        )
    args: list[ConcreteArg] = []
    for arg in launch.args:
        if arg.tensor is not None:
            tensor_dims(task, arg.tensor, b_layout)
            args.append(ConcreteArg("tensor", arg.tensor))
        elif arg.workspace:
            args.append(ConcreteArg("workspace", None))
        elif arg.tensor_map is not None:
            args.append(ConcreteArg("tensor_map", _tensor_map(arg.tensor_map, task, b_layout, env)))
        else:
            bits = 32 if arg.i32 is not None else 64
            value = evaluate(arg.i32 if arg.i32 is not None else arg.i64 or 0, env)
            if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
                raise LaunchError(f"argument {arg.i32 or arg.i64} of {launch.entry} is {value}, over {bits} bits")
            args.append(ConcreteArg(f"i{bits}", value))
    return ConcreteLaunch(launch.entry, grid, block, cluster, smem, tuple(args), spec.cooperative)


def _tensor_map(spec: TensorMapSpec, task: Task, b_layout: str, env: dict[str, int]) -> ConcreteTensorMap:
    tensor = next((t for t in task.tensors if t.role == spec.tensor), None)
    if tensor is None:
        raise LaunchError(f"a tensor map names tensor '{spec.tensor}', which this task does not have")
    size = {"float16": 2, "float32": 4}[tensor.dtype]
    dims = tuple(evaluate(d, env) for d in spec.dims)
    box = tuple(evaluate(b, env) for b in spec.box)
    swizzle = evaluate(spec.swizzle, env)
    if spec.strides is None:
        strides = tuple(prod(dims[: i + 1]) for i in range(len(dims) - 1))
    else:
        strides = tuple(evaluate(s, env) for s in spec.strides)
    stride_bytes = tuple(s * size for s in strides)
    what = f"the tensor map of {spec.tensor}"
    if any(not 1 <= d <= 2**32 for d in dims) or any(not 1 <= b <= 256 for b in box):
        raise LaunchError(f"{what} has dims {dims} and box {box}; dims are 1 … 2^32 and box sizes 1 … 256")
    if any(s % 16 or not 0 < s < 2**40 for s in stride_bytes):
        raise LaunchError(f"{what} has row strides of {stride_bytes} bytes; TMA needs multiples of 16")
    if swizzle not in (0, 32, 64, 128):
        raise LaunchError(f"{what} has swizzle {swizzle}; it must be 0, 32, 64 or 128 bytes")
    if (box[0] * size) % 16 or (swizzle and box[0] * size > swizzle):
        raise LaunchError(
            f"{what} has an inner box of {box[0] * size} bytes; it must be a multiple of 16 and at most the swizzle"
        )
    span = 1 + sum((d - 1) * s for d, s in zip(dims, (1, *strides), strict=True))
    available = prod(tensor_dims(task, spec.tensor, b_layout))
    if span > available:
        raise LaunchError(f"{what} spans {span} elements but the tensor has {available}")
    return ConcreteTensorMap(spec.tensor, dims, stride_bytes, box, swizzle, spec.l2_promotion, spec.oob_fill)
