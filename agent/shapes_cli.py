"""The command ``agent shapes``: sets of shapes as the CSV that other commands take. agent/cli.py registers it."""

from __future__ import annotations

from typing import Annotated

import typer

from agent.edge import guarded


def shapes(
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A model of configs/models.yaml, or all; repeatable.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="M,M,…", help="Numbers of tokens, for --model: 1,16,4096.")
    ] = None,
    grid: Annotated[str | None, typer.Option(metavar="NAME", help="paper: the 1000 shapes of CUDA-L2.")] = None,
) -> None:
    """M,N,K a line, for the --shapes of `agent sweep`, `record` and `certify`. Every shape once.

    \b
    The projections of two models at three batches:
      agent shapes --model llama3-8b --model qwen2.5-7b --batch 16,100,4096 > mine.csv
      agent record --shapes mine.csv --out mine.sqlite --deadline 3600
    All models:
      agent shapes --model all --batch 1,7,16,33,64,100,128,256,1000,2048,4096,8191
    """
    with guarded():
        from agent.errors import UsageError
        from agent.sweep_shapes import choose, load_models
        from tools.records import Task

        if (grid is None) == (not model):
            raise UsageError("give one set of shapes: --grid paper, or --model NAME with --batch 1,16,4096")
        names: list[str | None] = [None]
        if model:
            names = [*(load_models() if "all" in model else model)]

        def of(name: str | None) -> list[Task]:
            return choose(
                grid_name=grid, csv=None, model=name, batches=batch, recorded=None,
                accumulate="float32", limit=None, note=lambda text: None,
            )  # fmt: skip

        tasks = {task.task_id: task for name in names for task in of(name)}
        print("M,N,K")
        for task in tasks.values():
            print(",".join(str(task.dims[name]) for name in ("M", "N", "K")))
