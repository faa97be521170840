"""The command ``agent export-trajectories``. agent/cli.py registers it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.edge import guarded
from agent.errors import UsageError

if TYPE_CHECKING:
    from tools.records import DeviceInfo
    from training.export import Counts, Filters
    from training.rows import Row
    from training.synthesise import Recipe

#: A line of progress every so many trajectories, where stderr is no terminal.
EVERY = 1000


def export_trajectories(
    out: Annotated[Path, typer.Option(metavar="FILE", help="rows.jsonl or rows.parquet.")],
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="SESSION|DB", help="Sessions by name, or databases of sweeps.")
    ] = None,
    from_records: Annotated[
        str | None, typer.Option(metavar="h200|FILE", help="Also trajectories synthesised from a record file.")
    ] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with at least this reward.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only of this policy or kind, e.g. anthropic; repeatable.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="M,N,K", help="Only of this shape; repeatable.")] = None,
    status: Annotated[
        list[str] | None, typer.Option(help="Only ok, failed, not_recorded or none; may be repeated.")
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="The local policy's short prompt instead of the one that was told.")
    ] = False,
    groups: Annotated[int, typer.Option(min=1, max=1000, help="--from-records: groups of a shape.")] = 4,
    group_size: Annotated[int, typer.Option(min=1, max=64, help="--from-records: rollouts of a group.")] = 8,
    pruned: Annotated[
        bool, typer.Option("--pruned", help="--from-records: also shapes where only likely plans are recorded.")
    ] = False,
    split: Annotated[
        str, typer.Option(help="--from-records: train, heldout, off_grid, all (default); or several, with commas.")
    ] = "all",
    seed: Annotated[int, typer.Option(help="--from-records: same seed, same rows.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="The summary as one JSON document on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Write logged rollouts as rows to train on: keys and absolute paths stay behind, shapes are split for good.

    Example: agent export-trajectories sweep.sqlite --from-records h200 --out rows.jsonl
    """
    with guarded():
        from training.export import Counts, Filters, export
        from training.rows import format_of
        from training.splits import asked_splits
        from training.synthesise import Recipe
        from training.writing import write_rows

        if not sources and from_records is None:
            raise UsageError("nothing to export: name a session or a database, or give --from-records h200")
        format_of(out)
        if out.suffix == ".parquet":
            _needs_datasets()
        filters = Filters(min_reward, policy or (), _labels(shape or []), _statuses(status or []), compact)
        counts = Counts()
        splits = asked_splits(split)
        recipe = Recipe(seed, groups, group_size, pruned=pruned, splits=splits)
        with ExitStack() as stack:
            found = _rows(sources or [], from_records, filters, recipe, stack)
            write_rows(out, export(found, filters, counts, _Lines(quiet)))
        if json_output:
            print(json.dumps({"file": str(out), **counts.as_json()}))
        else:
            print(_told(out, counts))


def _rows(
    sources: list[str], from_records: str | None, filters: Filters, recipe: Recipe, stack: ExitStack
) -> Iterator[Row | str]:
    from agent.session import store_path
    from memory.store import Store
    from policy.redacting import Secrets
    from tools.paths import home_dir
    from training.export import rows_of

    secrets = Secrets.of(os.environ)
    for source in sources:
        path, session = (Path(source), None) if _is_file(source) else (store_path(home_dir()), source)
        if not path.is_file():
            raise UsageError(f"there is no file {source}, and no session of that name; `agent show` lists sessions")
        store = stack.enter_context(Store(path))
        if session is not None and store.session(session) is None:
            raise UsageError(f"there is no session {session} in {path}; `agent show` lists them")
        yield from rows_of(store, session, filters, secrets, _recorded_device())
    if from_records is not None:
        yield from _synthesised(from_records, recipe)


def _synthesised(name: str, recipe: Recipe) -> Iterator[Row]:
    from agent.config import load_settings
    from tools.families import load_families
    from tools.record_file import RecordReader
    from tools.replay import path_of
    from training.synthesise import synthesise

    records = RecordReader(path_of(name))
    try:
        loaded = load_settings(None, os.environ)
        yield from synthesise(records, load_families(), recipe, loaded.reward, loaded.memory)
    finally:
        records.close()


def _recorded_device() -> DeviceInfo:
    """Of trajectories that do not say which device's facts they were told."""
    from tools.record_file import RecordReader
    from tools.replay import default_path

    records = RecordReader(default_path())
    try:
        return records.device.model_copy(update={"kind": "replay", "recorded_on": records.meta("recorded_on")})
    finally:
        records.close()


def _is_file(source: str) -> bool:
    return "/" in source or Path(source).suffix in (".sqlite", ".db") or Path(source).is_file()


def _labels(shapes: list[str]) -> frozenset[str]:
    from tools.hgemm import hgemm, parse_shape

    return frozenset(hgemm(*parse_shape(text)).label for text in shapes)


def _statuses(given: list[str]) -> frozenset[str]:
    from typing import get_args

    from training.rows import RowStatus

    known = get_args(RowStatus)
    for one in given:
        if one not in known:
            raise UsageError(f"--status is one of {', '.join(known)}, not '{one}'")
    return frozenset(given)


def _needs_datasets() -> None:
    from importlib.util import find_spec

    from tools.extras import install_command

    if find_spec("datasets") is None:
        raise UsageError(f"Parquet is written with `datasets`: {install_command('train')}, or write rows.jsonl")


class _Lines:
    """Progress on stderr."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def __call__(self, read: int) -> None:
        if not self._quiet and read % EVERY == 0:
            print(f"{read} trajectories read", file=sys.stderr, flush=True)


def _told(out: Path, counts: Counts) -> str:
    said = counts.as_json()
    splits = ", ".join(f"{n} {split}" for split, n in said["splits"].items()) or "none"
    lines = [
        f"{out}: {said['rows']} rows in {said['groups']} groups ({splits}); "
        f"{said['with_reward']} with a reward, {said['with_tokens']} with tokens"
    ]
    lines += [f"left out: {n} ({why})" for why, n in said["left_out"].items()]
    return "\n".join(lines)
