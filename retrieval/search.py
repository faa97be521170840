"""Hybrid search: vectors, words and exact identifiers, fused by reciprocal rank; the declaration of a name wins."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from retrieval import layout
from retrieval.arch import parse_arch
from retrieval.cpp_chunks import group_key
from retrieval.errors import RetrievalError
from retrieval.index import Index
from retrieval.lexical import ChunkRow, SymbolRow
from retrieval.passages import Passage, Ranking, SearchResult
from retrieval.query import Question, parse

MAX_K = 50
CANDIDATES = 100  # per ranking
RRF = 12  # reciprocal rank fusion: 1 / (RRF + rank)
WEIGHTS = {"vectors": 1.0, "words": 1.0, "exact": 0.7}
#: Added for declaring an asked-for name; even the least is above any sum of reciprocal ranks.
DECLARED, MEMBER, ALIASED = 1.0, 0.7, 0.4
MAX_DECLARED = 3  # of the answers to a sentence; a bare identifier may fill them all
ALIKE = 0.85  # Jaccard similarity of words, numbers left out, from which a passage repeats another
ALIKE_NAMESAKE = 0.4  # the same between declarations of one name, for a question in words
PER_FILE = 2  # passages of one file, for a question in words
LOOKED_AT = 12  # times as many candidates as passages
MAX_ALSO = 8  # citations of repetitions
PASSAGE_LINES = 80
MAX_NAMES = 40  # of the names that a passage declares
PASSAGE_CHARS = 6000


def search_docs(query: str, arch: str | None = None, k: int = 5, *, folder: Path | None = None) -> list[Passage]:
    """The tool for the policy: the best passages of the index in use, to be shown as quotations
    (``retrieval.quoting``). Raises RetrievalError with one sentence that can be shown to the model."""
    folder = folder or layout.default_folder()
    generation = layout.current(folder)
    return list(search(_opened(folder, generation), query, k=k, arch=arch).passages)


@lru_cache(maxsize=2)
def _opened(folder: Path, generation: Path | None) -> Index:
    """Kept open between questions; a rebuild makes another generation and so another entry."""
    return Index.open(folder)


def search(
    index: Index, query: str, *, k: int = 5, arch: str | None = None, ranking: Ranking = "hybrid"
) -> SearchResult:
    """Raises RetrievalError for an empty question, a bad ``k``, or an architecture that the index does not have."""
    started = time.monotonic()
    if not 1 <= k <= MAX_K:
        raise RetrievalError(f"between 1 and {MAX_K} passages can be asked for, not {k}")
    tag = _known_arch(index, arch)
    question = parse(query)
    scores: dict[int, float] = {}
    if ranking != "lexical":
        _fuse(scores, [number for number, _ in index.nearest(question.text, CANDIDATES, tag)], WEIGHTS["vectors"])
    named: dict[int, list[SymbolRow]] = {}
    hidden = 0
    if ranking != "vectors":
        _fuse(scores, index.reader.word_hits(question.words, CANDIDATES, tag), WEIGHTS["words"])
        _fuse(scores, index.reader.exact_hits(_names(index, question), CANDIDATES, tag), WEIGHTS["exact"])
        named, hidden = _declaring(index, question, tag, scores)
    passages = _distinct(index, question, sorted(scores, key=lambda i: (-scores[i], i)), scores, named, k)
    return SearchResult(
        query=question.text,
        arch=tag,
        ranking=ranking,
        passages=passages,
        hidden=hidden,
        elapsed_ms=(time.monotonic() - started) * 1e3,
    )


def _names(index: Index, question: Question) -> list[str]:
    """The identifiers without words that are only written in capitals: in a sentence COPY is a name where something is
    declared as COPY, and otherwise would find every chunk with a name that begins so."""
    return [
        name
        for name in question.identifiers
        if question.bare
        or not (name.isalpha() and name.isupper())
        or any(symbol.name == name for symbol in index.reader.symbols(name))
    ]


def _known_arch(index: Index, arch: str | None) -> str | None:
    if not arch:
        return None
    try:
        tag = parse_arch(arch)
    except ValueError as error:
        raise RetrievalError(str(error)) from error
    if tag not in (known := index.reader.arches()):
        raise RetrievalError(f"nothing in the index is written for {tag}; it knows {', '.join(known) or 'none'}")
    return tag


def _fuse(scores: dict[int, float], ranked: Sequence[int], weight: float) -> None:
    for rank, number in enumerate(ranked, 1):
        scores[number] = scores.get(number, 0.0) + weight / (RRF + rank)


def _declaring(
    index: Index, question: Question, tag: str | None, scores: dict[int, float]
) -> tuple[dict[int, list[SymbolRow]], int]:
    """Chunks that declare an asked-for name, lifted above all others, and how many the architecture filter hides."""
    lifted: dict[int, float] = {}
    named: dict[int, list[SymbolRow]] = {}
    hidden: set[int] = set()
    for identifier in question.identifiers:
        found = index.reader.symbols(identifier)
        # exact case comes first; in a sentence GEMM is a word and not the function gemm
        found = [s for s in found if s.name == found[0].name and (question.bare or s.name in identifier)]
        worth = {id(s): MEMBER if s.member and "::" not in identifier else DECLARED for s in found}
        for target in dict.fromkeys(s.alias_of for s in found if s.alias_of and question.bare):
            for symbol in index.reader.symbols(target):
                if symbol not in found:
                    worth[id(symbol)] = ALIASED
                    found.append(symbol)
        for symbol in found:
            if tag and symbol.arch and tag not in symbol.arch:
                hidden.add(symbol.chunk)
                continue
            named.setdefault(symbol.chunk, []).append(symbol)
            lifted[symbol.chunk] = max(lifted.get(symbol.chunk, 0.0), worth[id(symbol)])
    best = sorted(lifted, key=lambda i: (-lifted[i] - scores.get(i, 0.0), i))
    for number in best if question.bare else best[:MAX_DECLARED]:
        scores[number] = scores.get(number, 0.0) + lifted[number]
    return named, len(hidden - set(named))


def _distinct(
    index: Index,
    question: Question,
    ranked: Sequence[int],
    scores: dict[int, float],
    named: dict[int, list[SymbolRow]],
    k: int,
) -> tuple[Passage, ...]:
    """The first ``k`` that do not repeat each other; those left out are cited by the one they repeat. A question in
    words gets its answers from several files: more of one file come only when there is nothing else."""
    considered = ranked[: LOOKED_AT * k]
    rows = index.reader.chunks(considered)
    chosen: list[tuple[Passage, frozenset[str]]] = []
    later: list[Passage] = []
    per_file: Counter[str] = Counter()
    for number in considered:
        if len(chosen) == k:
            break
        passage = _passage(index, rows[number], scores[number], named.get(number, ()))
        words = _word_set(passage.text)
        for at, (other, seen) in enumerate(chosen):
            if _repeats(passage, words, other, seen, question.bare):
                also = (*other.also_at, passage.citation)[:MAX_ALSO]
                chosen[at] = (other.model_copy(update={"also_at": also}), seen)
                break
        else:
            if not question.bare and per_file[passage.path] >= PER_FILE:
                later.append(passage)
                continue
            per_file[passage.path] += 1
            chosen.append((passage, words))
    return tuple([passage for passage, _ in chosen] + later[: k - len(chosen)])


def _repeats(passage: Passage, words: frozenset[str], other: Passage, seen: frozenset[str], bare: bool) -> bool:
    """Nearly the same words under the same name: test_wait is no repetition of try_wait. A question in words has no
    use for a second overload or for the same member of another kernel either."""
    if passage.text == other.text:
        return True
    alike = len(words & seen) / max(len(words | seen), 1)
    if "prose" in (passage.kind, other.kind):
        return passage.kind == other.kind and alike >= ALIKE
    if _name_key(passage) != _name_key(other):
        return False
    return alike >= ALIKE or (not bare and (passage.path == other.path or alike >= ALIKE_NAMESAKE))


def _name_key(passage: Passage) -> str:
    return group_key(passage.title.split(" … ")[0].rsplit("::", 1)[-1])


def _word_set(text: str) -> frozenset[str]:
    """Numbers left out, but not those of types: F16 is not F32."""
    return frozenset(re.sub(r"(?<![A-Z])\d+", "#", word) for word in re.findall(r"\w+", text))


def _passage(index: Index, row: ChunkRow, score: float, named: Iterable[SymbolRow]) -> Passage:
    """The chunk's lines; of a group, or a chunk too long to show, those of the asked-for member."""
    found = index.reader.document(row.document)
    first, last, title, arch = row.first, row.last, row.title, row.arch
    names = sorted(named, key=lambda s: (s.last - s.first, s.first))
    asked = next(iter(names), None)
    if asked is not None and (row.members > 1 or asked.first - row.first > PASSAGE_LINES // 2):
        first, last, title, arch = asked.first, asked.last, asked.qualified, asked.arch or row.arch
    last = min(last, first + PASSAGE_LINES - 1)
    while last > first and len(found.document.text(first, last)) > PASSAGE_CHARS:
        last -= 1
    cited = found.document.cited(first, last)
    shown = [s for s in index.reader.declared_in(row.id) if first <= s.first <= last]
    return Passage(
        citation=f"{found.document.path}:{cited[0]}-{cited[1]}",
        path=found.document.path,
        first_line=cited[0],
        last_line=cited[1],
        title=title,
        kind=row.kind,
        text=found.document.text(first, last)[:PASSAGE_CHARS],
        arch=arch,
        source=found.source.name,
        version=found.source.version,
        licence=found.licence,
        score=round(score, 6),
        declares=tuple(dict.fromkeys(s.name for s in (*names, *shown)))[:MAX_NAMES],
        stands_for=row.members,
    )
