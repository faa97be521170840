"""Reads a session for inspection, finished or running: store, checkpoints and log. Writes and measures nothing."""

from __future__ import annotations

import difflib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, cast

from agent import session as sessions
from agent.errors import AgentError, UsageError
from agent.finish import STAGES, admitted
from agent.session import CHECKPOINTS, SessionConfig
from agent.state import Finalist, SessionState
from inspection.answers import View
from inspection.trace import Final, RolloutEnd, Trace, TraceStep, finish_step, rollout_number, search_steps
from memory.answer_ids import final_id
from memory.exemplars_read import Tried, tried
from memory.store import Store, StoreError
from tools.device import Device
from tools.families import ManifestError, load_families
from tools.gate import Toolbox
from tools.records import (
    DeviceInfo,
    Family,
    Trajectory,
    Variant,
)

LOG_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class _NoDevice:
    """What a toolbox needs of a device to look results up."""

    info: DeviceInfo


@dataclass(frozen=True)
class Reader:
    """One session, read at one moment. Made by ``opened``."""

    home: Path
    config: SessionConfig
    store: Store | None
    families: Mapping[str, Family]
    _labels: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return sessions.folder_of(self.home, self.config.session_id)

    # --- variants ------------------------------------------------------------------------------------------------

    def variant(self, key: str) -> Variant | None:
        return self.store.variant(key) if self.store is not None else None

    def tried(self, key: str) -> Tried | None:
        """A variant with everything that the store knows of it at the session's task and on its device."""
        variant = self.variant(key)
        if variant is None or self._toolbox is None:
            return None
        return tried(self._toolbox, variant, self.config.settings.session.task)

    @cached_property
    def _toolbox(self) -> Toolbox | None:
        if self.store is None:
            return None
        return Toolbox(cast("Device", _NoDevice(self.config.device_info)), self.store, self.families)

    def _label(self, key: str) -> str:
        """Empty for what is no key of a variant."""
        if key not in self._labels:
            variant = self.variant(key)
            self._labels[key] = variant.label if variant is not None else ""
        return self._labels[key]

    # --- the trace -----------------------------------------------------------------------------------------------

    def trace(self) -> Trace:
        """Raises StoreError. Of a damaged checkpoint or log the trace says so, and holds the rest."""
        config, remarks = self.config, []
        now = state_of(self.folder)  # before the steps: what is called finished has all of them
        steps: tuple[TraceStep, ...] = ()
        trajectories: list[Trajectory] = []
        if self.store is not None:
            trajectories = list(self.store.trajectories(config.session_id))
            steps = search_steps(trajectories, self.store.get, self._label)
        state: SessionState | None = None
        try:
            state = self._state()
        except AgentError as error:
            remarks.append(str(error))
        finals, finish = self._finals(state, steps)
        spent = state["spent"] if state is not None else None
        return Trace(
            session_id=config.session_id,
            task=config.settings.session.task,
            device=config.device_info,
            policy=config.settings.policy.name,
            created_at=config.created_at,
            state=now,
            activity=self._activity(),
            steps=(*steps, *finish),
            rollouts=tuple(_end(one, state) for one in trajectories),
            finals=tuple(finals),
            stopped_by=state["stopped_by"] if state is not None else "",
            cost_usd=spent["usd"] if spent else 0.0,
            tokens=spent["input_tokens"] + spent["output_tokens"] if spent else 0,
            remarks=tuple(remarks),
        )

    def _state(self) -> SessionState | None:
        from agent.graph import DamagedCheckpoint, checkpoints_to_read, last_state

        path = self.folder / CHECKPOINTS
        if not path.is_file():
            return None
        try:
            with checkpoints_to_read(path) as saver:
                return last_state(saver, self.config.session_id)
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # the session has just begun
                return None
            raise sessions.checkpoint_error(self.folder, error) from error
        except (sqlite3.Error, DamagedCheckpoint) as error:
            raise sessions.checkpoint_error(self.folder, error) from error

    def _finals(self, state: SessionState | None, steps: tuple[TraceStep, ...]) -> tuple[list[Final], list[TraceStep]]:
        finals: list[Final] = []
        found: list[TraceStep] = []
        finalists: list[Finalist] = state["finalists"] if state is not None else []
        for finalist in finalists:
            mine = list(self._measured(finalist["key"], steps[-1] if steps else None))
            offline = next((s for s in mine if s.tool == "time" and s.mode == "offline"), None)
            found += mine
            finals.append(
                Final(
                    key=finalist["key"],
                    label=self._label(finalist["key"]),
                    screen_ratio=finalist["screen_ratio"],
                    stage=finalist["stage"],
                    admitted=bool(admitted([finalist])),
                    why=finalist["why"],
                    ratio=offline.ratio if offline is not None else None,
                )
            )
        ranked = sorted(finals, key=lambda f: (not f.admitted, -(f.ratio or 0.0), -f.screen_ratio, f.key))
        return ranked, found

    def _measured(self, key: str, last: TraceStep | None) -> Iterator[TraceStep]:
        for tool, record in STAGES.items():
            for mode in self.config.settings.session.modes if tool == "time" else (None,):
                payload = self.store.get(final_id(self.config.session_id, key, tool, mode)) if self.store else None
                if payload is not None:
                    yield finish_step(key, self._label(key), tool, mode, record.from_json(payload), last)

    def _activity(self) -> str:
        """The last whole line of session.log."""
        for line in reversed(_tail(self.folder / "session.log").splitlines()):
            try:
                event: dict[str, Any] = json.loads(line)
                return f"{event['at'][:19]} {event['event']} {event['text']}".strip()
            except (ValueError, KeyError, TypeError):
                continue
        return ""


def _end(trajectory: Trajectory, state: SessionState | None) -> RolloutEnd:
    """A trajectory says how it ended only when its round has ended; until then the state does."""
    number = rollout_number(trajectory)
    group = {one["number"]: one["ended_by"] for one in state["group"]} if state is not None else {}
    over = state is None or trajectory.round < state["round"]
    return RolloutEnd(
        rollout=number,
        round=trajectory.round,
        ended_by=group.get(number) or (trajectory.ended_by if over else None),
        submitted_key=trajectory.submitted_key,
        reward=trajectory.reward,
    )


@contextmanager
def opened(home: Path, session_id: str, families: Mapping[str, Family] | None = None) -> Iterator[Reader]:
    """Raises UsageError for a session that is not there, StoreError for a store that cannot be read."""
    config = load(home, session_id)
    path = sessions.store_path(home)
    if families is None:
        try:
            families = load_families()
        except ManifestError:  # only sanitize needs them; a checkout in the middle of a change is no reason to be blind
            families = {}
    if not path.is_file():
        if (sessions.folder_of(home, session_id) / "summary.json").exists():
            raise StoreError(
                f"the store {path}, which holds what the session {session_id} measured, is not there: put it back"
            )
        yield Reader(home, config, None, families)  # it has only begun
        return
    with Store(path, read_only=True) as store:
        yield Reader(home, config, store, families)


def load(home: Path, session_id: str) -> SessionConfig:
    """Suggests names for one that is not there."""
    if not sessions.folder_of(home, session_id).is_dir():
        known = sessions.session_ids(home)
        close = difflib.get_close_matches(session_id, known, n=3, cutoff=0.4)
        if not known:
            advice = "there are none yet: agent optimize --shape 4096,4096,4096"
        elif close:
            advice = f"did you mean {', '.join(close)}?"
        else:
            advice = f"the newest is {known[0]}; `agent show` lists them"
        raise UsageError(f"there is no session {session_id} in {sessions.sessions_folder(home)}; {advice}")
    return sessions.load(home, session_id)


def state_of(folder: Path) -> str:
    """From what is on the disk alone: taking the lock, however shortly, could keep a session from being resumed."""
    if (folder / "summary.json").is_file():
        return "finished"
    try:
        holder = (folder / "lock").read_text(encoding="utf-8").rpartition(" ")[2]
        os.kill(int(holder), 0)
    except PermissionError:
        return "running"  # by another user
    except (OSError, ValueError):
        return "stopped"
    return "running"


@dataclass(frozen=True)
class Listed:
    """A session in a list; ``problem`` is why it cannot be opened."""

    session_id: str
    state: str
    task: str = ""
    policy: str = ""
    created_at: str = ""
    best: float | None = None
    problem: str = ""


def listed(home: Path, limit: int = 200) -> list[Listed]:
    """Newest first. One that is damaged is listed with its sentence."""
    found = []
    for name in sessions.session_ids(home)[:limit]:
        folder = sessions.folder_of(home, name)
        try:
            config = sessions.load(home, name)
            state = state_of(folder)
            summary = sessions.partial_summary(home, config) if state == "finished" else None
        except (AgentError, StoreError) as error:
            found.append(Listed(name, "damaged", problem=str(error)))
            continue
        found.append(
            Listed(
                name,
                state,
                config.settings.session.task.label,
                config.settings.policy.name,
                config.created_at,
                summary.best.final_ratio if summary is not None and summary.best is not None else None,
            )
        )
    return found


def fingerprint(home: Path, session_id: str) -> tuple[object, ...]:
    """Changes whenever a session's trace may have."""
    folder = sessions.folder_of(home, session_id)
    store = sessions.store_path(home)
    files = (store, store.with_name(store.name + "-wal"), folder / "session.log", folder / "summary.json")
    return (state_of(folder), *(_stamp(path) for path in files))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return file.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


class Watch:
    """A session read again whenever it has changed. Threads may share one."""

    def __init__(self, home: Path, session_id: str, families: Mapping[str, Family] | None = None) -> None:
        self._home, self._session_id, self._families = home, session_id, families
        self._lock = Lock()
        self._stamp: tuple[object, ...] = ()
        self._trace: Trace | None = None

    @contextmanager
    def view(self) -> Iterator[View]:
        """As it is now. Raises as ``opened``."""
        with opened(self._home, self._session_id, self._families) as reader:
            self._families = reader.families
            yield View(self._current(reader), reader.tried)

    def _current(self, reader: Reader) -> Trace:
        with self._lock:
            stamp = fingerprint(self._home, self._session_id)
            if self._trace is None or stamp != self._stamp:
                self._trace, self._stamp = reader.trace(), stamp
            return self._trace
