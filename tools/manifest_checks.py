"""What a manifest must keep to, field by field, before any of its plans is looked at. Pure.

Each check raises ManifestError with the field and what to do about it. Whether a plan can be launched at all is
tools/families.py's question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

from tools.expr import ExprError, names
from tools.hgemm import hgemm
from tools.manifest_files import ManifestError
from tools.records import Expr, Family, LaunchSpec, Task
from tools.sourcecheck import check_flags, check_kernels, check_source

#: Knob values are tried one by one: more combinations than this, before any constraint, would take minutes.
MAX_COMBINATIONS = 300_000
MAX_KNOBS = 64
MAX_DIM = 2**31 - 1

#: What a family can compute, and the task of it at given dims.
OPERATIONS: Mapping[str, Callable[[Mapping[str, int]], Task]] = {
    "hgemm": lambda dims: hgemm(dims["M"], dims["N"], dims["K"])
}

_FAMILY_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)
_KNOB_NAME = re.compile(r"[A-Z][A-Z0-9_]*", re.ASCII)
_CONSTANT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_RESERVED = frozenset({"sm_count", "ctas_per_sm", "max_active_clusters", "B_NK", "ceil_div", "min", "max"})


def check_fields(family: Family) -> None:
    """Everything that needs no plan. Raises ManifestError, without the file's name."""
    if not _FAMILY_NAME.fullmatch(family.name):
        raise ManifestError(f"the folder's name {family.name!a} cannot be a family's: letters, digits, _ and -")
    if not 0 < family.revision <= MAX_DIM:
        raise ManifestError("field 'revision': must be a positive integer below 2^31")
    if family.op not in OPERATIONS:
        known = ", ".join(OPERATIONS)
        raise ManifestError(f"field 'op': there is no operation {family.op!a}; there is {known}")
    if not family.b_layouts:
        raise ManifestError("field 'b_layouts': name at least one of nk and kn")
    _distinct("b_layouts", family.b_layouts)
    dims = tuple(OPERATIONS[family.op]({"M": 1, "N": 1, "K": 1}).dims)
    _check_knobs(family, dims)
    _check_names(family, dims)
    _check_sanitize_dims(family, dims)
    _check_tensors(family)
    if forbidden := check_flags(family.flags):
        raise ManifestError(f"field 'flags': {forbidden}")
    entries = [launch.entry for launch in family.launch.launches]
    if problem := check_source(family.source) or check_kernels(family.source, entries):
        raise ManifestError(f"the kernel source (with includes): {problem.detail}")


def _distinct(field: str, values: Sequence[object]) -> None:
    twice = next((value for number, value in enumerate(values) if value in values[:number]), None)
    if twice is not None:
        raise ManifestError(f"field '{field}': {twice} is given twice; leave one out")


def _check_knobs(family: Family, dims: Sequence[str]) -> None:
    if len(family.knobs) > MAX_KNOBS:
        raise ManifestError(f"field 'knobs': {len(family.knobs)} knobs, at most {MAX_KNOBS} are possible")
    for name, knob in family.knobs.items():
        if not _KNOB_NAME.fullmatch(name) or name in _RESERVED or name in dims:
            raise ManifestError(f"{name!a} cannot be a knob name (capitals, digits, _; not a reserved name)")
        if wrong := [value for value in knob.values if abs(value) > MAX_DIM]:
            shown = str(wrong[0]) if wrong[0].bit_length() < 128 else "a number of so many digits"
            raise ManifestError(f"field 'knobs.{name}.values': {shown} is beyond 32 bits")
        _distinct(f"knobs.{name}.values", knob.values)
    product = combinations(family)
    if product > MAX_COMBINATIONS:
        count = f"{product}" if product < 10**15 else f"about 10^{len(str(product)) - 1}"
        raise ManifestError(
            f"field 'knobs': {count} combinations of values, before constraints; at most {MAX_COMBINATIONS} are tried: "
            "give the knobs fewer values, or make two families"
        )


def combinations(family: Family) -> int:
    """Of a layout and a value of each knob, whatever the constraints."""
    return len(family.b_layouts) * prod(len(knob.values) for knob in family.knobs.values())


def _check_names(family: Family, dims: Sequence[str]) -> None:
    knobs = set(family.knobs) | {"B_NK"}
    for constraint in family.constraints:
        _known(constraint, knobs, "constraint")
    constants = set(family.launch.constants)
    if clash := constants & (knobs | _RESERVED | set(dims)):
        raise ManifestError(f"constants {', '.join(sorted(clash))} hide knobs, dimensions or reserved names")
    if wrong := [name for name in constants if not _CONSTANT_NAME.fullmatch(name)]:
        raise ManifestError(f"field 'launch.constants': {wrong[0]!a} cannot be a name: letters, digits and _")
    known = knobs | constants | {*dims, "sm_count"}
    for demand in family.accepts:
        _known(demand, known, "accepts")
    for expr in _launch_exprs(family.launch):
        _known(expr, known | {"ctas_per_sm", "max_active_clusters"}, "launch expression")


def _known(expr: Expr, known: set[str], what: str) -> None:
    try:
        unknown = names(expr) - known
    except ExprError as error:
        raise ManifestError(f"{what}: {error}") from error
    if unknown:
        raise ManifestError(f"{what} '{expr}' names unknown {', '.join(sorted(unknown))}")


def _launch_exprs(spec: LaunchSpec) -> Iterator[Expr]:
    yield from spec.constants.values()
    yield spec.workspace_bytes
    yield spec.workspace_state.bytes
    for launch in spec.launches:
        yield from (*launch.grid, *launch.block, *launch.cluster, launch.smem_bytes)
        for arg in launch.args:
            if arg.tensor_map:
                tensor_map = arg.tensor_map
                yield from (*tensor_map.dims, *tensor_map.box, *(tensor_map.strides or ()), tensor_map.swizzle)
            elif arg.i32 is not None or arg.i64 is not None:
                yield arg.i32 if arg.i32 is not None else (arg.i64 or 0)


def _check_sanitize_dims(family: Family, dims: Sequence[str]) -> None:
    for number, shape in enumerate(family.sanitize_dims):
        field = f"field 'sanitize_dims.{number}'"
        if unknown := sorted(set(shape) - set(dims)):
            raise ManifestError(f"{field}: {family.op} has no dimension {unknown[0]}; it has {', '.join(dims)}")
        if missing := [name for name in dims if name not in shape]:
            raise ManifestError(f"{field}: {missing[0]} is missing")
        if wrong := [name for name in dims if not 0 < shape[name] <= MAX_DIM]:
            raise ManifestError(f"{field}: {wrong[0]} must be a positive integer below 2^31")
    _distinct("sanitize_dims", family.sanitize_dims)


def _check_tensors(family: Family) -> None:
    task = OPERATIONS[family.op]({"M": 1, "N": 1, "K": 1})
    roles = [tensor.role for tensor in task.tensors]
    for number, launch in enumerate(family.launch.launches):
        for position, arg in enumerate(launch.args):
            role = arg.tensor_map.tensor if arg.tensor_map else arg.tensor
            if role is not None and role not in roles:
                raise ManifestError(
                    f"field 'launch.launches.{number}.args.{position}': {family.op} has no tensor {role!a}; an "
                    f"argument is one of {', '.join(roles)}, workspace, {{i32: …}}, {{i64: …}} or {{tensor_map: …}}"
                )
