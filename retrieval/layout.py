"""The index folder: which files lie where, and the switch from one generation to the next.

    CURRENT            the name of the generation in use; replaced as the last step of a build
    gen-<digest>/      manifest.json, passages.sqlite, chroma/
    cache.sqlite       chunks and vectors already worked out (retrieval/cache.py)
    added.json         folders that the user added
    lock               held by a running build

A generation never changes once it has its name. The one before the current is kept, for readers that have it open.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, ValidationError

from retrieval.embedding import Embedder
from retrieval.errors import RetrievalError
from retrieval.passages import Skipped, SourceInfo
from tools.paths import home_dir
from tools.records import Record
from tools.whole_files import replacing

SCHEMA_VERSION = 1
CURRENT = "CURRENT"
MANIFEST = "manifest.json"
PASSAGES = "passages.sqlite"
CHROMA = "chroma"
CACHE = "cache.sqlite"
ADDED = "added.json"
REPAIR = "run `agent index build`"  # chunks and vectors are kept apart, so this takes a minute
REBUILD = "run `agent index build --rebuild`"


class Manifest(Record):
    """What a generation holds. ``digest`` covers every document, the cutters and the embedder. ``hnsw`` has the hash of
    each file of the neighbour graph: Chroma crashes the process on a damaged one, so they are looked at first."""

    schema_version: int
    digest: str
    embedder: str
    embedder_digest: str
    dims: int
    built_at: str
    documents: int
    chunks: int
    vectors: int
    symbols: int
    sources: tuple[SourceInfo, ...]
    skipped: tuple[Skipped, ...] = ()
    hnsw: dict[str, str] = Field(default_factory=dict)


def default_folder() -> Path:
    return home_dir() / "index"


def current(folder: Path) -> Path | None:
    """The generation in use; None if nothing was built. Raises RetrievalError if the pointer is broken."""
    try:
        name = (folder / CURRENT).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RetrievalError(f"{folder / CURRENT} cannot be read: {REPAIR}") from error
    generation = folder / name
    if not name.startswith("gen-") or "/" in name or not generation.is_dir():
        raise RetrievalError(f"the index {folder} is damaged, its generation '{name[:40]}' is missing: {REPAIR}")
    return generation


def embedder_in_use(folder: Path) -> str | None:
    """The name of the embedder of the index there; None if there is none, or it is damaged."""
    try:
        generation = current(folder)
        return read_manifest(generation).embedder if generation else None
    except RetrievalError:
        return None


def read_manifest(generation: Path) -> Manifest:
    path = generation / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        version = json.loads(text).get("schema_version")
        if version != SCHEMA_VERSION:
            raise RetrievalError(
                f"the index {generation.parent} was built by another version of this program: {REPAIR}"
            )
        return Manifest.from_json(text)
    except (OSError, ValueError, AttributeError, ValidationError) as error:
        raise RetrievalError(
            f"the index {generation.parent} is damaged, {path.name} cannot be read: {REPAIR}"
        ) from error


def check_embedder(manifest: Manifest, embedder: Embedder, folder: Path) -> None:
    """Raises RetrievalError if the index was made with another embedder."""
    if (manifest.embedder, manifest.embedder_digest) != (embedder.name, embedder.digest):
        raise RetrievalError(
            f"the index {folder} was made with the embedder {manifest.embedder} ({manifest.embedder_digest}), whose "
            f"vectors do not compare with those of {embedder.name} ({embedder.digest}): {REBUILD}"
        )


def check_graph(generation: Path, manifest: Manifest) -> None:
    """Raises RetrievalError if a file of the neighbour graph is not as it was written."""
    if graph_hashes(generation) != manifest.hnsw:
        raise RetrievalError(f"the index {generation.parent} is damaged, its vector files have changed: {REPAIR}")


def graph_hashes(generation: Path) -> dict[str, str]:
    root = generation / CHROMA
    files = sorted(path for path in root.glob("*/*") if path.is_file())
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}


def switch(folder: Path, finished: Path, name: str) -> None:
    """Gives a finished generation its name and makes it the current one."""
    generation = folder / name
    if generation.exists():  # the same content, built anew
        shutil.rmtree(generation)
    finished.rename(generation)
    before = None
    with contextlib.suppress(RetrievalError):
        before = current(folder)
    write_atomic(folder / CURRENT, f"{name}\n")
    for path in folder.glob("gen-*"):
        if path not in (generation, before):
            shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Removes what killed builds left."""
    for path in folder.glob("tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def read_added(folder: Path) -> list[Path]:
    path = folder / ADDED
    try:
        return [Path(entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise RetrievalError(f"{path} is damaged: delete it, and add your folders again") from error


def write_added(folder: Path, added: list[Path]) -> None:
    write_atomic(folder / ADDED, json.dumps([str(path) for path in added], indent=1) + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Whole or not at all."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


@contextmanager
def build_lock(folder: Path) -> Iterator[None]:
    """One build at a time. The lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("w")
    except OSError as error:
        raise RetrievalError(f"the index folder {folder} cannot be written: {error.strerror or error}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RetrievalError(f"another build of the index {folder} is running: wait for it to end") from error
        yield
