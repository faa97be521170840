"""Ctrl-C while a session runs: the first asks it to stop between two calls, the second ends the process at once.

The work runs in a thread of its own, because the main thread alone hears signals and must not wait for a request of
minutes. Ending at once is safe: a session survives kill -9.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Generic, TypeVar

from agent.errors import EXIT_INTERRUPTED

T = TypeVar("T")

#: How long a running call may take to end after the first ctrl-C.
GRACE_S = 20.0


class StopFlag:
    def __init__(self) -> None:
        self._event = Event()

    def request(self) -> None:
        self._event.set()

    def requested(self) -> bool:
        return self._event.is_set()


class _Worker(Thread, Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(daemon=True, name="session")
        self._work = work
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error


def interruptible(work: Callable[[], T], on_interrupt: Callable[[], None], come_back: str) -> T:
    """``work()`` or its exception. After a second ctrl-C, or ``GRACE_S`` after the first, exits with 130."""
    worker = _Worker(work)
    worker.start()
    asked_at: float | None = None
    while worker.is_alive():
        try:
            worker.join(0.2)
            if asked_at is not None and time.monotonic() - asked_at > GRACE_S:
                _leave(come_back)
        except KeyboardInterrupt:
            if asked_at is not None:
                _leave(come_back)
            asked_at = time.monotonic()
            on_interrupt()
    if worker.error is not None:
        raise worker.error
    result: T = worker.result  # type: ignore[assignment]
    return result


def _leave(come_back: str) -> None:
    print(f"\ninterrupted; go on with: {come_back}", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)
