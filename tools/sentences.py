"""Three plain sentences on what limits a kernel, from its profile. Pure.

The thresholds are rules of thumb of the trade (Nsight Compute's own "speed of light" advice uses 60 % and 80 %).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

BUSY_PCT = 60.0
IDLE_PCT = 40.0

_UNITS = {
    "tensor_pipe_pct": "the tensor cores",
    "dram_pct": "device memory",
    "l2_pct": "the L2 cache",
    "l1_pct": "the L1 cache and shared-memory pipe",
    "shared_pct": "shared-memory bandwidth",
    "issue_slots_pct": "instruction issue",
}

#: What a stall means and what usually helps.
_STALLS = {
    "barrier": "waiting at a CTA barrier; fewer or smaller barriers, or named barriers and mbarriers between roles",
    "branch_resolving": "waiting for branches; unroll, or take the branch out of the inner loop",
    "dispatch_stall": "held back by the dispatcher",
    "drain": "draining stores before exit; overlap the epilogue with the next tile's main loop",
    "gmma": "waiting for wgmma; more work in flight per warpgroup, or a deeper pipeline",
    "imc_miss": "missing the constant cache",
    "lg_throttle": "too many global accesses in flight; use wider accesses or TMA",
    "long_scoreboard": "waiting for global or L2 data; deeper prefetch, more stages, or more CTAs",
    "math_pipe_throttle": "waiting for a busy math pipe, which is what a compute-bound kernel should do",
    "membar": "waiting at a memory fence; weaken its scope, or fence less often",
    "mio_throttle": "too many shared-memory or special instructions in flight; use ldmatrix, wider accesses or wgmma",
    "no_instruction": "missing the instruction cache; a smaller unroll or less code",
    "not_selected": "ready but not chosen: there are more warps than issue slots",
    "short_scoreboard": "waiting for shared-memory data; interleave ldmatrix with mma, or avoid bank conflicts",
    "sleeping": "asleep in a spin loop",
    "tex_throttle": "too many texture accesses in flight",
    "wait": "waiting out fixed instruction latencies; more independent work per warp",
}


def sentences(metrics: Mapping[str, float], stalls: Mapping[str, float]) -> tuple[str, ...]:
    """What the kernel is bound by; why warps do not issue; what occupancy, conflicts or waves add. Always three when
    anything was measured, none otherwise."""
    if not metrics:
        return ()
    return _bound(metrics), _stalled(stalls), _shape(metrics)


def _bound(metrics: Mapping[str, float]) -> str:
    used = {name: metrics[name] for name in _UNITS if name in metrics}
    time = f"{metrics['time_us']:.2f} us under ncu" if "time_us" in metrics else "the time is unknown"
    if not used:
        return f"No unit's utilisation could be measured ({time})."
    top = max(used, key=lambda name: used[name])
    others = [f"{_UNITS[n]} {used[n]:.0f} %" for n in sorted(used, key=lambda n: -used[n]) if n != top][:2]
    beside = f"; {', '.join(others)}" if others else ""
    if used[top] >= BUSY_PCT:
        kind = "memory" if top in ("dram_pct", "l2_pct") else "compute" if top == "tensor_pipe_pct" else "throughput"
        return f"It is {kind}-bound: {_UNITS[top]} at {used[top]:.0f} % of peak{beside} ({time})."
    if used[top] < IDLE_PCT:
        return (
            f"It is latency-bound: no unit is above {used[top]:.0f} % of peak "
            f"({_UNITS[top]}{beside}), so launch, prologue and exposed waits decide ({time})."
        )
    return f"No single limit: the busiest is {_UNITS[top]} at {used[top]:.0f} % of peak{beside} ({time})."


def _stalled(stalls: Mapping[str, float]) -> str:
    waiting = {name: value for name, value in stalls.items() if name != "not_selected" and value > 0}
    if not waiting:
        return "No stall reasons were measured."
    top = max(waiting, key=lambda name: waiting[name])
    share = 100 * waiting[top] / sum(waiting.values())
    meaning = _STALLS.get(top, "an uncommon reason")
    return (
        f"Warps stall most on {top} ({waiting[top]:.2f} warps per issue, {share:.0f} % of the top stalls): {meaning}."
    )


def _of_limit(metrics: Mapping[str, float]) -> str:
    """ncu samples the occupancy: of a short kernel it can come out above what the launch allows."""
    if "occupancy_limit_pct" not in metrics:
        return ""
    if metrics["occupancy_pct"] >= metrics["occupancy_limit_pct"]:
        return ", all that registers and shared memory allow"
    return f" of at most {metrics['occupancy_limit_pct']:.0f} %"


def _shape(metrics: Mapping[str, float]) -> str:
    parts = []
    if "registers" in metrics:
        parts.append(f"{metrics['registers']:.0f} registers a thread")
    if "occupancy_pct" in metrics:
        parts.append(f"occupancy {metrics['occupancy_pct']:.0f} %{_of_limit(metrics)}")
    waves = metrics.get("waves")
    if waves is not None:
        if waves < 1:
            parts.append(f"{waves:.2f} waves, so SMs stand idle")
        else:
            tail = waves % 1
            parts.append(f"{waves:.2f} waves" + (", the last one thin" if 0 < tail < 0.5 and waves < 8 else ""))
    wavefronts = metrics.get("shared_wavefronts", 0.0)
    if wavefronts > 0 and "bank_conflicts" in metrics:
        share = 100 * metrics["bank_conflicts"] / wavefronts
        parts.append(f"bank conflicts in {share:.0f} % of shared-memory wavefronts")
    if metrics.get("l2_hit_pct", math.inf) <= 100:  # over tiny launches ncu's two passes can disagree and give more
        parts.append(f"L2 hit rate {metrics['l2_hit_pct']:.0f} %")
    if not parts:
        return "Nothing is known of occupancy, registers or conflicts."
    text = ", ".join(parts)
    return text[0].upper() + text[1:] + "."
