"""The commands ``agent train sft`` and ``agent train grpo``. agent/cli.py registers them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agent.edge import guarded

if TYPE_CHECKING:
    from training.loop import Job, Result

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Fine-tune the local policy on exported rollouts: imitation first, then offline reinforcement learning.",
)

#: A step of a large model and its checkpoint may take minutes; a second signal ends at once.
GRACE_S = 900.0

Rows = Annotated[Path, typer.Argument(metavar="ROWS", help="Of agent export-trajectories: .jsonl or .parquet.")]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the adapter goes; the same command goes on in it.")]
Adapter = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Go on from this adapter, not from a new one.")]
BaseName = Annotated[str | None, typer.Option("--base", help="smollm2 (default), a model's folder, or a hub's id.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="E.g. --set lora.rank=8.")]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="YAML with sections base, lora, sft, grpo.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew where FOLDER holds another training.")]
Keep = Annotated[bool, typer.Option("--keep-checkpoints", help="Also after the end.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; progress stays on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


@app.command()
def sft(
    rows: Rows,
    out: Out,
    adapter: Adapter = None,
    base: BaseName = None,
    settings: Sets = None,
    config: Config = None,
    fresh: Fresh = False,
    keep_checkpoints: Keep = False,
    json_output: Json = False,
    quiet: Quiet = False,
) -> None:
    """Imitate the best rollouts of training shapes; the loss covers the policy's own turns only.

    Example: agent train sft rows.jsonl --out adapters/sft
    """
    _train("sft", rows, out, adapter, base, settings, config, fresh, keep_checkpoints, json_output, quiet)


@app.command()
def grpo(
    rows: Rows,
    out: Out,
    adapter: Adapter = None,
    base: BaseName = None,
    settings: Sets = None,
    config: Config = None,
    fresh: Fresh = False,
    keep_checkpoints: Keep = False,
    json_output: Json = False,
    quiet: Quiet = False,
) -> None:
    """Offline GRPO: what was better than the rest of its group becomes likelier. Nothing is sampled or measured.

    Example: agent train grpo rows.jsonl --adapter adapters/sft --out adapters/grpo
    """
    _train("grpo", rows, out, adapter, base, settings, config, fresh, keep_checkpoints, json_output, quiet)


def _train(
    kind: Literal["sft", "grpo"],
    rows: Path,
    out: Path,
    adapter: Path | None,
    base: str | None,
    settings: list[str] | None,
    config: Path | None,
    fresh: bool,
    keep_checkpoints: bool,
    json_output: bool,
    quiet: bool,
) -> None:
    with guarded():
        from agent.config import load_sections, parse_assignment
        from agent.interrupt import StopFlag
        from tools.paths import home_dir
        from training.loop import Job, is_main_process
        from training.settings import TrainSettings

        overrides: dict[str, Any] = dict(parse_assignment(text) for text in settings or [])
        if base is not None:
            overrides["base.name"] = base
        main = is_main_process()
        stop = StopFlag()
        job = Job(
            kind=kind,
            rows=rows,
            out=out,
            settings=load_sections(TrainSettings, config, os.environ, overrides),
            home=home_dir(),
            adapter=adapter,
            fresh=fresh,
            keep_checkpoints=keep_checkpoints,
            stop_requested=stop.requested,
            show=_shown(quiet or not main),
        )
        result = _interruptible(job, stop.request)
        if main:
            print(json.dumps(result.as_json()) if json_output else _told(result))
        _leave_the_others()


def _leave_the_others() -> None:
    """One of several processes ends here and not where Python does: a thread of gloo's that waits for Python, to let go
    of a tensor, aborts it there ("terminate called without an active exception"), and the training of all has failed.
    To close the process group first is no way: that waits for the thread, and holds what the thread waits for."""
    from training.loop import process_count

    if process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _interruptible(job: Job, stop: Callable[[], None]) -> Result:
    from agent.errors import Stopped
    from agent.interrupt import interruptible
    from training.errors import TrainingStopped

    def work() -> Result:
        from training.grpo import train_grpo
        from training.sft import train_sft

        try:
            return train_sft(job) if job.kind == "sft" else train_grpo(job)
        except TrainingStopped as stopped:
            raise Stopped(f"{stopped}; the same command goes on from there") from stopped

    def on_interrupt() -> None:
        stop()
        job.show("stopping after this step, with a checkpoint (ctrl-C again: at once)")

    try:
        return interruptible(work, on_interrupt, "the same command; it goes on from the last checkpoint", GRACE_S)
    except Stopped as stopped:
        print(f"interrupted: {stopped}", file=sys.stderr, flush=True)
        raise typer.Exit(stopped.exit_code) from None


def _shown(quiet: bool) -> Callable[[str], None]:
    def show(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return show


def _told(result: Result) -> str:
    if result.already:
        return f"{result.out} is finished already; --fresh trains anew"
    figures = ", ".join(f"{n} {v:.4g}" for n, v in sorted(result.figures.items()) if isinstance(v, float))
    return f"{result.out}: {result.steps} steps on {result.rows} rows in {result.elapsed_s:.0f} s\n{figures}"
