"""Which shapes a variant is sanitized at: a small one, one with tails, and for a raw source its own. Pure.

compute-sanitizer slows a kernel by two orders of magnitude and more, so a family, whose source is ours, never runs at a
large shape where a small one does the same work. A raw source may do at one shape what it does at no other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from math import prod

from tools.expr import ExprError, names
from tools.launching import accepts, unlaunchable
from tools.records import Expr, Family, LaunchSpec, Task, Variant

#: Of an H200: the shapes must be the same whatever machine asks.
SM_COUNT = 132
#: A shape's dims are reduced modulo this, so that residues modulo any tile or vector size up to it stay what they are.
REDUCE_MODULO = 256
#: Added to one dimension to give it a tail; the first that the variant takes.
TAIL_STEPS = (1, 2, 4, 8, 16, 32, 64)


def sanitize_tasks(variant: Variant, task: Task, families: Mapping[str, Family] | None = None) -> tuple[Task, ...]:
    """The tasks to sanitize ``variant`` at, each once, the smallest first.

    A plan of a known family runs at ``family_tasks``, whatever ``task`` is. Any other variant runs at ``task`` too; one
    whose launch does not depend on every dimension is made for one shape and runs only there.
    """
    if stated := family_tasks(variant, task, families):
        return stated
    try:
        for_one_shape = not _named_dims(variant) >= set(task.dims)
    except ExprError:  # the launch is refused anyway, with this sentence, wherever it is tried
        for_one_shape = True
    if for_one_shape:
        return (task,)
    small = _small(variant, task)
    tail = _tail(variant, small)
    found = {t.task_id: t for t in (small, tail, task) if t is not None}
    return tuple(found.values())


def family_tasks(variant: Variant, task: Task, families: Mapping[str, Family] | None) -> tuple[Task, ...]:
    """Where the family of a plan has its plans sanitized, once for all shapes; empty for any other variant."""
    family = (families or {}).get(variant.plan.family) if variant.plan else None
    if family is None:
        return ()
    return tuple(t for t in (_with(task, dims) for dims in family.sanitize_dims) if launchable(variant, t))


def launchable(variant: Variant, task: Task) -> bool:
    """Whether the variant takes this shape and its launch resolves within the limits, at some occupancy."""
    return accepts(variant, task) is None and unlaunchable(variant, task, SM_COUNT) is None


def _with(task: Task, dims: Mapping[str, int]) -> Task:
    return task.model_copy(update={"dims": {name: dims.get(name, size) for name, size in task.dims.items()}})


def _small(variant: Variant, task: Task) -> Task:
    """The smallest shape, by volume, with each dim either its own or reduced, that the variant takes."""
    choices = [sorted({_reduced(size), size}) for size in task.dims.values()]
    shapes = sorted(itertools.product(*choices), key=prod)
    tasks = (_with(task, dict(zip(task.dims, shape, strict=True))) for shape in shapes)
    return next((t for t in tasks if launchable(variant, t)), task)


def _reduced(size: int) -> int:
    return size if size < 2 * REDUCE_MODULO else REDUCE_MODULO + size % REDUCE_MODULO


def _tail(variant: Variant, small: Task) -> Task | None:
    """``small`` with as many dims as possible off the tile grid, each by the finest step that the variant takes."""
    current = small
    for name, size in small.dims.items():
        longer = (_with(current, {**current.dims, name: size + step}) for step in TAIL_STEPS)
        current = next((t for t in longer if launchable(variant, t)), current)
    return None if current.dims == small.dims else current


def _named_dims(variant: Variant) -> set[str]:
    return {name for expr in _expressions(variant.launch) for name in names(expr)}


def _expressions(spec: LaunchSpec) -> Iterator[Expr]:
    yield from spec.constants.values()
    yield spec.workspace_bytes
    for launch in spec.launches:
        yield from (*launch.grid, *launch.block, *launch.cluster, launch.smem_bytes)
        for arg in launch.args:
            if arg.tensor_map is not None:
                yield from (*arg.tensor_map.dims, *arg.tensor_map.box, *(arg.tensor_map.strides or ()))
            yield from (expr for expr in (arg.i32, arg.i64) if expr is not None)
