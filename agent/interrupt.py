"""Ctrl-C, SIGTERM and SIGHUP. While a session runs, the first asks it to stop between two calls, the second ends the
process at once; elsewhere the first raises Interrupted, so that devices are closed, and the second ends the process.

The work runs in a thread of its own, because the main thread alone hears signals and must not wait for a request of
minutes. Ending at once is safe: a session survives kill -9, and what we started dies with us (tools/proc.py).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from threading import Event, Thread, Timer, current_thread, main_thread
from typing import Any, Generic, TypeVar

from agent.errors import EXIT_INTERRUPTED, Interrupted, Stopped

T = TypeVar("T")

#: How long a running call may take to end after the first signal.
GRACE_S = 20.0
#: Two signals within this time are one: `timeout` and terminals send theirs to a process and again to its group.
ECHO_S = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


class _Heard:
    """The signals that came, echoes left out."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._at: list[float] = []

    def __call__(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if not self._at or now - self._at[-1] > ECHO_S:
            self.numbers.append(number)
            self._at.append(now)

    def forget(self) -> None:
        self.numbers.clear()
        self._at.clear()

    def waited_s(self) -> float:
        """Since the first."""
        return time.monotonic() - self._at[0] if self._at else 0.0

    @property
    def exit_code(self) -> int:
        return 128 + self.numbers[0] if self.numbers else EXIT_INTERRUPTED


def raise_on_signals() -> None:
    """For the console script: a signal raises Interrupted in the main thread; a second one ends the process."""
    heard = _Heard()

    def handle(number: int, frame: object) -> None:
        before = len(heard.numbers)
        heard(number, frame)
        if len(heard.numbers) > 1:
            os._exit(heard.exit_code)
        if before == 0:
            raise Interrupted(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, handle)
    show_others = sys.unraisablehook

    def lost(found: sys.UnraisableHookArgs) -> None:
        """Raised in a __del__ or a callback of C, where Python drops it: send it again in a moment."""
        if not isinstance(found.exc_value, Interrupted):
            show_others(found)
            return
        heard.forget()
        again = Timer(0.02, os.kill, (os.getpid(), found.exc_value.exit_code - 128))
        again.daemon = True
        again.start()

    sys.unraisablehook = lost


def interruptible(
    work: Callable[[], T], on_interrupt: Callable[[], None], come_back: str, grace_s: float = GRACE_S
) -> T:
    """``work()`` or its exception; Stopped has the exit code of the signal. After a second signal, or ``grace_s`` after
    the first, exits with that code.

    In a thread that is not the main one no signal is heard. A handler and not KeyboardInterrupt: in Python 3.11 that
    exception, raised inside ``Thread.join``, leaves a running thread looking finished.
    """
    heard = _Heard()
    before: dict[int, Any] = {}
    if current_thread() is main_thread():
        for number in SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, heard)
    try:
        worker = _Worker(work)
        worker.start()
        told = False
        while not worker.done.wait(0.1):
            if heard.numbers and not told:
                told = True
                on_interrupt()
            if len(heard.numbers) > 1 or heard.waited_s() > grace_s:
                print(f"\ninterrupted; go on with: {come_back}", file=sys.stderr, flush=True)
                os._exit(heard.exit_code)
    finally:
        for heard_number, handler in before.items():
            if handler is not None:  # it was not set from Python
                signal.signal(heard_number, handler)
    if worker.error is not None:
        if isinstance(worker.error, Stopped):
            worker.error.exit_code = heard.exit_code
        raise worker.error
    result: T = worker.result  # type: ignore[assignment]
    return result
