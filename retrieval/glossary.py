"""Names for one thing: what the PTX manual, CUTLASS and people call it.

A question that uses one name is also looked up under the others (``other_names``, lexical side). A passage's
abbreviated names are also indexed spelled out (``spelled_out``): most atoms have no comment that would say it.
"""

from __future__ import annotations

import re

from retrieval.tokens import parts

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
#: Parts of identifiers, in lower case, and what they stand for.
ABBREVIATIONS: dict[str, str] = {
    "tma": "tensor memory accelerator copy",
    "ldsm": "ldmatrix load matrix from shared memory",
    "stsm": "stmatrix store matrix to shared memory",
    "mma": "matrix multiply accumulate",
    "gmma": "wgmma warpgroup matrix multiply accumulate",
    "umma": "tcgen05 matrix multiply accumulate",
    "tmem": "tensor memory",
    "smem": "shared memory",
    "gmem": "global memory",
    "rmem": "registers",
    "reg": "registers",
    "evt": "epilogue visitor tree",
    "clc": "cluster launch control",
    "cta": "thread block",
    "im2col": "image to column convolution",
    "desc": "descriptor",
    "bar": "barrier",
    "sf": "scale factor",
    "alloc": "allocate",
    "dealloc": "deallocate free",
    "coord": "coordinate",
    "idx": "index",
    "f16": "fp16 half",
    "f32": "fp32 float",
    "bf16": "bfloat16",
    "tf32": "tensorfloat",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "f64": "fp64 double",
    "s8": "int8",
    "u8": "uint8",
}
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


def spelled_out(identifiers: str) -> str:
    """What the abbreviations in these identifiers stand for, in the order in which they occur."""
    words = (word.lower() for word in parts(identifiers))
    return ", ".join(dict.fromkeys(ABBREVIATIONS[word] for word in words if word in ABBREVIATIONS))
