"""What the compile tests share: the real nvcc (or the reason to skip), one cache a session, small variants."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tools.records import ArgSpec, KernelLaunch, LaunchSpec, Variant
from tools.toolchain import Toolchain, find_toolchain, how_to_install

#: (A, B, C, M, N, K), as every hack takes them.
GEMM_ARGS: tuple[object, ...] = ("A", "B", "C", {"i32": "M"}, {"i32": "N"}, {"i32": "K"})


def real_toolchain() -> Toolchain:
    toolchain = find_toolchain()
    if toolchain.nvcc is None:
        pytest.skip(how_to_install("nvcc"))
    return toolchain


def small_variant(
    source: str, *, entry: str = "kernel", args: Sequence[object] = GEMM_ARGS, flags: tuple[str, ...] = ()
) -> Variant:
    launch = KernelLaunch(
        entry=entry, grid=(1, 1, 1), block=(32, 1, 1), args=tuple(ArgSpec.model_validate(a) for a in args)
    )
    return Variant(source=source, launch=LaunchSpec(launches=(launch,)), flags=flags)
