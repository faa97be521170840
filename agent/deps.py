"""What the nodes of a session work with, and the small cache in front of the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from agent.config import Settings
from agent.documents import Documents
from agent.errors import SessionError, Stopped
from agent.progress import Event, EventKind, Observer, silent
from memory.store import Store
from policy.base import Policy
from policy.prompts import Templates
from tools.gate import Toolbox
from tools.records import BaselineResult, Budget, Family, Mode, Step, Task, Trajectory, Variant

#: A search may take as many turns as its evaluations need.
UNLIMITED_TURNS = 10**9


@dataclass
class Deps:
    """One session's collaborators. ``stop_requested`` is asked between two calls."""

    session_id: str
    folder: Path
    settings: Settings
    task: Task
    families: Mapping[str, Family]
    policy: Policy
    toolbox: Toolbox
    store: Store
    templates: Templates
    documents: Documents | None = None  # what search_docs asks; None where there is nothing to ask
    observer: Observer = silent
    stop_requested: Callable[[], bool] = lambda: False
    device_lock: Lock = field(default_factory=Lock)
    broken: str = ""  # why this process can evaluate nothing more
    _variants: dict[str, Variant] = field(default_factory=dict)
    _trajectories: dict[int, Trajectory] = field(default_factory=dict)
    _lap_start: float = field(default_factory=time.monotonic)

    @property
    def max_turns(self) -> int:
        return UNLIMITED_TURNS if self.policy.is_search else self.settings.policy.max_turns

    def emit(self, kind: EventKind, text: str = "", **fields: object) -> None:
        self.observer(Event(kind, text, dict(fields)))

    def check_stop(self) -> None:
        """Asked before every call. Raises Stopped, or SessionError if a call beside this one found no compiler."""
        if self.broken:
            raise SessionError(self.broken)
        if self.stop_requested():
            raise Stopped("stopped")

    def lap_s(self) -> float:
        """Seconds at work since the last call."""
        now = time.monotonic()
        elapsed, self._lap_start = now - self._lap_start, now
        return elapsed

    # --- variants ------------------------------------------------------------------------------------------------

    def put_variant(self, variant: Variant) -> None:
        if variant.key not in self._variants:
            self.store.put_variant(variant)
            self._variants[variant.key] = variant

    def variant(self, key: str) -> Variant:
        """Of a key that the state holds, so a missing one means that the store was exchanged."""
        found = self.find_variant(key)
        if found is None:
            raise SessionError(f"the store {self.store.path} lacks variant {key} of this session; restore that file")
        return found

    def find_variant(self, key: str) -> Variant | None:
        if key not in self._variants:
            found = self.store.variant(key)
            if found is None:
                return None
            self._variants[key] = found
        return self._variants[key]

    # --- trajectories --------------------------------------------------------------------------------------------

    def trajectory_id(self, number: int) -> str:
        return f"{self.session_id}/{number}"

    def trajectory(self, number: int) -> Trajectory:
        if number not in self._trajectories:
            found = self.store.trajectory(self.trajectory_id(number))
            if found is None:
                raise SessionError(
                    f"the store {self.store.path} lacks rollout {number} of this session; restore that file"
                )
            self._trajectories[number] = found
        return self._trajectories[number]

    def has_trajectory(self, number: int) -> bool:
        return number in self._trajectories or self.store.trajectory(self.trajectory_id(number)) is not None

    def put_trajectory(self, number: int, trajectory: Trajectory) -> None:
        self.store.put_trajectory(trajectory)
        self._trajectories[number] = trajectory

    def new_trajectory(
        self, number: int, index: int, round_number: int, quota: int, steps: tuple[Step, ...]
    ) -> Trajectory:
        return Trajectory(
            trajectory_id=self.trajectory_id(number),
            session_id=self.session_id,
            task=self.task,
            policy=self.policy.name,
            device=self.toolbox.info.label,
            round=round_number,
            index_in_group=index,
            steps=steps,
            quota=quota,
        )

    # --- references ----------------------------------------------------------------------------------------------

    def baselines(self, mode: Mode) -> BaselineResult:
        """At final budget; at screen budget where only that is recorded."""
        budgets: tuple[Budget, ...] = ("final", "screen")
        with self.device_lock:
            results = []
            for budget in budgets:
                results.append(self.toolbox.baselines(self.task, mode, budget))
                if results[-1].ok:
                    return results[-1]
        return results[0]
