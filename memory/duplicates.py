"""Near-duplicates: a source that says the same as an earlier one is recognised and not measured again. Pure.

Two sources say the same if their C++ tokens do: comments, white space, line splices, and how an integer is written
(case, separators, hexadecimal, brackets around a macro's literal) do not count. Anything more, a renamed variable
included, makes another kernel: a duplicate that is missed costs one evaluation, one that is none would cost the truth.
The launch counts by what it resolves to at the shape. Different sources whose cubin and launch are the same are found
after the compile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from tools.launching import LaunchError, resolve
from tools.records import CompileResult, Task, Variant, content_hash

#: Every kind of token ends somewhere, at the end of the text if need be, so that scanning takes linear time.
_TOKEN = re.compile(
    r"""
      (?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z))
    | (?P<raw>(?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\(.*?(?:\)(?P=mark)"|\Z))
    | (?P<text>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"?|(?:u8|[uUL])?'(?:\\.|[^'\\\n])*'?)
    | (?P<number>\.?[0-9](?:'?[0-9A-Za-z_.]|(?<=[eEpP])[+-])*)
    | (?P<word>[A-Za-z_$]\w*)
    | (?P<newline>\n)
    | (?P<blank>[^\S\n]+)
    | (?P<punctuation>->\*?|\+\+|--|<<=?|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|::|\.\.\.|\#\#|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_INTEGER = re.compile(r"(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9][0-9]*)([uUlLzZ]*)")
#: With these in a source its layout is part of its meaning.
_LAYOUT_MATTERS = re.compile(r"__LINE__|__COUNTER__|__FILE__|^[ \t]*#[ \t]*line\b", re.MULTILINE)
#: Where an expression names the occupancy, which is not known here, two made-up ones must resolve alike.
_PROBES = ((2, 1024), (3, 2187))


def normalised(source: str) -> str:
    """One token a line, directives closed by an empty line. A source whose layout matters is returned as it is."""
    if _LAYOUT_MATTERS.search(source) or ('R"' in source and "\\\n" in source):
        return source
    lines: list[str] = []
    directive: list[str] | None = None
    fresh = True  # nothing but blanks so far on this line
    for match in _TOKEN.finditer(source.replace("\r\n", "\n").replace("\\\n", "")):
        kind, token = match.lastgroup, match.group()
        if kind == "newline":
            if directive is not None:
                lines += [*_directive(directive), ""]
            directive, fresh = None, True
        elif kind in ("blank", "comment"):
            if directive:
                directive.append(" ")
        elif token == "#" and fresh:
            directive, fresh = [], False
        else:
            fresh = False
            token = _number(token) if kind == "number" else token
            (lines if directive is None else directive).append(token)
    if directive is not None:
        lines += [*_directive(directive), ""]
    return "\n".join(lines)


def _directive(tokens: list[str]) -> list[str]:
    """A preprocessor line. Only after a macro's name does a blank decide what follows: ``F(x)`` or ``F (x)``; inside an
    include's angle brackets it is part of a file's name."""
    words = [token for token in tokens if token != " "]
    if words[:1] == ["include"]:
        return ["#" + "".join(words[:1]), "".join(tokens).removeprefix("include").strip()]
    if words[:1] != ["define"] or len(words) < 2:
        return ["#", *words]
    at = tokens.index(words[1])
    takes_arguments = tokens[at + 1 : at + 2] == ["("]
    body = words[2:]
    if len(body) == 3 and body[0] == "(" and body[2] == ")" and body[1][:1].isdigit() and not takes_arguments:
        body = body[1:2]
    return ["#define", words[1] + ("(" if takes_arguments else ""), *(body[1:] if takes_arguments else body)]


def _number(token: str) -> str:
    """An integer in decimal with its suffix in one case; anything else as it stands. From 2^31 on, a hexadecimal
    literal may be unsigned where the decimal one is not, so those keep their base."""
    plain = token.replace("'", "")
    found = _INTEGER.fullmatch(plain)
    if found is None or len(plain) > 20:
        return token
    digits, suffix = found.groups()
    octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
    value = int(digits, 8 if octal else 0)
    return f"{value}{suffix.lower()}" if value < 2**31 else plain.lower()


@lru_cache(maxsize=512)
def _source_id(source: str) -> str:
    return content_hash(normalised(source))


def launch_id(variant: Variant, task: Task, sm_count: int) -> str:
    """What is launched at this shape, in concrete numbers; of a spec that does not resolve, its text."""
    try:
        found = [repr(resolve(variant, task, sm_count, lambda *_, probe=probe: probe)) for probe in _PROBES]
    except LaunchError:
        found = [variant.launch.to_json()]
    return content_hash([variant.b_layout, *found])


class Twins:
    """The variants known at one task, and who among them is whose twin. The first one learnt speaks for all."""

    def __init__(self, task: Task, sm_count: int) -> None:
        self._task = task
        self._sm_count = sm_count
        self._launch: dict[str, str] = {}
        self._first: dict[tuple[str, str, tuple[str, ...]], str] = {}

    def learn(self, variants: Iterable[Variant]) -> None:
        for variant in variants:
            if variant.key not in self._launch:
                self._launch[variant.key] = launch_id(variant, self._task, self._sm_count)
                self._first.setdefault(self._identity(variant), variant.key)

    def knows(self, key: str) -> bool:
        return key in self._launch

    def of(self, variant: Variant) -> str | None:
        """Key of an earlier variant that says the same; None if there is none, or only itself."""
        found = self._first.get(self._identity(variant))
        return found if found != variant.key else None

    def of_cubin(
        self, variant: Variant, compiled: CompileResult, compiled_of: Callable[[str], CompileResult | None]
    ) -> str | None:
        """Key of an earlier variant that compiled to the same machine code and is launched alike."""
        if not compiled.ok:
            return None
        launch = launch_id(variant, self._task, self._sm_count)
        for key, other_launch in self._launch.items():
            if key != variant.key and other_launch == launch:
                other = compiled_of(key)
                if other is not None and other.cubin_sha256 == compiled.cubin_sha256:
                    return key
        return None

    def _identity(self, variant: Variant) -> tuple[str, str, tuple[str, ...]]:
        launch = self._launch.get(variant.key) or launch_id(variant, self._task, self._sm_count)
        return _source_id(variant.source), launch, variant.flags


def remark(found: str, same: str = "code") -> str:
    """What the policy is told instead of a new measurement."""
    return f"the same {same} as {found}, but for what does not count: that variant's result, nothing was measured again"
