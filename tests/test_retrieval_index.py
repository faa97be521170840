"""The index on disk: incremental, resumable, switched at once; damaged or foreign ones end in one sentence."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("chromadb")

from retrieval import layout
from retrieval.build import SLAB
from retrieval.embedding import HashingEmbedder
from retrieval.errors import RetrievalError
from retrieval.index import Index, status
from retrieval.search import search
from retrieval.sources import added_folder
from tests.retrieval_kit import GUIDE, build_small, write_corpus

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index that no test changes."""
    base = tmp_path_factory.mktemp("built")
    build_small(base / "index", write_corpus(base / "corpus"))
    return base / "index"


def is_one_sentence(message: str) -> bool:
    return "\n" not in message and len(message) < 400 and "Traceback" not in message


# --- building --------------------------------------------------------------------------------------------------------


def test_passages_keep_where_they_come_from(built: Path) -> None:
    with Index.open(built) as index:
        (passage, *_) = search(index, "SM90_TMA_LOAD").passages
    assert passage.path == "corpus/include/copy.hpp"
    assert passage.citation == f"corpus/include/copy.hpp:{passage.first_line}-{passage.last_line}"
    lines = (built.parent / passage.path).read_text().splitlines()
    assert passage.text == "\n".join(lines[passage.first_line - 1 : passage.last_line])
    assert (passage.source, passage.licence, passage.arch) == ("corpus", "MIT", ("sm90",))


def test_only_what_changed_is_cut_and_embedded(tmp_path: Path, corpus: Path) -> None:
    first = build_small(tmp_path / "index", corpus)
    assert (first.documents, first.documents_cut, first.vectors_kept) == (3, 3, 0)

    again = build_small(tmp_path / "index")
    assert again.up_to_date
    assert (again.documents_cut, again.vectors_new) == (0, 0)

    (corpus / "guide.md").write_text(GUIDE + "\n## Rounding\n\nHow results are rounded to half precision at the end.\n")
    changed = build_small(tmp_path / "index")
    assert not changed.up_to_date
    assert changed.documents_cut == 1
    assert changed.vectors_new == 1, "the sections that stayed the same keep their vectors"
    with Index.open(tmp_path / "index") as index:
        assert search(index, "rounded to half precision").passages[0].title == "Tiles > Rounding"


def test_a_deleted_file_is_gone(tmp_path: Path, corpus: Path) -> None:
    build_small(tmp_path / "index", corpus)
    (corpus / "include" / "copy.hpp").unlink()
    report = build_small(tmp_path / "index")
    assert (report.documents, report.documents_cut, report.vectors_new) == (2, 0, 0)
    with Index.open(tmp_path / "index") as index:
        assert all("copy.hpp" not in p.path for p in search(index, "SM90_TMA_LOAD", k=20).passages)


def test_folders_are_remembered_and_can_be_removed(tmp_path: Path, corpus: Path) -> None:
    other = tmp_path / "notes"
    other.mkdir()
    (other / "a.md").write_text("# Notes\n\nOccupancy depends on registers and on shared memory.\n")
    build_small(tmp_path / "index", corpus)
    assert [s.name for s in build_small(tmp_path / "index", other).sources] == ["corpus", "notes"]
    assert status(tmp_path / "index").added == (str(corpus), str(other))
    assert [s.name for s in build_small(tmp_path / "index", remove=[corpus]).sources] == ["notes"]
    with pytest.raises(RetrievalError, match="was never added"):
        build_small(tmp_path / "index", remove=[corpus])


def test_two_folders_of_one_name_have_their_own_citations(tmp_path: Path) -> None:
    for parent in ("x", "y"):
        (tmp_path / parent / "docs").mkdir(parents=True)
        (tmp_path / parent / "docs" / "a.md").write_text(f"# About {parent}\n\nA sentence of five words.\n")
    report = build_small(tmp_path / "index", tmp_path / "x" / "docs", tmp_path / "y" / "docs")
    assert [s.prefix for s in report.sources] == ["docs/", "docs-2/"]


def test_a_checkout_has_its_commit_as_version(tmp_path: Path, corpus: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    (corpus / ".git" / "refs" / "heads").mkdir(parents=True)
    (corpus / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (corpus / ".git" / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    info = added_folder(corpus / "include", set()).info
    assert (info.kind, info.version, info.licence) == ("git", commit[:12], "MIT")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: p / "missing", "does not exist"),
        (lambda p: (p / "f.md").write_text("x") and p / "f.md", "is a file"),
        (lambda p: (p / "empty").mkdir() or p / "empty", "holds no Markdown"),
    ],
)
def test_a_bad_folder_is_one_sentence(tmp_path: Path, make: Callable[[Path], Path], said: str) -> None:
    with pytest.raises(RetrievalError, match=said) as caught:
        build_small(tmp_path / "index", make(tmp_path))
    assert is_one_sentence(str(caught.value))
    assert status(tmp_path / "index").added == (), "a folder that cannot be read is not remembered"


def test_nothing_to_index(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="nothing to index"):
        build_small(tmp_path / "index")


def test_unreadable_files_are_skipped_with_a_reason(tmp_path: Path, corpus: Path) -> None:
    (corpus / "huge.txt").write_bytes(b"x" * (50 << 20))
    (corpus / "line.txt").write_text("word " * 20_000)
    (corpus / "picture.md").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 10)
    (corpus / "cyrillic.md").write_bytes("# Заголовок\n\nТекст на другом языке.\n".encode("koi8-r") * 30)
    (corpus / "latin.md").write_bytes(b"# Caf\xe9\n\n" + b"An otherwise plain English sentence.\n" * 30)
    (corpus / "wide.md").write_bytes("# Breites\n\nEin Satz in zwei Bytes je Zeichen.\n".encode("utf-16"))
    (corpus / "broken.ipynb").write_text("{not json")
    (corpus / "loop").symlink_to(corpus)
    (corpus / "outside.md").symlink_to("/etc/hostname")
    report = build_small(tmp_path / "index", corpus)
    reasons = {one.path.removeprefix("corpus/"): one.reason for one in report.skipped}
    assert set(reasons) == {"huge.txt", "line.txt", "picture.md", "cyrillic.md", "broken.ipynb"}
    assert "50 MB" in reasons["huge.txt"]
    assert "characters" in reasons["line.txt"]
    assert "binary" in reasons["picture.md"]
    assert "UTF-8" in reasons["cyrillic.md"]
    assert all(map(is_one_sentence, reasons.values()))
    assert report.documents == 3 + 2
    assert status(tmp_path / "index").manifest is not None


# --- killed and watched ----------------------------------------------------------------------------------------------

KILLED = """
    import os, signal, sys
    from pathlib import Path
    from retrieval.embedding import HashingEmbedder
    from tests.retrieval_kit import build_small

    calls = 0

    class Killed(HashingEmbedder):
        def embed_documents(self, texts):
            global calls
            calls += 1
            if sys.argv[3] == "embedding" and calls == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().embed_documents(texts)

    def progress(what, done, total):
        if what == sys.argv[3] == "writing" and done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)

    build_small(Path(sys.argv[1]), Path(sys.argv[2]), embedder=Killed(), progress=progress)
"""


def run_python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def many_functions(root: Path, count: int) -> Path:
    root.mkdir(parents=True)
    words = ("load", "store", "reduce", "shuffle", "swizzle", "prefetch", "commit", "wait")
    text = "".join(
        f"/// Function {i} does the {words[i % 8]} of tile {i * 7} in stage {i % 5}.\n"
        f"void {words[i % 8]}_{chr(97 + i % 26)}{chr(97 + i // 26)}(int x{i});\n\n"
        for i in range(count)
    )
    (root / "many.hpp").write_text(text)
    return root


def test_a_build_killed_while_embedding_goes_on_where_it_was(tmp_path: Path) -> None:
    corpus = many_functions(tmp_path / "corpus", 3 * SLAB)
    killed = run_python(KILLED, tmp_path / "index", corpus, "embedding")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert status(tmp_path / "index").manifest is None, "half an index is no index"
    report = build_small(tmp_path / "index")  # the folder was remembered before the long work
    assert report.documents_cut == 0
    assert report.vectors_kept == 2 * SLAB
    with Index.open(tmp_path / "index") as index:
        assert report.vectors_new == index.vectors.count() - 2 * SLAB > 0


def test_a_build_killed_while_writing_leaves_the_old_index_in_use(tmp_path: Path) -> None:
    corpus = many_functions(tmp_path / "corpus", 40)
    build_small(tmp_path / "index", corpus)
    before = status(tmp_path / "index").generation
    (corpus / "new.md").write_text(GUIDE)
    killed = run_python(KILLED, tmp_path / "index", corpus, "writing")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert status(tmp_path / "index").generation == before
    with Index.open(tmp_path / "index") as index:
        assert search(index, "swizzle of tile 28").passages
    report = build_small(tmp_path / "index")
    assert (report.documents_cut, report.vectors_new) == (0, 0)
    assert status(tmp_path / "index").generation != before
    assert not list((tmp_path / "index").glob("tmp-*"))


def test_a_reader_keeps_its_generation_through_a_rebuild(tmp_path: Path, corpus: Path) -> None:
    build_small(tmp_path / "index", corpus)
    with Index.open(tmp_path / "index") as index:
        (corpus / "guide.md").write_text("# Other\n\nQuite another text about nothing in particular.\n")
        build_small(tmp_path / "index")
        titles = [p.title for p in search(index, "neighbouring tiles share operands in L2").passages]
    assert titles[0] == "Tiles > Swizzling"


def test_one_build_at_a_time(tmp_path: Path, corpus: Path) -> None:
    with layout.build_lock(tmp_path / "index"), pytest.raises(RetrievalError, match="another build"):
        build_small(tmp_path / "index", corpus)


# --- damaged and foreign ---------------------------------------------------------------------------------------------


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def graph_file(generation: Path, name: str) -> Path:
    return next(generation.glob(f"chroma/*/{name}"))


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "pointer": lambda index, gen: (index / "CURRENT").write_text("gen-of-nothing\n"),
    "pointer outside": lambda index, gen: (index / "CURRENT").write_text("../../etc\n"),
    "manifest": lambda index, gen: (gen / "manifest.json").write_text('{"schema_version": 1, "dig'),
    "manifest of another version": lambda index, gen: (gen / "manifest.json").write_text('{"schema_version": 99}'),
    "no passages": lambda index, gen: (gen / "passages.sqlite").unlink(),
    "passages cut short": lambda index, gen: os.truncate(gen / "passages.sqlite", 5000),
    "passages overwritten": lambda index, gen: overwrite(gen / "passages.sqlite", 0, b"\xff" * 4096),
    "vectors gone": lambda index, gen: shutil.rmtree(gen / "chroma"),
    "vector database": lambda index, gen: overwrite(gen / "chroma" / "chroma.sqlite3", 0, b"\xff" * 4096),
    "neighbour graph": lambda index, gen: overwrite(graph_file(gen, "data_level0.bin"), 10, b"\xff" * 400),
    "neighbour graph cut short": lambda index, gen: os.truncate(graph_file(gen, "data_level0.bin"), 10),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_index_is_one_sentence_and_is_mended_from_the_cache(
    tmp_path: Path, built: Path, damage: Callable[[Path, Path], object]
) -> None:
    index = tmp_path / "index"
    shutil.copytree(built, index)
    generation = layout.current(index)
    assert generation is not None
    damage(index, generation)
    with pytest.raises(RetrievalError) as caught:
        Index.open(index)
    assert is_one_sentence(str(caught.value))
    assert "agent index build" in str(caught.value)
    report = build_small(index)
    assert (report.documents_cut, report.vectors_new) == (0, 0)
    with Index.open(index) as mended:
        assert search(mended, "SM90_TMA_LOAD").passages


def test_damage_in_the_middle_is_found_by_the_search(tmp_path: Path, built: Path) -> None:
    index = tmp_path / "index"
    shutil.copytree(built, index)
    generation = layout.current(index)
    assert generation is not None
    size = (generation / "passages.sqlite").stat().st_size
    overwrite(generation / "passages.sqlite", 8192, b"\xff" * (size - 8192))
    with pytest.raises(RetrievalError) as caught, Index.open(index) as opened:
        search(opened, "SM90_TMA_LOAD")
    assert is_one_sentence(str(caught.value))


def test_a_damaged_cache_is_one_sentence(tmp_path: Path, built: Path) -> None:
    index = tmp_path / "index"
    shutil.copytree(built, index)
    for path in index.glob("cache.sqlite-*"):
        path.unlink()
    overwrite(index / "cache.sqlite", 0, b"\xff" * 4096)
    with pytest.raises(RetrievalError, match="--rebuild") as caught:
        build_small(index)
    assert is_one_sentence(str(caught.value))
    assert build_small(index, rebuild=True).vectors_kept == 0


def test_another_embedders_index_is_refused(tmp_path: Path, corpus: Path) -> None:
    build_small(tmp_path / "index", corpus)
    with pytest.raises(RetrievalError, match=r"hashing-1-512.*hashing-1-128") as caught:
        Index.open(tmp_path / "index", HashingEmbedder(128))
    assert is_one_sentence(str(caught.value))
    with pytest.raises(RetrievalError, match="do not compare"):
        build_small(tmp_path / "index", embedder=HashingEmbedder(128))
    report = build_small(tmp_path / "index", embedder=HashingEmbedder(128), rebuild=True)
    assert report.vectors_kept == 0
    with Index.open(tmp_path / "index", HashingEmbedder(128)) as index:
        assert search(index, "SM90_TMA_LOAD").passages


def test_no_index_yet(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="agent index build"):
        Index.open(tmp_path / "index")
    assert status(tmp_path / "index").manifest is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(RetrievalError, match="cannot be written"):
        build_small(tmp_path / "closed" / "index", corpus)


# --- the net ---------------------------------------------------------------------------------------------------------

#: Every way of Python to a socket is closed before anything else is imported.
NO_NET = """
    import socket, sys

    def refuse(*arguments, **more):
        print("the net was tried:", arguments, file=sys.stderr)
        sys.stderr.flush()
        import os
        os._exit(7)

    socket.getaddrinfo = socket.gethostbyname = socket.create_connection = refuse
    socket.socket.connect = socket.socket.connect_ex = refuse

    from pathlib import Path
    from retrieval.index import Index
    from retrieval.search import search
    from tests.retrieval_kit import build_small

    build_small(Path(sys.argv[1]), Path(sys.argv[2]))
    with Index.open(Path(sys.argv[1])) as index:
        print(search(index, "SM90_TMA_LOAD").passages[0].citation)
        index.vectors._collection.configuration  # a collection that is looked at makes no embedder either
"""


def test_nothing_tries_the_net(tmp_path: Path, corpus: Path) -> None:
    done = run_python(NO_NET, tmp_path / "index", corpus)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("corpus/include/copy.hpp:")


def test_the_closed_net_is_noticed() -> None:
    tried = run_python(NO_NET.split("    from pathlib")[0] + "\n    socket.create_connection(('localhost', 9))\n")
    assert tried.returncode == 7


def test_text_is_never_embedded_by_chroma_itself(built: Path) -> None:
    """A collection that is reopened by name alone finds our embedding function, which refuses."""
    import chromadb
    from chromadb.config import Settings

    generation = layout.current(built)
    client = chromadb.PersistentClient(str(generation / "chroma"), settings=Settings(anonymized_telemetry=False))  # type: ignore[operator]
    with pytest.raises(Exception, match="explicit vectors"):
        client.get_collection("passages").query(query_texts=["tiles"], n_results=1)
    client.close()


def test_opening_is_quick(built: Path) -> None:
    started = time.process_time()
    with Index.open(built) as index:
        search(index, "predication of tiles")
    assert time.process_time() - started < 5.0, "chromadb is imported; anything slower is a model being loaded"
