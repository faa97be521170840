"""Measures retrieval on question → passage pairs: ``python -m retrieval.evaluate`` or ``agent index evaluate``.

A question counts as answered at rank r if the r-th passage lies in a file that it names and declares the symbol, or
stands under the heading, that it names. The same questions go through vectors alone and the lexical side alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import yaml
from pydantic import Field, ValidationError

from retrieval import layout
from retrieval.errors import RetrievalError
from retrieval.index import Index
from retrieval.passages import Passage, Ranking
from retrieval.search import search
from tools.records import Record

QUESTIONS = Path(__file__).with_name("questions.yaml")
RANKINGS: tuple[Ranking, ...] = get_args(Ranking)
K = 5
#: What the set must reach, hybrid, recall@5.
GOAL_ALL, GOAL_EXACT = 0.85, 0.95


class Target(Record):
    """``file`` is the end of a path. Exactly one of ``symbol`` and ``heading``; the heading of a file's own comment is
    its name."""

    file: str
    symbol: str | None = None
    heading: str | None = None


class QuestionCase(Record):
    """``find[0]`` is what the question was written from: without its file the question is skipped."""

    ask: str
    kind: Literal["exact", "how"]
    corpus: Literal["cutlass", "ptx", "docs"]
    split: Literal["tune", "held"]
    arch: str | None = None
    find: tuple[Target, ...] = Field(min_length=1)


class Score(Record):
    """Of one group of questions under one ranking. ``mrr``: mean of 1/rank, 0 where not among the first five."""

    group: str
    ranking: Ranking
    questions: int
    recall_at_1: float
    recall_at_5: float
    mrr: float


class Miss(Record):
    ask: str
    ranking: Ranking
    found: tuple[str, ...]


class Evaluation(Record):
    """``skipped``: questions whose files are not in the index. Times are of hybrid searches, in milliseconds."""

    scores: tuple[Score, ...]
    skipped: int
    misses: tuple[Miss, ...]
    median_ms: float
    worst_ms: float

    @property
    def good_enough(self) -> bool:
        wanted = {"all": GOAL_ALL, "exact": GOAL_EXACT}
        hybrid = {score.group: score.recall_at_5 for score in self.scores if score.ranking == "hybrid"}
        return all(hybrid.get(group, 0.0) >= goal for group, goal in wanted.items())


def load_questions(path: Path = QUESTIONS) -> list[QuestionCase]:
    """Raises RetrievalError if the file is no list of questions."""
    try:
        cases = [QuestionCase.model_validate(entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]
    except (OSError, yaml.YAMLError, TypeError, ValidationError) as error:
        raise RetrievalError(f"{path} is no list of questions: {str(error).splitlines()[0]}") from error
    if not cases:
        raise RetrievalError(f"{path} holds no question")
    return cases


def evaluate(index: Index, cases: Sequence[QuestionCase]) -> Evaluation:
    """Every case under every ranking; the groups are all, each kind, corpus and split."""
    paths = index.reader.paths()
    usable = [case for case in cases if any(path.endswith(case.find[0].file) for path in paths)]
    ranks: dict[Ranking, list[int]] = {}
    misses: list[Miss] = []
    took: list[float] = []
    for ranking in RANKINGS:
        ranks[ranking] = []
        for case in usable:
            result = search(index, case.ask, k=K, arch=case.arch, ranking=ranking)
            rank = next((n for n, p in enumerate(result.passages, 1) if _answers(p, case)), 0)
            ranks[ranking].append(rank)
            if ranking == "hybrid":
                took.append(result.elapsed_ms)
            if not rank:
                found = tuple(f"{p.citation} {p.title}" for p in result.passages)
                misses.append(Miss(ask=case.ask, ranking=ranking, found=found))
    scores = [
        _score(name, ranking, [ranks[ranking][at] for at in members])
        for name, members in _groups(usable).items()
        for ranking in RANKINGS
    ]
    took.sort()
    return Evaluation(
        scores=tuple(scores),
        skipped=len(cases) - len(usable),
        misses=tuple(misses),
        median_ms=took[len(took) // 2] if took else 0.0,
        worst_ms=took[-1] if took else 0.0,
    )


def _groups(cases: Sequence[QuestionCase]) -> dict[str, list[int]]:
    """Name of a group → the positions of its questions."""
    groups: dict[str, list[int]] = {}
    for label in ("", "{0.kind}", "corpus {0.corpus}", "split {0.split}"):
        for at, case in enumerate(cases):
            groups.setdefault(label.format(case) or "all", []).append(at)
    return groups


def _answers(passage: Passage, case: QuestionCase) -> bool:
    return any(passage.path.endswith(target.file) and _holds(passage, target) for target in case.find)


def _holds(passage: Passage, target: Target) -> bool:
    if target.heading is not None:
        return target.heading.lower() in [heading.lower() for heading in passage.title.split(" > ")]
    return target.symbol in passage.declares


def _score(group: str, ranking: Ranking, ranks: Sequence[int]) -> Score:
    count = max(len(ranks), 1)
    return Score(
        group=group,
        ranking=ranking,
        questions=len(ranks),
        recall_at_1=sum(rank == 1 for rank in ranks) / count,
        recall_at_5=sum(0 < rank <= K for rank in ranks) / count,
        mrr=sum(1 / rank for rank in ranks if rank) / count,
    )


def table(found: Evaluation) -> str:
    """Recall@5 (recall@1, MRR) by group and ranking, as text."""
    lines = [f"{'':<16}{'questions':>10}" + "".join(f"{ranking:>24}" for ranking in RANKINGS)]
    for group in dict.fromkeys(score.group for score in found.scores):
        row = {score.ranking: score for score in found.scores if score.group == group}
        cells = (f"{s.recall_at_5:.3f} ({s.recall_at_1:.2f}, {s.mrr:.2f})" for s in (row[r] for r in RANKINGS))
        lines.append(f"{group:<16}{row['hybrid'].questions:>10}" + "".join(f"{cell:>24}" for cell in cells))
    lines.append("recall@5 (recall@1, mean reciprocal rank)")
    if found.skipped:
        lines.append(f"{found.skipped} questions skipped: their documents are not in this index")
    lines.append(f"hybrid: {found.median_ms:.0f} ms median, {found.worst_ms:.0f} ms at worst")
    verdict = "reached" if found.good_enough else "NOT reached"
    lines.append(f"goal (recall@5 of {GOAL_ALL} overall, {GOAL_EXACT} for exact identifiers): {verdict}")
    return "\n".join(lines)


def missed(found: Evaluation) -> str:
    """What hybrid search did not find, and what it answered instead."""
    misses = [miss for miss in found.misses if miss.ranking == "hybrid"]
    return "\n".join("\n    ".join([miss.ask, *miss.found]) for miss in misses)


def main(argv: Sequence[str]) -> int:
    """``python -m retrieval.evaluate [--misses] [INDEX FOLDER]``. Exit 0 if the goal is reached, 1 otherwise."""
    folders = [argument for argument in argv if not argument.startswith("-")]
    try:
        started = time.monotonic()
        with Index.open(Path(folders[0]) if folders else layout.default_folder()) as index:
            opened = time.monotonic() - started
            found = evaluate(index, load_questions())
    except RetrievalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(found))
    print(f"opened in {opened:.2f} s")
    if "--misses" in argv:
        print(missed(found))
    return 0 if found.good_enough else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
