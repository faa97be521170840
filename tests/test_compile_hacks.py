"""Reward hacks that never get past compile: one file each in hacks/rejected_by_compile, compiled with the real nvcc."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.nvcc import real_toolchain, small_variant
from tools.compiling import CompileCache, Limits, compile_variant
from tools.records import CompileResult, Reason, Status

FILES = sorted((Path(__file__).parent / "hacks" / "rejected_by_compile").glob("*.cu"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> CompileCache:
    return CompileCache(tmp_path_factory.mktemp("cubins"))


def compile_file(path: Path, cache: CompileCache, limits: Limits | None = None) -> CompileResult:
    variant = small_variant(path.read_text())
    return compile_variant(variant, toolchain=real_toolchain(), cache=cache, limits=limits or Limits())


def expectations(path: Path) -> list[str]:
    match = re.match(r"// expect: (.+)\n", path.read_text())
    assert match, f"{path.name} does not say what it expects"
    return match.group(1).split(", ")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_each_hack_is_rejected_with_its_reason(path: Path, cache: CompileCache) -> None:
    result = compile_file(path, cache)
    expected = expectations(path)
    if expected == ["ok"]:
        assert result.ok, result.detail
        assert cache.cubin(result) is not None
        return
    assert result.status is Status.FAILED
    assert result.reason in [Reason(e) for e in expected], result.detail
    assert len(result.detail) > 20
    assert "\n" not in result.detail
    assert cache.cubin(result) is None


def test_the_sentence_names_what_is_wrong(cache: CompileCache) -> None:
    wanted = {
        "device_array_cache": "'cache'",
        "device_malloc": "malloc",
        "fp16_accumulate_mma": "HMMA.16816.F16",
        "fp16_accumulate_wgmma": "HGMMA.64x8x16.F16",
        "multiplies_in_bf16_mma": "HMMA.16816.F32.BF16",
        "multiplies_in_bf16_wgmma": "HGMMA.64x8x16.F32.BF16",
        "multiplies_in_fp8_wgmma": "QGMMA.64x8x32.F32",
        "multiplies_int8_mma": "IMMA",
        "asm_global_state": "hidden_counter",
        "include_library": "cublas_v2.h",
        "host_second_stream": "cudaStreamCreate|<<<",
    }
    for path in FILES:
        if path.stem in wanted:
            assert re.search(wanted[path.stem], compile_file(path, cache).detail), path.stem


@pytest.mark.parametrize("stem", ["fp16_accumulate_mma", "fp16_accumulate_wgmma"])
def test_fp16_accumulation_is_allowed_when_the_task_asks_for_it(stem: str, cache: CompileCache) -> None:
    path = next(p for p in FILES if p.stem == stem)
    result = compile_file(path, cache, Limits(allow_fp16_accumulate=True))
    assert result.ok, result.detail
    assert any(".F16" in name for name in result.mma)
