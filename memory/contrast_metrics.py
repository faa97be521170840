"""Two profiles side by side, and what sets them apart in computed sentences. Pure.

Differences that ncu's own scatter explains are not told: 5 % of a quantity, 3 points of a percentage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tools.records import ProfileResult

MIN_FACTOR = 1.05
MIN_STALL_FACTOR = 1.25
MIN_POINTS = 3.0
MAX_REMARKS = 8

#: Shares that are compared in points.
_SHARES = {
    "tensor_pipe_pct": "tensor cores busy",
    "l2_hit_pct": "L2 hit",
    "l1_hit_pct": "L1 hit",
    "occupancy_pct": "occupancy",
    "issue_slots_pct": "issue slots used",
}
#: Quantities that are compared by their factor.
_AMOUNTS = {
    "l2_pct": "L2 throughput",
    "shared_pct": "shared-memory throughput",
    "registers": "registers a thread",
    "waves": "waves",
    "bank_conflicts": "bank conflicts",
}
_UNITS = {"time_us": "us", "dram_bytes_read": "bytes", "dram_bytes_written": "bytes"}


class Remark(NamedTuple):
    weight: float  # the larger, the sooner it is told
    text: str


def metric_table(a: ProfileResult | None, b: ProfileResult | None, names: tuple[str, str]) -> list[str]:
    """Every metric that either has. Empty without any profile."""
    ours, theirs = a.metrics if a else {}, b.metrics if b else {}
    metrics = list(dict.fromkeys((*ours, *theirs)))
    stalls = list(dict.fromkeys((*(a.stalls if a else {}), *(b.stalls if b else {}))))
    if not metrics:
        return []
    lines = [f"| ncu | {names[0]} | {names[1]} |", "|---|---|---|"]
    lines += [f"| {name} | {_cell(ours.get(name), name)} | {_cell(theirs.get(name), name)} |" for name in metrics]
    for name in stalls:
        mine, other = (_cell((p.stalls if p else {}).get(name), name) for p in (a, b))
        lines.append(f"| stall {name} | {mine} | {other} |")
    return lines


def compare_profiles(a: ProfileResult, b: ProfileResult, names: tuple[str, str] = ("A", "B")) -> str:
    """One sentence: ``A against B: +37 % DRAM throughput (2.9 against 2.1 TB/s), L2 hit 58 % against 42 %.``"""
    remarks = sorted(_remarks(a, b), key=lambda r: -r.weight)[:MAX_REMARKS]
    if not remarks:
        return f"The profiles of {names[0]} and {names[1]} do not differ beyond ncu's scatter."
    return f"{names[0]} against {names[1]}: {', '.join(r.text for r in remarks)}."


def _remarks(a: ProfileResult, b: ProfileResult) -> Iterator[Remark]:
    yield from _factor("DRAM throughput", dram_tb_per_s(a.metrics), dram_tb_per_s(b.metrics), "TB/s")
    yield from _factor("DRAM traffic", _dram_mb(a.metrics), _dram_mb(b.metrics), "MB")
    for name, what in _SHARES.items():
        ours, theirs = a.metrics.get(name), b.metrics.get(name)
        # Over tiny launches ncu's passes can disagree and give more than all.
        if ours is None or theirs is None or max(ours, theirs) > 100 or abs(ours - theirs) < MIN_POINTS:
            continue
        yield Remark(abs(ours - theirs) / 30, f"{what} {ours:.0f} % against {theirs:.0f} %")
    for name, what in _AMOUNTS.items():
        unit = "% of peak" if name.endswith("_pct") else ""
        yield from _factor(what, a.metrics.get(name), b.metrics.get(name), unit)
    for name in dict.fromkeys((*a.stalls, *b.stalls)):
        ours, theirs = a.stalls.get(name), b.stalls.get(name)
        if name in ("selected", "not_selected") or ours is None or theirs is None:
            continue  # one that is missing is only not among the top ones
        larger, smaller = max(ours, theirs), min(ours, theirs)
        if larger >= MIN_STALL_FACTOR * smaller and larger >= 0.1:
            weight = 0.5 * math.log(larger / max(smaller, 0.05))
            yield Remark(weight, f"{name} stalls {ours:.2f} against {theirs:.2f} warps an issue")


def _factor(what: str, ours: float | None, theirs: float | None, unit: str) -> Iterator[Remark]:
    if ours is None or theirs is None or min(ours, theirs) < 0 or ours == theirs:
        return
    values = f"({_number(ours)} against {_number(theirs)}{f' {unit}' if unit else ''})"
    if min(ours, theirs) == 0:
        yield Remark(1.0, f"{'no ' if ours == 0 else ''}{what} {values}")
    elif max(ours, theirs) >= MIN_FACTOR * min(ours, theirs):
        yield Remark(abs(math.log(ours / theirs)), f"{100 * (ours / theirs - 1):+.0f} % {what} {values}")


def dram_tb_per_s(metrics: Mapping[str, float]) -> float | None:
    """Bytes read and written over the time under ncu; None where either is unknown."""
    megabytes, time_us = _dram_mb(metrics), metrics.get("time_us", 0.0)
    return megabytes / time_us if megabytes is not None and time_us > 0 else None


def _dram_mb(metrics: Mapping[str, float]) -> float | None:
    if not {"dram_bytes_read", "dram_bytes_written"} <= metrics.keys():
        return None
    return (metrics["dram_bytes_read"] + metrics["dram_bytes_written"]) / 1e6


def _cell(value: float | None, name: str) -> str:
    if value is None:
        return "-"
    unit = " %" if name.endswith("_pct") else f" {_UNITS[name]}" if name in _UNITS else ""
    return f"{_number(value)}{unit}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
