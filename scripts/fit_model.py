"""Fits the constants of the analytical model to a record file and writes configs/model.yaml. About two minutes.

    python scripts/fit_model.py                      # records/h200.sqlite → configs/model.yaml
    python scripts/fit_model.py --records FILE --out FILE

Robust least squares (soft L1) on the logarithm of time, over every offline timing at screen budget of the families that
the model has terms for. A timing weighs (best time at its shape / its time)^3: the order of good plans matters, how bad
the bad ones are does not. Each constant also has a prior around START, so that one which the records say nothing about
stays where physics put it. Needs scipy (the extra `report`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.device import DeviceBroken  # noqa: E402
from tools.families import load_families  # noqa: E402
from tools.model import FOLDS, columns, fold_of, load_fitted  # noqa: E402
from tools.model_quality import KS, Measured, evaluate, measured  # noqa: E402
from tools.model_terms import FAMILIES, Case  # noqa: E402
from tools.record_file import RecordReader  # noqa: E402

WEIGHT_POWER = 3.0
SOFT_L1_SCALE = 0.04  # of log time: errors beyond 4 % count linearly
PRIOR_STRENGTH = 0.3
#: Width of a constant's prior, in log: what is known from elsewhere, other machine constants, the families' own.
KNOWN = ("launch_us", "hbm_read_bytes_per_us", "hbm_write_bytes_per_us", "overlap_exponent", "kn_factor")
KNOWN_WIDTH, MACHINE_WIDTH, FAMILY_WIDTH = 0.15, 0.4, 0.7

START: dict[str, float] = {
    "machine.launch_us": 0.9,
    "machine.sm_tensor_flop_per_us": 7300000.0,
    "machine.sm_smem_bytes_per_us": 260000.0,
    "machine.l2_read_bytes_per_us": 8000000.0,
    "machine.l2_write_bytes_per_us": 5000000.0,
    "machine.gpc_read_bytes_per_us": 800000.0,
    "machine.l2_kept_fraction": 0.7,
    "machine.l2_fade_fraction": 0.5,
    "machine.hbm_read_bytes_per_us": 4300000.0,
    "machine.hbm_write_bytes_per_us": 4000000.0,
    "machine.tma_latency_us": 0.7,
    "machine.power_flop_per_us": 800000000.0,
    "machine.flop_per_l2_byte": 20,
    "wgmma_persistent.overlap_exponent": 4,
    "wgmma_tile.overlap_exponent": 4,
    "mma_cpasync.overlap_exponent": 4,
    "wgmma_splitk.overlap_exponent": 4,
    "mma_ldg.overlap_exponent": 4,
    "plain_tiled.overlap_exponent": 4,
    "wgmma_persistent.odd_tile_factor": 1.3,
    "wgmma_persistent.cluster_step_us": 0.02,
    "wgmma_persistent.step_us": 0.02,
    "wgmma_persistent.epilogue_us": 0.3,
    "wgmma_persistent.epilogue_pingpong_us": 0.3,
    "wgmma_persistent.element_pingpong_us": 3e-05,
    "wgmma_persistent.turn_us": 0.05,
    "wgmma_persistent.element_us": 3e-05,
    "wgmma_persistent.split_c_factor": 1.2,
    "wgmma_persistent.keep_c_factor": 1.03,
    "wgmma_persistent.start_us": 0.8,
    "wgmma_persistent.cluster_launch_us": 0.1,
    "wgmma_persistent.kn_factor": 1.0,
    "wgmma_tile.step_us": 0.03,
    "wgmma_tile.copy_step_us": 0.05,
    "wgmma_tile.reduction_us": 0.4,
    "wgmma_tile.reduction_element_us": 0.0001,
    "wgmma_tile.start_tma_us": 0.8,
    "wgmma_tile.start_copy_us": 0.6,
    "wgmma_tile.element_us": 2e-05,
    "wgmma_tile.cluster_launch_us": 0.1,
    "wgmma_tile.kn_factor": 1.0,
    "wgmma_splitk.step_us": 0.01,
    "wgmma_splitk.exchange_us": 1.6,
    "wgmma_splitk.exchange_element_us": 0.0002,
    "wgmma_splitk.start_us": 0.9,
    "wgmma_splitk.kn_factor": 1.0,
    "mma_cpasync.kn_factor": 1.1,
    "mma_cpasync.sm_tensor_flop_per_us": 3500000.0,
    "mma_cpasync.copy_element_us": 1e-05,
    "mma_cpasync.warp_mma_us": 1.3e-07,
    "mma_cpasync.warp_copy_us": 1e-05,
    "mma_cpasync.step_us": 0.05,
    "mma_cpasync.group_step_us": 0.1,
    "mma_cpasync.latency_us": 0.5,
    "mma_cpasync.sum_us": 0.2,
    "mma_cpasync.sum_element_us": 0.001,
    "mma_cpasync.reduction_us": 0.3,
    "mma_cpasync.reduction_element_us": 0.0001,
    "mma_cpasync.start_us": 0.5,
    "mma_cpasync.element_us": 0.003,
    "mma_cpasync.cluster_launch_us": 0.1,
    "mma_ldg.load_byte_us": 1.5e-05,
    "mma_ldg.load_byte_kn_us": 4e-05,
    "mma_ldg.sm_byte_us": 1.5e-05,
    "mma_ldg.sm_byte_kn_us": 2e-05,
    "mma_ldg.sum_us": 0.1,
    "mma_ldg.sum_element_us": 0.0005,
    "mma_ldg.reduction_us": 0.3,
    "mma_ldg.start_us": 0.3,
    "mma_ldg.latency_us": 0.3,
    "mma_ldg.cluster_launch_us": 0.1,
    "plain_tiled.sm_tensor_flop_per_us": 700000.0,
    "plain_tiled.copy_element_us": 0.0001,
    "plain_tiled.start_us": 1.5,
    "plain_tiled.step_us": 0.2,
    "plain_tiled.kn_factor": 1.1,
}


class Block:
    """All timings of one family."""

    def __init__(self, family: str, shapes: list[Measured], sm_count: int, l2_bytes: int) -> None:
        rows = [(plan, shape, i) for shape in shapes for i, plan in enumerate(shape.plans) if plan.family == family]
        self.family = family
        self.term = FAMILIES[family]
        self.x = columns([plan for plan, _, _ in rows])
        m, n, k = (np.array([shape.task.dims[d] for _, shape, _ in rows], float) for d in "MNK")
        self.case = Case(m, n, k, sm_count, l2_bytes)
        self.log_us = np.log([shape.times_us[i] for _, shape, i in rows])
        relative = np.array([shape.ratios[i] / shape.ratios.max() for _, shape, i in rows])
        self.weight = np.maximum(relative, 0.03) ** WEIGHT_POWER

    def residuals(self, c: dict[str, float]) -> np.ndarray:
        return self.weight * (np.log(self.term(self.x, self.case, c)) - self.log_us)


def fit(shapes: list[Measured], sm_count: int, l2_bytes: int) -> dict[str, float]:
    from scipy.optimize import least_squares

    present = {plan.family for shape in shapes for plan in shape.plans}
    blocks = [Block(family, shapes, sm_count, l2_bytes) for family in FAMILIES if family in present]
    names, start = list(START), np.log(list(START.values()))
    widths = np.array([_width(name) for name in names])

    def residuals(z: np.ndarray) -> np.ndarray:
        c = dict(zip(names, np.exp(z), strict=True))
        return np.concatenate([*(b.residuals(c) for b in blocks), PRIOR_STRENGTH * (z - start) / widths])

    def jacobian(z: np.ndarray) -> np.ndarray:
        """Forward differences; a family's constants move only its own timings."""
        c = dict(zip(names, np.exp(z), strict=True))
        base = [b.residuals(c) for b in blocks]
        ends = np.cumsum([0, *map(len, base)])
        out = np.zeros((ends[-1] + len(z), len(z)))
        for j, name in enumerate(names):
            moved = {**c, name: c[name] * np.exp(1e-4)}
            for i, block in enumerate(blocks):
                if name.startswith(("machine.", block.family + ".")):
                    out[ends[i] : ends[i + 1], j] = (block.residuals(moved) - base[i]) / 1e-4
            out[ends[-1] + j, j] = PRIOR_STRENGTH / widths[j]
        return out

    found = least_squares(residuals, start, jac=jacobian, loss="soft_l1", f_scale=SOFT_L1_SCALE, max_nfev=80)
    return {name: float(f"{value:.5g}") for name, value in zip(names, np.exp(found.x), strict=True)}


def _width(name: str) -> float:
    if name.split(".")[1] in KNOWN:
        return KNOWN_WIDTH
    return MACHINE_WIDTH if name.startswith("machine.") else FAMILY_WIDTH


def write(path: Path, constants: dict[str, float], folds: list[dict[str, float]], provenance: dict[str, Any]) -> None:
    grouped: dict[str, dict[str, float]] = {}
    for name, value in constants.items():
        group, short = name.split(".")
        grouped.setdefault(group, {})[short] = value
    order = [f"{group}.{short}" for group, members in grouped.items() for short in members]
    head = (
        "# Constants of the analytical model (tools/model_terms.py, docs/model.md), fitted by scripts/fit_model.py.\n"
        "# folds: the same constants in the same order, each fitted without the shapes of its fold (tools/model.py).\n"
    )
    data = {"provenance": provenance, "constants": grouped}
    text = head + yaml.safe_dump(data, sort_keys=False, width=120)
    text += "folds:\n" + "".join(f"  - {[fold[name] for name in order]}\n" for fold in folds)
    part = path.with_suffix(".part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", type=Path, default=ROOT / "records" / "h200.sqlite")
    parser.add_argument("--out", type=Path, default=ROOT / "configs" / "model.yaml")
    options = parser.parse_args()
    begun = time.perf_counter()
    try:
        records = RecordReader(options.records)
    except DeviceBroken as error:
        sys.exit(f"error: {error}")
    device = records.device
    shapes, partial = measured(records, load_families())
    print(f"{len(shapes)} shapes, {sum(len(s.plans) for s in shapes)} timings; {partial} shapes in part, left out")
    constants = fit(shapes, device.sm_count, device.l2_bytes)
    folds = [fit([s for s in shapes if fold_of(s.task) != i], device.sm_count, device.l2_bytes) for i in range(FOLDS)]
    provenance = {
        "records": options.records.name,
        "recorded_on": records.meta("recorded_on") or "",
        "records_commit": records.meta("commit") or "",
        "device": f"{device.name}, driver {device.driver}",
        "sm_count": device.sm_count,
        "l2_bytes": device.l2_bytes,
        "shapes": len(shapes),
        "timings": sum(len(s.plans) for s in shapes),
        "timing": "every plan of every family that accepts the shape, offline, screen budget",
        "fitted_on": datetime.now(UTC).date().isoformat(),
        "loss": f"soft L1 at {SOFT_L1_SCALE} on log time, weight (best / time)^{WEIGHT_POWER:g}",
    }
    write(options.out, constants, folds, provenance)
    load_fitted.cache_clear()
    overall = evaluate(shapes, device, load_fitted(options.out))[0]
    print(", ".join(f"regret at {k}: {100 * overall.regret[k].mean:.2f} %" for k in KS), "(held out, mean)")
    print(f"→ {options.out} in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
