"""What a question asks for: identifiers to be found as they are written, and words."""

from __future__ import annotations

import re
from dataclasses import dataclass

from retrieval.errors import RetrievalError
from retrieval.glossary import other_names
from retrieval.tokens import chains, looks_exact, spaced

MAX_CHARS = 2000
MAX_WORDS = 40
_COMMON = """a an and are as at be been but by can could did do does doing for from get gets give had has have how i if
    in into is it its like me my of on one or our out so some such than that the their them then there these they this
    those to too up us use used uses using was way we were what when where which who why will with would you your should
    need about between does't e g eg ie vs via"""
_STOP_WORDS = frozenset(_COMMON.split())
#: MMA_Traits<SM90_…>: specialisations are indexed under the name with their first argument.
_SPECIALISED = re.compile(r"([A-Za-z_]\w*)\s*<\s*([A-Za-z_][\w:]*)")
_WORD = re.compile(r"[A-Za-z0-9]+")


@dataclass(frozen=True, slots=True)
class Question:
    """``bare`` means that the question is nothing but identifiers: what declares them is the answer."""

    text: str
    identifiers: tuple[str, ...]
    words: tuple[str, ...]
    bare: bool


def parse(text: str) -> Question:
    """Raises RetrievalError for an empty question."""
    cleaned = re.sub(r"[\s\x00-\x1f]+", " ", text).strip()[:MAX_CHARS]
    if not re.search(r"\w", cleaned):
        raise RetrievalError("the question is empty: ask for a name or say what you look for")
    # `foo<A, B>(x)` asks for foo; what is inside brackets is asked for too, but as words
    tokens = [token for token in chains(cleaned) if len(token) > 1]
    specialised = [f"{name}<{first}>" for name, first in _SPECIALISED.findall(cleaned)]
    single = len(cleaned.split()) == 1
    identifiers = [token for token in tokens if looks_exact(token)] or (tokens[:1] if single else [])
    wholes = [token for token in identifiers if not any(token != t and token in re.split(r"::|\.", t) for t in tokens)]
    words = [word.lower() for word in (*_WORD.findall(cleaned.replace("_", " ")), *_WORD.findall(spaced(cleaned)))]
    kept = [word for word in dict.fromkeys(words) if word not in _STOP_WORDS] or list(dict.fromkeys(words))
    rest = cleaned
    for identifier in wholes:
        rest = rest.replace(identifier, " ")
    bare = bool(wholes) and not re.search(r"[A-Za-z]{2,}", re.sub(r"<.*?>|\(.*?\)", " ", rest))
    if not bare:
        kept += [word for word in other_names(spaced(cleaned)) if word not in kept]
    return Question(cleaned, tuple(dict.fromkeys([*specialised, *wholes])), tuple(kept[:MAX_WORDS]), bare)
