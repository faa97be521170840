"""A session's folder, its lock, and running it to the end or to the next interruption.

<home>/store.sqlite                       results, variants, trajectories of all sessions (memory/store.py)
<home>/sessions/<session_id>/config.json      settings and device, as they were at the start
                             checkpoints.sqlite   LangGraph's state after every step
                             session.log      one line an event
                             best/            kernel.cu, launch.json, result.json of the winner
                             summary.json     what the session came to
                             lock             held by the process that runs it
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from agent.config import Settings
from agent.devices import open_device
from agent.errors import SessionError, UsageError
from agent.files import read_text, write_atomic
from agent.progress import Event, Observer, silent
from agent.summary import Summary
from policy.tool_schemas import first_error
from tools.device import Device
from tools.records import DeviceInfo

if TYPE_CHECKING:
    from memory.store import Store

CONFIG_VERSION = 1
MAX_COMPILES = 16  # side by side, where the settings say nothing
CHECKPOINTS = "checkpoints.sqlite"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")


class SessionConfig(BaseModel):
    """config.json. ``device`` is resolved (never auto); ``device_info`` is what it was when the session began."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = CONFIG_VERSION
    session_id: str
    created_at: str
    device: str
    device_info: DeviceInfo
    settings: Settings


def sessions_folder(home: Path) -> Path:
    return home / "sessions"


def store_path(home: Path) -> Path:
    return home / "store.sqlite"


def folder_of(home: Path, session_id: str) -> Path:
    """Raises UsageError for a name that could leave the folder of sessions."""
    if not _NAME.match(session_id):
        raise UsageError(f"'{session_id}' is not a session name: letters, digits, . _ and -, at most 80")
    return sessions_folder(home) / session_id


def create(home: Path, settings: Settings, name: str | None, device_name: str, info: DeviceInfo) -> SessionConfig:
    """Writes the session's folder. Raises UsageError, StoreError."""
    from memory.store import Store

    session_id = name or _new_name(home, f"{settings.session.task.label}-{settings.policy.name}")
    folder = folder_of(home, session_id)
    if not folder.exists() and store_path(home).is_file():
        # Rollouts and answers in the store carry the name; a second session of it would read the first one's.
        with Store(store_path(home)) as store:
            if store.session(session_id) is not None:
                raise UsageError(
                    f"{store.path} still remembers a session {session_id} whose folder is gone: choose another name"
                )
    try:
        sessions_folder(home).mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError as error:
        raise UsageError(
            f"there is already a session {session_id}: `agent resume {session_id}`, or choose another --session"
        ) from error
    except OSError as error:
        raise UsageError(f"the folder {folder} cannot be made: {error.strerror}; see HGEMM_AGENT_HOME") from error
    config = SessionConfig(
        session_id=session_id,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device_name,
        device_info=info,
        settings=settings,
    )
    write_atomic(folder / "config.json", config.model_dump_json(indent=2) + "\n")
    return config


def load(home: Path, session_id: str) -> SessionConfig:
    path = folder_of(home, session_id) / "config.json"
    if not path.parent.is_dir():
        raise UsageError(f"there is no session {session_id} in {sessions_folder(home)}; `agent show` lists them")
    try:
        data = json.loads(read_text(path, "the session's file"))
        version = data.get("version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > CONFIG_VERSION:
            raise UsageError(f"{path} is of a newer hgemm-agent (version {version}, this one reads {CONFIG_VERSION})")
        return SessionConfig.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{path} is not a session's file: {first_error(error)}") from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def session_ids(home: Path) -> list[str]:
    """Newest first."""
    folder = sessions_folder(home)
    found = [p.parent for p in folder.glob("*/config.json")] if folder.is_dir() else []
    return [p.name for p in sorted(found, key=lambda p: (p / "config.json").stat().st_mtime_ns, reverse=True)]


def run(
    home: Path,
    config: SessionConfig,
    environ: Mapping[str, str],
    observer: Observer = silent,
    stop_requested: Callable[[], bool] = lambda: False,
    device: Device | None = None,
) -> Summary:
    """From wherever the session is to its end. Raises SessionError, Stopped, PolicyError, DeviceBroken or StoreError;
    after any of them, and after kill -9, the same call goes on. A ``device`` that is passed in stays open."""
    from agent.deps import Deps
    from agent.finish_nodes import FinishNodes
    from agent.graph import build_graph, checkpoints, run_graph
    from memory.store import Store
    from policy.factory import make_policy
    from policy.prompts import load_templates
    from tools.families import load_families
    from tools.gate import Toolbox, device_scope

    folder = folder_of(home, config.session_id)
    with ExitStack() as stack:
        stack.enter_context(locked(folder))
        store = stack.enter_context(Store(store_path(home)))
        if device is None:
            device = open_device(config.device)
            stack.callback(device.close)
        if device_scope(device.info) != device_scope(config.device_info):
            raise SessionError(
                f"session {config.session_id} was begun on {config.device_info.label}, but {config.device} is now "
                f"{device.info.label}: measurements of two devices do not mix, begin a new session"
            )
        families = load_families()
        store.check_families(families)
        policy = make_policy(config.settings.policy, families, environ)
        stack.callback(policy.close)
        deps = Deps(
            session_id=config.session_id,
            folder=folder,
            settings=config.settings,
            task=config.settings.session.task,
            families=families,
            policy=policy,
            toolbox=Toolbox(device, store, families),
            store=store,
            templates=load_templates(),
            observer=_logged(observer, stack, folder),
            stop_requested=stop_requested,
        )
        _register(store, config)
        try:
            saver = stack.enter_context(checkpoints(folder / CHECKPOINTS))
            concurrency = _concurrency(config.settings, device.info, policy.is_search)
            state = run_graph(build_graph(deps, saver), config.session_id, concurrency)
        except sqlite3.Error as error:
            raise _checkpoint_error(folder, error) from error
        except BaseException:
            store.set_session_status(config.session_id, "stopped")
            raise
        return FinishNodes(deps).summary(state)


def partial_summary(home: Path, config: SessionConfig) -> Summary:
    """summary.json of a finished session, else what its last checkpoint says."""
    from agent.graph import checkpoints, last_state
    from agent.state import initial_state
    from agent.summary import summarise

    folder = folder_of(home, config.session_id)
    if (folder / "summary.json").is_file():
        try:
            return Summary.from_json(read_text(folder / "summary.json", "the summary"))
        except ValidationError as error:
            raise UsageError(f"{folder / 'summary.json'} is damaged: {first_error(error)}") from error
    state = None
    if (folder / CHECKPOINTS).is_file():
        try:
            with checkpoints(folder / CHECKPOINTS) as saver:
                state = last_state(saver, config.session_id)
        except sqlite3.Error as error:
            raise _checkpoint_error(folder, error) from error
    return summarise(
        session_id=config.session_id,
        task=config.settings.session.task,
        device=config.device_info,
        policy=config.settings.policy.name,
        seed=config.settings.session.seed,
        state=state or initial_state(),
        entries=[],
        references=[],
        source_path=None,
        cost_known=True,
        finished=False,
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The session belongs to this process. The kernel frees the lock of a process that dies, kill -9 included."""
    path = folder / "lock"
    try:
        file = path.open("a+")
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise SessionError(
                f"session {folder.name} is already being run by {holder}; wait for it or end it"
            ) from error
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def _checkpoint_error(folder: Path, error: sqlite3.Error) -> SessionError:
    from tools.sqlite_errors import explain

    return SessionError(explain(error, f"the file {folder / CHECKPOINTS}"))


def _concurrency(settings: Settings, info: DeviceInfo, is_search: bool) -> int:
    """Tasks of one step at a time: compilers on a GPU host, requests of a language model."""
    compiles = settings.session.parallel_compiles
    if compiles is None:
        compiles = min(MAX_COMPILES, os.cpu_count() or 1) if info.kind == "cuda" else 1
    return compiles if is_search else max(compiles, settings.group_size)


def _register(store: Store, config: SessionConfig) -> None:
    if store.session(config.session_id) is None:
        store.create_session(config.session_id, config.model_dump(mode="json"))
    else:
        store.set_session_status(config.session_id, "running")


def _logged(observer: Observer, stack: ExitStack, folder: Path) -> Observer:
    """Events also go to session.log, one JSON object a line."""
    try:
        log = stack.enter_context((folder / "session.log").open("a", buffering=1))
    except OSError as error:
        raise UsageError(f"{folder / 'session.log'} cannot be written: {error.strerror}") from error

    def observe(event: Event) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        log.write(json.dumps({"at": stamp, "event": event.kind, "text": event.text, **event.fields}) + "\n")
        observer(event)

    return observe


def _new_name(home: Path, stem: str) -> str:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = (f"{stem}-{stamp}{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    return next(name for name in names if not folder_of(home, name).exists())
