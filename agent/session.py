"""A session's folder, its lock, and running it to the end or to the next interruption.

<home>/store.sqlite                       results, variants, trajectories of all sessions (memory/store.py)
<home>/sessions/<session_id>/config.json      settings and device, as they were at the start
                             checkpoints.sqlite   LangGraph's state after every step
                             session.log      one line an event
                             best/            kernel.cu, launch.json, result.json of the winner
                             summary.json     what the session came to
                             lock             held by the process that runs it
<home>/sessions/.new-*                    a session in the making, or what a killed process left of one
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from agent.config import Settings
from agent.devices import open_device
from agent.documents import Documents, find_documents
from agent.errors import SessionError, UsageError, refusal
from agent.files import read_text, write_atomic
from agent.progress import Event, Observer, silent
from agent.summary import Summary
from tools.device import Device
from tools.records import DeviceInfo
from tools.revision import commit
from tools.validation import first_error

if TYPE_CHECKING:
    from memory.store import Store

CONFIG_VERSION = 1
MAX_COMPILES = 16  # side by side, where the settings say nothing
CHECKPOINTS = "checkpoints.sqlite"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_UNFINISHED = ".new-"
_HOME = "HGEMM_AGENT_HOME"
#: Making a session takes milliseconds; what is older than this was left by a process that was killed.
_ABANDONED_S = 600.0


class SessionConfig(BaseModel):
    """config.json. ``device`` is resolved (never auto); ``device_info`` is what it was when the session began."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = CONFIG_VERSION
    session_id: str
    created_at: str
    device: str
    device_info: DeviceInfo
    settings: Settings
    commit: str = ""  # of the program that began it


def sessions_folder(home: Path) -> Path:
    return home / "sessions"


def store_path(home: Path) -> Path:
    return home / "store.sqlite"


def folder_of(home: Path, session_id: str) -> Path:
    """Raises UsageError for a name that could leave the folder of sessions."""
    if not _NAME.fullmatch(session_id):
        shown = session_id if len(session_id) <= 100 and session_id.isprintable() else repr(session_id[:100])
        raise UsageError(f"'{shown}' is not a session name: letters, digits, . _ and -, at most 80")
    return sessions_folder(home) / session_id


def create(home: Path, settings: Settings, name: str | None, device_name: str, info: DeviceInfo) -> SessionConfig:
    """Makes the session's folder, whole or not at all. Raises UsageError, PolicyError, StoreError."""
    from policy.local_policy import located

    settings = settings.model_copy(update={"policy": located(settings.policy)})
    stem = f"{settings.session.task.label}-{settings.policy.name}"
    for session_id in (name,) if name is not None else _new_names(stem):
        folder = folder_of(home, session_id)
        if not folder.exists():
            _check_forgotten(home, session_id)
        config = SessionConfig(
            session_id=session_id,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            device=device_name,
            device_info=info,
            settings=settings,
            commit=commit(),
        )
        if _make(folder, config):
            return config
    raise UsageError(f"there is already a session {name}: `agent resume {name}`, or choose another --session")


def _check_forgotten(home: Path, session_id: str) -> None:
    """Rollouts and answers in the store carry the name; a second session of it would read the first one's."""
    from memory.store import Store

    if store_path(home).is_file():
        with Store(store_path(home)) as store:
            if store.session(session_id) is not None:
                raise UsageError(
                    f"{store.path} still remembers a session {session_id} whose folder is gone: choose another name"
                )


def _make(folder: Path, config: SessionConfig) -> bool:
    """False if there is such a folder. One without anything in it is none: a disk that was full may have left it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for old in folder.parent.glob(f"{_UNFINISHED}*"):
            with contextlib.suppress(FileNotFoundError):  # it has just got its name
                if time.time() - old.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(old, ignore_errors=True)
        made = folder.parent / f"{_UNFINISHED}{secrets.token_hex(8)}"
        made.mkdir()
    except OSError as error:
        raise UsageError(f"the folder {folder} cannot be made: {refusal(error, _HOME)}") from error
    try:
        write_atomic(made / "config.json", config.model_dump_json(indent=2) + "\n", _HOME)
        made.rename(folder)
    except (FileExistsError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            return False
        raise UsageError(f"the folder {folder} cannot be made: {refusal(error, _HOME)}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return True


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
    found: list[tuple[int, str]] = []
    for path in folder.glob("*/config.json") if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # it was moved away meanwhile
            found.append((path.stat().st_mtime_ns, path.parent.name))
    return [name for _, name in sorted(found, reverse=True) if _NAME.fullmatch(name)]


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
    from agent.graph import DamagedCheckpoint, build_graph, checkpoints, run_graph
    from memory.store import Store, StoreError
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
            documents=_documents(home, config.settings),
            observer=_logged(observer, stack, folder),
            stop_requested=stop_requested,
        )
        _register(store, config)
        try:
            saver = stack.enter_context(checkpoints(folder / CHECKPOINTS))
            concurrency = _concurrency(config.settings, device.info, policy.is_search)
            state = run_graph(build_graph(deps, saver), config.session_id, concurrency)
        except (sqlite3.Error, DamagedCheckpoint) as error:
            raise checkpoint_error(folder, error) from error
        except BaseException:
            with contextlib.suppress(StoreError):  # a full disk: the first error is the one to tell
                store.set_session_status(config.session_id, "stopped")
            raise
        return FinishNodes(deps).summary(state)


def partial_summary(home: Path, config: SessionConfig) -> Summary:
    """summary.json of a finished session, else what its last checkpoint says."""
    from agent.graph import DamagedCheckpoint, checkpoints, last_state
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
        except (sqlite3.Error, DamagedCheckpoint) as error:
            raise checkpoint_error(folder, error) from error
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
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {refusal(error)}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, 100, 0).decode(errors="replace").strip() or "another process"
            raise SessionError(
                f"session {folder.name} is already being run by {holder}; wait for it or end it"
            ) from error
        except OSError as error:
            raise SessionError(
                f"{path} cannot be locked ({error.strerror}): set HGEMM_AGENT_HOME to a folder on a local disk"
            ) from error
        with contextlib.suppress(OSError):  # a full disk; the number is only for the sentence above
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()}".encode(), 0)
        yield
    finally:
        os.close(lock)


def checkpoint_error(folder: Path, error: Exception) -> SessionError:
    from tools.sqlite_errors import explain

    what = f"the file {folder / CHECKPOINTS}"
    if isinstance(error, sqlite3.Error):
        return SessionError(explain(error, what))
    return SessionError(
        f"{what} is damaged ({error}): restore it, or move it away; `agent resume {folder.name}` then searches anew, "
        "and nothing that was measured is measured again"
    )


def _concurrency(settings: Settings, info: DeviceInfo, is_search: bool) -> int:
    """Tasks of one step at a time: compilers on a GPU host, requests of a language model."""
    compiles = settings.session.parallel_compiles
    if compiles is None:
        compiles = min(MAX_COMPILES, os.cpu_count() or 1) if info.kind == "cuda" else 1
    return compiles if is_search else max(compiles, settings.group_size)


def _documents(home: Path, settings: Settings) -> Documents | None:
    """A search reads none, and imports nothing for it."""
    if settings.is_search or not settings.policy.docs_searches:
        return None
    return find_documents(home / "index", settings.policy.docs_tokens)


def _register(store: Store, config: SessionConfig) -> None:
    if store.session(config.session_id) is None:
        store.create_session(config.session_id, config.model_dump(mode="json"))
    else:
        store.set_session_status(config.session_id, "running")


def _logged(observer: Observer, stack: ExitStack, folder: Path) -> Observer:
    """Events also go to session.log, one JSON object a line."""
    path = folder / "session.log"
    try:
        log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        stack.callback(os.close, log)
        size = os.fstat(log).st_size
        if size and os.pread(log, 1, size - 1) != b"\n":  # a line that a full disk or a kill cut off
            os.write(log, b"\n")
    except OSError as error:
        raise SessionError(f"{path} cannot be written: {refusal(error)}") from error

    def observe(event: Event) -> None:
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"at": stamp, "event": event.kind, "text": event.text, **event.fields}) + "\n"
        data = line.encode()
        try:
            while data:
                data = data[os.write(log, data) :]
        except OSError as error:
            raise SessionError(f"{path} cannot be written: {refusal(error)}") from error
        observer(event)

    return observe


def _new_names(stem: str) -> Iterator[str]:
    """Of sessions that were given none. Two that begin in one second differ by a number."""
    while True:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        yield from (f"{stem}-{stamp}{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 100))))
