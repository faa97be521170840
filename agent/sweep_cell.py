"""One shape of a sweep, from its first proposal to its row: what a worker does. No Dask here, no database.

The nodes are those of a session (agent/nodes.py, agent/finish_nodes.py) in the same order, without LangGraph's
checkpoints: a checkpoint a step costs more than a replayed evaluation, and a cell that begins again finds every
measurement and every turn of a language model in its journal, so it is where it was within milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agent import routing
from agent.config import Settings
from agent.deps import Deps
from agent.devices import check_fits, recorded_tasks
from agent.errors import SessionError, UsageError
from agent.finish_nodes import FinishNodes
from agent.nodes import SearchNodes
from agent.state import SessionState, gather, initial_state
from agent.summary import Summary
from agent.sweep_journal import (
    CellResults,
    Entry,
    RememberedPolicy,
    SharedResults,
    Spool,
    SweepError,
    SweepToolbox,
    locked,
)
from agent.sweep_rows import Stamp, SweepRow
from memory.store import Store, StoreError
from policy.base import Policy, PolicyError
from policy.prompts import Templates, load_templates
from tools.device import Device, DeviceBroken
from tools.gate import device_scope
from tools.records import DeviceInfo, Family, Status, Task

OpenDevice = Callable[[str], Device]
MakePolicy = Callable[[Settings, Mapping[str, Family]], Policy]
LoadFamilies = Callable[[], dict[str, Family]]


@dataclass(frozen=True)
class Cell:
    """``known``: what the database holds of this task and device. ``jobs``: evaluations at a time."""

    cell_id: str
    config_id: str
    task: Task
    settings: Settings
    scope: str
    known: tuple[Entry, ...] = ()
    jobs: int = 1


@dataclass(frozen=True)
class CellResult:
    """``done`` has a row. ``gone``: the database has it already. ``unavailable``: this machine lacks something for this
    shape. ``broken``: the device did not answer. ``stop``: no shape can be done now (full disk, no key). What was
    measured comes back in every case."""

    cell_id: str
    outcome: Literal["done", "gone", "unavailable", "broken", "stop"]
    detail: str = ""
    row: SweepRow | None = None
    entries: list[Entry] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)  # JSON of tools.records.Variant
    trajectories: list[str] = field(default_factory=list)


class Workshop:
    """What a worker process keeps between cells: its device, its families, its policy, the shared results."""

    def __init__(
        self, spool: Spool, spec: str, open_device: OpenDevice, load_families: LoadFamilies, make_policy: MakePolicy
    ) -> None:
        self.spool = spool
        self._spec = spec
        self._open = open_device
        self._make_policy = make_policy
        self._device: Device | None = None
        self._recorded: frozenset[str] = frozenset()
        self._policies: dict[str, Policy] = {}
        self._templates: Templates | None = None
        self.families = load_families()
        self.shared = SharedResults(spool.shared)
        self.shared.follow()

    @property
    def device(self) -> Device:
        """Raises DeviceBroken or UsageError."""
        if self._device is None:
            self._device = self._open(self._spec)
            self._recorded = frozenset(task.task_id for task in recorded_tasks(self._device))
        return self._device

    @property
    def info(self) -> DeviceInfo:
        return self.device.info

    def knows(self, task: Task) -> bool:
        return self.info.kind != "replay" or task.task_id in self._recorded

    def policy(self, settings: Settings) -> Policy:
        key = settings.policy.model_dump_json()
        if key not in self._policies:
            self._policies[key] = self._make_policy(settings, self.families)
        return self._policies[key]

    @property
    def templates(self) -> Templates:
        if self._templates is None:
            self._templates = load_templates()
        return self._templates

    def drop_device(self) -> None:
        if self._device is not None:
            device, self._device = self._device, None
            device.close()

    def close(self) -> None:
        self.drop_device()
        for policy in self._policies.values():
            policy.close()
        self.shared.close()


def run_cell(cell: Cell, shop: Workshop) -> CellResult:
    """Answers with a value for everything that can go wrong with a shape or a machine."""
    folder = shop.spool.cell(cell.cell_id)
    try:
        with locked(folder / "lock"):
            if shop.spool.is_closed(cell.cell_id):
                return CellResult(cell.cell_id, "gone", "the database holds it")
            results = CellResults(folder, shop.shared, cell.known)
            try:
                return _run(cell, shop, results)
            except (DeviceBroken, UsageError) as error:
                shop.drop_device()
                return CellResult(cell.cell_id, "broken", str(error), entries=results.new())
            except SessionError as error:
                return CellResult(cell.cell_id, "unavailable", str(error), entries=results.new())
            finally:
                results.close()
    except (SweepError, PolicyError, StoreError) as error:
        return CellResult(cell.cell_id, "stop", str(error))


def _run(cell: Cell, shop: Workshop, results: CellResults) -> CellResult:
    started = time.monotonic()
    device, task = shop.device, cell.task
    if device_scope(device.info) != cell.scope:
        raise DeviceBroken(f"the device is now {device.info.label}: one sweep measures on one model and driver")
    stamp = Stamp(cell.config_id, cell.scope, task, cell.settings, device.info)
    if not shop.knows(task):
        detail = f"nothing was recorded at {task.label}"
        return CellResult(cell.cell_id, "done", row=stamp.row("not_recorded", detail, time.monotonic() - started))
    try:
        check_fits(task, device.info)
    except UsageError as error:
        return CellResult(cell.cell_id, "done", row=stamp.row("too_large", str(error), time.monotonic() - started))
    with Store(Path(":memory:")) as store:
        deps = Deps(
            session_id=f"sweep-{cell.cell_id}",
            folder=shop.spool.cell(cell.cell_id),
            settings=cell.settings,
            task=task,
            families=shop.families,
            policy=RememberedPolicy(shop.policy(cell.settings), results),
            toolbox=SweepToolbox(device, results, shop.shared, shop.families),
            store=store,
            templates=shop.templates,
        )
        state, summary = drive(deps, cell.jobs)
        lacking = [f["why"] for f in state["finalists"] if f["missed"] == Status.UNAVAILABLE]
        if summary.best is None and lacking:  # a row would say that there is no kernel
            raise SessionError(f"{lacking[0].rstrip('.')}; `agent doctor` says what to install")
        row = stamp.of_summary(summary, time.monotonic() - started)
        return CellResult(
            cell.cell_id,
            "done",
            row=row,
            entries=results.new(),
            variants=[deps.variant(key).to_json() for key in _worth_keeping(state, deps)],
            trajectories=[trajectory.to_json() for trajectory in store.trajectories()],
        )


def _worth_keeping(state: SessionState, deps: Deps) -> list[str]:
    """Finalists, and what no family can render again."""
    finalists = [finalist["key"] for finalist in state["finalists"]]
    raw = [row["key"] for row in state["trials"] if deps.variant(row["key"]).plan is None]
    return list(dict.fromkeys(finalists + raw))


# --- the order of the nodes: agent/graph.py without checkpoints -------------------------------------------------------

_GATHERED = ("thoughts", "answers", "verdicts")


def drive(deps: Deps, jobs: int = 1) -> tuple[SessionState, Summary]:
    """A whole session but for its last node, which writes the winner's files. A test holds it to agent/graph.py. The
    rollouts of a group think at the same time whatever ``jobs`` is: a local model waits for all of them."""
    search, finish = SearchNodes(deps), FinishNodes(deps)
    state = initial_state()

    def take(update: Mapping[str, Any]) -> None:
        for name, value in update.items():
            merged = gather(state[name], value) if name in _GATHERED else value  # type: ignore[literal-required]
            state[name] = merged  # type: ignore[literal-required]

    thinkers = jobs if deps.policy.is_search else max(jobs, deps.settings.group_size)
    with _fan(jobs) as fan, _fan(thinkers) as think:
        take(search.open(state))
        while True:
            take(search.start_group(state))
            thinking: Sequence[Any] | str = routing.thinks(state)
            while not isinstance(thinking, str):
                think(search.think, thinking, take)
                take(search.admit(state))
                acting = routing.acts(state)
                if not isinstance(acting, str):
                    fan(search.act, acting, take)
                take(search.tell(state))
                thinking = routing.after_tell(state)
            take(search.end_group(state))
            if routing.after_group(state) == "shortlist":
                break
        take(finish.shortlist(state))
        while not isinstance(measuring := routing.measures(state), str):
            fan(finish.measure, measuring, take)
            take(finish.judge(state))
    return state, finish.summary(state)


Fan = Callable[[Callable[[Any], Mapping[str, Any]], Sequence[Any], Callable[[Mapping[str, Any]], None]], None]


@contextmanager
def _fan(jobs: int) -> Iterator[Fan]:
    """One call an input: in threads, so that compilers and a model's requests run side by side, or one by one."""
    if jobs <= 1:

        def in_turn(node: Any, inputs: Sequence[Any], take: Any) -> None:
            for one in inputs:
                take(node(one))

        yield in_turn
        return
    with ThreadPoolExecutor(jobs) as pool:

        def side_by_side(node: Any, inputs: Sequence[Any], take: Any) -> None:
            for update in pool.map(node, inputs):
                take(update)

        yield side_by_side
