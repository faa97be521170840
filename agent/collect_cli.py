"""The command ``agent collect``. agent/cli.py registers it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from agent.edge import guarded

#: Seconds between two lines of progress.
EVERY_S = 10.0


def collect(
    out: Annotated[Path, typer.Option(metavar="FILE", help="rows.jsonl or rows.parquet, for agent train grpo.")],
    adapter: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of agent train (default: the base as it is).")
    ] = None,
    groups: Annotated[int, typer.Option(min=1, max=1000, help="Of a shape; each has a prompt of its own.")] = 4,
    group_size: Annotated[int, typer.Option(min=1, max=64, help="Rollouts of a group.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Another one for every round of an iteration.")] = 0,
    split: Annotated[
        str, typer.Option(help="train (default), heldout, off_grid, all; or several, with commas.")
    ] = "train",
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="A record file (default: the H200's).")
    ] = None,
    pruned: Annotated[bool, typer.Option("--pruned", help="Also shapes where only likely plans are recorded.")] = False,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Conversations side by side; hundreds on a GPU.")] = 8,
    jobs: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that share the shapes and the batch, each with a model.")
    ] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="E.g. --set policy.local.base.name=FOLDER."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="The summary as one JSON document on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Groups of rollouts of a local model on what was recorded, as rows to train on; nothing is measured.

    Example: agent collect --adapter adapters/sft --out rows.jsonl
    """
    with guarded():
        from agent.config import load_settings, parse_assignment
        from policy.local_policy import located
        from policy.redacting import Secrets
        from policy.settings import PACKAGED
        from tools.replay import default_path
        from training.collect_parts import Order, remove_parts, rows_of, rows_of_parts
        from training.export import Counts, Filters, export
        from training.rows import format_of
        from training.writing import write_rows

        format_of(out)
        loaded = load_settings(None, os.environ, dict(parse_assignment(text) for text in settings or []))
        given = str(adapter) if adapter is not None else loaded.policy.local.adapter
        if given == PACKAGED and adapter is None:
            given = None
        local = loaded.policy.local.model_copy(update={"adapter": given})
        order = Order(
            policy=located(loaded.policy.model_copy(update={"name": "local", "local": local})),
            reward=loaded.reward,
            memory=loaded.memory,
            source=(source or default_path()).absolute(),
            split=split,
            pruned=pruned,
            seed=seed,
            groups=groups,
            group_size=group_size,
            batch=batch,
            parts=jobs,
        )
        counts, progress = Counts(), _Progress(quiet)
        if jobs == 1:
            rows = rows_of(order, Secrets.of(os.environ), progress)
        else:
            rows = rows_of_parts(order, out.absolute(), progress)
        write_rows(out, export(rows, Filters(), counts))
        remove_parts(out.absolute())
        said = counts.as_json()
        if json_output:
            print(json.dumps({"file": str(out), **said}))
        else:
            print(f"{out}: {said['rows']} rollouts in {said['groups']} groups; {said['with_reward']} with a reward")


class _Progress:
    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._begun = self._last = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if not self._quiet and (now - self._last >= EVERY_S or done == of):
            self._last = now
            rate = done / (now - self._begun)
            print(f"{done} of {of} rollouts, {rate:.1f}/s", file=sys.stderr, flush=True)
