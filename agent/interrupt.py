"""Ctrl-C while a session runs: the first asks it to stop between two calls, the second ends the process at once.

The work runs in a thread of its own, because the main thread alone hears signals and must not wait for a request of
minutes. Ending at once is safe: a session survives kill -9.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from threading import Event, Thread, current_thread, main_thread
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
        self.done = Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


def interruptible(work: Callable[[], T], on_interrupt: Callable[[], None], come_back: str) -> T:
    """``work()`` or its exception. After a second ctrl-C, or ``GRACE_S`` after the first, exits with 130.

    In a thread that is not the main one ctrl-C is not heard. A handler and not KeyboardInterrupt: in Python 3.11 that
    exception, raised inside ``Thread.join``, leaves a running thread looking finished.
    """
    asked_at: list[float] = []
    hears = current_thread() is main_thread()
    previous = signal.getsignal(signal.SIGINT)
    if hears:
        signal.signal(signal.SIGINT, lambda number, frame: asked_at.append(time.monotonic()))
    try:
        worker = _Worker(work)
        worker.start()
        told = False
        while not worker.done.wait(0.1):
            if asked_at and not told:
                told = True
                on_interrupt()
            if len(asked_at) > 1 or (asked_at and time.monotonic() - asked_at[0] > GRACE_S):
                print(f"\ninterrupted; go on with: {come_back}", file=sys.stderr, flush=True)
                os._exit(EXIT_INTERRUPTED)
    finally:
        if hears:
            signal.signal(signal.SIGINT, previous)
    if worker.error is not None:
        raise worker.error
    result: T = worker.result  # type: ignore[assignment]
    return result
