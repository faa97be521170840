"""The command ``agent sweep``. agent/cli.py registers it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent.edge import complain, guarded
from agent.errors import EXIT_ERROR, EXIT_OK, EXIT_REJECTED, UsageError, interrupted_code
from tools.extras import install_command

if TYPE_CHECKING:
    from agent.config import Settings
    from agent.sweep_farm import Place
    from agent.sweep_progress import Progress
    from agent.sweep_table import SweepSummary
    from policy.base import Policy
    from tools.records import Family, Task

Grid = Annotated[str | None, typer.Option("--grid", metavar="NAME", help="paper: the 1000 shapes of CUDA-L2.")]
Shapes = Annotated[Path | None, typer.Option("--shapes", metavar="CSV", help="M,N,K a line.")]
Model = Annotated[str | None, typer.Option("--model", metavar="NAME", help="A model's layers, e.g. llama3-70b.")]
Batch = Annotated[str | None, typer.Option("--batch", metavar="M,…", help="With --model: tokens, e.g. 1,16,4096.")]
Recorded = Annotated[bool, typer.Option("--records", help="The shapes that a replay device has records of.")]


def sweep(
    grid: Grid = None,
    shapes: Shapes = None,
    model: Model = None,
    batch: Batch = None,
    records: Recorded = False,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE", help="Repeatable: cuda:0, cuda:all, replay:h200 or replay:PATH (default auto)."),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes of a replay device (default: cores).")] = None,
    scheduler: Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Dask scheduler, tcp://HOST:8786.")] = None,
    scheduler_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A Dask scheduler's file.")] = None,
    policy: Annotated[str | None, typer.Option(help="search (default), random, anthropic, openai or local.")] = None,
    evaluations: Annotated[
        int | None, typer.Option(help="Budget a shape: new variants, e.g. 24 (default 400).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, budget and recording: same table (default 0).")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Any setting, e.g. --set policy.model=NAME."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML with the sections of configs/.")] = None,
    db: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: <home>/sweep.sqlite.")] = None,
    spool: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Workers' journals, on a disk all hosts see (default: by --db).")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many shapes.")] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write the table, a line a shape.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Search kernels for many shapes on all devices, into one database. Killed, the same command goes on.

    Example: agent sweep --grid paper --device cuda:all --evaluations 24
    """
    with guarded():
        from agent.config import load_settings, parse_assignment
        from agent.sweep_progress import Progress

        _needs_dask()
        overrides: dict[str, Any] = dict(parse_assignment(text) for text in settings or [])
        flags = {"policy.name": policy, "budget.evaluations": evaluations, "session.seed": seed}
        overrides |= {name: value for name, value in flags.items() if value is not None}
        loaded = load_settings(config, os.environ, overrides)
        path = _database(db)
        if csv_file is not None and csv_file.is_dir():
            raise UsageError(f"--csv {csv_file} is a folder: give the name of a file")
        with Progress(quiet) as progress:
            specs = device or [loaded.session.device]
            if scheduler is None and scheduler_file is None:
                specs = expand_devices(specs)  # otherwise each worker does, on its own host
            tasks = _tasks(loaded, specs, grid, shapes, model, batch, records, limit, progress.note)
            place = _place(specs, workers, scheduler, scheduler_file)
            try:
                summary = _run(loaded, tasks, place, path, spool, progress)
            except KeyboardInterrupt as error:
                interrupted = "interrupted; nothing is lost: the same command goes on"
                complain(interrupted) if quiet else progress.note(interrupted)
                raise typer.Exit(interrupted_code(error)) from None
        raise typer.Exit(_tell(summary, csv_file, json_output))


def _run(
    loaded: Settings, tasks: list[Task], place: Place, db: Path, spool: Path | None, progress: Progress
) -> SweepSummary:
    from agent.devices import open_device
    from agent.sweep import Sweep, run
    from agent.sweep_table import summarise
    from agent.sweep_worker import Tools
    from policy.local_policy import located
    from tools.families import load_families

    loaded = loaded.model_copy(update={"policy": located(loaded.policy)})  # workers have folders of their own
    make_policy(loaded, load_families()).close()  # a missing key or model is found before a worker starts
    tools = Tools(open_device, load_families, make_policy)
    outcome = run(Sweep(tasks, loaded, db, place, tools, _jobs(loaded, place), spool), progress)
    return summarise(
        outcome.rows,
        config_id=outcome.config_id,
        device=outcome.info.label,
        db=str(db),
        unfinished=outcome.unfinished,
    )


def _tell(summary: SweepSummary, csv_file: Path | None, json_output: bool) -> int:
    """The exit code. Neither output keeps the other from being written."""
    from agent.files import write_atomic
    from agent.streams import result
    from agent.sweep_table import print_summary, to_csv
    from agent.tables import console_for_result

    try:
        with result(f"the database {summary.db} holds it, and the same command prints it"):
            if json_output:
                print(summary.to_json())
            else:
                print_summary(summary, console_for_result())
    finally:
        if csv_file is not None:
            write_atomic(csv_file, to_csv(summary.rows), "--csv")
    if summary.unfinished:
        complain(f"error: {len(summary.unfinished)} shapes are unfinished: run the same command again")
        return EXIT_ERROR
    return EXIT_OK if summary.states.get("won") else EXIT_REJECTED


def _database(given: Path | None) -> Path:
    from tools.paths import home_dir

    if given is None:
        return home_dir() / "sweep.sqlite"
    if given.is_dir():
        raise UsageError(f"--db {given} is a folder: give the name of a file, for example {given / 'sweep.sqlite'}")
    if given.exists() and not given.is_file():
        raise UsageError(f"--db {given} is a device or a pipe: a database needs a file that keeps what is written")
    return given


def make_policy(settings: Settings, families: Mapping[str, Family]) -> Policy:
    """In a worker, too, where the keys come from the worker's own environment."""
    from policy.factory import make_policy as make

    return make(settings.policy, families, os.environ)


def expand_devices(specs: list[str]) -> list[str]:
    """``cuda:all`` and comma lists taken apart, ``auto`` resolved, repeats refused. Raises UsageError."""
    from agent.devices import resolve
    from tools.visible_gpus import visible_gpus

    found: list[str] = []
    for spec in (part.strip() for text in specs for part in text.split(",")):
        if spec == "cuda:all":
            usable = [f"cuda:{gpu.ordinal}" for gpu in visible_gpus() if gpu.usable]
            if not usable:
                raise UsageError(
                    "cuda:all finds no GPU of compute capability 9.0 here; `agent devices` lists what there is"
                )
            found += usable
        else:
            found.append(resolve(spec))
    repeated = next((spec for spec in found if found.count(spec) > 1), None)
    if repeated is not None:
        raise UsageError(
            f"the device {repeated} is given twice; for several processes of a replay device say --workers"
        )
    return found


def _tasks(
    loaded: Settings, specs: list[str], grid: str | None, shapes: Path | None, model: str | None, batch: str | None,
    records: bool, limit: int | None, note: Any,
) -> list[Task]:  # fmt: skip
    from agent.devices import open_device, recorded_tasks
    from agent.sweep_shapes import choose

    recorded = None
    if records:
        if not specs[0].startswith("replay:"):
            raise UsageError("--records are the shapes of a replay device: give --device replay:h200 or replay:PATH")
        device = open_device(specs[0])
        try:
            recorded = recorded_tasks(device)
        finally:
            device.close()
    return choose(
        grid_name=grid,
        csv=shapes,
        model=model,
        batches=batch,
        recorded=recorded,
        accumulate=loaded.session.accumulate,
        limit=limit,
        note=note,
    )


def _place(specs: list[str], workers: int | None, scheduler: str | None, scheduler_file: Path | None) -> Place:
    from agent.sweep_farm import Place, check_address

    if scheduler is not None:
        check_address(scheduler)
    if scheduler is not None and scheduler_file is not None:
        raise UsageError("give --scheduler or --scheduler-file, not both")
    if scheduler is not None or scheduler_file is not None:
        if len(specs) > 1 or workers is not None:
            raise UsageError("a scheduler has its own workers: leave out --workers, and all devices but one")
        # Each worker sees its own GPU alone, so that it is number 0 of what it sees.
        return Place(scheduler=scheduler, scheduler_file=scheduler_file, default_spec=specs[0])
    if len(specs) == 1 and specs[0].startswith("replay:"):
        specs = specs * (workers or os.cpu_count() or 1)
    elif workers is not None and workers != len(specs):
        raise UsageError(f"a GPU has one worker: with {len(specs)} devices leave --workers out")
    return Place(specs=tuple(specs))


def _jobs(loaded: Settings, place: Place) -> int:
    """Evaluations of one cell at a time: a GPU host's cores are shared out for its compilers."""
    if loaded.session.parallel_compiles is not None:
        return loaded.session.parallel_compiles
    spec = place.specs[0] if place.specs else place.default_spec
    if spec.startswith("replay:"):
        return 1
    return max(1, min(8, (os.cpu_count() or 1) // max(1, len(place.specs))))


def _needs_dask() -> None:
    import importlib.util

    if importlib.util.find_spec("distributed") is None:
        raise UsageError(f"agent sweep needs Dask: {install_command('sweep')}")
