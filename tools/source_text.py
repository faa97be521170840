"""What a CUDA source says, apart from its comments and white space. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

_COMMENT = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
#: Literals are matched only so that a comment mark or a blank inside one is left alone.
_GAP_OR_LITERAL = re.compile(
    r"""
      R"(?P<mark>[^()\\\s]{0,16})\(.*?(?:\)(?P=mark)"|\Z)
    | "(?:\\.|[^"\\\n])*"?
    | '(?:\\.|[^'\\\n])*'?
    | (?P<gap>(?:\s+|//[^\n]*|/\*.*?(?:\*/|\Z))+)
    """,
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=1024)
def without_comments(source: str) -> str:
    """``source`` with every run of blanks and comments as one blank, or one line break if it holds one: about 1 ms for
    20 kB. Sources that come out the same compile to the same code. The reverse is memory/duplicates.py's affair: here a
    line that is broken elsewhere is another source."""

    def shortened(found: re.Match[str]) -> str:
        gap = found["gap"]
        if gap is None:
            return found[0]
        return "\n" if "\n" in (_COMMENT.sub("", gap) if "/" in gap else gap) else " "

    return _GAP_OR_LITERAL.sub(shortened, source.replace("\r\n", "\n").replace("\\\n", "")).strip()
