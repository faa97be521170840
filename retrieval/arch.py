"""Architecture tags (``sm80``, ``sm90``, ``sm100`` …): read off paths, names and PTX annotations.

A tag says what a passage is *written for*. A passage without tags is for any architecture. Code for an older
architecture mostly runs on newer ones, yet it is not tagged with them: a filter for sm90 answers with Hopper's own
ways and with what is neutral. The PTX headers state the first architecture that has an instruction ("PTX ISA 80,
SM_90"): those passages get every later architecture too, except for "SM_90a", which holds for that one alone.
"""

from __future__ import annotations

import re

#: Architectures in NVIDIA's order; what a "from SM_90 on" is expanded to.
KNOWN = ("sm70", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm101", "sm103", "sm110", "sm120", "sm121")
_CODENAMES = {
    "volta": "sm70",
    "turing": "sm75",
    "ampere": "sm80",
    "ada": "sm89",
    "hopper": "sm90",
    "blackwell": "sm100",
}
_NAMED = re.compile(r"(?<![A-Za-z])[sS][mM]_?(\d{2,3})(?=[^0-9]|$)|(?<=[a-z])Sm(\d{2,3})(?![0-9])")
_CODENAME = re.compile(r"(?<![A-Za-z])(" + "|".join(_CODENAMES) + r")(?![A-Za-z])", re.IGNORECASE)
_PTX = re.compile(r"PTX ISA (\d+)((?:,\s*(?://\s*)?SM_\d+[a-z]?)+)")
_WRITTEN = re.compile(r"(?:sm[_-]?)?(\d{2,3})[a-f]?", re.IGNORECASE)


def parse_arch(text: str) -> str:
    """``sm90`` for sm_90, SM90a, 90, 9.0 or hopper. Raises ValueError with one sentence."""
    cleaned = text.strip().lower()
    if cleaned in _CODENAMES:
        return _CODENAMES[cleaned]
    found = _WRITTEN.fullmatch(cleaned.replace(".", ""))
    if found is None:
        raise ValueError(f"'{text}' is not an architecture: write sm80, sm90, sm100 or hopper")
    return f"sm{found[1]}"


def in_name(text: str) -> tuple[str, ...]:
    """Architectures that a path or a declaration's head names: ``SM90_TMA_LOAD``, ``arch::Sm80``, ``57_hopper…``."""
    found = {f"sm{a or b}" for a, b in _NAMED.findall(text)}
    found |= {_CODENAMES[word.lower()] for word in _CODENAME.findall(text)}
    return ordered(found & set(KNOWN) | {a for a in found if a in ("sm50", "sm60", "sm61", "sm72")})


def in_ptx(text: str) -> tuple[str, ...]:
    """Architectures that PTX annotations in comments allow."""
    found: set[str] = set()
    for _, names in _PTX.findall(text):
        for number, exact in re.findall(r"SM_(\d+)([a-z]?)", names):
            found |= {f"sm{number}"} if exact else {a for a in KNOWN if int(a[2:]) >= int(number)}
    if found >= set(KNOWN):
        return ()  # every one of them: neutral
    return ordered(found)


def ordered(tags: set[str]) -> tuple[str, ...]:
    return tuple(sorted(tags, key=lambda tag: int(tag[2:])))
