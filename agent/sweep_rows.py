"""What a sweep came to at one shape: the row of the database, and the pure functions around it.

A row is a result of kind ``sweep`` under the key ``sweep-<cell_id>``. A cell is one shape on one device (model, driver,
protocol) under one configuration (policy, budget, seed, families): the same command names the same cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from agent.config import Settings
from agent.summary import Entry, Summary
from memory.store import Store
from policy.base_model import files_id
from policy.factory import model_of
from policy.local_policy import located
from policy.settings import LocalSettings
from tools.records import (
    PROTOCOL_VERSION,
    READABLE_PROTOCOLS,
    BLayout,
    DeviceInfo,
    Family,
    Mode,
    Plan,
    Record,
    Task,
    TimingRow,
    content_hash,
)

KIND = "sweep"
CellStatus = Literal["won", "no_kernel", "not_recorded", "too_large"]

#: Settings that change what a shape comes to; the others only change how soon.
_SESSION = ("seed", "accumulate", "rounds", "group_size", "top_k", "modes")
_SEARCH = ("name", "batch", "startup_trials")
_MODEL = (
    *("name", "max_turns", "max_output_tokens", "temperature", "thinking", "effort"),
    *("exemplars", "max_failed_repairs"),
)


class SweepRow(Record):
    """``modes`` holds the winner's final timing against the headline reference, one row a mode; none without a
    winner."""

    cell_id: str
    config_id: str
    task_id: str
    dims: dict[str, int]
    policy: str
    seed: int
    budget_evaluations: int
    scope: str
    device: str
    device_label: str
    driver: str
    protocol_version: int = PROTOCOL_VERSION
    status: CellStatus
    detail: str = ""
    variant_key: str | None = None
    label: str | None = None
    b_layout: BLayout | None = None
    plan: Plan | None = None
    best_per_layout: dict[str, str] = Field(default_factory=dict)
    modes: tuple[TimingRow, ...] = ()
    evaluations: int = 0
    passed: int = 0
    rejected: dict[str, int] = Field(default_factory=dict)
    not_recorded: int = 0
    stopped_by: str = ""
    tokens: int = 0
    cost_usd: float = 0.0
    finished_at: str
    elapsed_s: float

    @property
    def key(self) -> str:
        return f"{KIND}-{self.cell_id}"

    @property
    def shape(self) -> str:
        return "x".join(map(str, self.dims.values()))

    def timing(self, mode: Mode = "offline") -> TimingRow | None:
        return next((row for row in self.modes if row.mode == mode), None)

    @property
    def config(self) -> str:
        """For people; ``config_id`` is exact."""
        return f"{self.policy}/{self.budget_evaluations}/seed{self.seed}"

    def facts(self) -> dict[str, Any]:
        """Everything that another run of the same cell must come to again on the same recording: no clock, no host."""
        return self.model_dump(mode="json", exclude={"finished_at", "elapsed_s"})


def config_id(settings: Settings, families: Mapping[str, Family]) -> str:
    policy = settings.policy
    is_search = settings.is_search
    chosen: dict[str, Any] = {
        "session": settings.session.model_dump(mode="json", include=set(_SESSION)),
        "budget": settings.budget.model_dump(mode="json"),
        "policy": policy.model_dump(mode="json", include=set(_SEARCH if is_search else _MODEL)),
        "families": {name: family.revision for name, family in families.items()},
    }
    if policy.name == "local":
        chosen["local"] = _local(located(policy).local)
    elif not is_search:
        chosen["model"] = model_of(policy)
    if not is_search:
        chosen["memory"] = settings.memory.model_dump(mode="json")
    if settings.floor_pct is not None:
        chosen["floor_pct"] = settings.floor_pct
    return content_hash(chosen)


def _local(settings: LocalSettings) -> dict[str, Any]:
    """By what is in the files, not by where they are: a training into the same folder makes another policy."""
    base, adapter = settings.base, Path(settings.adapter) if settings.adapter is not None else None
    return {
        **settings.model_dump(mode="json", exclude={"base", "adapter"}),
        "base": base.model_dump(mode="json", exclude={"name", "chat_template"}),
        "files": files_id(base, adapter),
    }


def cell_id(scope: str, config: str, task: Task) -> str:
    return content_hash([scope, config, task.task_id])


class Stamp:
    """The part of a row that is known before the cell runs."""

    def __init__(self, config: str, scope: str, task: Task, settings: Settings, info: DeviceInfo) -> None:
        self._fields: dict[str, Any] = {
            "cell_id": cell_id(scope, config, task),
            "config_id": config,
            "task_id": task.task_id,
            "dims": task.dims,
            "policy": settings.policy.name,
            "seed": settings.session.seed,
            "budget_evaluations": settings.evaluations,
            "scope": scope,
            "device": info.name,
            "device_label": info.label,
            "driver": info.driver,
            "protocol_version": info.protocol_version,
        }

    def row(self, status: CellStatus, detail: str, elapsed_s: float, **fields: Any) -> SweepRow:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return SweepRow(
            **{**self._fields, **fields}, status=status, detail=detail, finished_at=now, elapsed_s=elapsed_s
        )

    def of_summary(self, summary: Summary, elapsed_s: float) -> SweepRow:
        best = summary.best
        fields: dict[str, Any] = {
            "policy": summary.policy,
            "evaluations": summary.evaluations,
            "passed": summary.passed,
            "rejected": summary.rejected,
            "not_recorded": summary.not_recorded,
            "stopped_by": summary.stopped_by,
            "tokens": summary.input_tokens + summary.output_tokens,
            "cost_usd": summary.cost_usd,
        }
        if best is None:
            # Where a recording lacks the screen or the gate, nobody knows whether there is a kernel.
            unknown = summary.unrecorded_finalists or (summary.not_recorded and not summary.passed)
            status: CellStatus = "not_recorded" if unknown else "no_kernel"
            return self.row(status, _why_none(summary), elapsed_s, **fields)
        return self.row("won", "", elapsed_s, **fields, **_winner(best), best_per_layout=summary.best_per_layout)


def _winner(best: Entry) -> dict[str, Any]:
    rows = [row for mode in best.modes if (row := mode.row()) is not None]
    return {
        "variant_key": best.key,
        "label": best.label,
        "b_layout": best.b_layout,
        "plan": best.plan,
        "modes": tuple(rows),
    }


def _why_none(summary: Summary) -> str:
    if summary.unrecorded_finalists:
        return "the full gate was not recorded of those that passed the screen"
    if summary.provisional is not None:
        return f"the best of the screen did not pass the gate: {summary.provisional.why}"
    if summary.not_recorded and not summary.passed:
        return f"{summary.not_recorded} of {summary.evaluations} proposals had not been recorded, and none passed"
    if not summary.evaluations:
        return "no family takes this shape"
    return "no variant passed the screen"


def stored_rows(store: Store, config: str | None = None, any_protocol: bool = False) -> list[SweepRow]:
    """Oldest first. Rows that another version wrote in another form are left out: their cells run again."""
    found = []
    for payload in store.payloads(KIND):
        try:
            row = SweepRow.from_json(payload)
        except ValueError:
            continue
        if (any_protocol or row.protocol_version in READABLE_PROTOCOLS) and config in (None, row.config_id):
            found.append(row)
    return found


def in_order(rows: Iterable[SweepRow]) -> list[SweepRow]:
    return sorted(rows, key=lambda row: (tuple(row.dims.values()), row.task_id))
