"""Finds the declarations of a C++/CUDA file without a compiler: where each begins and ends, and what it is called.

No full parser: headers with unresolved macros have to work. Comments, strings and characters are masked first, so that
brackets inside them do not count; of ``#if`` branches that open different brackets the first one counts. A declaration
that the scan does not understand is still returned, only with a poor name; a file with unbalanced brackets ends in
one long declaration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["type", "function", "alias", "variable", "macro", "other"]

_MASKED = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^()\s\\]{0,16})\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n]){1,8}'",
    re.DOTALL,
)
_TOKEN = re.compile(r"[{};]|^[ \t]*#[ \t]*(?P<word>\w+)(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_NAMESPACE = re.compile(r"(?:^|[\s;])(?:inline\s+)?namespace\b(?P<name>[\w:\s]*)$")
_EXTERN = re.compile(r'extern\s+"?\s*"?\s*$')
_ACCESS = re.compile(r"\s*(?:public|private|protected)\s*:(?!:)")
_BARE_MACROS = re.compile(r"\s*(?:[A-Z_][A-Z0-9_]{3,}(?:\([^()\n]*\))?[ \t]*(?:\n|$)\s*)+")
_TYPE = re.compile(
    r"\b(?P<word>class|struct|union|enum)\s+(?:class\s+|struct\s+)?(?:\[\[.*?\]\]\s*)?"
    r"(?:(?:alignas|__align__|CUTE_ALIGNAS|CUTLASS_ALIGNAS|__attribute__)\s*\(.*?\)+\s*)?"
    r"(?:[A-Z_]+_API\s+)?(?P<name>[A-Za-z_]\w*(?:::\w+)*)"
)
_USING = re.compile(r"\busing\s+(?P<name>\w+)\s*(?:\[\[.*?\]\]\s*)?=(?P<target>.*)", re.DOTALL)
_CONCEPT = re.compile(r"\bconcept\s+(?P<name>\w+)\s*=")
_TYPEDEF = re.compile(r"\btypedef\b.*?(?P<name>\w+)\s*(?:\[[^\]]*\]\s*)*;?\s*$", re.DOTALL)
_OPERATOR = re.compile(r"((?:\w+(?:<[^<>]*>)?::)*operator\s*(?:\(\s*\)|\[\s*\]|\"\"\s*\w+|[^\s\w(]+|[\w:\s*&]+?))\s*\(")
_CALLED = re.compile(r"(?P<name>~?[A-Za-z_][\w:~]*)\s*$")
_VARIABLE = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)*(?:[={;]|$)")
_KEYWORDS = """if for while switch return sizeof alignof decltype noexcept requires static_assert __attribute__ asm
    __launch_bounds__ __align__ alignas explicit __CUTE_REQUIRES CUTE_REQUIRES _CCCL_REQUIRES _LIBCUDACXX_REQUIRES
    defined template"""
_NOT_NAMES = frozenset(_KEYWORDS.split())


@dataclass(frozen=True, slots=True)
class Declaration:
    """A declaration at one level. ``begin`` … ``end`` are offsets into the text, attached comments included;
    ``code`` is where the code itself begins, ``body`` the offset after its opening bracket (None without one)."""

    name: str
    kind: Kind
    scope: tuple[str, ...]
    begin: int
    code: int
    body: int | None
    end: int
    #: What the declaration says before its body, comments and strings blanked.
    head: str

    @property
    def qualified(self) -> str:
        return "::".join((*self.scope, self.name))

    @property
    def alias_of(self) -> str | None:
        """For ``using X = a::b::Y<…>;`` the ``Y``."""
        if self.kind != "alias" or (found := _USING.search(self.head)) is None:
            return None
        target = re.match(r"\s*(?:typename\s+)?([\w:]+)", found["target"])
        return target[1].rsplit("::", 1)[-1] if target else None


def mask(text: str) -> str:
    """The same text with comments blanked and the insides of strings replaced by spaces; every offset stays."""

    def blank(found: re.Match[str]) -> str:
        piece = found[0]
        if piece[0] in "\"'R" and len(piece) > 1:
            return piece[0] + re.sub(r"[^\n]", " ", piece[1:-1]) + piece[-1]
        return re.sub(r"[^\n]", " ", piece)

    return _MASKED.sub(blank, text)


def scan(
    text: str, masked: str, begin: int = 0, end: int | None = None, scope: tuple[str, ...] = ()
) -> Iterator[Declaration]:
    """The declarations between two offsets, in order; namespaces and ``extern "C"`` are looked through."""
    return _Scanner(text, masked, begin, len(text) if end is None else end, scope).run()


class _Scanner:
    def __init__(self, text: str, masked: str, begin: int, end: int, scope: tuple[str, ...]) -> None:
        self._text = text
        self._masked = masked
        self._limit = end
        self._outer = scope
        self._stack: list[str | None] = []  # a namespace's name (perhaps empty), or None for any other bracket
        self._opaque = 0
        self._branches: list[list[str | None]] = []
        self._start = begin  # where the statement being read began
        self._last = begin  # where the last finished one ended
        self._lead: int | None = None  # where its comments are attached, if not at its own beginning
        self._body: int | None = None
        self._guard: str | None = None  # the name that the last #ifndef asked for

    def run(self) -> Iterator[Declaration]:
        for token in _TOKEN.finditer(self._masked, self._start, self._limit):
            word, at = token["word"], token.start()
            if word is not None:
                found = self._directive(word, token)
            elif token[0] == "{":
                self._open(at)
                found = None
            elif token[0] == "}":
                found = self._close(at)
            else:
                found = self._finish(at + 1) if not self._opaque else None
            if found is not None:
                yield found
        if (found := self._finish(self._limit)) is not None:
            yield found

    def _directive(self, word: str, token: re.Match[str]) -> Declaration | None:
        if word in ("if", "ifdef", "ifndef"):
            self._branches.append(list(self._stack))
            self._guard = token[0].split()[-1] if word == "ifndef" else None
        elif word in ("else", "elif") and self._branches:
            self._restore(self._branches[-1])
        elif word == "endif" and self._branches:
            self._branches.pop()
        pending = self._masked[self._start : token.start()]
        if self._opaque or (pending.strip() and not _BARE_MACROS.fullmatch(pending)):
            return None
        if word != "define":
            self._start = token.end()
            return None
        found = re.match(r"[ \t]*#[ \t]*define[ \t]+(\w+)(.*)", token[0], re.DOTALL)
        begin = self._comment_before(token.start())
        self._start = self._last = token.end()
        guard, self._guard = self._guard, None
        if found is None or (not found[2].strip() and found[1] == guard):
            return None  # an include guard
        head = token[0].split("\n", 1)[0]
        return Declaration(found[1], "macro", (), begin, token.start(), None, token.end(), head)

    def _restore(self, stack: list[str | None]) -> None:
        self._stack = list(stack)
        self._opaque = sum(1 for name in stack if name is None)

    def _open(self, at: int) -> None:
        if not self._opaque:
            head = self._masked[self._start : at]
            space = _NAMESPACE.search(head)
            if space is not None or _EXTERN.search(head):
                self._stack.append(space["name"].strip() if space else "")
                self._start = at + 1
                self._body = None
                return
            if self._body is None:
                self._body = at + 1
        self._stack.append(None)
        self._opaque += 1

    def _close(self, at: int) -> Declaration | None:
        if not self._stack:
            self._start = self._last = at + 1  # one bracket too many
            return None
        if self._stack.pop() is not None:
            found = self._finish(at)
            self._start = self._last = at + 1
            return found
        self._opaque -= 1
        if self._opaque:
            return None
        following = re.compile(r"\s*(.)").match(self._masked, at + 1, self._limit)
        if following is not None and following[1] in ";,)(.":
            return None  # the statement goes on, up to its semicolon
        if following is not None and re.search(r"(?:^|\s)(?:typedef|struct|union|enum)\b[^()]*$", self._head()):
            rest = re.compile(r"\s*\w+(?:\[[^\]]*\])?\s*;").match(self._masked, at + 1, self._limit)
            if rest is not None:
                return None  # struct {…} name;
        return self._finish(at + 1)

    def _head(self) -> str:
        return self._masked[self._start : self._body - 1 if self._body else self._limit]

    def _finish(self, end: int) -> Declaration | None:
        """Ends the statement that began at ``_start``."""
        start, body = self._start, self._body
        head = self._masked[start : body - 1 if body else end]
        while (label := _ACCESS.match(head)) is not None:
            start += label.end()
            head = head[label.end() :]
        self._start, self._body = end, None
        if "is_not_supported_before" in head and body is None:
            self._lead = self._lead or start  # libcu++: belongs to the function that follows
            return None
        stripped = head.lstrip()
        code = start + len(head) - len(stripped)
        if (macros := _BARE_MACROS.match(stripped)) and macros.end() < len(stripped):
            stripped = stripped[macros.end() :]  # CUTLASS_DEVICE alone on its line
        if not _says_something(stripped):
            return None
        begin = self._comment_before(code if self._lead is None else self._lead)
        self._last, self._lead = end, None
        name, kind = name_of(stripped)
        names = tuple(part for space in self._stack if space for part in space.replace(" ", "").split("::"))
        return Declaration(name, kind, (*self._outer, *names), begin, code, body, end, stripped)

    def _comment_before(self, code: int) -> int:
        """Where the comments that belong to the code at ``code`` begin: up to the last declaration, a blank line
        followed by code, or a licence."""
        line = self._text.rfind("\n", 0, code) + 1
        begin = line if not self._masked[line:code].strip() else code
        while begin > self._last:
            above = self._text.rfind("\n", 0, begin - 1) + 1
            if above < self._last or begin == 0:
                break
            if (code_above := self._masked[above : begin - 1].strip()) and not _may_be_between(code_above):
                break
            begin = above
        return _without_licence(self._text, self._masked, begin, code)


def _says_something(head: str) -> bool:
    """Not only a semicolon, macros and directives, or a ``using namespace``."""
    if re.match(r"using\s+namespace\b", head) or _BARE_MACROS.fullmatch(head):
        return False
    code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", "", head, flags=re.MULTILINE)
    return len(code.strip(" \t\n;")) > 1 and not _BARE_MACROS.fullmatch(code)


def _may_be_between(line: str) -> bool:
    """Lines that may stand between a comment and what it describes."""
    if line.startswith("#"):
        return not line.startswith(("#include", "# include", "#pragma", "#endif"))
    return "is_not_supported_before" in line


def _without_licence(text: str, masked: str, begin: int, code: int) -> int:
    """Skips leading blank lines, rulers, directives and any comment with a copyright."""
    cursor = begin
    for found in _MASKED.finditer(text, begin, code):
        if "opyright" in found[0] or "SPDX-License" in found[0]:
            cursor = found.end()
    while cursor < code:
        stop = text.find("\n", cursor, code)
        if stop < 0:
            break
        line = text[cursor:stop].strip()
        if re.search(r"[A-Za-z0-9]", line) and not line.startswith("#"):
            break
        if line.startswith("/*"):
            break
        cursor = stop + 1
    return cursor


def name_of(head: str) -> tuple[str, Kind]:
    """What a declaration's head (comments blanked) declares, templates looked through."""
    bare = _without_templates(head)
    if (found := _USING.search(bare)) or (found := _CONCEPT.search(bare)):
        return found["name"], "alias"
    if re.match(r"\s*typedef\b", bare) and (found := _TYPEDEF.search(bare)):
        return found["name"], "alias"
    if found := re.match(r"\s*using\s+(?:typename\s+)?[\w:]*?::(?P<name>\w+)\s*;?\s*$", bare):
        return found["name"], "alias"
    if re.match(r"\s*(?:using|friend|static_assert|extern\s+template)\b", bare):
        return _first_word(bare), "other"
    opening = _call_bracket(bare)
    found = _TYPE.search(bare)
    if found and (opening is None or (found.start() < opening and not _returns_type(bare, found, opening))):
        return _specialised(bare, found), "type"
    if (operator := _OPERATOR.search(bare)) is not None:
        return re.sub(r"\s+", "", operator[1]).replace("operatornew", "operator new"), "function"
    if opening is not None and (called := _CALLED.search(re.sub(r"<[^<>]*>\s*$", "", bare[:opening]))):
        return called["name"], "function"
    if found := _VARIABLE.search(bare):
        return found["name"], "variable"
    return _first_word(bare), "other"


def _returns_type(bare: str, found: re.Match[str], opening: int) -> bool:
    """``struct X f(…)``: a function that returns a struct, not a struct. A base clause or ``final`` says a type."""
    between = bare[found.end("name") : opening]
    return (
        ":" not in between.replace("::", "")
        and bool(re.search(r"\w\s*$", between.strip()[-1:] or " "))
        and ("<" not in between)
    )


def _specialised(bare: str, found: re.Match[str]) -> str:
    """``MMA_Traits<SM90_…>`` for a specialisation: its first argument's name is what people look for."""
    arguments = re.match(r"\s*<(.*)", bare[found.end("name") :].split("{", 1)[0], re.DOTALL)
    name = found["name"]
    if arguments is None:
        return name
    first = re.match(r"\s*([\w:]+)", arguments[1])
    return f"{name}<{first[1]}>" if first else name


def _first_word(bare: str) -> str:
    found = re.search(r"\w+", bare)
    return found[0] if found else "?"


def _without_templates(head: str) -> str:
    """Drops leading ``template <…>`` and ``requires`` clauses, brackets balanced."""
    while found := re.match(r"\s*template\s*<", head):
        depth, at = 1, found.end()
        while at < len(head) and depth:
            if head[at] == "<":
                depth += 1
            elif head[at] == ">" and head[at - 1] != "-":
                depth -= 1
            elif head[at] == "(":  # (a > b) inside a template argument
                at = _matching(head, at)
            at += 1
        head = head[at:]
    return head


def _matching(text: str, at: int) -> int:
    depth = 0
    for position in range(at, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    return len(text) - 1


def _call_bracket(bare: str) -> int | None:
    """The offset of the bracket that opens the parameters, outside template arguments."""
    depth = at = 0
    while at < len(bare):
        char = bare[at]
        if char == "<":
            depth += 1
        elif char == ">" and bare[at - 1] != "-":
            depth = max(0, depth - 1)
        elif char == "=" and depth == 0 and not re.match(r"operator\s*$", bare[:at][-10:]):
            return None
        elif char == "(":
            before = re.search(r"(\w+)\s*(?:<[^<>]*>)?\s*$", bare[:at])
            if depth == 0 and before is not None and before[1] not in _NOT_NAMES:
                return at
            at = _matching(bare, at)
        at += 1
    return None
