"""Variant → CompileResult with the real nvcc: failures by name, limits, the cache, several at once."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.nvcc import GEMM_ARGS, real_toolchain, small_variant
from tools.build_cache import Build, CompileCache, FunctionUse, source_id
from tools.compiling import (
    BASE_FLAGS,
    Limits,
    classify_failure,
    compile_many,
    compile_variant,
    judge,
    nvcc_command,
    trim_log,
)
from tools.device import DeviceBroken
from tools.families import load_families, plans, render
from tools.proc import Completed, run
from tools.records import CompileResult, LaunchSpec, Reason, Status, Variant, content_hash
from tools.toolchain import Tool, Toolchain, find_toolchain

OK_SOURCE = (
    'extern "C" __global__ void kernel(const float* A, const float* B, float* C, int M, int N, int K)'
    "{ C[threadIdx.x] = A[threadIdx.x] + B[threadIdx.x] + M + N + K; }\n"
)


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "cubins")


def compiled(
    variant: Variant, cache: CompileCache, limits: Limits | None = None, toolchain: Toolchain | None = None
) -> CompileResult:
    return compile_variant(variant, toolchain=toolchain or real_toolchain(), cache=cache, limits=limits or Limits())


def fake_nvcc(folder: Path, body: str, version: str = "V13.0.88") -> Toolchain:
    """A toolchain whose nvcc is a shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvcc"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release 13.0, {version}" && exit 0\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return Toolchain(nvcc=Tool("nvcc", path), environment={"PATH": os.environ["PATH"]})


# --- what comes out --------------------------------------------------------------------------------------------------


def test_a_good_variant(cache: CompileCache) -> None:
    variant = small_variant(OK_SOURCE)
    result = compiled(variant, cache)
    assert result.ok, result.detail
    assert result.variant_id == variant.variant_id
    assert result.compiler == real_toolchain().compiler
    assert result.build_id == content_hash([variant.variant_id, result.compiler])
    assert result.registers is not None and 4 < result.registers < 64
    assert (result.spill_bytes, result.smem_static_bytes, result.mma, result.warnings) == (0, 0, {}, ())
    cubin = cache.cubin(result)
    assert cubin is not None and cubin.startswith(b"\x7fELF")
    assert CompileResult.from_json(result.to_json()) == result


@pytest.mark.parametrize("family", sorted(load_families()))
def test_each_family_compiles_without_spills(family: str, cache: CompileCache) -> None:
    found = load_families()[family]
    result = compiled(render(found, next(plans(found))), cache)
    assert result.ok, result.detail
    assert any(name.endswith(".F32") for name in result.mma)


def test_compile_error_is_one_sentence_with_a_log(cache: CompileCache) -> None:
    result = compiled(small_variant("#define X 1\n" + OK_SOURCE.replace("threadIdx.x]", "nowhere]")), cache)
    assert (result.status, result.reason) == (Status.FAILED, Reason.COMPILE_ERROR)
    assert result.detail == 'kernel.cu(2): error: identifier "nowhere" is undefined'
    assert "tmp" not in result.log
    assert "nowhere" in result.log


def test_ptx_error_has_no_temporary_names(cache: CompileCache) -> None:
    source = OK_SOURCE.replace("{ C[", '{ asm volatile("foo.bar;"); C[')
    result = compiled(small_variant(source), cache)
    assert result.reason is Reason.COMPILE_ERROR
    assert result.detail.startswith("ptxas kernel.ptx, line ")
    assert "tmpxft" not in result.log


@pytest.mark.parametrize(
    ("source", "entry", "words"),
    [
        (OK_SOURCE, "gemm", "'gemm'"),
        (OK_SOURCE.replace('extern "C" ', ""), "kernel", 'extern "C"'),
        ("__device__ int f() { return 1; }\n", "kernel", "no __global__ function"),
    ],
)
def test_missing_entry(source: str, entry: str, words: str, cache: CompileCache) -> None:
    result = compiled(small_variant(source, entry=entry), cache)
    assert result.reason is Reason.MISSING_ENTRY
    assert words in result.detail


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (GEMM_ARGS[:5], "takes 6 parameters; the launch spec gives 5"),
        (({"i64": "M"}, *GEMM_ARGS[1:5], {"i64": "K"}), "parameter 5 of the kernel kernel has 4 bytes"),
        (
            (
                {"tensor_map": {"tensor": "A", "dims": ["K", "M"], "box": [64, 64]}},
                *GEMM_ARGS[1:],
            ),
            "gives 128",
        ),
    ],
)
def test_arguments_must_fit_the_kernel(args: tuple[object, ...], words: str, cache: CompileCache) -> None:
    result = compiled(small_variant(OK_SOURCE, args=args), cache)
    assert result.reason is Reason.BAD_LAUNCH_SPEC
    assert words in result.detail


SPILLING = """
extern "C" __global__ void kernel(const float* A, const float* B, float* C, int M, int N, int K) {
  float r[64];
#pragma unroll
  for (int i = 0; i < 64; i++) r[i] = A[i * 32 + threadIdx.x];
  for (int j = 0; j < K; j++)
#pragma unroll
    for (int i = 0; i < 64; i++) r[i] = r[i] * r[(i * 7 + 1) & 63] + 1.0f;
#pragma unroll
  for (int i = 0; i < 64; i++) C[i * 32 + threadIdx.x] = r[i];
}
"""


def test_spills_over_the_limit(cache: CompileCache) -> None:
    variant = small_variant(SPILLING, flags=("-maxrregcount=32",))
    result = compiled(variant, cache)
    assert result.reason is Reason.REGISTER_SPILL
    assert result.spill_bytes is not None and result.spill_bytes > 100
    assert str(result.spill_bytes) in result.detail
    assert compiled(variant, cache, Limits(max_spill_bytes=1 << 20)).ok
    assert compiled(small_variant(SPILLING), cache).ok


SETMAXNREG = OK_SOURCE.replace("{ C[", '{ asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); C[')
SERIALISED = """
extern "C" __global__ void kernel(float* A, const void* B, void* C, int M, int N, int K) {
  float c[4] = {A[0], A[1], A[2], A[3]};
#define MMA asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;" \\
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(B), "l"(C))
  MMA;
  c[0] += 1.0f;
  c[1] *= c[0];
  MMA;
  asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; i++) A[i] = c[i];
}
"""


@pytest.mark.parametrize(("source", "code"), [(SETMAXNREG, "C7508"), (SERIALISED, "C751")])
def test_ptxas_warnings_that_disqualify(source: str, code: str, cache: CompileCache) -> None:
    result = compiled(small_variant(source), cache)
    assert result.reason is Reason.PTXAS_WARNING
    assert code in result.detail
    assert any(code in warning for warning in result.warnings)


def test_too_much_static_shared_memory(cache: CompileCache) -> None:
    source = OK_SOURCE.replace(
        "{ C[", "{ __shared__ float s[75000]; s[threadIdx.x] = A[0]; __syncthreads(); C[0] = s[M]; C["
    )
    result = compiled(small_variant(source), cache)
    assert result.reason is Reason.TOO_MUCH_SHARED_MEMORY


def test_endless_templates_end(cache: CompileCache) -> None:
    source = "template <int N> struct G { using t = typename G<N + 1>::t; };\n" + OK_SOURCE + "G<0>::t x;\n"
    result = compiled(small_variant(source), cache)
    assert result.reason is Reason.COMPILE_ERROR
    assert "recursion" in result.detail


#: 2^24 instantiations: minutes and gigabytes.
EXPLODING = (
    "template <int A, int B> struct H { static constexpr int v = H<A - 1, B>::v + H<A - 1, B + (1 << A)>::v; };\n"
    "template <int B> struct H<0, B> { static constexpr int v = B; };\n"
    + OK_SOURCE.replace("+ K;", "+ K + H<24, 0>::v;")
)


def test_deadline(cache: CompileCache) -> None:
    started = time.monotonic()
    result = compiled(small_variant(EXPLODING), cache, Limits(deadline_s=1.0))
    assert result.reason is Reason.COMPILE_TIMEOUT
    assert "1 s" in result.detail
    assert time.monotonic() - started < 30


def test_memory_limit(cache: CompileCache) -> None:
    result = compiled(small_variant(EXPLODING), cache, Limits(deadline_s=60, memory_bytes=300 << 20))
    assert result.reason is Reason.COMPILE_MEMORY
    assert "0.293 GiB" in result.detail


def test_timeouts_are_tried_again(cache: CompileCache) -> None:
    variant = small_variant(OK_SOURCE)
    assert compiled(variant, cache, Limits(deadline_s=0.01)).reason is Reason.COMPILE_TIMEOUT
    assert compiled(variant, cache).ok


@pytest.mark.parametrize(
    "flag", ["-I/etc", "--run", "-o/tmp/x", "-ccbin=sh", "@file", "-Xcompiler=-fplugin=x", "-DX=`id`", ""]
)
def test_flags_off_the_list(flag: str, cache: CompileCache) -> None:
    result = compiled(small_variant(OK_SOURCE, flags=(flag,)), cache)
    assert result.reason is Reason.COMPILE_ERROR
    assert "not allowed" in result.detail


def test_allowed_flags_reach_nvcc(cache: CompileCache) -> None:
    variant = small_variant(
        OK_SOURCE.replace("+ K;", "+ K + TWO; static_assert(__cplusplus > 201703L);"),
        flags=("-DTWO=2", "-std=c++20", "-use_fast_math", "-maxrregcount=64", "-Xptxas=-O2"),
    )
    assert compiled(variant, cache).ok


# --- toolchains that are not there, or are broken -----------------------------------------------------------------


def test_no_nvcc(cache: CompileCache) -> None:
    result = compiled(small_variant(OK_SOURCE), cache, toolchain=Toolchain())
    assert result.status is Status.UNAVAILABLE
    assert "pip install" in result.detail
    assert not cache.root.exists()
    # The candidate's own fault comes first: it would fail on any machine.
    assert compiled(small_variant("#include <vector>\n"), cache, toolchain=Toolchain()).status is Status.FAILED


def test_no_cutlass(cache: CompileCache) -> None:
    toolchain = replace(real_toolchain(), cutlass=None)
    result = compiled(small_variant("#include <cute/tensor.hpp>\n" + OK_SOURCE), cache, toolchain=toolchain)
    assert result.status is Status.UNAVAILABLE
    assert "nvidia-cutlass" in result.detail


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo \"nvcc fatal   : Unsupported gpu architecture 'compute_90a'\" >&2; exit 1", "sm_90a"),
        ("echo 'nvcc fatal   : Failed to preprocess host compiler properties.' >&2; exit 1", "g++"),
        ("echo 'sh: 1: g++: not found' >&2; exit 1", "g++"),
    ],
)
def test_an_nvcc_that_cannot_work_is_not_the_candidates_fault(
    body: str, words: str, tmp_path: Path, cache: CompileCache
) -> None:
    result = compiled(small_variant(OK_SOURCE), cache, toolchain=fake_nvcc(tmp_path, body))
    assert result.status is Status.UNAVAILABLE
    assert words in result.detail
    assert not list(tmp_path.glob("cubins/*"))  # with g++ installed, the next try works


@pytest.mark.parametrize(
    ("done", "reason"),
    [
        (Completed(1, b"", b"x.cu(1): error: bad\n", False, 1.0), Reason.COMPILE_ERROR),
        (Completed(-9, b"", b"", True, 1.0), Reason.COMPILE_TIMEOUT),
        (Completed(1, b"", b"terminate called after throwing 'std::bad_alloc'", False, 1.0), Reason.COMPILE_MEMORY),
        (Completed(1, b"", b"nvcc error   : 'cicc' died due to signal 11 (Invalid)", False, 1.0), Reason.COMPILE_ERROR),
        (Completed(1, b"", b"x.cu(1): error #20012-D: bad\nlast line\n", False, 1.0), Reason.COMPILE_ERROR),
        (
            Completed(255, b"", b"ptxas fatal   : Unresolved extern function '_Z1f'", False, 1.0),
            Reason.UNRESOLVED_SYMBOL,
        ),
    ],
)
def test_failures_are_classified(done: Completed, reason: Reason) -> None:
    found, detail = classify_failure(done, done.text, Limits())
    assert found is reason
    assert detail and "without an error in the source" not in detail


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("exit 3", "it ended with code 3, nothing was said"),
        ("exit 0", "it ended with code 0, nothing was said"),
        ("exec /nonexistent/nvcc.real", "/nonexistent/nvcc.real"),
        ("echo 'kernel.cu(1): warning: odd'; echo 'no licence' >&2; exit 1", "it ended with code 1, no licence"),
        ("kill -9 $$", "it was killed, most likely because this machine ran out of memory"),
        ("(exit 137); exit $?", "it was killed"),
        ("echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\" >&2; exit 9", "it was killed"),
        ("echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1", "it was killed"),
    ],
)
def test_a_failure_that_is_not_the_sources(body: str, words: str, tmp_path: Path, cache: CompileCache) -> None:
    variant = small_variant(OK_SOURCE)
    result = compiled(variant, cache, toolchain=fake_nvcc(tmp_path, body))
    assert result.status is Status.UNAVAILABLE
    assert words in result.detail and "`agent doctor`" in result.detail and "\n" not in result.detail
    # Nothing is kept: the next try with the same compiler says something else.
    again = compiled(variant, cache, toolchain=fake_nvcc(tmp_path, "echo 'kernel.cu(1): error: no' >&2; exit 1"))
    assert again.reason is Reason.COMPILE_ERROR and "error: no" in again.detail


@pytest.mark.parametrize(
    "said",
    [
        "died due to signal 9",
        "g++: fatal error: Killed signal terminated program cc1plus",
        "No space left on device",
        "Disk quota exceeded",
        "out of memory",
        "nvcc fatal   : Unsupported gpu architecture",
        "g++: No such file or directory",
        "gcc: Failed to preprocess host compiler properties.",
        "nvcc failed without an error in the source",
    ],
)
@pytest.mark.parametrize(
    "how",
    [
        "#error {said}",
        'static_assert(false, "no\\n{said}");',
        '[[deprecated("a\\n{said}")]] __device__ void f() {{}}\n__global__ void k() {{ f(); asm volatile("no;"); }}',
    ],
)
def test_a_source_cannot_speak_for_the_machine(how: str, said: str, cache: CompileCache) -> None:
    """Otherwise one turn of a model could end a session, or get away without a verdict."""
    source = f"{OK_SOURCE}\n{how.format(said=said)}\n"
    result = compiled(small_variant(source), cache, toolchain=real_toolchain())
    assert (result.status, result.reason) == (Status.FAILED, Reason.COMPILE_ERROR), result.detail


def test_a_source_without_a_kernel(cache: CompileCache) -> None:
    """Also where there is no compiler."""
    for toolchain in (Toolchain(), fake_nvcc(cache.root, "exit 3")):
        result = compiled(small_variant("int f() { return 1; }"), cache, toolchain=toolchain)
        assert (result.status, result.reason) == (Status.FAILED, Reason.MISSING_ENTRY)
        assert "no __global__ function" in result.detail


def test_an_odd_nvcc_is_machinery(tmp_path: Path, cache: CompileCache) -> None:
    """Success without a readable cubin is not a property of the candidate."""
    toolchain = fake_nvcc(tmp_path, "echo nonsense > kernel.cubin")
    with pytest.raises(DeviceBroken, match="not a readable cubin"):
        compiled(small_variant(OK_SOURCE), cache, toolchain=toolchain)


def test_full_disk_while_compiling(tmp_path: Path, cache: CompileCache) -> None:
    toolchain = fake_nvcc(tmp_path, "echo 'fatal error: error writing to x: No space left on device' >&2; exit 1")
    with pytest.raises(DeviceBroken, match="disk is full"):
        compiled(small_variant(OK_SOURCE), cache, toolchain=toolchain)


@pytest.mark.parametrize("blocks", [1, 40], ids=["nvcc itself", "gcc"])
def test_a_limit_on_the_size_of_files_while_compiling(blocks: int, tmp_path: Path, cache: CompileCache) -> None:
    """With the real nvcc, whose front end is gcc."""
    real = real_toolchain().nvcc
    assert real is not None
    toolchain = fake_nvcc(tmp_path, f'ulimit -f {blocks}; exec {real.path} "$@"')
    with pytest.raises(DeviceBroken, match=r"ulimit -f\) is too low"):
        compiled(small_variant(OK_SOURCE), cache, toolchain=toolchain)


def test_the_environment_cannot_change_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_toolchain()
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DK=7")
    monkeypatch.setenv("CPATH", "/nonexistent")
    assert compiled(small_variant(OK_SOURCE), CompileCache(tmp_path / "c"), toolchain=find_toolchain()).ok


def test_logs_are_trimmed() -> None:
    text = "first\n" + "x" * 100_000 + "\nlast"
    trimmed = trim_log(text)
    assert trimmed.startswith("first") and trimmed.endswith("last")
    assert len(trimmed) < 9000


# --- cache -----------------------------------------------------------------------------------------------------------


def count_compiles(folder: Path) -> tuple[Toolchain, Path]:
    """The real nvcc behind a script that notes each call."""
    real = real_toolchain().nvcc
    assert real is not None
    calls = folder / "calls"
    folder.mkdir(parents=True, exist_ok=True)
    calls.touch()
    return fake_nvcc(folder, f'echo x >> {calls}\nexec {real.path} "$@"'), calls


def calls_of(path: Path) -> int:
    return len(path.read_text().split())


def test_the_second_time_is_from_the_cache(tmp_path: Path, cache: CompileCache) -> None:
    toolchain, calls = count_compiles(tmp_path)
    good, bad = small_variant(OK_SOURCE), small_variant(OK_SOURCE.replace("+ K", "+ nowhere"))
    first = [compiled(v, cache, toolchain=toolchain) for v in (good, bad)]
    assert calls_of(calls) == 2
    again = [compiled(v, CompileCache(cache.root), toolchain=toolchain) for v in (good, bad)]
    assert calls_of(calls) == 2
    for one, two in zip(first, again, strict=True):
        assert one.model_copy(update={"elapsed_s": 0.0}) == two.model_copy(update={"elapsed_s": 0.0})
    assert cache.cubin(again[0]) == cache.cubin(first[0])
    # Another compiler is another build.
    other = fake_nvcc(
        tmp_path / "other", f"echo x >> {calls}\necho 'kernel.cu(1): error: no' >&2\nexit 1", version="V13.1.0"
    )
    assert compiled(good, cache, toolchain=other).reason is Reason.COMPILE_ERROR
    assert calls_of(calls) == 3


def test_variants_that_differ_only_in_their_launch_share_a_build(tmp_path: Path, cache: CompileCache) -> None:
    toolchain, calls = count_compiles(tmp_path)
    base = small_variant(OK_SOURCE)
    variants = [
        base.model_copy(update={"launch": base.launch.model_copy(update={"constants": {"SPLIT": n}})})
        for n in (1, 2, 3)
    ]
    assert len({v.variant_id for v in variants}) == 3
    results = [r for _, r in compile_many(variants, 2, toolchain=toolchain, cache=cache)]
    assert [r.variant_id for r in results] == [v.variant_id for v in variants]
    assert len({r.build_id for r in results}) == 3
    assert len({r.cubin_sha256 for r in results}) == 1
    assert calls_of(calls) == 1


@pytest.mark.parametrize(
    "damage", ["truncate json", "garbage json", "newer json", "truncate cubin", "flip cubin", "lose cubin"]
)
def test_a_damaged_entry_is_built_again(damage: str, tmp_path: Path, cache: CompileCache) -> None:
    toolchain, calls = count_compiles(tmp_path)
    variant = small_variant(OK_SOURCE)
    first = compiled(variant, cache, toolchain=toolchain)
    (record,) = cache.root.glob("*.json")
    (cubin,) = cache.root.glob("*.cubin")
    what, which = damage.split()
    path = record if which == "json" else cubin
    data = path.read_bytes()
    match what:
        case "truncate":
            path.write_bytes(data[: len(data) // 2])
        case "garbage":
            path.write_bytes(b"\xff\x00 not json")
        case "newer":
            path.write_text(json.dumps({**json.loads(data), "a_field_of_the_future": 1}))
        case "flip":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "lose":
            path.unlink()
    if which == "cubin":
        assert cache.cubin(first) is None
    again = compiled(variant, cache, toolchain=toolchain)
    assert again.ok
    assert again.cubin_sha256 == first.cubin_sha256
    assert cache.cubin(again) is not None
    assert calls_of(calls) == 2
    assert not list(cache.root.glob(".tmp-*"))


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with pytest.raises(DeviceBroken, match=r"cannot write the compile cache in .*file/cubins"):
        compiled(small_variant(OK_SOURCE), CompileCache(blocker / "cubins"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is missing")
def test_a_full_disk_leaves_no_half_file(tmp_path: Path, cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = small_variant(OK_SOURCE)
    real_open = os.fdopen

    def full(handle: int, *args: object, **kwargs: object) -> object:
        os.close(handle)
        return real_open(os.open("/dev/full", os.O_WRONLY), "wb", buffering=0)

    with monkeypatch.context() as patch:
        patch.setattr("tools.build_cache.os.fdopen", full)
        with pytest.raises(DeviceBroken, match="the disk is full"):
            compiled(variant, cache)
    assert list(cache.root.iterdir()) == []
    assert compiled(variant, cache).ok


# --- several at once -------------------------------------------------------------------------------------------------


def test_compile_many_keeps_the_order(cache: CompileCache) -> None:
    slow = small_variant(OK_SOURCE.replace("+ K;", "+ K + 1;") + "#include <cuda_fp16.h>\n")
    variants = [slow, small_variant("int main() {}"), small_variant(OK_SOURCE), small_variant(OK_SOURCE, entry="no")]
    results = list(compile_many(variants, 2, toolchain=real_toolchain(), cache=cache))
    assert [v for v, _ in results] == variants
    assert [r.reason for _, r in results] == [None, Reason.HOST_CODE, None, Reason.MISSING_ENTRY]
    for variant, result in results:
        alone = compiled(variant, cache)
        assert alone.model_copy(update={"elapsed_s": 0.0}) == result.model_copy(update={"elapsed_s": 0.0})


def test_closing_the_iterator_stops_what_runs(tmp_path: Path, cache: CompileCache) -> None:
    toolchain = fake_nvcc(tmp_path, "grep -q quick kernel.cu && exit 1\nsleep 60")
    variants = [small_variant("// quick\n" + OK_SOURCE), *(small_variant(f"// {i}\n" + OK_SOURCE) for i in range(6))]
    started = time.monotonic()
    results = compile_many(variants, 2, toolchain=toolchain, cache=cache)
    assert next(results)[1].status is Status.UNAVAILABLE
    results.close()
    assert time.monotonic() - started < 30
    assert threading.active_count() < 10


PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.nvcc import small_variant
from tools.compiling import CompileCache, compile_variant
from tools.toolchain import find_toolchain
result = compile_variant(small_variant(sys.argv[3]), toolchain=find_toolchain(), cache=CompileCache(Path(sys.argv[2])))
print(result.ok, result.cubin_sha256)
"""


def test_two_processes_build_the_same_source(cache: CompileCache) -> None:
    real_toolchain()
    root = str(Path(__file__).resolve().parent.parent)
    done: list[Completed] = []

    def one() -> None:
        argv = [sys.executable, "-c", PROCESS, root, str(cache.root), OK_SOURCE]
        done.append(run(argv, deadline_s=120))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({d.stdout for d in done}) == 1, [d.text for d in done]
    assert done[0].stdout.startswith(b"True")
    assert sorted(p.suffix for p in cache.root.iterdir()) == [".cubin", ".json"]


# --- judgement, pure -------------------------------------------------------------------------------------------------


def test_judgement_takes_the_worst_of_the_launched_kernels() -> None:
    one = small_variant(OK_SOURCE, entry="a").launch.launches[0]
    two = small_variant(OK_SOURCE, entry="b").launch.launches[0]
    variant = Variant(source=OK_SOURCE, launch=LaunchSpec(launches=(one, two)))
    sizes = (8, 8, 8, 4, 4, 4)
    build = Build(
        compiler="nvcc 13.0.88",
        cubin_sha256="0" * 64,
        entries={
            "a": FunctionUse(registers=30, smem_static_bytes=64, params=sizes),
            "b": FunctionUse(registers=90, smem_static_bytes=8, spill_bytes=4, params=None),
            "unused": FunctionUse(registers=255, smem_static_bytes=1 << 15, spill_bytes=400),
        },
        functions={"_Z1fi": FunctionUse(spill_bytes=12)},
    )
    result = judge(variant, build, Limits(max_spill_bytes=16))
    assert result.ok
    assert (result.registers, result.smem_static_bytes, result.spill_bytes) == (90, 64, 16)
    assert judge(variant, build, Limits(max_spill_bytes=15)).reason is Reason.REGISTER_SPILL


def test_source_id_depends_on_source_flags_and_compiler() -> None:
    ids = {source_id(s, f, c) for s in ("a", "b") for f in ((), ("-DX=1",)) for c in ("nvcc 13.0.88", "nvcc 12.9.1")}
    assert len(ids) == 8


@pytest.mark.parametrize("what", ["tools.build_cache.ANALYSIS_VERSION", "tools.compiling.BASE_FLAGS"])
def test_a_build_is_made_again_when_flags_or_analysis_change(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain, cache, variant = real_toolchain(), CompileCache(tmp_path), small_variant(OK_SOURCE)
    before = compile_variant(variant, toolchain=toolchain, cache=cache)
    builds = set(tmp_path.glob("*.json"))
    assert compile_variant(variant, toolchain=toolchain, cache=cache).ok
    assert set(tmp_path.glob("*.json")) == builds
    monkeypatch.setattr(what, 99 if "ANALYSIS" in what else (*BASE_FLAGS, "-DTWICE"))
    after = compile_variant(variant, toolchain=toolchain, cache=cache)
    assert len(set(tmp_path.glob("*.json"))) == 2
    assert (after.build_id, after.cubin_sha256) == (before.build_id, before.cubin_sha256)


def test_the_command_names_no_folder_of_the_user() -> None:
    command = nvcc_command(small_variant(OK_SOURCE), real_toolchain())
    assert "-I" not in command
    assert command[-3:] == ["kernel.cu", "-o", "kernel.cubin"]
    assert "arch=compute_90a,code=sm_90a" in command
