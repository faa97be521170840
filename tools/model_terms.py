"""What a plan of each family costs at a shape, by its parts: arithmetic, shared memory, L2, HBM, and what is paid once.

All values are float64 arrays over plans (shapes broadcast); times are microseconds, rates per microsecond. ``c`` holds
the constants of configs/model.yaml by name: ``machine.…``, and a family's under the family's name. The structure
follows the kernels' own comments; tiles, rings and clusters are read from the knobs. docs/model.md says it in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Columns = Mapping[str, Array]  # a knob's values, and B_NK
Constants = Mapping[str, float]

SM_SMEM_BYTES = 233_472  # 228 KiB of an SM; each CTA takes 1 KiB beside its own
SM_REGISTERS = 65_536
SM_THREADS = 2_048
SM_CTAS = 32
#: What rows of a tile that A does not have add to its time, as a part of it, where few rows are all that there is: by
#: least squares over the same plans with and without RAGGED at 21 shapes, measured before the record held any. Over all
#: that it holds scripts/ragged_rows.py finds 0.3 to 0.5 and 2.3. Families without RAGGED are charged the same.
MISSING_ROWS_TMA, MISSING_ROWS_COPY = 0.6, 1.5
FEW_ROWS = 512
GPC_SMS = 16  # 16 or 18 on an H200; CTAs of a plain launch fill one GPC after the other (docs/kernels.md)


class Gpu(Protocol):
    """What the model needs to know of a GPU; a DeviceInfo says it."""

    @property
    def sm_count(self) -> int: ...

    @property
    def l2_bytes(self) -> int: ...


@dataclass(frozen=True)
class Case:
    """The shape (numbers, or arrays that broadcast with the plans) and the GPU."""

    m: Array
    n: Array
    k: Array
    sm_count: int
    l2_bytes: int

    @classmethod
    def of(cls, m: float, n: float, k: float, gpu: Gpu) -> Case:
        return cls(np.float64(m), np.float64(n), np.float64(k), gpu.sm_count, gpu.l2_bytes)  # type: ignore[arg-type]


def ceil_div(a: Array | float, b: Array | float) -> Array:
    return np.ceil(np.asarray(a) / b)


def longest(p: float, *parts: Array) -> Array:
    """A smooth maximum: parts that overlap, but not perfectly. ``p`` → infinity is the plain maximum."""
    top = np.maximum.reduce(np.broadcast_arrays(*parts))
    total: Array = np.add.reduce([np.broadcast_to((part / top) ** p, top.shape) for part in parts])
    return np.asarray(top * total ** (1.0 / p))


def occupancy(smem: Array, threads: Array, registers: Array) -> Array:
    """CTAs that an SM holds at once, at least one."""
    by_registers = SM_REGISTERS // (threads * np.ceil(registers / 8) * 8)
    fit = np.minimum(SM_SMEM_BYTES // (smem + 1024), np.minimum(SM_THREADS // threads, by_registers))
    return np.maximum(1.0, np.minimum(SM_CTAS, fit))


def cluster_slots(sm_count: int, size: Array) -> Array:
    """SMs that clusters of this size can use: GPCs of unequal width strand some from 4 CTAs up. Seen on one H200: 30
    clusters of 4 and 15 of 8 run at once, 32 and 16 do not; its pairs use every SM."""
    return sm_count - np.where(size >= 4, 12.0, 0.0)


def missed(c: Constants, case: Case) -> Array:
    """The part of the operands' bytes that L2 no longer holds when the same buffers are used again: 0 to 1."""
    touched = 2 * (case.m * case.k + case.k * case.n + case.m * case.n)
    kept = c["machine.l2_kept_fraction"] * case.l2_bytes
    return np.clip((touched / kept - 1) / c["machine.l2_fade_fraction"], 0.0, 1.0)


def hbm_us(c: Constants, case: Case, reads_a: Array | float = 1.0, reads_b: Array | float = 1.0) -> Array:
    """Traffic beyond L2: each operand as often as it is read from there, C once."""
    read = 2 * (case.m * case.k * reads_a + case.k * case.n * reads_b)
    return missed(c, case) * (
        read / c["machine.hbm_read_bytes_per_us"] + 2 * case.m * case.n / c["machine.hbm_write_bytes_per_us"]
    )


def l2_us(c: Constants, case: Case, loaded: Array) -> Array:
    """Bytes that all CTAs load through L2, and the stores of C."""
    return loaded / c["machine.l2_read_bytes_per_us"] + 2 * case.m * case.n / c["machine.l2_write_bytes_per_us"]


def gpc_us(c: Constants, case: Case, x: Columns, bm: Array | float, k: Array, splits: Array | float) -> Array:
    """Operands on their way into a GPC, where a tile of A or B that several SMs want at once arrives once: the fewer
    rows and columns the 16 neighbours of the launch order stand for, the better. A column of tiles (of fewer than 16,
    the first one alone: more rows must not look quicker), or with ``RASTER_BLOCK`` 4 x 4. ``k``: K of one CTA."""
    bn, blocked = x["BN"], x["RASTER_BLOCK"] == 1
    tiles_m, tiles_n = ceil_div(case.m, bm), ceil_div(case.n, bn)
    rows, columns = np.where(blocked, 4.0, np.minimum(GPC_SMS, tiles_m)), np.where(blocked, 4.0, 1.0)
    waves = np.maximum(1.0, tiles_m * tiles_n * splits / case.sm_count)
    return waves * (rows * bm + columns * bn) * 2 * k / c["machine.gpc_read_bytes_per_us"]


def missing_rows(x: Columns, case: Case, bm: Array, cost: Array | float) -> Array:
    """A factor: with RAGGED, or where the family asks nothing of the memory for such rows, they cost nothing."""
    part = 1 - case.m / (ceil_div(case.m, bm) * bm)
    counts = (case.m % 64 != 0) & (case.m <= FEW_ROWS) & (np.asarray(x.get("RAGGED", 0.0)) != 1)
    return np.asarray(np.where(counts, 1 + cost * part, 1.0))


def wgmma_smem_bytes(bm: Array, bn: Array, k: Array | float) -> Array:
    """Shared-memory traffic of a tile over ``k``: a warpgroup reads its 64 rows of A and all of B; TMA writes both."""
    return (bm / 64 * (64 + bn) + (bm + bn)) * 2 * k


def wgmma_persistent(x: Columns, case: Case, c: Constants) -> Array:
    f = "wgmma_persistent."
    p = c[f + "overlap_exponent"]
    bm, bn, pingpong, consumers = x["BM"], x["BN"], x["PINGPONG"] == 1, x["CONSUMERS"]
    cm, cn = x["CLUSTER_M"], x["CLUSTER_N"]
    size = cm * cn
    tiles_m, tiles_n = ceil_div(case.m, bm * cm), ceil_div(case.n, bn * cn)
    units = tiles_m * tiles_n  # of a cluster
    workers = np.floor(case.sm_count / size) * x["CTAS"]
    rounds = ceil_div(units, workers)
    active = np.minimum(units * size, case.sm_count)
    together = np.minimum(x["CTAS"], ceil_div(units * size, case.sm_count))
    budget = np.where(x["CTAS"] == 1, 232448, 115712)
    c_bytes = bm * bn * 2 * (1 + pingpong) / x["C_SPLIT"]
    stages = np.minimum(8, np.floor((budget - c_bytes - 256) / ((bm + bn) * 128)))
    steps = ceil_div(case.k, 64)

    tensor = 2 * bm * bn * 64 / c["machine.sm_tensor_flop_per_us"]
    loaded_step = (bm / cn + bn / cm) * 128
    work = longest(p, tensor, wgmma_smem_bytes(bm, bn, 64) / c["machine.sm_smem_bytes_per_us"])
    once_step = c[f + "step_us"] + np.where(size > 1, c[f + "cluster_step_us"], 0.0)
    step = longest(p, work + once_step, c["machine.tma_latency_us"] / stages)
    odd = np.where(bn % 32 == 0, 1.0, c[f + "odd_tile_factor"])
    share = np.where(pingpong, 1, consumers)
    epilogue = np.where(pingpong, c[f + "epilogue_pingpong_us"], c[f + "epilogue_us"])
    epilogue = epilogue + odd * bm * bn / share * np.where(pingpong, c[f + "element_pingpong_us"], c[f + "element_us"])
    epilogue = epilogue * np.where((x["C_SPLIT"] == 2) & ~pingpong, c[f + "split_c_factor"], 1.0)
    main = steps * step + np.where(pingpong, c[f + "turn_us"], 0.0)
    chain = np.where(pingpong, np.maximum(main, (main + epilogue) / 2), main + epilogue)
    tile = longest(p, together * steps * work, chain)
    # What nothing overlaps: the first stage on its way in, the last tile on its way out, all SMs at once.
    first = active * together * loaded_step / c["machine.l2_read_bytes_per_us"]
    last = (
        np.where(pingpong, epilogue, 0.0) + odd * active * together * bm * bn * 2 / c["machine.l2_write_bytes_per_us"]
    )

    along_n = x["RASTER_N"] == 1
    fast, slow_bytes = np.where(along_n, tiles_n, tiles_m), np.where(along_n, 2 * case.m * case.k, 2 * case.n * case.k)
    strips = ceil_div(fast, x["RASTER_GROUP"])
    again = 1 + (strips - 1) * np.clip(slow_bytes / (c["machine.l2_kept_fraction"] * case.l2_bytes) - 0.5, 0.0, 1.0)
    hbm = hbm_us(c, case, np.where(along_n, again, 1.0), np.where(along_n, 1.0, again))
    hbm = hbm * np.where(x["EVICT_C"] == 1, 1.0, c[f + "keep_c_factor"])
    loaded = units * size * loaded_step / 64 * case.k
    power = (2 * case.m * case.n * case.k + loaded * c["machine.flop_per_l2_byte"]) / c["machine.power_flop_per_us"]
    once = (
        c["machine.launch_us"] + c[f + "start_us"] + np.where(size > 1, c[f + "cluster_launch_us"], 0.0) + first + last
    )
    kn = np.where(x["B_NK"] == 1, 1.0, c[f + "kn_factor"]) * missing_rows(x, case, bm, MISSING_ROWS_TMA)
    return once + kn * longest(p, rounds * tile, odd * l2_us(c, case, loaded), hbm, power)


def wgmma_tile(x: Columns, case: Case, c: Constants) -> Array:
    f = "wgmma_tile."
    p = c[f + "overlap_exponent"]
    bm, bn, bk, split, slices, stages = x["BM"], x["BN"], x["BK"], x["CLUSTER_K"], x["SLICES"], x["STAGES"]
    tma = x["LOADER"] == 1
    threads = bm * 2 * slices + np.where(tma, 32, 128)
    out = np.where(slices * split == 1, bm * bn * 2, slices * bm * bn * 4 + 16)
    smem_bytes = stages * (bm + bn) * bk * 2 + out + stages * 16
    fit = occupancy(smem_bytes, threads, 26 + bn / 2)
    ctas = ceil_div(case.m, bm) * ceil_div(case.n, bn) * split
    rounds = ceil_div(ctas, cluster_slots(case.sm_count, split) * fit)
    queue = ceil_div(ctas, case.sm_count)
    steps = ceil_div(ceil_div(case.k, bk), split)

    tensor = 2 * bm * bn * bk / c["machine.sm_tensor_flop_per_us"]
    work = longest(p, tensor, wgmma_smem_bytes(bm, bn, bk) / c["machine.sm_smem_bytes_per_us"])
    step = longest(
        p,
        work / slices + np.where(tma, c[f + "step_us"], c[f + "copy_step_us"] * (bm + bn) / 128) / slices,
        c["machine.tma_latency_us"] / stages,
    )
    reduction = np.where(slices * split > 1, c[f + "reduction_us"] + bm * bn * c[f + "reduction_element_us"], 0.0)
    fixed = np.where(tma, c[f + "start_tma_us"], c[f + "start_copy_us"]) + c[f + "element_us"] * bm * bn + reduction
    chain = rounds * (fixed + steps * step)
    once = c["machine.launch_us"] + np.where(split > 1, c[f + "cluster_launch_us"] * np.log2(split), 0.0)
    l2 = l2_us(c, case, ctas * (bm + bn) * 2 * case.k / split)
    # Clusters are dealt out to the GPCs in turn, and their tiles are not what is asked here.
    gpc = np.where(split > 1, 0.0, gpc_us(c, case, x, bm, case.k, 1))
    kn = np.where(x["B_NK"] == 1, 1.0, c[f + "kn_factor"])
    kn = kn * missing_rows(x, case, bm, np.where(tma, MISSING_ROWS_TMA, MISSING_ROWS_COPY))
    return once + kn * longest(p, chain, fixed + queue * steps * work, fixed + l2, fixed + gpc, hbm_us(c, case))


def splitk_split(x: Columns, case: Case) -> tuple[Array, Array, Array]:
    """Tiles, stages, and CTAs that share a tile's K: as the family's launch computes them, for all plans at once."""
    bm, bn = x["BM"], x["BN"]
    tiles = ceil_div(case.m, bm) * ceil_div(case.n, bn)
    stages = np.minimum(8, 232_192 // ((bm + bn) * x["BK"] * 2))
    return tiles, stages, np.maximum(2, np.minimum(np.minimum(case.sm_count // tiles, bn // 8), case.k // 256))


def wgmma_splitk(x: Columns, case: Case, c: Constants) -> Array:
    f = "wgmma_splitk."
    p = c[f + "overlap_exponent"]
    bm, bn, bk = x["BM"], x["BN"], x["BK"]
    tiles, stages, split = splitk_split(x, case)
    steps = ceil_div(ceil_div(case.k, bk), split)

    tensor = 2 * bm * bn * bk / c["machine.sm_tensor_flop_per_us"]
    work = longest(p, tensor, wgmma_smem_bytes(bm, bn, bk) / c["machine.sm_smem_bytes_per_us"])
    step = longest(p, work + c[f + "step_us"], c["machine.tma_latency_us"] / stages)
    exchange = c[f + "exchange_us"] + bm * bn * c[f + "exchange_element_us"]  # trips to L2, however many splits
    fixed = c[f + "start_us"] + exchange
    loaded = tiles * (bm + bn) * 2 * case.k
    kn = np.where(x["B_NK"] == 1, 1.0, c[f + "kn_factor"]) * missing_rows(x, case, bm, MISSING_ROWS_TMA)
    chain, l2, hbm = fixed + steps * step, fixed + l2_us(c, case, loaded), exchange + hbm_us(c, case)
    gpc = fixed + gpc_us(c, case, x, bm, case.k / split, split)
    return c["machine.launch_us"] + kn * longest(p, chain, l2, gpc, hbm)


def mma_cpasync(x: Columns, case: Case, c: Constants) -> Array:
    f = "mma_cpasync."
    p = c[f + "overlap_exponent"]
    bm, bn, bk, stages = x["BM"], x["BN"], x["BK"], x["STAGES"]
    warps, slices, split = x["WARPS"], x["SLICES"], x["CLUSTER_K"]
    alone = warps == 1
    across = np.where(alone, 1, warps / 2)  # warps along N; two along M
    wm, wn = bm / np.where(alone, 1, 2), bn / across
    threads = 32 * warps * slices
    smem_bytes = slices * stages * (bm + bn) * bk * 2 + np.where(split > 1, bm * bn * 4 + 16, 0)
    fit = occupancy(smem_bytes, threads, 48 + 2.4 * wm * wn / 32)
    ctas = ceil_div(case.m, bm) * ceil_div(case.n, bn) * split
    rounds = ceil_div(ctas, cluster_slots(case.sm_count, split) * fit)
    queue = ceil_div(ctas, case.sm_count)
    steps = ceil_div(ceil_div(case.k, bk), slices * split)

    kn = np.where(x["B_NK"] == 1, 1.0, c[f + "kn_factor"])
    smem = (warps * (wm + wn) + (bm + bn)) * 2 * bk / c["machine.sm_smem_bytes_per_us"]
    work = slices * longest(
        p, 2 * bm * bn * bk / c[f + "sm_tensor_flop_per_us"], smem, kn * (bm + bn) * bk * c[f + "copy_element_us"]
    )
    # One warp's own instructions: copies, ldmatrix, mma.
    own = bk * ((wm * wn) * c[f + "warp_mma_us"] + kn * (bm + bn) / warps * c[f + "warp_copy_us"])
    step = longest(
        p, own + np.where(alone, c[f + "step_us"], c[f + "group_step_us"]), c[f + "latency_us"] / (stages - 1)
    )
    sum_parts = np.where(slices > 1, c[f + "sum_us"] + c[f + "sum_element_us"] * bm * bn * slices / threads, 0.0)
    reduction = np.where(split > 1, c[f + "reduction_us"] + c[f + "reduction_element_us"] * bm * bn, 0.0)
    fixed = c[f + "start_us"] + sum_parts + reduction + c[f + "element_us"] * bm * bn / threads
    chain = rounds * (fixed + steps * step)
    once = c["machine.launch_us"] + np.where(split > 1, c[f + "cluster_launch_us"] * np.log2(split), 0.0)
    l2 = l2_us(c, case, ctas * (bm + bn) * 2 * case.k / split)
    gpc = np.where(split > 1, 0.0, gpc_us(c, case, x, bm, case.k, 1))
    parts = longest(p, chain, fixed + queue * steps * work, fixed + l2, fixed + gpc, hbm_us(c, case))
    return once + missing_rows(x, case, bm, MISSING_ROWS_COPY) * parts


def mma_ldg(x: Columns, case: Case, c: Constants) -> Array:
    f = "mma_ldg."
    p = c[f + "overlap_exponent"]
    bn, slices, unroll, split = x["BN"], x["SLICES"], x["UNROLL"], x["CLUSTER_K"]
    nk = x["B_NK"] == 1
    fit = occupancy(slices * 16 * (bn + 4) * 4, 32 * slices, 28 + bn * unroll)
    ctas = ceil_div(case.m, 16) * ceil_div(case.n, bn) * split
    rounds = ceil_div(ctas, cluster_slots(case.sm_count, split) * fit)
    queue = ceil_div(ctas, case.sm_count)
    steps = ceil_div(case.k, 32 * unroll * slices * split)

    bytes_step = (16 + bn) * 64 * unroll
    own = bytes_step * np.where(nk, c[f + "load_byte_us"], c[f + "load_byte_kn_us"])
    work = bytes_step * slices * np.where(nk, c[f + "sm_byte_us"], c[f + "sm_byte_kn_us"])
    sum_parts = np.where(slices > 1, c[f + "sum_us"] + c[f + "sum_element_us"] * bn * 16 / 32, 0.0)
    reduction = np.where(split > 1, c[f + "reduction_us"], 0.0)
    fixed = c[f + "start_us"] + sum_parts + reduction
    chain = rounds * (fixed + steps * (c[f + "latency_us"] + own))
    once = c["machine.launch_us"] + np.where(split > 1, c[f + "cluster_launch_us"] * np.log2(split), 0.0)
    l2 = l2_us(c, case, ctas * (16 + bn) * 2 * case.k / split)
    gpc = np.where(split > 1, 0.0, gpc_us(c, case, x, 16.0, case.k, 1))
    return once + longest(p, chain, fixed + queue * steps * work, fixed + l2, fixed + gpc, hbm_us(c, case))


def plain_tiled(x: Columns, case: Case, c: Constants) -> Array:
    f = "plain_tiled."
    p = c[f + "overlap_exponent"]
    bm, bn = x["BM"], x["BN"]
    fit = occupancy((bm + bn) * 80.0, np.full_like(bm, 128.0), 40 + bm * bn / 128)
    ctas = ceil_div(case.m, bm) * ceil_div(case.n, bn)
    steps = ceil_div(case.k, 32)
    work = 2 * bm * bn * 32 / c[f + "sm_tensor_flop_per_us"] + (bm + bn) * 32 * c[f + "copy_element_us"]
    chain = ceil_div(ctas, case.sm_count * fit) * (c[f + "start_us"] + steps * (c[f + "step_us"] + work))
    kn = np.where(x["B_NK"] == 1, 1.0, c[f + "kn_factor"])
    return c["machine.launch_us"] + kn * longest(
        p, chain, ceil_div(ctas, case.sm_count) * steps * work, hbm_us(c, case)
    )


def by_tile(x: Columns, case: Case) -> Array:
    """A rough cost from tile and split alone, for families without terms of their own: knobs BM, BN, and SPLIT… or
    CLUSTER_K (parts of K). Nothing in it was fitted: 790 TFLOP/s, 6 TB/s from L2, 1.4 us launch."""
    bm, bn = x["BM"], x["BN"]
    parts = [values for name, values in x.items() if name.startswith(("SPLIT", "CLUSTER_K"))]
    splits = np.maximum.reduce([np.ones_like(bm), *parts])
    k = ceil_div(case.k, splits)
    waves = ceil_div(ceil_div(case.m, bm) * ceil_div(case.n, bn) * splits, case.sm_count)
    busy = np.maximum(2 * bm * bn * k / (790e6 / 132), 2 * (bm + bn) * k / (6e6 / 132))
    return np.asarray(1.4 + waves * (busy + 0.4) + np.where(splits > 1, 0.6, 0.0))


FAMILIES: Mapping[str, Callable[[Columns, Case, Constants], Array]] = {
    "wgmma_persistent": wgmma_persistent,
    "wgmma_tile": wgmma_tile,
    "wgmma_splitk": wgmma_splitk,
    "mma_cpasync": mma_cpasync,
    "mma_ldg": mma_ldg,
    "plain_tiled": plain_tiled,
}
