"""What runs inside a Dask worker: a plugin that holds the worker's Workshop, and the functions sent to it."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from agent.sweep_cell import Cell, CellResult, LoadFamilies, MakePolicy, OpenDevice, Workshop, run_cell
from agent.sweep_journal import Entry, Journal, Spool, SweepError
from policy.base import PolicyError
from tools.device import DeviceBroken
from tools.families import ManifestError


@dataclass(frozen=True)
class Tools:
    """How a worker gets what it works with; pickled by reference, so all of them are functions of a module."""

    open_device: OpenDevice
    load_families: LoadFamilies
    make_policy: MakePolicy


@dataclass(frozen=True)
class Hello:
    """A worker's answer to who it is. ``scope`` is ``tools.gate.device_scope``; ``error`` is a sentence instead."""

    host: str
    shares_spool: bool
    info: Any = None
    error: str = ""


class SweepPlugin(WorkerPlugin):
    """Dask gives it to every worker, also to those that join later or come back after a crash. ``specs`` names the
    device of a local worker; others have ``default_spec``. Opening a device waits for the first cell."""

    def __init__(self, name: str, spool: Path, tools: Tools, default_spec: str, specs: dict[str, str]) -> None:
        self.name = name
        self._spool = spool
        self._tools = tools
        self._default_spec = default_spec
        self._specs = specs
        self._shop: Workshop | None = None
        self._spec = default_spec

    def setup(self, worker: Any) -> None:
        self._spec = self._specs.get(str(worker.name), self._default_spec)
        if self._specs and threading.current_thread() is threading.main_thread():
            # Ctrl-C, the end of a terminal and `timeout` reach a whole group; local workers end when the driver says so
            # or is gone.
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)

    def teardown(self, worker: Any) -> None:
        if self._shop is not None:
            self._shop.close()
            self._shop = None

    @property
    def shop(self) -> Workshop:
        if self._shop is None:
            spool = Spool(self._spool)
            spool.create()
            tools = self._tools
            self._shop = Workshop(spool, self._spec, tools.open_device, tools.load_families, tools.make_policy)
        return self._shop

    @property
    def spool(self) -> Spool:
        return Spool(self._spool)


def _plugin(name: str, worker: Any = None) -> SweepPlugin:
    found: Any = (worker or get_worker()).plugins[name]
    plugin: SweepPlugin = found
    return plugin


def work(name: str, cell: Cell) -> tuple[str, CellResult]:
    """The task: one cell. The worker's address comes back with it."""
    worker = get_worker()
    try:
        shop = _plugin(name, worker).shop
    except (DeviceBroken, ManifestError) as error:
        return worker.address, CellResult(cell.cell_id, "broken", str(error))
    except SweepError as error:
        return worker.address, CellResult(cell.cell_id, "stop", str(error))
    return worker.address, run_cell(cell, shop)


def hello(name: str, spool_identity: str) -> Hello:
    """Opens the worker's device. Run as a task, so that it has the worker's thread to itself."""
    import socket

    from agent.errors import AgentError

    host = socket.gethostname()
    plugin = _plugin(name)
    try:
        shop = plugin.shop
        return Hello(host, shop.spool.identity == spool_identity, shop.info)
    except (AgentError, DeviceBroken, ManifestError, PolicyError) as error:
        return Hello(host, False, error=str(error))


def leftovers(name: str, dask_worker: Any = None) -> list[Entry]:
    """What the journals on a host of its own hold."""
    return _plugin(name, dask_worker).spool.leftovers()


def seed(name: str, entries: list[Entry], dask_worker: Any = None) -> None:
    """Compile and sanitize results of the database, for a host that does not share the driver's folder."""
    spool = _plugin(name, dask_worker).spool
    spool.create()
    journal = Journal(spool.shared)
    journal.append(entries)
    journal.close()


def forget(name: str, done: list[str], dask_worker: Any = None) -> None:
    """The database holds these cells: their journals may go."""
    spool = _plugin(name, dask_worker).spool
    for cell_id in done:
        spool.forget(cell_id)
