"""Families as data: ``kernels/<name>/family.yaml`` + CUDA source → Family; plan → Variant."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tools.expr import ExprError, evaluate, names
from tools.launching import accepts
from tools.paths import kernels_dir
from tools.records import BLayout, Family, LaunchSpec, Plan, Task, Variant, content_hash
from tools.source_text import without_comments

_LOCAL_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
_KNOB_NAME = re.compile(r"^[A-Z][A-Z0-9_]*$")
_RESERVED = {"sm_count", "ctas_per_sm", "max_active_clusters", "B_NK"}


class ManifestError(ValueError):
    """A manifest is broken; the message names the file and what to change."""


def load_families(root: Path | None = None) -> dict[str, Family]:
    """All families under ``root`` (default: the packaged ``kernels/``), by name."""
    root = root or kernels_dir()
    manifests = sorted(root.glob("*/family.yaml"))
    if not manifests:
        raise ManifestError(f"no kernel families under {root}: expected {root}/<name>/family.yaml")
    families = [load_family(path.parent) for path in manifests]
    return {family.name: family for family in families}


def load_family(folder: Path) -> Family:
    """One family. Raises ManifestError on anything that is not a sound manifest."""
    path = folder / "family.yaml"
    try:
        data = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise ManifestError(f"{path} does not exist") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(data, dict):
        raise ManifestError(f"{path} must be a mapping of manifest fields")
    file_name = data.pop("source", "kernel.cu")
    try:
        source = inline_includes(folder / str(file_name), (folder, folder.parent / "include"))
        family = Family.model_validate({**data, "name": folder.name, "source": source})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise ManifestError(f"{path}: field '{where}': {first['msg']}") from error
    _check(family, path)
    return family


def inline_includes(path: Path, search: tuple[Path, ...], seen: set[Path] | None = None) -> str:
    """The text of ``path`` with every ``#include "local"`` replaced by that file, once. Angle includes stay."""
    seen = set() if seen is None else seen
    try:
        text = path.read_text()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ManifestError(f"the kernel source {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"the kernel source {path} cannot be read as text: {error}") from error

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        found = next((d / name for d in search if (d / name).is_file()), None)
        if found is None or ".." in Path(name).parts or Path(name).is_absolute():
            raise ManifestError(f"{path}: cannot find the included file '{name}' beside it or in kernels/include")
        if found in seen:
            return ""
        seen.add(found)
        return inline_includes(found, search, seen)

    return _LOCAL_INCLUDE.sub(replace, text).replace("#pragma once\n", "")


def _check(family: Family, path: Path) -> None:
    for name in family.knobs:
        if not _KNOB_NAME.match(name) or name in _RESERVED or name in {"M", "N", "K"}:
            raise ManifestError(f"{path}: '{name}' cannot be a knob name (capitals, digits, _; not a reserved name)")
    knob_names = set(family.knobs) | {"B_NK"}
    for constraint in family.constraints:
        _names_known(constraint, knob_names, path, "constraint")
    derived = set(family.launch.constants)
    if clash := derived & (set(family.knobs) | _RESERVED | {"M", "N", "K"}):
        raise ManifestError(f"{path}: constants {', '.join(sorted(clash))} hide knobs, dimensions or reserved names")
    known = knob_names | derived | {"M", "N", "K", "sm_count"}
    for demand in family.accepts:
        _names_known(demand, known, path, "accepts")
    for expr in _launch_exprs(family.launch):
        _names_known(expr, known | _RESERVED, path, "launch expression")
    for constraint in family.constraints:
        if not _can_hold(constraint, family):
            raise ManifestError(f"{path}: the constraint '{constraint}' never holds")
    try:
        any_plan = next(plans(family), None) is not None
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error
    if not any_plan:
        raise ManifestError(f"{path}: the constraints rule out every combination of knob values")


def _names_known(expr: int | str, known: set[str], path: Path, what: str) -> None:
    try:
        unknown = names(expr) - known
    except ExprError as error:
        raise ManifestError(f"{path}: {what}: {error}") from error
    if unknown:
        raise ManifestError(f"{path}: {what} '{expr}' names unknown {', '.join(sorted(unknown))}")


def _launch_exprs(spec: LaunchSpec) -> Iterator[int | str]:
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
            yield Plan(family=family.name, revision=family.revision, b_layout=layout, knobs=env)
    except ExprError as error:
        raise ManifestError(f"family {family.name}: {error}") from error


def validate_plan(family: Family, b_layout: str, knobs: dict[str, Any]) -> Plan:
    """A plan from loose values (an LLM's JSON). Raises ManifestError that says what is wrong."""
    if b_layout not in family.b_layouts:
        raise ManifestError(f"{family.name} has layouts {', '.join(family.b_layouts)} of B, not '{b_layout}'")
    if unknown := sorted(set(knobs) - set(family.knobs)):
        raise ManifestError(f"{family.name} has no knob {', '.join(unknown)}; it has {', '.join(family.knobs)}")
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
    ordered = {name: knobs[name] for name in family.knobs}
    return Plan(family=family.name, revision=family.revision, b_layout=b_layout, knobs=ordered)


def render(family: Family, plan: Plan) -> Variant:
    """The variant of a plan: knobs as macros before the source, knobs as constants in the launch spec."""
    macros = {n: v for n, v in plan.knobs.items() if not family.knobs[n].runtime}
    macros["B_NK"] = int(plan.b_layout == "nk")
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    constants = {**plan.knobs, **family.launch.constants}
    return Variant(
        source=defines + family.source,
        launch=family.launch.model_copy(update={"constants": constants}),
        b_layout=plan.b_layout,
        flags=family.flags,
        plan=plan,
        accepts=family.accepts,
    )


def content_id(family: Family) -> str:
    """What its plans are made of, apart from comments and the knobs' values: as ``Variant.content_id``, for all plans
    of a revision at once."""
    runtime = sorted(name for name, knob in family.knobs.items() if knob.runtime)
    launch = family.launch.model_dump(mode="json")
    return content_hash([without_comments(family.source), launch, list(family.flags), runtime])


@lru_cache(maxsize=32)
def _variants(family_json: str) -> tuple[Variant, ...]:
    family = Family.from_json(family_json)
    return tuple(render(family, plan) for plan in plans(family))


def accepted_plans(families: dict[str, Family], task: Task) -> list[Variant]:
    """Every plan of every family that takes this task's shape, rendered."""
    found = []
    for family in families.values():
        if family.op == task.op:
            found += [v for v in _variants(family.to_json()) if accepts(v, task) is None]
    return found
