"""The seam between the loop and whatever proposes kernels: a search, a hosted model, a local one, a test's script."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import Field

from tools.records import DeviceInfo, Plan, Reason, Record, Status, Step, Task


class PolicyError(RuntimeError):
    """The policy's machinery failed (no key, the provider is down). The message is one sentence; nothing is lost."""


class ToolSchema(Record):
    """One tool as a model sees it: ``parameters`` is a JSON Schema object."""

    name: str
    description: str
    parameters: dict[str, Any]


class Trial(Record):
    """One evaluated variant, as the policy is told of it. ``ratio`` is offline, screen budget, against the headline
    reference; it exists iff ``status`` is OK."""

    key: str
    label: str
    plan: Plan | None = None
    status: Status
    reason: Reason | None = None
    ratio: float | None = None


class PolicyRequest(Record):
    """Everything one turn of a policy may depend on. The same request must give the same step from a search policy:
    there is no clock in it."""

    task: Task
    device: DeviceInfo
    tools: tuple[ToolSchema, ...] = ()
    #: The conversation of this rollout so far, system and user prompt included.
    steps: tuple[Step, ...] = ()
    #: In proposal order: earlier rounds of the session, then this rollout's own.
    trials: tuple[Trial, ...] = ()
    reference_us: dict[str, float] = Field(default_factory=dict)
    #: New variants this rollout may still have evaluated.
    evaluations_left: int
    turns_left: int
    seed: int = 0
    #: Counts all rollouts of the session, so that those of one group differ.
    rollout: int = 0
    #: Rollouts that take a turn at this moment, this one included: a policy may answer all of them at once.
    beside: int = 1


class Policy(Protocol):
    """``step`` answers with the assistant's next message. Raises PolicyError, and nothing else, when it cannot."""

    @property
    def name(self) -> str: ...

    @property
    def is_search(self) -> bool:
        """True if it needs no prompt and no second rollout of the same group: a search, not a language model."""
        ...

    def step(self, request: PolicyRequest) -> Step: ...

    def close(self) -> None: ...
