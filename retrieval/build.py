"""Builds the index: read, cut, embed what is new, write a generation, switch to it.

Killed at any moment, the next build finds the chunks and vectors already made, and readers keep the old generation
until the switch. Nothing is fetched: files are read from this machine and the model from a package.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from retrieval import layout, lexical, vectors
from retrieval.cache import BuildCache
from retrieval.chunking import cut, fingerprint, readable
from retrieval.embedding import Embedder
from retrieval.errors import RetrievalError
from retrieval.index import Index
from retrieval.layout import Manifest
from retrieval.lexical import PassageWriter
from retrieval.passages import Chunk, Document, Skipped, SourceInfo
from retrieval.reading import Unreadable, read_file
from retrieval.sources import Source, added_folder, document_licence, installed_packages
from retrieval.vectors import MAX_BATCH, VectorIndex, arch_metadata
from tools.extras import install_command
from tools.records import Record, content_hash

SLAB = 256  # texts embedded between two commits: a kill loses at most these
FILES_PER_COMMIT = 50

#: (what, done, total), called often.
Progress = Callable[[str, int, int], None]

#: A chunk's id, the key of its vector, and what Chroma keeps beside it.
_Row = tuple[int, tuple[str, dict[str, str | int | bool]]]


class BuildReport(Record):
    """``up_to_date``: nothing had changed, so nothing was written."""

    folder: str
    up_to_date: bool
    documents: int
    documents_cut: int
    chunks: int
    symbols: int
    vectors_new: int
    vectors_kept: int
    sources: tuple[SourceInfo, ...]
    skipped: tuple[Skipped, ...]
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class _Entry:
    """A document with its chunks. ``key`` names the chunks in the cache."""

    source: int
    document: Document
    licence: str
    key: str
    chunks: tuple[Chunk, ...]


def build(
    folder: Path,
    embedder: Embedder,
    *,
    add: Sequence[Path] = (),
    remove: Sequence[Path] = (),
    rebuild: bool = False,
    packages: Callable[[], list[Source]] = installed_packages,
    progress: Progress = lambda what, done, total: None,
) -> BuildReport:
    """Brings the index up to date with its sources. ``add`` and ``remove`` change the remembered folders; ``rebuild``
    forgets everything worked out before. Raises RetrievalError with one sentence."""
    started = time.monotonic()
    with layout.build_lock(folder):
        layout.clean(folder)
        before = None if rebuild else _before(folder, embedder)
        sources = _sources(folder, add, remove, packages)
        if rebuild:
            for path in folder.glob(f"{layout.CACHE}*"):
                path.unlink()
        cache = BuildCache(folder / layout.CACHE)
        try:
            skipped: list[Skipped] = []
            entries, cuts = _entries(sources, cache, skipped, progress)
            if not entries:
                raise RetrievalError("none of the sources holds a file that can be indexed")
            digest = _digest(entries, sources, skipped, embedder)
            if before is not None and before.digest == digest:
                return _report(folder, before, cuts, 0, True, started)
            new = _embed_missing(entries, cache, embedder, progress)
            manifest = _write(folder, digest, sources, entries, skipped, cache, embedder, progress)
            cache.keep_only({e.key for e in entries}, {_vector_key(embedder, c) for e in entries for c in e.chunks})
        finally:
            cache.close()
    return _report(folder, manifest, cuts, new, False, started)


def _before(folder: Path, embedder: Embedder) -> Manifest | None:
    """What is there and whole; a damaged generation is built anew from the cache. Raises RetrievalError if it was made
    with another embedder."""
    try:
        generation = layout.current(folder)
        manifest = layout.read_manifest(generation) if generation else None
    except RetrievalError:
        return None
    if manifest is None:
        return None
    layout.check_embedder(manifest, embedder, folder)
    try:
        with Index.open(folder, embedder) as index:
            index.reader.check()
    except RetrievalError:
        return None
    return manifest


def _sources(
    folder: Path, add: Sequence[Path], remove: Sequence[Path], packages: Callable[[], list[Source]]
) -> list[Source]:
    """The packages and the remembered folders; the latter are remembered before the long work begins."""
    remembered = layout.read_added(folder)
    unwanted = {path.resolve() for path in remove}
    if unknown := unwanted - set(remembered):
        known = ", ".join(map(str, remembered)) or "none"
        raise RetrievalError(f"{min(unknown)} was never added to this index; added: {known}")
    kept = [path for path in remembered if path not in unwanted]
    kept += [path for path in dict.fromkeys(p.resolve() for p in add) if path not in kept]
    found = packages()
    for path in kept:
        found.append(added_folder(path, {source.info.name for source in found}))
    if not found:
        raise RetrievalError(
            f"there is nothing to index: {install_command('retrieval')}, or add a folder with --add PATH"
        )
    layout.write_added(folder, kept)
    return found


def _entries(
    sources: Sequence[Source], cache: BuildCache, skipped: list[Skipped], progress: Progress
) -> tuple[list[_Entry], int]:
    """Every readable document with its chunks, and how many had to be cut."""
    total = sum(len(source.files) for source in sources)
    entries: list[_Entry] = []
    pending: dict[str, list[Chunk]] = {}
    done = cuts = 0
    for number, source in enumerate(sources):
        for name in source.files:
            done += 1
            path = source.info.prefix + name
            try:
                file = read_file(Path(source.info.root, name))
                document = readable(path, file.text)
            except Unreadable as error:
                skipped.append(Skipped(path=path, reason=str(error)))
                continue
            except ValueError as error:
                skipped.append(Skipped(path=path, reason=str(error)))
                continue
            key = content_hash([fingerprint(), path, file.sha256])
            chunks = cache.chunks(key)
            if chunks is None:
                chunks = pending[key] = cut(document)
                cuts += 1
            licence = document_licence(file.text, source.info)
            entries.append(_Entry(number, document, licence, key, tuple(chunks)))
            if len(pending) >= FILES_PER_COMMIT:
                cache.put_chunks(pending)
                pending = {}
            progress("reading", done, total)
    cache.put_chunks(pending)
    return entries, cuts


def _digest(
    entries: Sequence[_Entry], sources: Sequence[Source], skipped: Sequence[Skipped], embedder: Embedder
) -> str:
    """Everything that the generation depends on, the code that writes it included."""
    writers = [hashlib.sha256(Path(str(m.__file__)).read_bytes()).hexdigest() for m in (lexical, vectors)]
    infos = [source.info.model_dump() for source in sources]
    documents = [[entry.key, entry.licence] for entry in entries]
    left_out = [[one.path, one.reason] for one in skipped]
    return content_hash([layout.SCHEMA_VERSION, writers, embedder.name, embedder.digest, infos, documents, left_out])


def _vector_key(embedder: Embedder, chunk: Chunk) -> str:
    return content_hash([embedder.name, embedder.digest, chunk.embed])


def _embed_missing(entries: Sequence[_Entry], cache: BuildCache, embedder: Embedder, progress: Progress) -> int:
    """Embeds texts that have no vector yet; those of one length go together, which wastes no padding."""
    known = cache.known_vectors()
    wanted = {_vector_key(embedder, c): c.embed for entry in entries for c in entry.chunks if c.embed}
    missing = sorted((key for key in wanted if key not in known), key=lambda key: (len(wanted[key]), key))
    for at in range(0, len(missing), SLAB):
        progress("embedding", at, len(missing))
        keys = missing[at : at + SLAB]
        cache.put_vectors(keys, embedder.embed_documents([wanted[key] for key in keys]))
    progress("embedding", len(missing), len(missing))
    return len(missing)


def _write(
    folder: Path,
    digest: str,
    sources: Sequence[Source],
    entries: Sequence[_Entry],
    skipped: Sequence[Skipped],
    cache: BuildCache,
    embedder: Embedder,
    progress: Progress,
) -> Manifest:
    """A new generation, complete before it is switched to."""
    temporary = folder / f"tmp-{os.getpid()}"
    temporary.mkdir()
    infos = tuple(source.info for source in sources)
    total = sum(len(entry.chunks) for entry in entries)
    with_vectors = sum(1 for entry in entries for chunk in entry.chunks if chunk.embed)
    manifest = Manifest(
        schema_version=layout.SCHEMA_VERSION,
        digest=digest,
        embedder=embedder.name,
        embedder_digest=embedder.digest,
        dims=embedder.dims,
        built_at=datetime.now(UTC).isoformat(timespec="seconds"),
        documents=len(entries),
        chunks=total,
        vectors=with_vectors,
        symbols=sum(len(chunk.symbols) for entry in entries for chunk in entry.chunks),
        sources=infos,
        skipped=tuple(skipped),
    )
    writer = PassageWriter(temporary / layout.PASSAGES)
    for number, info in enumerate(infos):
        writer.add_source(number, info)
    ids: list[int] = []
    for number, entry in enumerate(entries):
        ids += writer.add_document(number, entry.source, entry.licence, entry.document, entry.chunks)
        progress("writing", len(ids), total + with_vectors)
    writer.finish({"digest": digest})
    collection = VectorIndex.create(temporary / layout.CHROMA, with_vectors, embedder.name)
    written = 0
    for batch in _batches([row for row in zip(ids, _described(entries, infos, embedder), strict=True) if row[1][0]]):
        keys = [key for _, (key, _) in batch]
        collection.add([i for i, _ in batch], cache.vectors(keys, embedder.dims), [about for _, (_, about) in batch])
        written += len(batch)
        progress("writing", total + written, total + with_vectors)
    collection.close()
    manifest = manifest.model_copy(update={"hnsw": layout.graph_hashes(temporary)})
    layout.write_atomic(temporary / layout.MANIFEST, manifest.to_json())
    layout.switch(folder, temporary, f"gen-{digest}")
    return manifest


def _described(
    entries: Sequence[_Entry], infos: Sequence[SourceInfo], embedder: Embedder
) -> Iterator[tuple[str, dict[str, str | int | bool]]]:
    """For every chunk the key of its vector (empty: none), and what Chroma keeps beside it."""
    for entry in entries:
        info = infos[entry.source]
        for chunk in entry.chunks:
            first, last = entry.document.cited(chunk.first, chunk.last)
            about: dict[str, str | int | bool] = {
                "path": entry.document.path,
                "first_line": first,
                "last_line": last,
                "title": chunk.title,
                "licence": entry.licence,
                "source": info.name,
                "version": info.version,
            }
            yield _vector_key(embedder, chunk) if chunk.embed else "", about | arch_metadata(chunk.arch)


def _batches(items: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
    for at in range(0, len(items), MAX_BATCH):
        yield items[at : at + MAX_BATCH]


def _report(folder: Path, manifest: Manifest, cuts: int, new: int, up_to_date: bool, started: float) -> BuildReport:
    return BuildReport(
        folder=str(folder),
        up_to_date=up_to_date,
        documents=manifest.documents,
        documents_cut=cuts,
        chunks=manifest.chunks,
        symbols=manifest.symbols,
        vectors_new=new,
        vectors_kept=manifest.vectors - new,
        sources=manifest.sources,
        skipped=manifest.skipped,
        elapsed_s=time.monotonic() - started,
    )
