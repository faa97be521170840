"""The workers of a sweep, on Dask distributed: a local cluster of one process per device, or a scheduler that is given.

Dask moves cells and results, restarts workers and gives the cells of a dead one to another. What is durable is no
business of Dask's: see agent/sweep_journal.py. With agent/sweep_worker.py the only module that imports distributed.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from agent.errors import UsageError
from agent.files import read_json
from agent.sweep_cell import Cell, CellResult
from agent.sweep_journal import Entry, Spool, SweepError
from agent.sweep_worker import Hello, SweepPlugin, Tools, forget, hello, leftovers, seed, work

#: distributed.Client, most of whose methods have no types.
Client = Any

#: What a cell takes of a worker, so that a worker has one at a time whatever its number of threads.
RESOURCES = {"GPU": 1}
CONNECT_TIMEOUT_S = 15.0
MAX_SCHEDULER_FILE_BYTES = 16 << 20  # a scheduler lists its workers in it
_ADDRESS = re.compile(r"((tcp|tls|ws|wss|ucx)://)?(\[[0-9A-Fa-f:.]+(%\w+)?\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})/?")
WORKERS_TIMEOUT_S = 90.0
#: Opening a GPU the first time includes starting its worker process.
HELLO_TIMEOUT_S = 300.0
#: At most so long after ctrl-C a worker that was to be started still begins.
STARTING_S = 2.0
#: Without any worker for this long, a local cluster will not have one again.
NO_WORKERS_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where cells run. ``specs`` are the devices of a local cluster, one worker each; empty with a scheduler."""

    specs: tuple[str, ...] = ()
    scheduler: str | None = None
    scheduler_file: Path | None = None
    default_spec: str = "auto"


@dataclass(frozen=True)
class Finished:
    """A cell that came back, and the worker it ran on. ``died``: it ended several workers. ``error``: a bug of ours."""

    cell_id: str
    worker: str
    result: CellResult | None = None
    died: str = ""
    error: str = ""


class Farm:
    """Submits cells and hands back what they came to. Not thread-safe."""

    def __init__(self, client: Client, name: str, place: Place, spool: Spool) -> None:
        self._client = client
        self._name = name
        self._place = place
        self._spool = spool
        self._done: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._tries: dict[str, int] = {}
        self._retired: set[str] = set()
        self._workers: tuple[float, list[str]] = (0.0, [])
        self._seen_workers = time.monotonic()

    # --- workers ---------------------------------------------------------------------------------------------------

    def workers(self) -> list[str]:
        """Addresses of those that may be given cells, as of a second ago."""
        now = time.monotonic()
        if now - self._workers[0] < 1.0:
            return self._workers[1]
        # Not Client.scheduler_info: a summary without workers may take the place of what it fetched before it returns.
        found = self._client.sync(self._client.scheduler.identity, n_workers=-1)["workers"]
        usable = [address for address, facts in found.items() if facts.get("resources", {}).get("GPU")]
        self._workers = (now, [address for address in usable if address not in self._retired])
        return self._workers[1]

    def hellos(self) -> dict[str, Hello]:
        """Opens every worker's device. Raises SweepError if a worker does not answer."""
        identity = self._spool.identity or ""
        asked = {
            address: self._client.submit(
                hello, self._name, identity, workers=[address], resources=RESOURCES, pure=False, retries=2
            )
            for address in self.workers()
        }
        found = {}
        for address, future in asked.items():
            try:
                found[address] = future.result(timeout=HELLO_TIMEOUT_S)
            except Exception as error:  # whatever it was, the user has to look at that worker
                raise SweepError(f"the worker at {address} does not answer: {_sentence(error)}") from error
        return found

    def leftovers(self, addresses: Sequence[str]) -> list[Entry]:
        found = self._client.run(leftovers, self._name, workers=list(addresses)) if addresses else {}
        return [entry for entries in found.values() for entry in entries]

    def seed(self, addresses: Sequence[str], entries: list[Entry]) -> None:
        if addresses and entries:
            self._client.run(seed, self._name, entries, workers=list(addresses))

    def forget(self, addresses: Sequence[str], done: list[str]) -> None:
        if addresses and done:
            self._client.run(forget, self._name, done, workers=list(addresses))

    def retire(self, address: str) -> None:
        """No more cells for this worker; those it holds go to others."""
        self._retired.add(address)
        self._workers = (0.0, [])
        self._client.retire_workers(workers=[address], close_workers=True)

    # --- cells -----------------------------------------------------------------------------------------------------

    def submit(self, cell: Cell) -> None:
        attempt = self._tries[cell.cell_id] = self._tries.get(cell.cell_id, 0) + 1
        key = f"{self._name}-{cell.cell_id}-{attempt}"
        future = self._client.submit(work, self._name, cell, key=key, resources=RESOURCES, pure=False)
        self._await(cell.cell_id, future)

    def _await(self, cell_id: str, future: Any) -> None:
        future.add_done_callback(lambda done: self._done.put((cell_id, done)))

    def next(self, timeout_s: float) -> Finished | None:
        """The next cell that came back; None if there is none within the time. Raises SweepError when none can come."""
        try:
            cell_id, future = self._done.get(timeout=timeout_s)
        except queue.Empty:
            self._check()
            return None
        if future.status == "finished":
            return self._fetch(cell_id, future)
        if future.status == "error":
            return self._failed(cell_id, future, future.exception())
        if future.status == "cancelled":
            raise SweepError(self._lost())
        # "lost": the worker died with the result before we came to fetch it. Dask runs the cell again.
        self._await(cell_id, future)
        return None

    def _fetch(self, cell_id: str, future: Any) -> Finished | None:
        """A worker may also die with its result while we fetch it; the journal makes running it again quick."""
        from distributed import TimeoutError as DaskTimeout

        try:
            address, result = future.result(timeout=10.0)
        except DaskTimeout:
            self._await(cell_id, future)
            return None
        except Exception as error:
            if future.status == "cancelled":
                raise SweepError(self._lost()) from error
            return self._failed(cell_id, future, error)
        future.release()
        return Finished(cell_id, address, result)

    def _failed(self, cell_id: str, future: Any, error: BaseException) -> Finished:
        future.release()
        if type(error).__name__ == "KilledWorker":
            return Finished(cell_id, "", died=f"its worker died {self._deaths()} times")
        return Finished(cell_id, "", error=_sentence(error))

    def _check(self) -> None:
        if self._client.status != "running":
            raise SweepError(self._lost())
        now = time.monotonic()
        if self.workers():
            self._seen_workers = now
        elif self._place.specs and now - self._seen_workers > NO_WORKERS_S:
            raise SweepError("no worker process is left and none could be started again: run the same command again")

    def _lost(self) -> str:
        return f"the scheduler {_address(self._place)} went away; nothing is lost: run the same command again"

    def _deaths(self) -> int:
        import dask

        return int(dask.config.get("distributed.scheduler.allowed-failures")) + 1


@contextmanager
def open_farm(place: Place, spool: Spool, tools: Tools, name: str) -> Iterator[Farm]:
    """Starts or joins the workers. Raises SweepError with one sentence."""
    with ExitStack() as stack:
        client = stack.enter_context(_joined(place) if not place.specs else _started(place, spool))
        specs = {_worker_name(i): _inner(spec) for i, spec in enumerate(place.specs)}
        plugin = SweepPlugin(name, spool.root.absolute(), tools, place.default_spec, specs)
        farm = Farm(client, name, place, spool)
        try:
            client.wait_for_workers(max(1, len(place.specs)), timeout=WORKERS_TIMEOUT_S)
        except TimeoutError as error:
            raise SweepError(_no_workers(place)) from error
        try:
            client.register_plugin(plugin, name=name)
        except Exception as error:  # a worker that cannot import us answers with its own ImportError
            raise SweepError(f"the workers cannot load hgemm-agent: {_sentence(error)}") from error
        stack.callback(_unregister, client, name, place)
        if not farm.workers():
            raise SweepError(
                f"no worker {_of(place)} has the resource GPU: start each with --nthreads 1 --resources GPU=1"
            )
        yield farm


def _unregister(client: Client, name: str, place: Place) -> None:
    """Leaves the workers of someone else's cluster as they were; a local one ends with us."""
    if not place.specs and client.status == "running":
        client.unregister_worker_plugin(name=name)


@contextmanager
def _started(place: Place, spool: Spool) -> Iterator[Client]:
    import dask
    import distributed
    from distributed.deploy.spec import close_clusters

    try:
        Path.cwd()
    except OSError as error:
        raise SweepError("the current folder is gone, and no worker can start in it: change to another") from error
    _start_resource_tracker()
    with ExitStack() as stack:
        # A shape that ends worker after worker is given up by agent/sweep.py, not here: deaths of others count too.
        stack.enter_context(dask.config.set({"distributed.scheduler.allowed-failures": 5}))
        workers = {
            _worker_name(i): {
                "cls": distributed.Nanny,
                "options": {
                    "nthreads": 1,
                    "resources": RESOURCES,
                    "memory_limit": 0,
                    "local_directory": str(spool.root / "dask"),
                    "name": _worker_name(i),
                    "env": _environment(spec),
                    "silence_logs": logging.CRITICAL,
                    "host": "127.0.0.1",
                    "death_timeout": 60,
                },
            }
            for i, spec in enumerate(place.specs)
        }
        local = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
        scheduler = {"cls": distributed.Scheduler, "options": {**local, "port": 0, "dashboard": False}}
        dask_api: Any = distributed
        loop = stack.enter_context(_quiet_loop())
        # The stack ends the cluster. Dask would try again at exit, and fail on one that ctrl-C kept from starting.
        atexit.unregister(close_clusters)
        try:
            cluster = stack.enter_context(
                dask_api.SpecCluster(
                    workers=workers, scheduler=scheduler, silence_logs=logging.CRITICAL, name="sweep", loop=loop
                )
            )
            client = stack.enter_context(dask_api.Client(cluster, set_as_default=False))
        except KeyboardInterrupt:
            _end_starting(len(workers))
            raise
        except (OSError, RuntimeError) as error:  # of a nanny: the current folder is gone, no process is left
            raise SweepError(f"the local workers could not be started: {_sentence(error)}") from error
        yield client


def _end_starting(count: int) -> None:
    """Ends the workers that are being started, ``count`` in all, before what they are to read from us is gone: each of
    them would show a traceback. A thread may be about to start the next."""
    ended: set[int | None] = set()
    until = time.monotonic() + STARTING_S
    while len(ended) < count and time.monotonic() < until:
        for worker in multiprocessing.active_children():
            worker.kill()
            ended.add(worker.pid)
        time.sleep(0.02)


@contextmanager
def _quiet_loop() -> Iterator[Any]:
    """Dask's event loop in a thread that has SIGINT blocked, and so have the workers that it starts: ctrl-C reaches a
    whole group, and each that is still importing would show a traceback of its own. ``SweepPlugin`` comes later."""
    from distributed.utils import LoopRunner

    runner: Any = LoopRunner()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the thread inherits
    try:
        runner.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # What fails there is missed here, as an answer or a worker. asyncio would show a traceback as well, of each worker
    # that ctrl-C kept from starting.
    runner.loop.asyncio_loop.set_exception_handler(lambda loop, context: None)
    try:
        yield runner.loop
    finally:
        runner.stop()


def _start_resource_tracker() -> None:
    """Before multiprocessing does it, in a way that the user never hears of it.

    It ignores ctrl-C and SIGTERM, but the end of a terminal takes it before its clients, and its successor shows a
    traceback for each thing that it has never heard of. And Dask's threads are cut off by our exit, now and then
    between removing a semaphore and saying so, which the tracker, having tidied up, would warn of.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which it inherits
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")  # likewise
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.pop()
        signal.signal(signal.SIGHUP, before)


@contextmanager
def _joined(place: Place) -> Iterator[Client]:
    import distributed

    address = str(place.scheduler) if place.scheduler_file is None else _address_in(place.scheduler_file)
    check_address(address)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    try:
        _probe(address)
        dask_api: Any = distributed
        client = dask_api.Client(address=address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except Exception as error:  # Dask passes on whatever the other end's answer led to
        raise SweepError(
            f"there is no scheduler at {_address(place)} ({_sentence(error)}): start one with `dask scheduler`, or "
            "leave the option out to use this machine"
        ) from error
    with client:
        yield client


def _probe(address: str) -> None:
    """Raises unless a scheduler answers. A Client that cannot connect cannot be closed either, and shows tracebacks."""
    import distributed

    async def ask() -> Any:
        dask_api: Any = distributed
        connection = dask_api.Security().get_connection_args("client")
        async with dask_api.core.rpc(address, connection_args=connection) as scheduler:
            return await scheduler.identity()

    async def in_time() -> Any:
        return await asyncio.wait_for(ask(), CONNECT_TIMEOUT_S)

    try:
        found = asyncio.run(in_time())
    except TimeoutError as error:
        raise TimeoutError(f"nothing answered within {CONNECT_TIMEOUT_S:.0f} s") from error
    if not isinstance(found, dict) or found.get("type") != "Scheduler":
        raise ValueError("what answered is no scheduler")


def check_address(address: str) -> None:
    """Raises UsageError. Dask waits half a minute for a nonsense address, and then shows a traceback."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 2**16:
        raise UsageError(f"{address!r} is not the address of a Dask scheduler: write tcp://HOST:PORT")


def _address_in(path: Path) -> str:
    """A scheduler that was started a moment ago writes its file soon, and not at one stroke."""
    until = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            content = read_json(path, "the scheduler file", MAX_SCHEDULER_FILE_BYTES)
            if isinstance(content, dict) and isinstance(content.get("address"), str):
                return str(content["address"])
            why = f"the scheduler file {path} names no address"
        except UsageError as error:
            why = str(error)
        if time.monotonic() > until:
            raise SweepError(f"{why}: start a scheduler with `dask scheduler --scheduler-file {path}`")
        time.sleep(0.1)


def _worker_name(index: int) -> str:
    return f"device-{index}"


def _inner(spec: str) -> str:
    """What a device is called inside a worker that sees only this one."""
    return "cuda:0" if spec.startswith("cuda:") else spec


def _environment(spec: str) -> dict[str, str]:
    """A local worker's GPU alone is visible to it. ``cuda:N`` counts what is visible to us."""
    if not spec.startswith("cuda:"):
        return {}
    from tools.visible_gpus import named_gpus

    ordinal = int(spec.removeprefix("cuda:"))
    visible = named_gpus() or []
    if visible and ordinal >= len(visible):
        raise SweepError(f"there is no {spec}: CUDA_VISIBLE_DEVICES names {len(visible)}")
    return {"CUDA_VISIBLE_DEVICES": visible[ordinal] if visible else str(ordinal)}


def _of(place: Place) -> str:
    return f"at {_address(place)}" if place.scheduler_file or place.scheduler else _address(place)


def _address(place: Place) -> str:
    return str(place.scheduler_file or place.scheduler or "of this machine")


def _no_workers(place: Place) -> str:
    if place.specs:
        return f"the {len(place.specs)} local workers did not start within {WORKERS_TIMEOUT_S:.0f} s"
    return (
        f"no worker joined the scheduler {_address(place)} within {WORKERS_TIMEOUT_S:.0f} s: start them with "
        "`dask worker … --nthreads 1 --resources GPU=1`"
    )


def _sentence(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return text[:300] if text else type(error).__name__
