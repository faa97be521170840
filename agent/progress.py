"""What a running session tells whoever watches: plain events. Rendering is in agent/live.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

EventKind = Literal["opened", "round", "trying", "tried", "told", "finish", "measuring", "measured", "concluded"]


@dataclass(frozen=True)
class Event:
    kind: EventKind
    text: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


Observer = Callable[[Event], None]


def silent(event: Event) -> None:
    """Watches nothing."""
