"""Reading cubins: ELF, parameters, module state, tensor-core instructions against nvdisasm, ptxas's report."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.nvcc import real_toolchain
from tools.compiling import BASE_FLAGS
from tools.cubin import (
    CubinError,
    disqualifying,
    fp16_accumulators,
    other_inputs,
    ptxas_usage,
    ptxas_warnings,
    read_cubin,
    without_paths,
)
from tools.proc import run
from tools.toolchain import how_to_install


def nvcc(source: str, folder: Path, *flags: str) -> tuple[bytes, str]:
    """The cubin and what the compiler printed."""
    tool = real_toolchain().nvcc
    assert tool is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.cu").write_text(source)
    done = run([str(tool.path), *BASE_FLAGS, *flags, "kernel.cu", "-o", "kernel.cubin"], deadline_s=120, cwd=folder)
    assert done.returncode == 0, done.text
    return (folder / "kernel.cubin").read_bytes(), done.text


def mma_kernel(
    name: str, shape: str, types: str, d: int, a: int, b: int, half: bool = False, sparse: bool = False
) -> str:
    """One mma.sync with ``d``, ``a``, ``b`` registers an operand."""
    kind, letter = ("unsigned", "r") if half else ("float", "f")
    operand = itertools.count(d)
    registers = ["{" + ",".join(f"%{next(operand)}" for _ in range(n)) + "}" for n in (a, b)]
    accumulator = "{" + ",".join(f"%{i}" for i in range(d)) + "}"
    inputs = ",".join(f'"r"(p[{100 + i}])' for i in range(a + b + sparse))
    selector = f", %{d + a + b}, 0x0" if sparse else ""
    return (
        f'extern "C" __global__ void {name}(unsigned* p) {{ {kind} c[{d}]; '
        f"for (int i = 0; i < {d}; i++) c[i] = (({kind}*)p)[i];\n"
        f'asm volatile("mma{".sp::ordered_metadata" if sparse else ""}.sync.aligned.{shape}.row.col.{types} '
        f'{accumulator},{registers[0]},{registers[1]},{accumulator}{selector};" : '
        + ",".join(f'"+{letter}"(c[{i}])' for i in range(d))
        + f" : {inputs});\nfor (int i = 0; i < {d}; i++) (({kind}*)p)[i] = c[i]; }}\n"
    )


def wgmma_kernel(name: str, n: int, k: int, d_type: str, in_type: str, registers: bool, transpose: bool = False) -> str:
    """One wgmma; A from registers or from shared memory."""
    half = d_type == "f16"
    count = n // 4 if half else n // 2
    kind, letter = ("unsigned", "r") if half else ("float", "f")
    accumulator = "{" + ",".join(f"%{i}" for i in range(count)) + "}"
    if registers:
        a = "{" + ",".join(f"%{count + i}" for i in range(4)) + "}"
        inputs, b = ",".join(f'"r"(p[{900 + i}])' for i in range(4)) + ',"l"(y)', f"%{count + 4}"
    else:
        a, inputs, b = f"%{count}", '"l"(x),"l"(y)', f"%{count + 1}"
    major = f", {'' if registers else '0, '}{int(transpose)}" if in_type in ("f16", "bf16") else ""
    return (
        f'extern "C" __global__ void {name}(unsigned* p, unsigned long long x, unsigned long long y) {{ '
        f'{kind} c[{count}]; _Pragma("unroll") for (int i = 0; i < {count}; i++) c[i] = (({kind}*)p)[i];\n'
        f'asm volatile("wgmma.fence.sync.aligned;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d_type}.{in_type}.{in_type} "
        f"{accumulator}, {a}, {b}, 1, 1, 1{major};"
        '\\nwgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;" : '
        + ",".join(f'"+{letter}"(c[{i}])' for i in range(count))
        + f' : {inputs});\n_Pragma("unroll") for (int i = 0; i < {count}; i++) (({kind}*)p)[i] = c[i]; }}\n'
    )


FORMS = [
    mma_kernel("m0", "m16n8k16", "f32.f16.f16.f32", 4, 4, 2),
    mma_kernel("m1", "m16n8k16", "f16.f16.f16.f16", 2, 4, 2, half=True),
    mma_kernel("m2", "m16n8k8", "f32.f16.f16.f32", 4, 2, 1),
    mma_kernel("m3", "m16n8k8", "f16.f16.f16.f16", 2, 2, 1, half=True),
    mma_kernel("m4", "m16n8k16", "f32.bf16.bf16.f32", 4, 4, 2),
    mma_kernel("m5", "m16n8k8", "f32.tf32.tf32.f32", 4, 4, 2),
    mma_kernel("m6", "m16n8k4", "f32.tf32.tf32.f32", 4, 2, 1),
    mma_kernel("m7", "m16n8k32", "f16.f16.f16.f16", 2, 4, 4, half=True, sparse=True),
    mma_kernel("m8", "m16n8k16", "f32.f16.f16.f32", 4, 2, 2, sparse=True),
    mma_kernel("m9", "m16n8k32", "f16.e4m3.e4m3.f16", 2, 4, 2, half=True),
    mma_kernel("m10", "m16n8k32", "s32.s8.s8.s32", 4, 4, 2, half=True),
    *(
        wgmma_kernel(f"g{i}", n, 16, d, t, registers, transpose)
        for i, (n, (d, t), registers, transpose) in enumerate(
            itertools.product(
                (8, 64, 256), (("f32", "f16"), ("f16", "f16"), ("f32", "bf16")), (False, True), (False, True)
            )
        )
    ),
    wgmma_kernel("q0", 32, 32, "f32", "e4m3", False),
    wgmma_kernel("q1", 32, 32, "f16", "e5m2", True),
    wgmma_kernel("t0", 16, 8, "f32", "tf32", False),
]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    folder = tmp_path_factory.mktemp("forms")
    cubin, _ = nvcc("".join(FORMS), folder, "-O1")
    return cubin, folder / "kernel.cubin"


def test_decoding_agrees_with_the_disassembler(forms: tuple[bytes, Path]) -> None:
    nvdisasm = real_toolchain().nvdisasm
    if nvdisasm is None:
        pytest.skip(how_to_install("nvdisasm"))
    cubin, path = forms
    sass = run([str(nvdisasm.path), "-c", str(path)], deadline_s=60).stdout.decode()
    printed: Counter[str] = Counter()
    for match in re.finditer(r"\*/\s+(?:@!?U?P\d+\s+)?((?:H|Q|I|D|B)G?MMA[\w.]*)", sass):
        name = re.sub(r"\.E[45]M[23]", "", match.group(1))
        printed[name if name[0] in "HQ" else name.split(".")[0]] += 1
    assert len(printed) > 20
    assert len(read_cubin(cubin).entries) == len(FORMS)
    assert read_cubin(cubin).mma == dict(printed)


def test_fp16_accumulators_are_told_apart(forms: tuple[bytes, Path]) -> None:
    mma = read_cubin(forms[0]).mma
    half = fp16_accumulators(mma)
    assert {"HMMA.16816.F16", "HMMA.1688.F16", "HMMA.SP.16832.F16", "HGMMA.64x256x16.F16"} < set(half)
    assert "QGMMA.64x32x32.F16" in half
    assert not {"HMMA.16816.F32", "HGMMA.64x256x16.F32", "HMMA.16816.F32.BF16", "IMMA"} & set(half)


def test_other_inputs_than_fp16_are_told_apart(forms: tuple[bytes, Path]) -> None:
    mma = read_cubin(forms[0]).mma
    other = set(other_inputs(mma))
    assert {"HMMA.16816.F32.BF16", "HMMA.1688.F32.TF32", "HGMMA.64x256x16.F32.BF16", "IMMA"} < other
    assert {"QGMMA.64x32x32.F32", "QGMMA.64x32x32.F16", "HGMMA.64x16x8.F32.TF32"} < other
    assert set(mma) - other == {name for name in mma if name.endswith((".F32", ".F16")) and name[0] == "H"}
    assert other_inputs({"DMMA": 1, "BMMA": 1, "BGMMA": 1, "IGMMA": 1}) == ("BMMA", "BGMMA", "IGMMA")
    assert other_inputs({"HMMA.16816.F32.?": 1}) == ("HMMA.16816.F32.?",)


STATE = """
#include <cuda_fp16.h>
__device__ int zeroed[16];
__device__ int set = 5;
__constant__ float table[4] = {1, 2, 3, 4};
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void k(int* o, int i, long long j, const __grid_constant__ Map map, short s, double z) {
  __shared__ int shared[32];
  shared[threadIdx.x] = i;
  __syncthreads();
  zeroed[i]++;
  o[0] = zeroed[i] + set + table[i] + shared[j & 31] + map.bytes[i] + s + z;
  printf("%d", i);
}
extern "C" __global__ void other(int* o) { o[1] = 2; }
"""


def test_state_symbols_parameters(tmp_path: Path) -> None:
    cubin, log = nvcc(STATE, tmp_path)
    facts = read_cubin(cubin)
    assert facts.entries == {"k": (8, 4, 8, 128, 2, 8), "other": (8,)}
    assert {"zeroed", "set"} <= set(facts.mutable_globals)
    assert "table" not in facts.mutable_globals
    assert facts.unresolved == ("vprintf",)
    assert not facts.constant_address_taken
    assert facts.mma == {}
    usage = ptxas_usage(log)
    assert usage["k"].smem_static_bytes == 128
    assert (usage["k"].registers or 0) > 8
    assert usage["other"].smem_static_bytes == 0


LIBRARY_OBJECTS = """
#include <cuda/std/tuple>
#include <cuda/std/iterator>
struct Wide { float values[16]; };
__constant__ float table[16];
__device__ int never_used;
extern "C" __global__ void k(float* o, const __grid_constant__ Wide wide) {
  auto t = cuda::std::make_tuple(1, 2.0f);
  o[threadIdx.x] = cuda::std::get<1>(t) + wide.values[threadIdx.x] + table[threadIdx.x];
}
"""


def test_what_the_code_cannot_reach_does_not_count(tmp_path: Path) -> None:
    """libcu++ leaves its function objects in module memory; parameters and constants may be indexed."""
    cubin, _ = nvcc(LIBRARY_OBJECTS, tmp_path)
    assert b"never_used" in cubin or b"__cpo" in cubin
    facts = read_cubin(cubin)
    assert facts.mutable_globals == ()
    assert not facts.constant_address_taken


INTERNAL = """
namespace { __device__ __noinline__ int f(int x) { asm volatile("nanosleep.u32 1;"); return x * 3; } }
static __device__ __noinline__ int g(int x) { asm volatile("nanosleep.u32 2;"); return x * 5; }
extern "C" __global__ void k(int* o) { o[0] = f(o[1]) + g(o[2]); }
"""


def test_the_same_source_gives_the_same_bytes_anywhere(tmp_path: Path) -> None:
    one, _ = nvcc(INTERNAL, tmp_path / "one")
    two, _ = nvcc(INTERNAL, tmp_path / "two")
    assert one != two, "nvcc no longer puts a hash of the path into names: without_paths has become pointless"
    assert without_paths(one) == without_paths(two)
    assert read_cubin(without_paths(one)).entries == {"k": (8,)}


@pytest.mark.parametrize("keep", [0, 5, 64, 500, 5000])
def test_bytes_that_are_no_cubin(keep: int, forms: tuple[bytes, Path]) -> None:
    with pytest.raises(CubinError):
        read_cubin(forms[0][:keep])
    with pytest.raises(CubinError):
        read_cubin(b"not an ELF file" * 20)


LOG = """\
kernel.cu(4): warning #177-D: variable "x" was declared but never referenced
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in the function 'k'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    672 bytes stack frame, 1300 bytes spill stores, 1648 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 672 bytes cumulative stack size, 2048 bytes smem
ptxas info    : Function properties for _Z1fi
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Compiling entry function 'l' for 'sm_90a'
ptxas info    : Function properties for l
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""


def test_ptxas_report() -> None:
    usage = ptxas_usage(LOG)
    assert (usage["k"].registers, usage["k"].smem_static_bytes, usage["k"].spill_bytes) == (32, 2048, 2948)
    assert (usage["l"].registers, usage["l"].spill_bytes) == (255, 0)
    assert (usage["_Z1fi"].registers, usage["_Z1fi"].spill_bytes) == (None, 12)
    warnings = ptxas_warnings(LOG)
    assert len(warnings) == 2
    assert "C7510" in (disqualifying(warnings) or "")
    assert disqualifying(warnings[:1]) is None
    assert disqualifying(("ptxas info : (C7517) warpgroup.wait is injected",)) is None
