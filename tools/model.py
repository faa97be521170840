"""The analytical model of HGEMM plans: which will be quick at a shape, and how quick anything could be. Pure.

``rank`` orders some 270 plans in about 2 ms. Constants were fitted to measurements of one H200 (configs/model.yaml says
which), hot L2, graph replay; on another GPU only SM count and L2 size are exchanged, so trust the order less and the
microseconds not at all. Never reported as a measurement. HGEMM only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from tools.hgemm import flops, min_bytes
from tools.model_terms import FAMILIES, Case, Columns, Constants, Gpu, by_tile
from tools.paths import configs_dir
from tools.records import Plan, Task, content_hash

FOLDS = 5


class ModelError(ValueError):
    """configs/model.yaml is missing or not sound; the message says what to do."""


class Fitted(NamedTuple):
    """``folds[i]`` was fitted without the shapes of fold i, for honest evaluation; ``constants`` with all shapes."""

    constants: Constants
    folds: tuple[Constants, ...]
    provenance: Mapping[str, Any]
    gpu: Gpu  # that of the measurements


class GpuSize(NamedTuple):
    sm_count: int
    l2_bytes: int


class Ranked(NamedTuple):
    plan: Plan
    #: None for a plan that the model knows nothing about.
    time_us: float | None


@lru_cache(maxsize=4)
def load_fitted(path: Path | None = None) -> Fitted:
    """The committed constants. Raises ModelError with one sentence."""
    path = path or configs_dir() / "model.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        names = [f"{group}.{name}" for group, members in data["constants"].items() for name in members]
        values = [float(v) for members in data["constants"].values() for v in members.values()]
        columns = [values, *([float(v) for v in fold] for fold in data["folds"])]
        sets = [MappingProxyType(dict(zip(names, column, strict=True))) for column in columns]
        if len(sets) != FOLDS + 1 or not all(v > 0 for column in columns for v in column):
            raise ValueError(f"needs {FOLDS} folds, and constants above zero")
        provenance = MappingProxyType(dict(data["provenance"]))
        gpu = GpuSize(int(provenance["sm_count"]), int(provenance["l2_bytes"]))
        return Fitted(sets[0], tuple(sets[1:]), provenance, gpu)
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{path} cannot be used ({reason}): get it again, or run scripts/fit_model.py") from error


def fold_of(task: Task) -> int:
    """Which fold a shape is held out with. A shape and its transpose go together: they are too alike to be apart."""
    m, n, k = task.dims["M"], task.dims["N"], task.dims["K"]
    return int(content_hash([min(m, n), max(m, n), k]), 16) % FOLDS


def held_out(task: Task, fitted: Fitted | None = None) -> Constants:
    """Constants that were fitted without this shape."""
    return (fitted or load_fitted()).folds[fold_of(task)]


def columns(plans: Sequence[Plan]) -> Columns:
    """Plans of one family as arrays, a knob each; B_NK is 1 where B is stored N x K."""
    names = dict.fromkeys(name for plan in plans for name in plan.knobs)
    found = {name: np.array([plan.knob(name) for plan in plans], float) for name in names}
    return found | {"B_NK": np.array([plan.b_layout == "nk" for plan in plans], float)}


def estimates_us(
    plans: Sequence[Plan], task: Task, gpu: Gpu, constants: Constants | None = None
) -> NDArray[np.float64]:
    """Microseconds of each plan, in order; NaN where the model knows nothing of the knobs or of the task's dims."""
    out = np.full(len(plans), np.nan)
    if not {"M", "N", "K"} <= set(task.dims):
        return out
    c = constants or load_fitted().constants
    case = Case.of(task.dims["M"], task.dims["N"], task.dims["K"], gpu)
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for i, plan in enumerate(plans):
        groups.setdefault((plan.family, tuple(plan.knobs)), []).append(i)
    for (family, knobs), members in groups.items():
        term = FAMILIES.get(family)
        if term is None and not {"BM", "BN"} <= set(knobs):
            continue
        x = columns([plans[i] for i in members])
        try:
            out[members] = by_tile(x, case) if term is None else term(x, case, c)
        except KeyError:  # another revision of the family, without a knob that its terms need
            out[members] = by_tile(x, case) if {"BM", "BN"} <= set(knobs) else np.nan
    return out


def rank(plans: Sequence[Plan], task: Task, gpu: Gpu, constants: Constants | None = None) -> list[Ranked]:
    """Most promising first; plans that the model does not know keep their order, after the known ones."""
    estimates = estimates_us(plans, task, gpu, constants)
    order = np.argsort(estimates, kind="stable")  # NaN last
    return [Ranked(plans[i], None if np.isnan(estimates[i]) else float(estimates[i])) for i in order]


def floor_us(task: Task, gpu: Gpu, constants: Constants | None = None) -> float:
    """A time that no kernel of these families should beat at this shape: every part at its fitted rate, perfectly
    overlapped, on every SM. For stopping early: a kernel near it has nothing left to find. Not a law: constants are
    fitted, so leave a few percent of room."""
    c = constants or load_fitted().constants
    fastest_start = min(v for name, v in c.items() if name.endswith((".start_us", ".start_tma_us", ".start_copy_us")))
    rate = min(c["machine.sm_tensor_flop_per_us"] * gpu.sm_count, c["machine.power_flop_per_us"])
    kept = c["machine.l2_kept_fraction"] * (1 + c["machine.l2_fade_fraction"]) * gpu.l2_bytes
    beyond_l2 = max(0.0, min_bytes(task) - kept) / max(
        c["machine.hbm_read_bytes_per_us"], c["machine.hbm_write_bytes_per_us"]
    )
    stored = 2 * task.dims["M"] * task.dims["N"] / c["machine.l2_write_bytes_per_us"]
    return float(max(c["machine.launch_us"] + fastest_start, flops(task) / rate, beyond_l2, stored))
