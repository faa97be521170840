"""The commands ``agent index build|status|evaluate`` and ``agent docs``. agent/cli.py registers them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

from agent.edge import guarded
from agent.errors import EXIT_ERROR

if TYPE_CHECKING:
    from retrieval.build import BuildReport
    from retrieval.index import IndexStatus
    from retrieval.passages import SearchResult

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The index of CuTe and CUTLASS documentation: build it, look at it, measure how well it answers.",
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Folder = Annotated[
    Path | None, typer.Option("--index", metavar="DIR", help="The index (default: index in $HGEMM_AGENT_HOME).")
]
SHOWN_SKIPPED = 10


@app.command()
def build(
    add: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="Also a folder or checkout of yours; remembered.")
    ] = None,
    remove: Annotated[list[Path] | None, typer.Option(metavar="PATH", help="Forget a folder added before.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Begin afresh: cut and embed everything again.")] = False,
    embedder: Annotated[
        str | None, typer.Option(metavar="NAME", help="minilm (default), or hashing: no model, worse answers.")
    ] = None,
    folder: Folder = None,
    json_output: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Index the headers, examples and notebooks of nvidia-cutlass and the cuda::ptx headers, and what you add.

    Only what changed is cut and embedded again; killed, the same command goes on. Nothing is downloaded.
    Example: agent index build --add ~/cutlass/media/docs
    """
    with guarded():
        from retrieval.build import build as build_index
        from retrieval.embedding import DEFAULT_EMBEDDER, make_embedder
        from retrieval.layout import default_folder, embedder_in_use

        where = folder or default_folder()
        name = embedder or (None if rebuild else embedder_in_use(where)) or DEFAULT_EMBEDDER
        with Progress(quiet) as progress:
            report = build_index(
                where,
                make_embedder(name),
                add=add or (),
                remove=remove or (),
                rebuild=rebuild,
                progress=progress.show,
            )
        print(report.to_json() if json_output else built(report))


@app.command()
def status(folder: Folder = None, json_output: Json = False) -> None:
    """What is indexed, with which embedder, and what was skipped and why."""
    with guarded():
        from retrieval.index import status as look
        from retrieval.layout import default_folder

        found = look(folder or default_folder())
        print(found.to_json() if json_output else described(found))


@app.command()
def evaluate(
    questions: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML; default: the packaged set.")] = None,
    misses: Annotated[bool, typer.Option("--misses", help="Also list the questions that found nothing.")] = False,
    folder: Folder = None,
    json_output: Json = False,
) -> None:
    """Recall of the hybrid search against vectors alone and the lexical side alone. Exit 1 below the goal."""
    with guarded():
        from retrieval.evaluate import QUESTIONS, load_questions, missed, table
        from retrieval.evaluate import evaluate as measure
        from retrieval.index import Index
        from retrieval.layout import default_folder

        cases = load_questions(questions or QUESTIONS)
        with Index.open(folder or default_folder()) as index:
            found = measure(index, cases)
        if json_output:
            print(found.to_json())
        else:
            print(table(found))
            if misses:
                print(missed(found))
        if not found.good_enough:
            raise typer.Exit(EXIT_ERROR)


def docs(
    query: Annotated[str, typer.Argument(help="A question, or a name: SM90_TMA_LOAD, cp.async.bulk.tensor.")],
    arch: Annotated[str | None, typer.Option(metavar="ARCH", help="Only for this: sm80, sm90, sm100, hopper.")] = None,
    k: Annotated[int, typer.Option("--k", "-k", min=1, max=50, help="Passages.")] = 5,
    folder: Folder = None,
    json_output: Json = False,
) -> None:
    """Look something up in the index of CuTe and CUTLASS documentation; every passage with file and lines.

    Example: agent docs "wait for a wgmma group" --arch sm90
    """
    with guarded():
        from retrieval.index import Index
        from retrieval.layout import default_folder
        from retrieval.search import search

        with Index.open(folder or default_folder()) as index:
            result = search(index, query, k=k, arch=arch)
        print(result.to_json() if json_output else answered(result))


# --- rendering --------------------------------------------------------------------------------------------------------


def built(report: BuildReport) -> str:
    lines = [
        f"{report.folder}: {report.documents} documents, {report.chunks} passages, {report.symbols} symbols"
        f" ({report.elapsed_s:.0f} s)"
    ]
    if report.up_to_date:
        lines.append("nothing has changed")
    else:
        lines.append(
            f"{report.documents_cut} documents cut anew; {report.vectors_new} passages embedded, "
            f"{report.vectors_kept} vectors kept"
        )
    lines += [f"skipped {one.path}: {one.reason}" for one in report.skipped[:SHOWN_SKIPPED]]
    if len(report.skipped) > SHOWN_SKIPPED:
        lines.append(f"and {len(report.skipped) - SHOWN_SKIPPED} more skipped: agent index status")
    return "\n".join(lines)


def described(found: IndexStatus) -> str:
    manifest = found.manifest
    if manifest is None:
        return f"{found.folder}: no index yet; make one with: agent index build"
    lines = [
        f"{found.folder}: {found.disk_bytes / 2**20:.0f} MiB, built {manifest.built_at}",
        f"{manifest.documents} documents, {manifest.chunks} passages, {manifest.vectors} vectors, "
        f"{manifest.symbols} symbols; embedder {manifest.embedder} ({manifest.embedder_digest})",
    ]
    for source in manifest.sources:
        version = f" {source.version}" if source.version else ""
        lines.append(f"{source.kind:<8} {source.name}{version} ({source.licence}) {source.root}")
    lines += [f"skipped  {one.path}: {one.reason}" for one in manifest.skipped]
    return "\n".join(lines)


def answered(result: SearchResult) -> str:
    """For a reader at a terminal: the same quotation marks as in a prompt, without its warning."""
    from retrieval.quoting import quote

    parts = [quote(passage, number) for number, passage in enumerate(result.passages, 1)]
    if not parts:
        parts = ["no passage was found"]
    if result.hidden:
        kept = "declares" if result.hidden == 1 else "declare"
        parts.append(f"{result.hidden} more {kept} that name, but not for {result.arch}: ask without --arch")
    return "\n\n".join(parts)


class Progress:
    """On stderr: one line that is overwritten on a terminal, a line every few seconds elsewhere."""

    EVERY_S = 5.0

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._last = 0.0
        self._what = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live and self._what and not self._quiet:
            sys.stderr.write("\r\x1b[K")

    def show(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if self._quiet or (what == self._what and now - self._last < (0.2 if self._live else self.EVERY_S)):
            return
        self._last, self._what = now, what
        begin, end = ("\r\x1b[K", "") if self._live else ("", "\n")
        sys.stderr.write(f"{begin}{what} {done} of {total}{end}")
        sys.stderr.flush()
