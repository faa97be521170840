"""Where documents come from: two packages, and folders or git checkouts that the user added."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from retrieval.errors import RetrievalError
from retrieval.passages import SourceInfo
from retrieval.reading import list_files
from tools.revision import commit

UNKNOWN_LICENCE = "unknown"
_SPDX = re.compile(r"SPDX-License-Identifier:\s*([A-Za-z0-9.+-]+(?: WITH [A-Za-z0-9.-]+)?)")
_LICENCE_FILES = re.compile(r"^(?:LICEN[SC]E|COPYING)(?:\.(?:txt|md|rst))?$", re.IGNORECASE)
_LICENCES = (  # a phrase of the text, and its SPDX name
    ("Apache License", "Apache-2.0"),
    ("Neither the name of", "BSD-3-Clause"),
    ("Redistribution and use in source and binary forms", "BSD-2-Clause"),
    ("Permission is hereby granted, free of charge", "MIT"),
    ("GNU LESSER GENERAL PUBLIC LICENSE", "LGPL"),
    ("GNU GENERAL PUBLIC LICENSE", "GPL"),
)


@dataclass(frozen=True, slots=True)
class _Package:
    """``marker`` is a file that every version carries; ``above`` how many folders up from it the root lies;
    ``folders`` of the root are indexed."""

    name: str
    marker: str
    above: int
    folders: tuple[str, ...]
    licence: str


#: Of CUTLASS, the instance tables of tools/library and tools/profiler are left out: they document nothing.
PACKAGES = (
    _Package(
        "nvidia-cutlass",
        "source/include/cute/tensor.hpp",
        3,
        ("include", "examples", "tools/util/include"),
        "BSD-3-Clause",
    ),
    _Package("nvidia-cuda-cccl", "cuda/__ptx/ptx_dot_variants.h", 3, ("cuda/__ptx",), "Apache-2.0 WITH LLVM-exception"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """``files`` are relative to the root of ``info``."""

    info: SourceInfo
    files: tuple[str, ...]


def installed_packages() -> list[Source]:
    """The packages of this environment that are indexed; those not installed are left out."""
    found = []
    for package in PACKAGES:
        try:
            distribution = metadata.distribution(package.name)
        except metadata.PackageNotFoundError:
            continue
        marker = next((f for f in distribution.files or () if str(f).endswith(package.marker)), None)
        if marker is None:
            continue
        root = Path(str(distribution.locate_file(marker))).parents[package.above - 1]
        files = [f"{folder}/{name}" for folder in package.folders for name in list_files(root / folder)]
        info = SourceInfo(
            name=package.name,
            kind="package",
            root=str(root),
            version=distribution.version,
            licence=package.licence,
        )
        found.append(Source(info, tuple(files)))
    return found


def added_folder(folder: Path, taken: set[str]) -> Source:
    """A folder or git checkout of the user. Raises RetrievalError if there is nothing to read. ``taken`` are the
    prefixes of other sources: citations begin with the folder's name, made unique."""
    if not folder.exists():
        raise RetrievalError(
            f"{folder} does not exist: add a folder of documents, or remove it from the index with --remove"
        )
    if not folder.is_dir():
        raise RetrievalError(f"{folder} is a file: add the folder that holds it")
    root = folder.resolve()
    files = list_files(root)
    if not files:
        raise RetrievalError(f"{folder} holds no Markdown, reST, HTML, notebook, C++ or CUDA file")
    prefix, number = root.name or "root", 2
    while prefix in taken:
        prefix, number = f"{root.name}-{number}", number + 1
    at = _commit(root)
    info = SourceInfo(
        name=prefix,
        kind="git" if at else "folder",
        root=str(root),
        version=at[:12],
        licence=_folder_licence(root),
        prefix=f"{prefix}/",
    )
    return Source(info, tuple(files))


def document_licence(text: str, source: SourceInfo) -> str:
    """What the head of the file says, else the licence of its source."""
    found = _SPDX.search(text[:4000])
    return found[1] if found else source.licence


def _folder_licence(root: Path) -> str:
    """From the licence file of the folder or, for a part of a checkout, of a folder above within it."""
    for folder in (root, *root.parents):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if _LICENCE_FILES.match(path.name) and path.is_file():
                text = path.read_text(errors="replace")[:20_000]
                spdx = _SPDX.search(text)
                return (
                    spdx[1] if spdx else next((name for phrase, name in _LICENCES if phrase in text), UNKNOWN_LICENCE)
                )
        if (folder / ".git").exists() or not _inside_checkout(folder):
            break
    return UNKNOWN_LICENCE


def _inside_checkout(folder: Path) -> bool:
    return any((above / ".git").exists() for above in folder.parents)


def _commit(root: Path) -> str:
    """Of the checkout that ``root`` is in; empty outside of one."""
    top = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), None)
    return commit(top) if top is not None else ""
