"""Documents are cut at declarations and headings, with their lines, names and architectures."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval import chunking
from retrieval.arch import in_name, in_ptx, parse_arch
from retrieval.cpp_scan import mask, name_of, scan
from retrieval.passages import Chunk, Document
from retrieval.tokens import chains, looks_exact, parts, spaced
from tests.retrieval_kit import COPIES, GUIDE, atoms


def cut(path: str, text: str) -> list[Chunk]:
    return chunking.cut(chunking.readable(path, text))


def declared(text: str) -> dict[str, str]:
    return {d.qualified: d.kind for d in scan(text, mask(text))}


def lines_of(text: str, chunk: Chunk) -> str:
    return "\n".join(text.splitlines()[chunk.first - 1 : chunk.last])


# --- C++ -------------------------------------------------------------------------------------------------------------


def test_a_declaration_carries_its_comment_and_no_licence() -> None:
    chunks = cut("copy.hpp", COPIES)
    wait = next(c for c in chunks if "store_wait" in c.title)
    text = lines_of(COPIES, wait)
    assert text.startswith("// Waits until at most N")
    assert text.rstrip().endswith("}")
    assert "wait_group.read" in text
    assert not any("Copyright" in lines_of(COPIES, c) for c in chunks)


def test_repetition_is_one_group_that_knows_every_member() -> None:
    chunks = cut("mma_sm90.hpp", atoms())
    groups = [c for c in chunks if c.kind == "group"]
    assert len(groups) == 2, "FP32 and FP16 accumulation are not the same group"
    for group in groups:
        names = [s.name for s in group.symbols if s.name.startswith("SM90")]
        assert len(names) == 8 == 1 + len(group.more)
        assert len({name.split("_")[2] for name in names}) == 1
    symbol = next(s for g in groups for s in g.symbols if s.name == "SM90_64x40x16_F32F16F16_SS")
    own = "\n".join(atoms().splitlines()[symbol.first - 1 : symbol.last])
    assert "struct SM90_64x40x16_F32F16F16_SS" in own
    assert "m64n40k16.f32" in own


def test_a_large_class_is_cut_at_its_members() -> None:
    members = "\n".join(
        f"  /// Advances iterator number {i} to the next tile of the matrix.\n  void step_{'abcdefgh'[i]}(int by) {{\n"
        + f"    position += by * {i};\n" * 25
        + "  }\n"
        for i in range(8)
    )
    chunks = cut("walker.h", f"namespace n {{\n/// Walks over tiles.\nclass Walker {{\npublic:\n{members}\n}};\n}}\n")
    titles = [c.title for c in chunks]
    assert titles[0] == "n::Walker"
    assert {"n::Walker::step_a", "n::Walker::step_h"} <= set(titles)
    assert all(c.last - c.first < 60 for c in chunks)


def test_a_long_body_is_cut_at_blank_lines() -> None:
    body = "\n".join(f"  work_{i}(alpha, beta_{i}, gamma * {i});" + ("\n" if i % 20 == 19 else "") for i in range(300))
    text = f"/// Does it all.\nvoid everything() {{\n{body}\n}}\n"
    chunks = [c for c in cut("long.cu", text) if c.title == "everything"]
    assert chunks[0].kind == "declaration"
    assert chunks[0].first == 1
    assert chunks[-1].last == len(text.splitlines())
    for before, after in pairwise(chunks):
        assert after.first == before.last + 1


@pytest.mark.parametrize(
    ("head", "name", "kind"),
    [
        ("template <class T, int N = (3 > 2)> struct Array", "Array", "type"),
        ("template <> struct Traits<SM90_64x8x16, 3>", "Traits<SM90_64x8x16>", "type"),
        ("enum class Major : int", "Major", "type"),
        ("class alignas(16) Box final : public Base<int>", "Box", "type"),
        ("CUTE_HOST_DEVICE constexpr auto make_layout(Shape const& s)", "make_layout", "function"),
        ("struct Result run(int x)", "run", "function"),
        ("bool operator()(int a) const", "operator()", "function"),
        ("T& operator[](int i)", "operator[]", "function"),
        ("using Copy = SM90::Op<T>;", "Copy", "alias"),
        ("using SM100::TMEM::LOAD;", "LOAD", "alias"),
        ("typedef unsigned int uint;", "uint", "alias"),
        ("static constexpr int kStages = 3;", "kStages", "variable"),
        ("template <class T> concept Tile = requires { T::shape; };", "Tile", "alias"),
    ],
)
def test_names(head: str, name: str, kind: str) -> None:
    assert name_of(head) == (name, kind)


def test_scopes_macros_and_aliases() -> None:
    text = (
        "#ifndef GUARD_H\n#define GUARD_H\nnamespace a::b { namespace {\n#define TWICE(x) \\\n  (2 * (x))\n"
        '#define HAS_TMA\nextern "C" { void f(int); }\nusing X = other::Y<int>;\n} }\n#endif\n'
    )
    found = {d.name: d for d in scan(text, mask(text))}
    assert set(found) == {"TWICE", "HAS_TMA", "f", "X"}, "the include guard is no macro of interest"
    assert found["f"].qualified == "a::b::f"
    assert found["X"].alias_of == "Y"


def test_branches_that_open_different_brackets() -> None:
    text = "#if A\nstruct S : B1 {\n#else\nstruct S : B2 {\n#endif\n  int x;\n};\nvoid after();\n"
    assert declared(text) == {"S": "type", "after": "function"}


def test_brackets_in_comments_and_strings_do_not_count() -> None:
    text = 'void f() { /* { */ char c = \'{\'; auto s = R"x({{)x"; asm("{"); } // {\nvoid g();\n'
    assert declared(text) == {"f": "function", "g": "function"}
    assert len(mask(text)) == len(text)


def test_ptx_wrappers_keep_the_annotated_comment() -> None:
    text = (
        "/*\n// st.async.weak [addr], value; // PTX ISA 81, SM_90\n__device__ void st_async(int* addr);\n*/\n"
        '#if __cccl_ptx_isa >= 810\nextern "C" void __cuda_ptx_st_async_is_not_supported_before_SM_90__();\n'
        'template <typename = void>\nstatic inline void st_async(int* addr)\n{\n  asm("st.async");\n}\n#endif\n'
    )
    (chunk,) = cut("st_async.h", text)
    assert [s.name for s in chunk.symbols] == ["st_async"]
    assert chunk.first == 1
    assert "sm80" not in chunk.arch
    assert {"sm90", "sm100"} <= set(chunk.arch)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="{}();<>=#\n ab/*\"'\\,:", max_size=300))
def test_any_text_can_be_cut(text: str) -> None:
    document = Document("x.hpp", tuple(text.splitlines()))
    for chunk in chunking.cut(document):
        assert 1 <= chunk.first <= chunk.last <= len(document.lines)
        for symbol in chunk.symbols:
            assert 1 <= symbol.first <= symbol.last <= len(document.lines)
        assert chunking.from_plain(json.loads(json.dumps(chunking.to_plain(chunk)))) == chunk


# --- prose -----------------------------------------------------------------------------------------------------------


def test_markdown_sections_have_their_heading_path() -> None:
    chunks = cut("guide.md", GUIDE)
    assert [c.title for c in chunks] == ["Tiles", "Tiles > Swizzling", "Tiles > Predication"]
    assert lines_of(GUIDE, chunks[1]).startswith("## Swizzling")


def test_fences_are_no_headings() -> None:
    text = "# Real\n\nSome text to read here.\n```\n# not a heading\n```\nMore text to read here.\n```\nx\n```\n"
    assert {c.title for c in cut("a.md", text)} == {"Real"}


def test_rst_titles() -> None:
    text = "=====\nTitle\n=====\n\nSome words to begin with here.\n\nPart\n----\n\nOther words that follow after it.\n"
    titles = [c.title for c in cut("a.rst", text)]
    assert titles[-1] == "Title > Part"


def test_notebooks_cite_lines_of_the_file() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Layouts\n", "A layout maps coordinates to indices."]},
        {"cell_type": "code", "source": ["layout = make_layout((4, 8))\n", "print(layout)"]},
    ]
    text = json.dumps({"cells": cells, "nbformat": 4}, indent=1)
    document = chunking.readable("n.ipynb", text)
    (chunk,) = chunking.cut(document)
    assert chunk.title == "Layouts"
    first, last = document.cited(chunk.first, chunk.last)
    raw = text.splitlines()
    assert "# Layouts" in raw[first - 1]
    assert "print(layout)" in "\n".join(raw[first - 1 : last])


def test_a_notebook_that_is_none() -> None:
    with pytest.raises(ValueError, match="not one"):
        chunking.readable("n.ipynb", "{}")


def test_html_loses_tags_scripts_and_navigation() -> None:
    text = (
        "<html><head><title>t</title><script>var evil = 1;</script></head><body><nav>Menu of many things</nav>\n"
        "<h1>Warpgroup <code>MMA</code></h1>\n<p>The operands lie in shared memory\n and registers.</p>\n"
        "<pre>wgmma.mma_async\n  second line</pre></body></html>"
    )
    document = chunking.readable("page.html", text)
    (chunk,) = chunking.cut(document)
    shown = document.text(chunk.first, chunk.last)
    assert chunk.title == "Warpgroup MMA"
    assert "operands lie in shared memory and registers" in shown
    assert "  second line" in shown
    assert "evil" not in shown
    assert "Menu" not in shown
    assert document.cited(chunk.first, chunk.first)[0] == 2


# --- tags and tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("include/cute/arch/copy_sm90_tma.hpp", ("sm90",)),
        ("examples/57_hopper_grouped_gemm/main.cu", ("sm90",)),
        ("struct SM100_TMEM_LOAD", ("sm100",)),
        ("DefaultGemm<arch::Sm80, arch::Sm90>", ("sm80", "sm90")),
        ("MainloopSm90TmaGmma", ("sm90",)),
        ("prism80 and adaptor", ()),
        ("smem_90", ()),
    ],
)
def test_architectures_in_names(text: str, tags: tuple[str, ...]) -> None:
    assert in_name(text) == tags


def test_architectures_in_ptx_annotations() -> None:
    assert "sm120" in in_ptx("// x; // PTX ISA 80, SM_90")
    assert "sm80" not in in_ptx("// x; // PTX ISA 80, SM_90")
    assert in_ptx("// x; // PTX ISA 86, SM_100a, SM_101a") == ("sm100", "sm101")
    assert in_ptx("// x; // PTX ISA 10, SM_50") == ()


@pytest.mark.parametrize("text", ["sm90", "SM_90a", "90", "9.0", "hopper", " Hopper "])
def test_ways_to_write_an_architecture(text: str) -> None:
    assert parse_arch(text) == "sm90"


def test_no_architecture() -> None:
    with pytest.raises(ValueError, match="not an architecture"):
        parse_arch("fast")


def test_tokens() -> None:
    assert chains("cute::copy(cp.async.bulk)") == ["cute::copy", "cute", "copy", "cp.async.bulk", "cp", "async", "bulk"]
    assert parts("SM90_64x128x16_F32F16F16_SS") == ["SM90", "64x128x16", "F32", "F16", "F16", "SS"]
    assert parts("TiledMma") == ["Tiled", "Mma"]
    assert spaced("make_tma_copy of 2D tiles") == "make tma copy of 2D tiles"
    assert all(map(looks_exact, ["SM90_TMA_LOAD", "TiledMma", "cp.async.bulk", "a::b", "wgmma_x"]))
    assert not any(map(looks_exact, ["copy", "Layout", "tensor", "I"]))
