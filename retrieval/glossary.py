"""Names for one thing: what the PTX manual, CUTLASS and people call it. A question that uses one is also looked up
under the others, on the lexical side only; the vectors do not need it."""

from __future__ import annotations

import re

#: Each row: phrases that mean the same. Words that mean much else besides are left out.
SAME: tuple[tuple[str, ...], ...] = (
    ("wgmma", "gmma", "warpgroup mma"),
    ("tcgen05", "umma"),
    ("ldmatrix", "ldsm"),
    ("stmatrix", "stsm"),
    ("tensor memory", "tmem"),
    ("shared memory", "smem"),
    ("global memory", "gmem"),
    ("tensor map", "tensormap", "tma descriptor"),
    ("tma", "tensor memory accelerator", "cp.async.bulk.tensor"),
    ("setmaxnreg", "register reconfiguration", "reg alloc", "number of registers"),
    ("programmatic dependent launch", "pdl", "griddepcontrol", "grid dependency control"),
    ("epilogue visitor tree", "evt"),
    ("cluster launch control", "clc", "clusterlaunchcontrol"),
    ("thread block", "threadblock", "cta"),
    ("distributed shared memory", "dsmem"),
    ("bfloat16", "bf16"),
    ("half precision", "fp16", "f16"),
    ("single precision", "fp32", "f32"),
    ("fp8", "e4m3", "e5m2"),
)
_WORDS = re.compile(r"[a-z0-9]+")


def other_names(text: str) -> list[str]:
    """The words of the other names of what the text speaks of, in the order of the table."""
    said = f" {' '.join(_WORDS.findall(text.lower()))} "
    found: list[str] = []
    for row in SAME:
        written = [" ".join(_WORDS.findall(phrase)) for phrase in row]
        used = [phrase for phrase in written if f" {phrase} " in said or f" {phrase}s " in said]
        if used:
            found += [word for phrase in written if phrase not in used for word in phrase.split()]
    return list(dict.fromkeys(found))
