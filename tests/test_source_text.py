"""Comments and white space do not count; anything that the compiler sees does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.source_text import without_comments

SOURCE = """#define BM 64  // rows
/* a tile
   of C */
__global__ void k(const char* s) {
  asm volatile("mov.b32 %0, 1; // kept" :: "r"(BM));
  char c = '"';  s = R"x(  /* kept */  )x";
}
"""


@pytest.mark.parametrize(
    "old, new",
    [
        ("// rows", "// rows of a tile"),
        ("  // rows", ""),
        ("/* a tile\n   of C */\n", ""),
        ("  asm", "\tasm"),
        ("{\n", "{\n\n\n"),
        ("\n", "\r\n"),
        ("#define BM 64", "#define \\\n BM 64"),
    ],
)
def test_what_does_not_count(old: str, new: str) -> None:
    assert old in SOURCE
    assert without_comments(SOURCE.replace(old, new)) == without_comments(SOURCE)


@pytest.mark.parametrize(
    "old, new",
    [
        ("64", "128"),
        ("// kept", "// cut"),
        ("  /* kept */", " /* kept */"),
        ("%0, 1;", "%0,  1;"),
        ("64  // rows\n/* a tile\n   of C */\n", "64 "),
        ("'\"'", "'\\''"),
        ("BM));", "BM)); /*"),
    ],
)
def test_what_counts(old: str, new: str) -> None:
    assert old in SOURCE
    assert without_comments(SOURCE.replace(old, new)) != without_comments(SOURCE)


@given(st.text(alphabet="ab \n/*\"'\\R()#", max_size=60))
def test_it_ends_and_is_stable(text: str) -> None:
    once = without_comments(text)
    assert without_comments(once) == once or any(mark in text for mark in "\"'\\/")
