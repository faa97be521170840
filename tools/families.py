"""Families as data: ``kernels/<name>/family.yaml`` + CUDA source → Family; plan → Variant."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tools.expr import ExprError, evaluate, names
from tools.launching import accepts, unlaunchable
from tools.manifest_checks import OPERATIONS, check_fields, combinations
from tools.manifest_files import ManifestError as ManifestError
from tools.manifest_files import inline_includes, read_manifest
from tools.paths import kernels_dir
from tools.records import BLayout, Family, Knob, Plan, Task, Variant, content_hash
from tools.source_text import without_comments
from tools.validation import first_problem

#: Plans of one family. Each becomes a source of its own, all of which are held at once.
MAX_PLANS = 20_000
#: Where a family that names no ``sanitize_dims`` must have one plan that can be launched.
_PROBES = tuple(itertools.product((64, 1, 1000, 4096, 16384), repeat=3))
_PROBED_PLANS = 64  # of each family at each probe
#: Of an H200; a launch that depends on it more narrowly than this is not known here.
_SM_COUNT = 132


def load_families(root: Path | None = None) -> dict[str, Family]:
    """All families under ``root`` (default: the packaged ``kernels/``), by name."""
    root = root or kernels_dir()
    manifests = sorted(root.glob("*/family.yaml"))
    if not manifests:
        raise ManifestError(f"no kernel families under {root}: expected {root}/<name>/family.yaml")
    families = [load_family(path.parent) for path in manifests]
    return {family.name: family for family in families}


def load_family(folder: Path) -> Family:
    """One family. Raises ManifestError on anything that is not a sound manifest, or that no GPU could launch."""
    path = folder / "family.yaml"
    data = read_manifest(path)
    file_name = data.pop("source", "kernel.cu")
    if not isinstance(file_name, str):
        raise ManifestError(f"{path}: field 'source' must be a file's name")
    source = inline_includes(folder / file_name, (folder, folder.parent / "include"))
    try:
        family = Family.model_validate({**data, "name": folder.name, "source": source})
    except ValidationError as error:
        where, message = first_problem(error)
        raise ManifestError(f"{path}: field '{where}': {message}") from error
    try:
        check_fields(family)
        _check_plans(family)
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error
    return family


def _check_plans(family: Family) -> None:
    """There are plans, not too many, and some can be launched."""
    if next(plans(family), None) is None:
        for constraint in family.constraints:
            if not _can_hold(constraint, family):
                raise ManifestError(f"the constraint '{constraint}' never holds")
        raise ManifestError("the constraints rule out every combination of knob values")
    if combinations(family) > MAX_PLANS and next(itertools.islice(plans(family), MAX_PLANS, None), None) is not None:
        raise ManifestError(f"more than {MAX_PLANS} plans keep the constraints: add constraints, or make two families")
    for number, dims in enumerate(family.sanitize_dims):
        if why := _nowhere(family, [dims], plans(family)):
            shape = ", ".join(f"{name}={size}" for name, size in dims.items())
            raise ManifestError(f"field 'sanitize_dims.{number}': no plan can be launched at {shape}: {why}")
    if not family.sanitize_dims:
        shapes = [dict(zip("MNK", probe, strict=True)) for probe in _PROBES]
        if why := _nowhere(family, shapes, itertools.islice(plans(family), _PROBED_PLANS)):
            raise ManifestError(
                f"no plan can be launched at any shape that was tried: {why}; if there is one, name it in sanitize_dims"
            )


def _nowhere(family: Family, shapes: Sequence[Mapping[str, int]], candidates: Iterable[Plan]) -> str:
    """Why none of the plans can be launched at any of the shapes: what hinders the first of them; empty if one can."""
    bare = family.model_copy(update={"source": ""})  # a source of each plan would only take time
    why = ""
    tasks = [OPERATIONS[family.op](dims) for dims in shapes]
    for plan in candidates:
        variant = render(bare, plan)
        for task in tasks:
            hindrance = accepts(variant, task, _SM_COUNT) or unlaunchable(variant, task, _SM_COUNT)
            if hindrance is None:
                return ""
            why = why or str(hindrance)
    return why


def _can_hold(constraint: str, family: Family) -> bool:
    """Whether any values of the knobs that it names satisfy a constraint on its own."""
    values = {"B_NK": tuple(int(layout == "nk") for layout in family.b_layouts)}
    values |= {name: knob.values for name, knob in family.knobs.items()}
    used = sorted(names(constraint))
    for combination in itertools.product(*(values[name] for name in used)):
        try:
            if evaluate(constraint, dict(zip(used, combination, strict=True))):
                return True
        except ExprError:  # another constraint may rule this combination out; if none does, `plans` says so
            continue
    return False


def plans(family: Family) -> Iterator[Plan]:
    """Every plan of a family, in the manifest's order. A constraint is tried as soon as the knobs that it names are
    chosen: most of a large product is never visited."""
    order = ("B_NK", *family.knobs)
    due: list[list[str]] = [[] for _ in order]
    for constraint in family.constraints:
        due[max((order.index(name) for name in names(constraint)), default=0)].append(constraint)
    values = ([int(layout == "nk") for layout in family.b_layouts], *(k.values for k in family.knobs.values()))

    def extend(env: dict[str, int]) -> Iterator[dict[str, int]]:
        depth = len(env)
        if depth == len(order):
            yield env
            return
        for value in values[depth]:
            longer = {**env, order[depth]: value}
            if all(evaluate(c, longer) for c in due[depth]):
                yield from extend(longer)

    try:
        for env in extend({}):
            layout: BLayout = "nk" if env.pop("B_NK") else "kn"
            yield Plan(family=family.name, revision=family.revision, b_layout=layout, knobs=_named(family, env))
    except ExprError as error:
        raise ManifestError(f"family {family.name}: {error}") from error


def validate_plan(family: Family, b_layout: str, knobs: dict[str, Any]) -> Plan:
    """A plan from loose values (an LLM's JSON). Raises ManifestError that says what is wrong."""
    if b_layout not in family.b_layouts:
        raise ManifestError(f"{family.name} has layouts {', '.join(family.b_layouts)} of B, not '{b_layout}'")
    if unknown := sorted(set(knobs) - set(family.knobs)):
        raise ManifestError(f"{family.name} has no knob {', '.join(unknown)}; it has {', '.join(family.knobs)}")
    knobs = {**{name: 0 for name, knob in family.knobs.items() if knob.optional}, **knobs}
    if missing := [k for k in family.knobs if k not in knobs]:
        raise ManifestError(f"the plan for {family.name} lacks {', '.join(missing)}")
    for name, knob in family.knobs.items():
        if type(knobs[name]) is not int or knobs[name] not in knob.values:
            allowed = ", ".join(map(str, knob.values))
            raise ManifestError(f"{family.name}: knob {name} is one of {allowed}, not {knobs[name]!r}")
    env = {**knobs, "B_NK": int(b_layout == "nk")}
    for constraint in family.constraints:
        try:
            holds = evaluate(constraint, env)
        except ExprError as error:
            raise ManifestError(f"{family.name}: the plan breaks the constraint {constraint}: {error}") from error
        if not holds:
            raise ManifestError(f"{family.name}: the plan breaks the constraint {constraint}")
    named = _named(family, knobs)
    return Plan(family=family.name, revision=family.revision, b_layout=b_layout, knobs=named)


def _named(family: Family, values: Mapping[str, int]) -> dict[str, int]:
    """What a plan says of its knobs, in the manifest's order."""
    return {name: values[name] for name, knob in family.knobs.items() if values[name] or not knob.optional}


def render(family: Family, plan: Plan) -> Variant:
    """The variant of a plan: knobs as macros before the source, knobs as constants in the launch spec."""
    values = {name: plan.knob(name) if knob.optional else plan.knobs[name] for name, knob in family.knobs.items()}
    constants = {**values, **family.launch.constants}
    return Variant(
        source=defines(plan, family.knobs) + family.source,
        launch=family.launch.model_copy(update={"constants": constants}),
        b_layout=plan.b_layout,
        flags=family.flags,
        plan=plan,
        accepts=family.accepts,
    )


def defines(plan: Plan, knobs: Mapping[str, Knob]) -> str:
    """The macros before a plan's source; run-time knobs change launch arguments only. What ``knobs`` does not have, of
    another revision or of a family that is not here, is a macro."""
    values = {name: plan.knob(name) for name, knob in knobs.items() if name in plan.knobs or knob.optional} | plan.knobs
    macros = {name: value for name, value in values.items() if name not in knobs or not knobs[name].runtime}
    return "".join(f"#define {n} {v}\n" for n, v in {**macros, "B_NK": int(plan.b_layout == "nk")}.items())


def content_id(family: Family) -> str:
    """What its plans are made of, apart from comments and the knobs' values: as ``Variant.content_id``, for all plans
    of a revision at once."""
    runtime = sorted(name for name, knob in family.knobs.items() if knob.runtime)
    launch = family.launch.model_dump(mode="json", exclude_defaults=True)  # a field of the future changes nothing
    return content_hash([without_comments(family.source), launch, list(family.flags), runtime])


@lru_cache(maxsize=32)
def _variants(family_json: str) -> tuple[Variant, ...]:
    family = Family.from_json(family_json)
    return tuple(render(family, plan) for plan in plans(family))


def variants(family: Family) -> tuple[Variant, ...]:
    """All its plans, rendered once."""
    return _variants(family.to_json())


def accepted_plans(families: Mapping[str, Family], task: Task, sm_count: int = _SM_COUNT) -> list[Variant]:
    """Every plan of every family that takes this task's shape on a GPU of so many SMs (an H200's 132), rendered."""
    found = []
    for family in families.values():
        if family.op == task.op:
            found += [v for v in variants(family) if accepts(v, task, sm_count) is None]
    return found


def plans_taking(families: Mapping[str, Family], task: Task, sm_count: int) -> list[Plan]:
    """Those of ``accepted_plans`` as plans, in the same order."""
    return [v.plan for v in accepted_plans(families, task, sm_count) if v.plan is not None]
