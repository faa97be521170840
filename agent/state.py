"""The graph's state: plain JSON types, ids and counts only, because every checkpoint holds all of it.

Texts (prompts, sources, answers, results) are in the store, under the ids found here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from policy.base import Trial
from tools.records import Plan, Reason, Status

EndedBy = Literal["submit", "budget", "error", "policy", "repairs", "floor"]


class Rollout(TypedDict):
    """One conversation of the running group."""

    number: int  # counts all rollouts of the session
    index: int  # within the group
    steps: int  # steps of the stored trajectory that belong to the state: more were written by an interrupted turn
    turns: int
    quota: int  # variants it may have evaluated
    spent: int
    nudged: bool
    failures: NotRequired[int]  # turns in a row whose candidates were all rejected
    searches: NotRequired[int]  # of the documentation
    ended_by: EndedBy | None
    submitted: str | None


class Call(TypedDict):
    """One tool call to run: the ``index``-th of the rollout's last step. ``key`` is the variant's, if there is one."""

    rollout: int
    index: int
    key: str | None
    refused: str  # a sentence if the loop answers it without running it


class Answer(TypedDict):
    """What a call came to. The text for the policy is in the store."""

    rollout: int
    index: int
    key: str | None
    tool: str
    status: str
    reason: str | None
    ratio: float | None
    time_us: float | None


class TrialRow(TypedDict):
    """An evaluated variant of a rollout, in proposal order."""

    rollout: int
    key: str
    status: str
    reason: str | None
    ratio: float | None


class Spent(TypedDict):
    evaluations: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    usd: float
    wall_s: float


class Thought(TypedDict):
    """That a rollout's next step is in the stored trajectory."""

    rollout: int


class Finalist(TypedDict):
    """A variant on its way through the whole gate."""

    key: str
    b_layout: str
    screen_ratio: float
    stage: Literal["verify", "sanitize", "time", "profile", "done"]
    missed: str  # the status that keeps it off the leaderboard: failed, not_recorded, unavailable; empty if none
    why: str  # one sentence, empty if nothing was missed


class FinalCall(TypedDict):
    """One measurement of the finish."""

    key: str
    tool: Literal["verify", "sanitize", "time", "profile"]
    mode: str | None


class Verdict(TypedDict):
    key: str
    tool: str
    mode: str | None
    status: str
    reason: str | None
    detail: str


def gather(left: list[Any], right: list[Any] | None) -> list[Any]:
    """Reducer of the channels that parallel nodes write to: append, and None clears."""
    return [] if right is None else [*left, *right]


class SessionState(TypedDict):
    round: int
    next_rollout: int
    group: list[Rollout]
    calls: list[Call]
    thoughts: Annotated[list[Thought], gather]
    answers: Annotated[list[Answer], gather]
    trials: list[TrialRow]
    seen: list[str]  # keys that cost an evaluation, or stand for one that did, in that order
    spent: Spent
    searched: bool  # no further round comes
    stopped_by: str  # which budget ended the search early, or "floor"; empty if none did
    finalists: list[Finalist]
    measures: list[FinalCall]
    verdicts: Annotated[list[Verdict], gather]


class ThinkInput(TypedDict):
    """What one fanned-out policy turn is sent."""

    rollout: Rollout
    trials: list[TrialRow]
    round: int
    evaluations_left: int
    beside: NotRequired[int]  # turns taken at the same time, this one included


class ActInput(TypedDict):
    call: Call
    steps: int


class MeasureInput(TypedDict):
    measure: FinalCall


def initial_state() -> SessionState:
    return SessionState(
        round=0,
        next_rollout=0,
        group=[],
        calls=[],
        thoughts=[],
        answers=[],
        trials=[],
        seen=[],
        spent=Spent(evaluations=0, input_tokens=0, output_tokens=0, cached_tokens=0, usd=0.0, wall_s=0.0),
        searched=False,
        stopped_by="",
        finalists=[],
        measures=[],
        verdicts=[],
    )


def to_trial(row: TrialRow, label: str, plan: Plan | None) -> Trial:
    return Trial(
        key=row["key"],
        label=label,
        plan=plan,
        status=Status(row["status"]),
        reason=Reason(row["reason"]) if row["reason"] else None,
        ratio=row["ratio"],
    )
