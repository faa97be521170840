"""The text check: what it lets through, what it names, and that tricks of the preprocessor do not get round it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.families import load_families
from tools.proc import run
from tools.records import Reason
from tools.sourcecheck import (
    MAX_SOURCE_BYTES,
    SourceProblem,
    allowed_header,
    check_source,
    headers,
    uses_cutlass,
)

KERNEL = 'extern "C" __global__ void k(int* o) { o[0] = 1; }\n'


def problem(source: str) -> SourceProblem:
    found = check_source(source)
    assert found is not None, source
    return found


@pytest.mark.parametrize(
    "source",
    [
        KERNEL,
        "#include <cuda_fp16.h>\n#include <cstdint>\n#include <cute/tensor.hpp>\n" + KERNEL,
        '#include "cutlass/gemm/gemm.h" // a quoted name is as good\n' + KERNEL,
        "#  include   <cuda/std/cstdint>  /* why not */\n" + KERNEL,
        "/* #include <vector>\n std::thread t; */ // main()\n" + KERNEL,
        'extern "C" __global__ void k(int* o) { asm volatile("// main() cudaMalloc(x) <<<"); }\n',
        'extern "C" __global__ void k() { asm volatile(R"(nanosleep.u32 1; // getenv( )"); }\n',
        "__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }\n" + KERNEL,
        "static __device__ __forceinline__ __host__ int f() { return 1; }\n" + KERNEL,
        'extern "C" {\n__global__ void k(int* o) { o[0] = 1; }\n}\n',
        "#define DEV static __device__ __forceinline__\n#pragma once\n#pragma unroll 4\n#if X\n#elif Y\n#endif\n"
        + KERNEL,
        "__global__ void k(const __grid_constant__ CUtensorMap map) { cudaGridDependencySynchronize(); }\n",
        "__device__ int f(P p, P* q) { return p.system(1) + q->open(2) + filesystem(3); }\n",
        "int x = 1'000'000; char c = '\"'; // don't\n" + KERNEL,
        "namespace n { __device__ int domain(int x) { return x; } }\n" + KERNEL,
        '_Pragma("unroll") __global__ void k() {}\n',
    ],
)
def test_device_code_passes(source: str) -> None:
    assert check_source(source) is None


def test_the_families_pass() -> None:
    for family in load_families().values():
        assert check_source(family.source) is None, family.name


@pytest.mark.parametrize(
    ("source", "reason", "words"),
    [
        ("#include <vector>\n", Reason.FORBIDDEN_INCLUDE, "vector"),
        ("\n\n#include <cstdio>\n", Reason.FORBIDDEN_INCLUDE, "line 3"),
        ("#include <cute/../../etc/passwd>\n", Reason.FORBIDDEN_INCLUDE, "allow-list"),
        ("#include </usr/include/stdio.h>\n", Reason.FORBIDDEN_INCLUDE, "stdio.h"),
        ('#include "kernel.cu"\n', Reason.FORBIDDEN_INCLUDE, "kernel.cu"),
        ("#define H <cuda_fp16.h>\n#include H\n", Reason.FORBIDDEN_INCLUDE, "line 2"),
        ("#include /*x*/ <vector>\n", Reason.FORBIDDEN_INCLUDE, "vector"),
        ("#/**/include <vector>\n", Reason.FORBIDDEN_INCLUDE, "vector"),
        ("%:include <vector>\n", Reason.FORBIDDEN_INCLUDE, "vector"),
        ("/* include <cuda_fp16.h> */ #include <vector>\n", Reason.FORBIDDEN_INCLUDE, "vector"),
        ("/*\n*/ #include <vector>\n", Reason.FORBIDDEN_INCLUDE, "vector"),
        ("#in\\\nclude <vector>\n", Reason.FORBIDDEN_INCLUDE, "vector"),
        ("#include <cuda_fp16.h> <vector>\n", Reason.FORBIDDEN_INCLUDE, "plain form"),
        ("#include_next <cuda_fp16.h>\n", Reason.FORBIDDEN_INCLUDE, "include_next"),
        ("#import <cuda_fp16.h>\n", Reason.FORBIDDEN_INCLUDE, "import"),
        ('#embed "/etc/passwd"\n', Reason.FORBIDDEN_INCLUDE, "embed"),
        ("#if __has_include(<vector>)\n#endif\n", Reason.FORBIDDEN_INCLUDE, "__has_include"),
        ('__global__ void k() { asm(".incbin \\"/etc/passwd\\""); }\n', Reason.FORBIDDEN_INCLUDE, "incbin"),
        ('#line 1 "/etc/passwd"\n', Reason.HOST_CODE, "#line"),
        ('# 1 "/etc/passwd"\n', Reason.HOST_CODE, "#1"),
        ("#pragma GCC dependency </etc/passwd>\n", Reason.HOST_CODE, "GCC dependency"),
        ('_Pragma("GCC poison x")\n', Reason.HOST_CODE, "poison"),
        ("??=include <vector>\n", Reason.HOST_CODE, "trigraph"),
        ("int main() { return 0; }\n", Reason.HOST_CODE, "main"),
        ("void f() { k<<<1, 32>>>(0); }\n", Reason.HOST_CODE, "<<<"),
        ("void f() { cudaMalloc(&p, 4); }\n", Reason.HOST_CODE, "cudaMalloc"),
        ("void f() { cuLaunchKernel(f, 1); }\n", Reason.HOST_CODE, "cuLaunchKernel"),
        ("auto h = cublasCreate;\n", Reason.HOST_CODE, "cublasCreate"),
        ("at::Tensor f();\n", Reason.HOST_CODE, "at"),
        ("std::thread t;\n", Reason.HOST_CODE, "thread"),
        ("\n\nvoid f() { ::system(0); }\n", Reason.HOST_CODE, "line 3"),
        ("const char* s = getenv(0);\n", Reason.HOST_CODE, "getenv"),
        ("void* d = dlopen(0, 1);\n", Reason.HOST_CODE, "dlopen"),
        ("__host__ void f() {}\n", Reason.HOST_CODE, "__host__"),
        ("__device__ int x();\n__host__ int f() { return 1; }\n", Reason.HOST_CODE, "line 2"),
        ('extern "C" void f(int);\n', Reason.HOST_CODE, 'extern "C"'),
        ('asm(".globl x");\n' + KERNEL, Reason.HOST_CODE, "asm outside"),
        ("__managed__ int x;\n", Reason.MUTABLE_GLOBAL, "__managed__"),
        ("int x;\0", Reason.COMPILE_ERROR, "NUL"),
        ("\ud800", Reason.COMPILE_ERROR, "Unicode"),
        ("x" * (MAX_SOURCE_BYTES + 1), Reason.COMPILE_ERROR, "larger"),
    ],
)
def test_what_is_rejected_and_how_it_is_named(source: str, reason: Reason, words: str) -> None:
    found = problem(source)
    assert found.reason is reason
    assert words in found.detail


#: Each hides an include from a reader whose idea of comments, literals or splices differs from the compiler's.
HIDING = {
    "splice in a line comment mark": "/\\\n/ /*\n#include <vector>\n/* */\n",
    "splice in a block comment end": "/* *\\\n/\n#include <vector>\n/* */\n",
    "splice in a raw string prefix": 'auto x = R\\\n"q(/*)q";\n#include <vector>\n/* */\n',
    "hex digit before a quote": "enum { a = 'x' }; int f(int b) { switch (b) { case'/*': return 1; } return 0; }\n"
    "#include <vector>\n/* */\n",
    "prefixed character literal": "auto x = u8'\"';\n#include <vector>\n",
    "digit separator": "int x = 1'0; /* ' */\n#include <vector>\n",
    "escaped quote": 'auto s = "\\"/*";\n#include <vector>\n/* */\n',
    "escape before a splice": 'auto s = "\\\\\n" /*";\n#include <vector>\n/* */\n',
    "raw string with a quote": 'auto s = R"(" /*)";\n#include <vector>\n/* */\n',
    "raw string with a delimiter": 'auto s = R"ab()" /*)ab";\n#include <vector>\n/* */\n',
    "name that ends in R": '#define fooR\nauto s = fooR"(/*";\n#include <vector>\n// )"\n',
    "carriage returns": "#include\r\n#include <vector>\r\n",
    "spaces after a splice": "// comment \\  \nstill comment\n#include <vector>\n",
    "comment in a string": 'auto s = "/*";\n#include <vector>\n',
}


@pytest.mark.parametrize("name", HIDING)
def test_no_include_can_be_hidden(name: str) -> None:
    assert check_source(HIDING[name]) is not None


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is missing: apt-get install g++")
def test_the_hidden_includes_are_real(tmp_path: Path) -> None:
    """What we call hidden is what the preprocessor sees: the cases above do include <vector>."""
    for name, source in HIDING.items():
        path = tmp_path / "x.cpp"
        path.write_bytes(source.encode())
        text = run(["g++", "-std=c++17", "-E", "-w", str(path)], deadline_s=60).stdout.decode()
        assert "class vector" in text, name


@given(st.text(alphabet="/*\\\n\"'R(){}#<> abuinclde0%:.", max_size=60))
def test_any_text_gets_an_answer(source: str) -> None:
    found = check_source(source)
    if found is not None:
        assert 1 <= found.line <= source.count("\n") + 1
    else:
        assert all(allowed_header(name) for name in headers(source))


def test_headers_in_order() -> None:
    source = '#include <cuda_fp16.h>\n/* #include <vector> */\n#include "cute/tensor.hpp"\n'
    assert headers(source) == ("cuda_fp16.h", "cute/tensor.hpp")
    assert uses_cutlass(source)
    assert not uses_cutlass("// #include <cute/tensor.hpp>\n" + KERNEL)
