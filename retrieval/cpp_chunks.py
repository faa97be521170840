"""Cuts C++/CUDA sources at declarations, comments attached.

Large classes are cut at their members and long bodies at blank lines; small neighbours share a chunk. Generated
repetition (thousands of MMA atoms that differ in a number) becomes one chunk a group: one vector, while every
member's name and line range is kept.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from retrieval.arch import in_name, in_ptx, ordered
from retrieval.cpp_scan import Declaration, mask, name_of, scan
from retrieval.glossary import spelled_out
from retrieval.passages import Chunk, Document, Symbol
from retrieval.tokens import spaced

LEAF_LINES = 90  # a declaration up to this long stays whole
PACK_LINES = 40  # small neighbours are put together up to this
HEAD_LINES = 45  # of a large class: what precedes its first large member
SMALL_MEMBER = 12  # lines; a function up to this long stays in the head
WINDOW_LINES = 110  # pieces of a long body
GROUP_MIN = 3
ALIKE = 0.72  # Jaccard similarity of two members' words, numbers left out
EMBED_CHARS = 420  # with the path about 115 word pieces: the model was trained on 128
SAID_CHARS = 300
DOCUMENTED_WORDS = 4  # of a comment that says something
FILE_CHARS = 1000  # of that comment
FILE_WORDS = 12  # a shorter comment at the head of a file says nothing of its own

_COMMENT = re.compile(
    r"//[/!<]*|/\*[*!]*|\*/|^\s*\*(?!/)|\\(?:file|brief|param|tparam|return)\b|[=\-*/~]{4,}", re.MULTILINE
)
_NUMBERS = re.compile(r"\d+(?:x\d+)*")
COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIMS = re.compile(r"\d+(?:x\d+)+|(?<![A-Za-z])\d+")


@dataclass(frozen=True, slots=True)
class _Unit:
    """A declaration with its lines."""

    declaration: Declaration
    first: int
    last: int

    @property
    def lines(self) -> int:
        return self.last - self.first + 1


class _File:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.text = "\n".join(document.lines)
        self.masked = mask(self.text)
        self._starts = [0]
        for line in document.lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self.path_arch = in_name(document.path)
        self.classes: set[tuple[str, ...]] = set()  # scopes that are classes

    def line(self, offset: int) -> int:
        return bisect_right(self._starts, min(offset, len(self.text)))

    def offset(self, line: int) -> int:
        return self._starts[line - 1]

    def units(self, declarations: Iterable[Declaration]) -> list[_Unit]:
        return [_Unit(d, self.line(d.begin), self.line(max(d.begin, d.end - 1))) for d in declarations]

    def slice(self, first: int, last: int) -> str:
        return self.text[self._starts[first - 1] : self._starts[last]]

    def masked_slice(self, first: int, last: int) -> str:
        return self.masked[self._starts[first - 1] : self._starts[last]]


def cut(document: Document) -> list[Chunk]:
    """The chunks of one source file, in no particular order."""
    file = _File(document)
    units = file.units(scan(file.text, file.masked))
    found = list(_file_comment(file, units))
    found += _level(file, units)
    return found


def _file_comment(file: _File, units: Sequence[_Unit]) -> Iterator[Chunk]:
    """What a file says about itself before its first declaration; a licence is left out."""
    stop = units[0].first - 1 if units else len(file.document.lines)
    end = file.offset(stop + 1) if stop < len(file.document.lines) else len(file.text)
    comments = [c for c in COMMENTS.finditer(file.text, 0, end) if not _is_licence(c[0])]
    said = " ".join(_plain(c[0]) for c in comments)
    if len(re.findall(r"[A-Za-z]{2,}", said)) < FILE_WORDS:
        return
    first, last = file.line(comments[0].start()), file.line(comments[-1].end() - 1)
    embed = f"{_path_words(file.document.path)}: {said}"[:FILE_CHARS]
    yield Chunk("file", file.document.path.rsplit("/", 1)[-1], first, last, embed, file.path_arch)


def _is_licence(comment: str) -> bool:
    return "opyright" in comment or "SPDX-License" in comment or "under the Apache License" in comment


def _level(file: _File, units: list[_Unit]) -> Iterator[Chunk]:
    """Chunks of the declarations of one scope."""
    groups, rest = _groups(file, units)
    for members in groups:
        yield _group(file, members)
    packed: list[_Unit] = []
    for unit in rest:
        if packed and not _goes_with(file, packed, unit):
            yield _leaf(file, packed)
            packed = []
        if unit.lines > LEAF_LINES:
            if packed:
                yield _leaf(file, packed)
                packed = []
            yield from _large(file, unit)
        else:
            packed.append(unit)
    if packed:
        yield _leaf(file, packed)


def _goes_with(file: _File, packed: Sequence[_Unit], unit: _Unit) -> bool:
    """Small neighbours share a chunk, except that a documented function or type of a namespace begins its own."""
    if unit.last - packed[0].first >= PACK_LINES:
        return False
    ours, theirs = packed[0].declaration, unit.declaration
    if ours.scope != theirs.scope and unit.lines >= 6:
        return False
    stands_alone = theirs.kind in ("function", "type") and theirs.scope not in file.classes
    return not (stands_alone and theirs.name != ours.name and _documented(file, unit))


def _documented(file: _File, unit: _Unit) -> bool:
    comment = _plain(file.text[unit.declaration.begin : unit.declaration.code])
    return len(re.findall(r"[A-Za-z]{2,}", comment)) >= DOCUMENTED_WORDS


def _groups(file: _File, units: Sequence[_Unit]) -> tuple[list[list[_Unit]], list[_Unit]]:
    """Near-identical declarations (one name but for its numbers) and what is left."""
    by_key: dict[tuple[object, ...], list[_Unit]] = {}
    for unit in units:
        declared = unit.declaration
        by_key.setdefault((declared.kind, declared.scope, group_key(declared.name)), []).append(unit)
    groups, grouped = [], set()
    for candidates in by_key.values():
        if len(candidates) < GROUP_MIN:
            continue
        while len(candidates) >= GROUP_MIN:
            model = _words(file, candidates[0])
            alike = [c for c in candidates if _similar(model, _words(file, c))]
            if len(alike) >= GROUP_MIN and sum(c.lines for c in alike) > PACK_LINES:
                groups.append(alike)
                grouped |= {id(c) for c in alike}
            candidates = [c for c in candidates[1:] if c not in alike]
    return groups, [u for u in units if id(u) not in grouped]


def group_key(name: str) -> str:
    """Sizes left out, types kept: SM90_64x128x16_F32F16F16_SS → SM90_#_F32F16F16_SS (SM90's digits follow a letter)."""
    return _DIMS.sub("#", name)


def _words(file: _File, unit: _Unit) -> frozenset[str]:
    declared = unit.declaration
    return frozenset(_NUMBERS.sub("#", word) for word in re.findall(r"\w+", file.masked[declared.code : declared.end]))


def _similar(a: frozenset[str], b: frozenset[str]) -> bool:
    return len(a & b) >= ALIKE * len(a | b)


def _group(file: _File, members: Sequence[_Unit]) -> Chunk:
    first = members[0]
    names = list(dict.fromkeys(member.declaration.name for member in members))
    title = first.declaration.qualified if len(names) == 1 else f"{first.declaration.qualified} … {names[-1]}"
    said = _embed(file, [first], title)
    symbols = tuple(s for member in members for s in _symbols(file, member))
    return Chunk(
        "group",
        title,
        first.first,
        first.last,
        said,
        _arch(file, members),
        symbols,
        tuple((member.first, member.last) for member in members[1:]),
    )


def _leaf(file: _File, units: Sequence[_Unit]) -> Chunk:
    named = [unit for unit in units if unit.declaration.kind != "other"] or units
    names = list(dict.fromkeys(unit.declaration.qualified for unit in named))
    title = names[0] if len(names) == 1 else ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    symbols = tuple(s for unit in units for s in _symbols(file, unit))
    first, last = units[0].first, units[-1].last
    said = _embed(file, units, title) if _means_something(file, units) else ""
    return Chunk("declaration", title, first, last, said, _arch(file, units), symbols)


def _means_something(file: _File, units: Sequence[_Unit]) -> bool:
    """Members without a comment have no vector: there are thousands of ``load(Fragment &)``, found by name."""
    return units[0].declaration.scope not in file.classes or any(_documented(file, unit) for unit in units)


def _large(file: _File, unit: _Unit) -> Iterator[Chunk]:
    declared = unit.declaration
    if declared.kind == "type" and declared.body is not None:
        scope = (*declared.scope, declared.name)
        members = file.units(scan(file.text, file.masked, declared.body, declared.end - 1, scope))
        members = [m for m in members if m.last <= unit.last and m.lines < unit.lines]
        if len(members) > 1:
            file.classes.add(scope)
            yield from _class(file, unit, members)
            return
    yield from _windows(file, unit)


def _class(file: _File, unit: _Unit, members: list[_Unit]) -> Iterator[Chunk]:
    """The head with the small members that come first, then the rest as a scope of its own."""
    kept, last = 0, file.line(unit.declaration.body or unit.declaration.end)
    for member in members:
        large = member.lines > (SMALL_MEMBER if member.declaration.kind == "function" else HEAD_LINES)
        if member.last - unit.first >= HEAD_LINES or large:
            break
        kept, last = kept + 1, member.last
    own = Symbol(unit.declaration.name, unit.declaration.qualified, unit.first, max(last, unit.first))
    arch = _arch(file, [unit])
    inner = tuple(s for member in members[:kept] for s in _symbols(file, member))
    head = Chunk(
        "declaration", own.qualified, unit.first, own.last, _embed(file, [unit], own.qualified), arch, (own, *inner)
    )
    yield head
    for chunk in _level(file, members[kept:]):
        yield chunk if chunk.arch else replace(chunk, arch=arch)


def _windows(file: _File, unit: _Unit) -> Iterator[Chunk]:
    """A long body in pieces; pieces that only repeat the one before are joined to it."""
    declared = unit.declaration
    pieces: list[list[int]] = []
    previous: frozenset[str] = frozenset()
    for first, last in _pieces(file, unit.first, unit.last):
        words = frozenset(_NUMBERS.sub("#", w) for w in re.findall(r"\w+", file.masked_slice(first, last)))
        if pieces and _similar(previous, words):
            pieces[-1][1] = last
        else:
            pieces.append([first, last])
            previous = words
    arch = _arch(file, [unit])
    (first, last), *rest = pieces
    begins = Symbol(declared.name, declared.qualified, first, min(last, first + LEAF_LINES))
    said = _embed_text(file, declared.qualified, file.slice(first, min(last, first + WINDOW_LINES)))
    yield Chunk("declaration", declared.qualified, first, last, said, arch, (begins,))
    for first, last in rest:
        yield Chunk("body", declared.qualified, first, last, "", arch)


def _pieces(file: _File, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Cut at blank lines, each piece between half a window and a whole one."""
    while last - first + 1 > WINDOW_LINES:
        half = first + WINDOW_LINES // 2
        blank = [n for n in range(half, first + WINDOW_LINES) if not file.document.lines[n - 1].strip()]
        end = blank[-1] if blank else first + WINDOW_LINES - 1
        yield first, end
        first = end + 1
    if first <= last:
        yield first, last


def _symbols(file: _File, unit: _Unit) -> Iterator[Symbol]:
    """The unit's own name, a specialisation's argument, and what a small class declares inside."""
    declared = unit.declaration
    arch = _own_arch(file, unit)
    if declared.kind != "other" and not _constructs(declared):
        member = declared.scope in file.classes
        yield Symbol(declared.name, declared.qualified, unit.first, unit.last, declared.alias_of, arch, member)
    if declared.kind == "type" and declared.body is not None and unit.lines <= LEAF_LINES:
        scope = (*declared.scope, declared.name)
        for inner in file.units(scan(file.text, file.masked, declared.body, declared.end - 1, scope)):
            d = inner.declaration
            if d.kind in ("type", "function", "alias") and inner.last <= unit.last and not _constructs(d):
                yield Symbol(d.name, d.qualified, inner.first, inner.last, None, arch, member=True)


def _constructs(declared: Declaration) -> bool:
    """Constructors and destructors: who asks for the name wants the class."""
    return bool(declared.scope) and declared.name.strip("~") == declared.scope[-1].split("<")[0]


def _own_arch(file: _File, unit: _Unit) -> tuple[str, ...]:
    """From the PTX annotations, else from the head of the declaration, else from the path."""
    declared = unit.declaration
    if annotated := in_ptx(file.text[declared.begin : declared.code]):
        return annotated
    return in_name(declared.head[:2000]) or in_name(" ".join(declared.scope)) or file.path_arch


def _arch(file: _File, units: Sequence[_Unit]) -> tuple[str, ...]:
    """The union; one neutral declaration makes the whole chunk neutral."""
    tags = [_own_arch(file, unit) for unit in units]
    return () if not all(tags) else ordered({tag for own in tags for tag in own})


# --- what the vector is made of --------------------------------------------------------------------------------------


def _embed(file: _File, units: Sequence[_Unit], title: str) -> str:
    """Names and comments first, then the signatures; code only where nobody wrote a comment. The path comes last: in
    front it made all passages of a folder alike (questions in words, vectors alone: recall@5 0.62 against 0.69)."""
    said = " ".join(_plain(file.text[u.declaration.begin : u.declaration.code]) for u in units)
    heads = _squeezed(spaced(" ".join(u.declaration.head for u in units)))
    bodies = " ".join(file.text[u.declaration.body : u.declaration.end] for u in units if u.declaration.body)
    inside = " ".join(_plain(comment) for comment in COMMENTS.findall(bodies[:6000]))
    if any(_documented(file, unit) for unit in units):
        rest = f"{inside[:120]} {heads[:120]}"
    else:
        code = _squeezed(spaced(COMMENTS.sub(" ", bodies[:3000])))
        rest = f"{inside[:160]} {heads[:160]} {code[:120]}"
    return f"{_names(title)}: {said[:SAID_CHARS]} {rest}"[:EMBED_CHARS] + f" {_path_words(file.document.path)}"


def _embed_text(file: _File, title: str, text: str) -> str:
    """The beginning of a long body."""
    said = " ".join(_plain(comment) for comment in COMMENTS.findall(text))
    code = _squeezed(spaced(COMMENTS.sub(" ", text)))
    return f"{_names(title)}: {said[:SAID_CHARS]} {code[:120]} {_path_words(file.document.path)}"


def _names(title: str) -> str:
    """The last parts of the first few names, as words, and what their abbreviations mean."""
    names = title.replace(" … ", ", ").split(", ")[:6]
    last = [name.rsplit("::", 1)[-1] for name in names]
    meaning = spelled_out(" ".join(last))
    return ", ".join(map(spaced, last)) + (f" ({meaning})" if meaning else "")


def _path_words(path: str) -> str:
    """The last folders and the file, as words."""
    kept = [part for part in path.split("/") if part not in ("include", "source", "src", "instructions", "generated")]
    return spaced(" ".join(kept[-3:]).rsplit(".", 1)[0].replace("_", " "))


def _plain(comment: str) -> str:
    return _squeezed(_COMMENT.sub(" ", comment))


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


__all__ = ["cut", "group_key", "name_of"]
