"""``agent compare A B``: two databases, or two policies of one, shape by shape. Pure, but for reading the databases.

What is compared are same-run ratios (reference time / kernel time), never absolute times: the ratio of B's to A's is
over 1 where B found the faster kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.compare_stats import Estimate, geometric_mean, mean, share
from agent.errors import UsageError
from agent.sweep_rows import SweepRow, stored_rows
from memory.store import Standing, Store
from tools.records import HEADLINE_REFERENCE, MODES, PROTOCOL_VERSION, Mode, Record

SEPARATOR = "@"


class Best(Record):
    """The best kernel of one side at one shape; without ``ratio`` it found none that passed the gate."""

    label: str = ""
    ratio: float | None = None
    lo: float | None = None
    hi: float | None = None


class Side(Record):
    """``budget`` is what each shape could spend, None where the database does not say (sessions). ``shapes``: task_id →
    mode → best."""

    name: str
    config: str
    device: str
    driver: str
    recorded: str
    protocol_version: int = PROTOCOL_VERSION
    budget: str | None
    shapes: dict[str, dict[Mode, Best]]
    dims: dict[str, dict[str, int]]


class Pair(Record):
    """Both sides at one shape. ``change`` = B's ratio / A's ratio; ``verdict`` needs the intervals to lie apart."""

    shape: str
    a: float
    b: float
    change: float
    verdict: str  # A, B, tie
    a_label: str
    b_label: str


class ModeComparison(Record):
    """Over the shapes at which both sides have a kernel."""

    mode: Mode
    pairs: tuple[Pair, ...]
    mean_a: Estimate
    mean_b: Estimate
    mean_change: Estimate
    geo_mean_change: Estimate
    b_faster: Estimate  # share of shapes
    wins_a: int  # clear ones
    wins_b: int
    ties: int


class Comparison(Record):
    """``only_a``, ``only_b``: shapes that the other side did not try; ``none_a``…: that it tried and found none."""

    a: str
    b: str
    device: str
    shared: int
    only_a: int
    only_b: int
    none_a: int
    none_b: int
    modes: tuple[ModeComparison, ...]

    def mode(self, mode: Mode = "offline") -> ModeComparison | None:
        return next((m for m in self.modes if m.mode == mode), None)


# --- reading a side ---------------------------------------------------------------------------------------------------


def split_operand(text: str, default_db: Path | None) -> tuple[Path, str]:
    """``FILE``, ``FILE@CONFIG``, or with a default database ``CONFIG``: (path, config; empty if there is none)."""
    path, _, config = text.rpartition(SEPARATOR)
    if path:
        return Path(path), config
    if default_db is not None and not Path(text).is_file():
        return default_db, text
    return Path(text), ""


def read_side(path: Path, config: str) -> Side:
    """The rows of one configuration. Raises UsageError with one sentence for a database without, or with several."""
    if not path.is_file():
        hint = "" if config or path.suffix else "; for a configuration, name its database: --db FILE"
        raise UsageError(f"there is no database {path}{hint}")
    with Store(path) as store:
        rows = stored_rows(store, any_protocol=True)
        if not rows:
            if config:
                raise UsageError(f"{path} holds no sweep, so there is no '{config}' in it")
            return _of_sessions(path, store)
    return _of_sweep(path, rows, config)


def _of_sweep(path: Path, rows: Sequence[SweepRow], config: str) -> Side:
    chosen = [row for row in rows if _is(row, config)]
    kinds = {(row.config_id, row.scope): f"{row.config} on {row.device_label} ({row.config_id})" for row in chosen}
    if not kinds:
        known = ", ".join(dict.fromkeys(row.config for row in rows))
        raise UsageError(f"{path} holds no sweep '{config}'; there are {known}")
    if len(kinds) > 1:
        raise UsageError(
            f"{path} holds several sweeps ({'; '.join(kinds.values())}): choose one as "
            f"{path}{SEPARATOR}CONFIG, where CONFIG is a policy, policy/budget/seedN or the id in brackets"
        )
    first = chosen[0]
    measured = [row for row in chosen if row.status in ("won", "no_kernel")]
    return Side(
        name=f"{path.name}{SEPARATOR}{first.config}",
        config=first.config,
        device=first.device,
        driver=first.driver,
        recorded=first.device_label,
        protocol_version=first.protocol_version,
        budget=f"{first.budget_evaluations} evaluations",
        shapes={row.task_id: {mode: _best_of_row(row, mode) for mode in MODES} for row in measured},
        dims={row.task_id: row.dims for row in measured},
    )


def _is(row: SweepRow, config: str) -> bool:
    parts = row.config.split("/")
    return not config or config in (parts[0], row.config, row.config_id, "/".join(parts[:2]))


def _best_of_row(row: SweepRow, mode: Mode) -> Best:
    timing = row.timing(mode)
    if timing is None:
        return Best()
    return Best(label=row.label or "", ratio=timing.ratio, lo=timing.ratio_lo, hi=timing.ratio_hi)


def _of_sessions(path: Path, store: Store) -> Side:
    """The best admitted kernel of every task, over all sessions of a store."""
    dims: dict[str, dict[str, int]] = {}
    protocol = PROTOCOL_VERSION
    for payload in store.payloads("time"):
        timing = json.loads(payload)
        if timing.get("rows"):
            dims.setdefault(timing["task_id"], timing["rows"][0]["dims"])
            protocol = int(timing["rows"][0]["protocol_version"])
    shapes: dict[str, dict[Mode, Best]] = {}
    devices: dict[tuple[str, str], None] = {}
    for task_id in dims:
        shapes[task_id] = {}
        for mode in MODES:
            standing = next(iter(store.leaderboard(task_id, mode=mode, admitted_only=True)), None)
            shapes[task_id][mode] = _best_of_standing(store, standing)
            if standing is not None:
                devices[standing.device, standing.driver] = None
    if not devices:
        raise UsageError(f"{path} holds no kernel that passed the whole gate")
    if len(devices) > 1:
        names = "; ".join(f"{name}, driver {driver}" for name, driver in devices)
        raise UsageError(f"{path} holds kernels of several devices ({names}), whose numbers do not mix")
    (device, driver) = next(iter(devices))
    return Side(
        name=path.name,
        config="sessions",
        device=device,
        driver=driver,
        recorded=f"{device}, driver {driver}",
        protocol_version=protocol,
        budget=None,
        shapes=shapes,
        dims=dims,
    )


def _best_of_standing(store: Store, standing: Standing | None) -> Best:
    if standing is None:
        return Best()
    variant = store.variant(standing.variant_key)
    label = variant.label if variant else standing.variant_key
    return Best(label=label, ratio=standing.ratio, lo=standing.ratio_lo, hi=standing.ratio_hi)


# --- comparing --------------------------------------------------------------------------------------------------------


def compare(a: Side, b: Side) -> Comparison:
    """Raises UsageError where the numbers do not compare."""
    if a.protocol_version != b.protocol_version:
        raise UsageError(
            f"{a.name} has protocol version {a.protocol_version}, {b.name} {b.protocol_version}: they do not compare"
        )
    if (a.device, a.driver) != (b.device, b.driver):
        raise UsageError(
            f"{a.name} is of {a.device}, driver {a.driver}, and {b.name} of {b.device}, driver {b.driver}: numbers of "
            "two devices do not compare"
        )
    if a.budget != b.budget and None not in (a.budget, b.budget):
        raise UsageError(f"{a.name} had {a.budget} a shape and {b.name} {b.budget}: give both the same budget")
    shared = [task_id for task_id in a.shapes if task_id in b.shapes]
    if not shared:
        raise UsageError(f"{a.name} and {b.name} have no shape in common")
    modes = [found for mode in MODES if (found := _mode(a, b, shared, mode)) is not None]
    return Comparison(
        a=a.name,
        b=b.name,
        device=a.recorded,
        shared=len(shared),
        only_a=len(a.shapes) - len(shared),
        only_b=len(b.shapes) - len(shared),
        none_a=sum(a.shapes[t]["offline"].ratio is None for t in shared),
        none_b=sum(b.shapes[t]["offline"].ratio is None for t in shared),
        modes=tuple(modes),
    )


def _mode(a: Side, b: Side, shared: Sequence[str], mode: Mode) -> ModeComparison | None:
    pairs = [
        pair
        for task_id in shared
        if (pair := _pair(a.shapes[task_id][mode], b.shapes[task_id][mode], a.dims[task_id])) is not None
    ]
    if not pairs:
        return None
    changes = [pair.change for pair in pairs]
    return ModeComparison(
        mode=mode,
        pairs=tuple(pairs),
        mean_a=mean([pair.a for pair in pairs]),
        mean_b=mean([pair.b for pair in pairs]),
        mean_change=mean(changes),
        geo_mean_change=geometric_mean(changes),
        b_faster=share([change > 1 for change in changes]),
        wins_a=sum(pair.verdict == "A" for pair in pairs),
        wins_b=sum(pair.verdict == "B" for pair in pairs),
        ties=sum(pair.verdict == "tie" for pair in pairs),
    )


def _pair(a: Best, b: Best, dims: Mapping[str, int]) -> Pair | None:
    if a.ratio is None or b.ratio is None or a.lo is None or b.lo is None or a.hi is None or b.hi is None:
        return None
    verdict = "B" if b.lo > a.hi else "A" if a.lo > b.hi else "tie"
    return Pair(
        shape="x".join(map(str, dims.values())),
        a=a.ratio,
        b=b.ratio,
        change=b.ratio / a.ratio,
        verdict=verdict,
        a_label=a.label,
        b_label=b.label,
    )


def to_json(comparison: Comparison) -> str:
    document: dict[str, Any] = {"reference": HEADLINE_REFERENCE, **comparison.model_dump(mode="json")}
    return json.dumps(document)
