"""Reads a file as text to index, or says in one phrase why not."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

CODE_SUFFIXES = frozenset({".h", ".hpp", ".hxx", ".hh", ".cuh", ".cu", ".inl", ".cpp", ".cc", ".cxx"})
PROSE_SUFFIXES = frozenset({".md", ".markdown", ".rst", ".txt", ".html", ".htm", ".ipynb"})
SUFFIXES = CODE_SUFFIXES | PROSE_SUFFIXES
MAX_BYTES = 16 << 20  # the largest header of CUTLASS has 3 MB
MAX_LINE = 20_000  # characters; longer lines are written by programs
MAX_BAD_SHARE = 0.01  # of bytes that are not UTF-8

#: Not documentation: licences would answer every question, build files none.
_IGNORED_NAMES = re.compile(
    r"^(?:LICENSE|LICENCE|COPYING|NOTICE|CMakeLists|requirements)\b.*\.(?:txt|md|rst)$", re.IGNORECASE
)
_IGNORED_FOLDERS = frozenset({"__pycache__", "node_modules", "build", "_build", "dist", "site-packages"})


class Unreadable(ValueError):
    """The message is the reason, as in "binary, not text"."""


@dataclass(frozen=True, slots=True)
class FileText:
    text: str
    sha256: str


def list_files(root: Path) -> list[str]:
    """Paths below ``root`` that may be documents, sorted, with ``/``. Hidden files, build folders and links that
    leave ``root`` are not looked at."""
    found: list[str] = []
    base = root.resolve()
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in _IGNORED_FOLDERS)
        for name in files:
            path = Path(folder, name)
            if name.startswith(".") or path.suffix.lower() not in SUFFIXES or _IGNORED_NAMES.match(name):
                continue
            if path.is_symlink() and not path.resolve().is_relative_to(base):
                continue
            found.append(path.relative_to(root).as_posix())
    return sorted(found)


def read_file(path: Path) -> FileText:
    """Raises Unreadable with the reason."""
    try:
        if not path.is_file():
            raise Unreadable("not a regular file")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise Unreadable(f"{size / 2**20:.0f} MB; more than {MAX_BYTES >> 20} MB is not read")
        data = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror or error}") from error
    text = _decode(data)
    if path.suffix.lower() not in (".html", ".htm", ".ipynb"):
        longest = max(map(len, text.splitlines()), default=0)
        if longest > MAX_LINE:
            raise Unreadable(f"has a line of {longest} characters; more than {MAX_LINE} is not written by people")
    return FileText(text, hashlib.sha256(data).hexdigest())


def _decode(data: bytes) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        try:
            return data.decode("utf-16")
        except UnicodeDecodeError as error:
            raise Unreadable("begins like UTF-16, but is not") from error
    if b"\0" in data:
        raise Unreadable("binary, not text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("utf-8-sig", errors="replace")
        if text.count("\ufffd") > MAX_BAD_SHARE * len(data):
            raise Unreadable("not UTF-8 text") from None
        return text
