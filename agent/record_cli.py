"""The command ``agent record``: measure families on GPUs, merge recordings, check one. agent/cli.py registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agent.edge import guarded
from agent.errors import EXIT_ERROR, UsageError


def record(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Record file to begin or go on with, e.g. h200.sqlite.")],
    deadline: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop after this long, e.g. 3600. Needed but for --merge.")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(metavar="cuda:N", help="cuda:0 (default); repeat it for more GPUs, or: all.")
    ] = None,
    shapes: Annotated[Path | None, typer.Option(metavar="CSV", help="M,N,K a line.")] = None,
    grid: Annotated[
        Literal["spread", "paper"] | None,
        typer.Option(help="spread: 128 shapes of all regimes (default); paper: all 1000."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N shapes.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Finalists per shape.")] = 3,
    server_top: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Time only N finalists in server mode; default: all.")
    ] = None,
    plans: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the N plans that the model ranks first; default: all.")
    ] = None,
    profiles: Annotated[bool, typer.Option(help="Take the ncu profile of each shape's best.")] = True,
    sanitize: Annotated[
        bool, typer.Option(help="Sanitize every plan; else left for later, and till then nothing is admitted.")
    ] = True,
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="No two candidates in one run with the references; slower.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Compile processes; default: one a core.")
    ] = None,
    commit: Annotated[str, typer.Option(help="Source revision, kept as provenance.")] = "",
    merge: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Put this record file into --out; repeat it for more.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Time winners of this record file again, into --out; compare.")
    ] = None,
    random: Annotated[
        int, typer.Option(min=0, metavar="N", help="With --check: so many shapes; 0: those that --out holds.")
    ] = 60,
    seed: Annotated[int, typer.Option(metavar="N", help="With --check: which shapes.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="With --check: one JSON document on stdout.")] = False,
) -> None:
    """Measure all families on GPUs into a record file that `--device replay:FILE` answers from.

    The same command goes on where it stopped, on as many GPUs as it is given; nothing is measured twice. The shapes of
    a grid come in an order in which every prefix holds all regimes.

    \b
    All 1000 shapes on every GPU here, the 24 most promising plans of each:
      agent record --device all --grid paper --plans 24 --top 5 --server-top 3 --no-profiles --out my.sqlite
        --deadline 3600
    Your shapes, every plan, on two GPUs:
      agent record --device cuda:0 --device cuda:1 --shapes my.csv --out my.sqlite --deadline 3600
    Recordings of two hosts with the same kind of GPU (what both measured stays as the first has it):
      agent record --merge a.sqlite --merge b.sqlite --out both.sqlite
    Do 60 shapes drawn at random come out within 5 % again? Exit code 2 if fewer than 90 % do:
      agent record --check h200.sqlite --random 60 --seed 1 --out again.sqlite --deadline 600
    """
    with guarded():
        from tools.record_file import RecordReader
        from tools.recording import OUT_OF_TIME
        from tools.recording import main as record_families
        from tools.recording_farm import known_device

        given = {
            "--deadline": deadline,
            "--shapes": shapes,
            "--grid": grid,
            "--limit": limit,
            "--top": top,
            "--server-top": server_top,
            "--plans": plans,
            "--jobs": jobs,
            "--commit": commit or None,
            "--check": check,
        }
        chosen = [name for name, value in {**given, "--merge": merge}.items() if value is not None]
        if len(sources := [name for name in ("--shapes", "--grid", "--merge", "--check") if name in chosen]) > 1:
            raise UsageError(f"{sources[0]} and {sources[1]} are two things: give one of them")
        if deadline is None and not merge:
            raise UsageError("how long may it take? Give --deadline SECONDS, for example --deadline 3600")
        arguments = [f"--out={out}"]
        if merge:
            arguments += ["--merge", *map(str, merge)]
        else:
            known_device(out)  # a mistaken file is told of on a machine without a GPU, too
            if check is not None:
                RecordReader(check).close()
            arguments += [
                f"--device={name}" for name in _gpus(device or ["cuda:0"], check is not None and out.exists())
            ]
            arguments += [f"{name}={value}" for name, value in given.items() if value is not None]
        if check is not None:
            arguments += [f"--random={random}", f"--seed={seed}"]
        flags = {"--no-profiles": not profiles, "--no-sanitize": not sanitize, "--one-by-one": one_by_one}
        flags |= {"--json": json_output}
        code = record_families([*arguments, *(name for name, wanted in flags.items() if wanted)])
        raise typer.Exit(EXIT_ERROR if code == OUT_OF_TIME else code)


def _gpus(names: list[str], perhaps_none: bool) -> list[str]:
    """As the recorder takes them. Raises UsageError where one is not there; ``perhaps_none``: it may not be needed."""
    from agent.devices import check_gpu, resolve

    found = []
    for name in names:
        gpu = name if name == "all" else resolve(name)
        if gpu != "all" and not gpu.startswith("cuda:"):
            raise UsageError(f"records are made on a GPU: --device cuda:0, not '{name}'")
        if not perhaps_none:
            check_gpu("cuda:0" if gpu == "all" else gpu, or_replay=False)
        found.append(gpu)
    return found
