"""A small corpus of our own in the manner of CuTe, and how to index it without a model."""

from __future__ import annotations

from pathlib import Path

from retrieval.build import BuildReport, build
from retrieval.embedding import Embedder, HashingEmbedder
from retrieval.sources import Source

LICENCE = """/*
 * Copyright (c) 2024 Somebody. All rights reserved.
 * SPDX-License-Identifier: MIT
 */
"""


def atoms() -> str:
    """Sixteen near-identical atoms, as CuTe has thousands, for FP32 and for FP16 accumulation."""
    text = LICENCE + "#pragma once\nnamespace demo {\n"
    for n in range(8, 129, 16):
        for accumulator, kind in (("F32", "float"), ("F16", "uint32_t")):
            name = f"SM90_64x{n}x16_{accumulator}F16F16_SS"
            text += (
                f"\n// GMMA 64x{n}x16 {accumulator}+=F16*F16\nstruct {name}\n{{\n"
                f"  using CRegisters = {kind}[{n // 2}];\n"
                "  __device__ static void\n  fma(uint64_t const& desc_a, uint64_t const& desc_b)\n  {\n"
                f'    asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.{accumulator.lower()}.f16.f16 ...");\n'
                "  }\n};\n"
            )
    return text + "}  // namespace demo\n"


COPIES = (
    LICENCE
    + """
#pragma once
namespace demo {

// Waits until at most N committed bulk stores are still in flight.
template <int N>
__device__ void store_wait()
{
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory");
}

/// Copies a tile with cp.async and fills with zeros where the predicate is false.
struct SM80_CP_ASYNC_ZFILL
{
  __device__ static void copy(void const* source, void* target, bool predicate);
};

/// Initiates a tensor copy from global to shared memory.
struct SM90_TMA_LOAD
{
  __device__ static void copy(void const* descriptor, uint64_t* barrier);
};

/// Loads an accumulator from tensor memory.
struct SM100_TMEM_LOAD
{
  __device__ static void copy(uint32_t address);
};

}  // namespace demo
"""
)

GUIDE = """# Tiles

How a large matrix is cut into tiles for the thread blocks.

## Swizzling

Neighbouring tiles are taken by neighbouring thread blocks so that they share operands in the L2 cache.

## Predication

What to do when the tile does not divide the matrix: compare the coordinate with the bound before every access.
"""


def write_corpus(root: Path) -> Path:
    (root / "include").mkdir(parents=True)
    (root / "include" / "mma_sm90.hpp").write_text(atoms())
    (root / "include" / "copy.hpp").write_text(COPIES)
    (root / "guide.md").write_text(GUIDE)
    (root / "LICENSE").write_text("Permission is hereby granted, free of charge, to any person obtaining a copy")
    return root


def no_packages() -> list[Source]:
    return []


def build_small(folder: Path, *add: Path, embedder: Embedder | None = None, **more: object) -> BuildReport:
    return build(folder, embedder or HashingEmbedder(), add=add, packages=no_packages, **more)  # type: ignore[arg-type]
