"""Near-duplicates: what says the same is recognised, what does not is not, and nothing takes long."""

from __future__ import annotations

import time

import pytest
from fakes import raw_variant, toy_families
from hypothesis import given
from hypothesis import strategies as st

from memory.duplicates import Twins, launch_id, normalised
from tools.families import accepted_plans
from tools.hgemm import hgemm
from tools.records import CompileResult, LaunchSpec, Status, Variant

TASK = hgemm(512, 256, 128)
KERNEL = """#include <cuda_fp16.h>
#define BM 64
#define MAD(a, b) ((a) * (b))
extern "C" __global__ void gemm(const __half* A, int M) {
    int x = MAD(threadIdx.x, 0x10) + BM;  // offset
    asm volatile("mov.u32 %0,  1; // kept" : "=r"(x));
    if (x >= M) return; /* done */
}
"""
REFORMATTED = r"""// by hand
#include   <cuda_fp16.h>
#  define BM   (0x40)
#define MAD(a,b) ((a)*(b))
extern "C"
__global__ void gemm( const __half *A, \
                      int M )
{ int x=MAD(threadIdx.x,16)+BM;
  asm volatile("mov.u32 %0,  1; // kept":"=r"(x)); if(x>=M)return; }"""


def variant(source: str, **update: object) -> Variant:
    return raw_variant().model_copy(update={"source": source, **update})


def test_comments_space_and_constants_do_not_count() -> None:
    assert normalised(KERNEL) == normalised(REFORMATTED)
    twins = Twins(TASK, 132)
    twins.learn([variant(KERNEL)])
    assert twins.of(variant(REFORMATTED)) == variant(KERNEL).key
    assert twins.of(variant(KERNEL)) is None, "it is itself, no twin"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x10", "17"),
        ("BM 64", "BM 65"),
        ("x >= M", "x > M"),
        ("MAD(a, b)", "MAD (a, b)"),  # another macro altogether
        ("mov.u32 %0,  1", "mov.u32 %0, 1"),  # blanks inside a string are text
        ("// kept", ""),
        ("int x", "unsigned x"),
        ("0x10", "16u"),
        ("0x10", "16.0"),
        ("#define BM 64\n", "#define BM 64\n#define BN 64\n"),
        ("cuda_fp16.h", "cuda_bf16.h"),
        ("* (b)", "*-(b)"),
        ("x >= M", "x >= M++"),
    ],
)
def test_what_changes_the_code_counts(old: str, new: str) -> None:
    assert old in KERNEL
    assert normalised(KERNEL) != normalised(KERNEL.replace(old, new))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a+ +b", "a++b"),
        ("a- -1", "a--1"),
        ("int a", "inta"),
        ("'a'", "'b'"),
        ('R"(a b)"', 'R"(a  b)"'),
        ("0xFFFFFFFF", "4294967295"),
    ],
)
def test_tokens_are_not_joined(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def test_a_source_whose_layout_matters_is_left_alone() -> None:
    assert normalised("int a = __LINE__;") != normalised("\nint a = __LINE__;")


words = st.sampled_from(["int", "x", "==", "+", "(", ")", "64", "0x40", '"a // b"', "#", "define", "'c'", "A"])


@given(
    st.lists(words, max_size=20),
    st.lists(st.sampled_from([" ", "\t", "/* x */", " /* y\n */ "]), min_size=20, max_size=20),
)
def test_any_blanks_between_tokens_are_alike(tokens: list[str], gaps: list[str]) -> None:
    single = " " + " ".join(tokens)
    mixed = " " + "".join(token + gap for token, gap in zip(tokens, gaps, strict=False))
    assert normalised(single) == normalised(mixed)


@given(st.text(max_size=400))
def test_any_text_is_taken_and_normal_form_is_stable_under_comments(text: str) -> None:
    assert isinstance(normalised(text), str)
    assert normalised("// c\n" + "int a;") == normalised("int a;")


@pytest.mark.parametrize("piece", ["x", "/*", '"', 'R"(', '\\"', "'", "#", "1'", "9", "(", "\n#define A 1"])
def test_hostile_sources_take_linear_time(piece: str) -> None:
    started = time.process_time()
    normalised(piece * (300_000 // len(piece)))
    assert time.process_time() - started < 5


def test_the_launch_counts_by_what_it_comes_to() -> None:
    def spec(grid: object, **more: object) -> LaunchSpec:
        launch = {"entry": "gemm", "grid": grid, "block": [128, 1, 1], "args": ["A", {"i32": "M"}]}
        return LaunchSpec.model_validate({"launches": [launch], **more})

    base = variant(KERNEL, launch=spec(["ceil_div(M, 64)", 1, 1]))
    same = variant(REFORMATTED, launch=spec(["(M + T - 1) // T", 1, 1], constants={"T": 64}))
    other = variant(REFORMATTED, launch=spec(["ceil_div(M, 32)", 1, 1]))
    twins = Twins(TASK, 132)
    twins.learn([base])
    assert twins.of(same) == base.key and twins.of(other) is None
    assert twins.of(variant(KERNEL, launch=base.launch, b_layout="kn")) is None
    assert twins.of(variant(KERNEL, launch=base.launch, flags=("-lineinfo",))) is None
    per_sm = variant(KERNEL, launch=spec(["ctas_per_sm * 2", 1, 1]))
    assert launch_id(per_sm, TASK, 132) != launch_id(variant(KERNEL, launch=spec([4, 1, 1])), TASK, 132)
    broken = variant(KERNEL, launch=spec(["nonsense", 1, 1]))
    twins.learn([broken])
    assert twins.of(variant(REFORMATTED, launch=broken.launch)) == broken.key


def test_a_rendered_plan_sent_back_as_source_is_the_plan() -> None:
    plan = next(p for p in accepted_plans(toy_families(), TASK))
    twins = Twins(TASK, 132)
    twins.learn([plan])
    sent = Variant(source="// mine\n" + plan.source, launch=plan.launch, b_layout=plan.b_layout)
    assert sent.key != plan.key and twins.of(sent) == plan.key


def test_identical_machine_code_with_the_same_launch() -> None:
    def compiled(v: Variant, sha: str) -> CompileResult:
        same = {"status": Status.OK, "variant_id": v.variant_id, "build_id": "b", "registers": 32}
        return CompileResult(**same, cubin_sha256=sha)

    first, renamed = variant(KERNEL), variant(KERNEL.replace("int x", "int y").replace("(x", "(y"))
    other_launch = renamed.model_copy(
        update={
            "launch": LaunchSpec.model_validate(
                {"launches": [{"entry": "gemm", "grid": [1, 1, 1], "block": [1, 1, 1], "args": []}]}
            )
        }
    )
    twins = Twins(TASK, 132)
    twins.learn([first])
    known = {first.key: compiled(first, "s")}
    assert twins.of(renamed) is None
    assert twins.of_cubin(renamed, compiled(renamed, "s"), known.get) == first.key
    assert twins.of_cubin(renamed, compiled(renamed, "t"), known.get) is None
    assert twins.of_cubin(other_launch, compiled(other_launch, "s"), known.get) is None
    assert twins.of_cubin(renamed, compiled(renamed, "s"), {}.get) is None
