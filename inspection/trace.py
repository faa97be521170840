"""A session as a timeline of steps, each with an id that never changes while the session goes on. Pure.

Ids: ``2.5`` is message 5 of rollout 2 (a prompt, a policy's turn, a note of the loop), ``2.5.1`` the second call of
that turn with its answer, ``finish.<key>.time.offline`` one measurement of the finish.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from memory.answer_ids import answer_id
from tools.records import DeviceInfo, Outcome, Record, Status, Step, Task, ToolCall, Trajectory

Kind = Literal["system", "user", "assistant", "call", "finish"]
#: Of a call whose answer is not in the store yet.
PENDING = "pending"


class TraceStep(Record):
    """``status``, ``reason``, ``ratio`` … are a call's or a measurement's. ``best_ratio`` is the best of the screen by
    the end of this step; ``rose`` marks those that raised it. ``evaluated`` counts the variants evaluated by then."""

    step_id: str
    kind: Kind
    round: int | None = None
    rollout: int | None = None
    text: str = ""
    reasoning: str = ""
    stop: str | None = None
    tool: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    malformed: str | None = None
    mode: str | None = None
    status: str | None = None
    reason: str | None = None
    detail: str = ""
    key: str | None = None
    label: str = ""
    ratio: float | None = None
    time_us: float | None = None
    evaluated: int = 0
    best_ratio: float | None = None
    rose: bool = False

    @property
    def refused(self) -> bool:
        """Answered without being run: no verdict on anything."""
        return self.status == Status.FAILED and self.reason is None

    @property
    def evaluates(self) -> bool:
        """Whether it counts as a trial of its variant, as in the session's own accounts."""
        return (
            bool(self.key) and not self.refused and self.status != PENDING and (self.tool or "").startswith("evaluate")
        )


class Final(Record):
    """A variant that went on to the whole gate. ``ratio`` is offline, final budget; ``why`` says what keeps it out."""

    key: str
    label: str
    screen_ratio: float
    stage: str
    admitted: bool
    why: str = ""
    ratio: float | None = None


class RolloutEnd(Record):
    """``ended_by`` is None while the rollout goes on."""

    rollout: int
    round: int
    ended_by: str | None = None
    submitted_key: str | None = None
    reward: float | None = None


class Trace(Record):
    """``state``: running, stopped or finished. ``activity`` is the last thing that the session said of itself.
    ``remarks`` are sentences on what could not be read; the rest holds all the same."""

    session_id: str
    task: Task
    device: DeviceInfo
    policy: str
    created_at: str
    state: str
    activity: str = ""
    steps: tuple[TraceStep, ...] = ()
    rollouts: tuple[RolloutEnd, ...] = ()
    finals: tuple[Final, ...] = ()
    stopped_by: str = ""
    cost_usd: float = 0.0
    tokens: int = 0
    remarks: tuple[str, ...] = ()

    def step(self, step_id: str) -> TraceStep | None:
        return next((s for s in self.steps if s.step_id == step_id), None)

    def of_key(self, key: str) -> list[TraceStep]:
        return [s for s in self.steps if s.key == key]

    @property
    def keys(self) -> list[str]:
        """Of the variants that steps are about, in the order of their first one."""
        return list(dict.fromkeys(s.key for s in self.steps if s.key))

    @property
    def labels(self) -> dict[str, str]:
        return {s.key: s.label for s in self.steps if s.key}

    @property
    def ratios(self) -> dict[str, float]:
        """The first screen ratio of every variant that has one."""
        found: dict[str, float] = {}
        for s in self.steps:
            if s.key and s.evaluates and s.ratio is not None:
                found.setdefault(s.key, s.ratio)
        return found


def rollout_number(trajectory: Trajectory) -> int:
    number = trajectory.trajectory_id.rpartition("/")[2]
    return int(number) if number.isdigit() else 0


def search_steps(
    trajectories: Iterable[Trajectory], answer: Callable[[str], str | None], label_of: Callable[[str], str]
) -> tuple[TraceStep, ...]:
    """All rollouts, in the order in which the session tells of them: round by round, turn by turn, rollout by rollout.
    ``answer`` is the stored answer of that id, as JSON; ``label_of`` names a variant by its key."""
    placed = [item for trajectory in trajectories for item in _placed(trajectory, answer, label_of)]
    return _counted(step for _, step in sorted(placed, key=lambda item: item[0]))


_Place = tuple[int, int, int, int, int]


def _placed(
    trajectory: Trajectory, answer: Callable[[str], str | None], label_of: Callable[[str], str]
) -> Iterator[tuple[_Place, TraceStep]]:
    number, turn = rollout_number(trajectory), -1
    where: dict[str, Any] = {"round": trajectory.round, "rollout": number}
    told = {s.result_id: s.text for s in trajectory.steps if s.result_id is not None}
    for position, message in enumerate(trajectory.steps):
        if message.role == "tool":
            continue  # it stands with its call
        turn += message.role == "assistant"
        step_id = f"{number}.{position}"
        yield (
            (trajectory.round, turn, number, position, -1),
            TraceStep(
                step_id=step_id,
                kind=message.role,
                text=message.text,
                reasoning=message.reasoning,
                stop=message.stop,
                **where,
            ),
        )
        for index, call in enumerate(message.tool_calls):
            stored_as = answer_id(trajectory.session_id, number, position + 1, index)
            payload = _payload(answer(stored_as))
            text = told.get(stored_as) or _told_to(trajectory.steps, position, call) or str(payload.get("text") or "")
            step = _call_step(f"{step_id}.{index}", call, payload, text, label_of, where)
            yield (trajectory.round, turn, number, position, index), step


def _call_step(
    step_id: str,
    call: ToolCall,
    payload: dict[str, Any],
    text: str,
    label_of: Callable[[str], str],
    where: dict[str, Any],
) -> TraceStep:
    said = _payload(text)
    key = payload.get("key") if isinstance(payload.get("key"), str) else None
    if key is None:
        asked = call.arguments.get("key")
        key = asked.strip() if isinstance(asked, str) and label_of(asked.strip()) else None
    return TraceStep(
        step_id=step_id,
        kind="call",
        text=text,
        tool=call.name,
        arguments=call.arguments,
        malformed=call.malformed,
        status=str(payload.get("status") or PENDING) if payload or not text else "told",
        reason=payload.get("reason"),
        detail=str(said.get("detail") or said.get("error") or ""),
        key=key,
        label=label_of(key) if key else "",
        ratio=payload.get("ratio"),
        time_us=payload.get("time_us"),
        **where,
    )


def _told_to(steps: Sequence[Step], position: int, call: ToolCall) -> str:
    """What the conversation says of a call whose stored answer is gone."""
    later = steps[position + 1 :]
    return next((s.text for s in later if s.role == "tool" and s.call_id == call.call_id), "")


def _payload(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _counted(steps: Iterable[TraceStep]) -> tuple[TraceStep, ...]:
    """With the best so far: every variant counts once, by its first trial."""
    seen: set[str] = set()
    best: float | None = None
    found = []
    for step in steps:
        rose = False
        if step.key and step.evaluates and step.key not in seen:
            seen.add(step.key)
            rose = step.ratio is not None and step.ratio > (best or 0.0)
            best = step.ratio if rose else best
        found.append(step.model_copy(update={"evaluated": len(seen), "best_ratio": best, "rose": rose}))
    return tuple(found)


def finish_step(
    key: str, label: str, tool: str, mode: str | None, result: Outcome, after: TraceStep | None
) -> TraceStep:
    """One measurement of the finish, as the session kept it."""
    row = result.row() if hasattr(result, "row") else None
    return TraceStep(
        step_id=finish_id(key, tool, mode),
        kind="finish",
        tool=tool,
        mode=mode,
        status=result.status.value,
        reason=result.reason.value if result.reason else None,
        detail=result.detail,
        key=key,
        label=label,
        ratio=row.ratio if row else None,
        time_us=row.time_us if row else None,
        evaluated=after.evaluated if after else 0,
        best_ratio=after.best_ratio if after else None,
    )


def finish_id(key: str, tool: str, mode: str | None) -> str:
    return ".".join(part for part in ("finish", key, tool, mode) if part)
