"""The processes of a recording as seen by the one that leads it: asked, stopped, mourned by name."""

from __future__ import annotations

import json
import queue
import signal
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Any

from tools.device import DeviceBroken
from tools.oneshot_job import child_environment
from tools.proc import Child
from tools.record_merge import difference
from tools.recording_scope import Echo
from tools.records import DeviceInfo

#: To open a GPU the first time on a cold disk.
START_S = 240.0

Request = dict[str, Any]
Reply = dict[str, Any]
#: Said in the thread of the leader.
Event = Callable[[], None]
Post = Callable[[Event], None]


class RecorderLostError(Exception):
    """One sentence: which process is gone, how it ended and what it was doing."""


class Hand:
    """One process and its GPU. A request at a time; ``stop`` and ``kill`` from any thread."""

    def __init__(self, name: str, argv: Sequence[str]) -> None:
        """Raises DeviceBroken if it cannot be started."""
        self.name = name
        try:
            self._child = Child(argv, env=child_environment())
        except OSError as error:
            raise DeviceBroken(f"the recorder of {name} could not be started: {error}") from error

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, request: Request, what: str, timeout_s: float) -> Reply:
        """Raises RecorderLostError; the process has ended then. ``what`` completes "it died …"."""
        frame = self._child.recv(timeout_s) if self._child.send(json.dumps(request).encode()) else None
        if frame is None:
            silent, tail = self._child.alive, self._child.stderr_tail().strip().splitlines()
            self._child.kill()
            code = self._child.returncode or 0
            ended = signal.Signals(-code).name if code < 0 else f"code {code}"
            how = f"died ({ended}{f': {tail[-1][:200]}' if tail else ''})"
            if silent:
                how = f"gave no answer within {timeout_s:.0f} s and was ended"
            raise RecorderLostError(f"the recorder of {self.name} {how} {what}")
        reply: Reply = json.loads(frame)
        if "broken" in reply:
            self._child.kill()
            raise RecorderLostError(f"{self.name} cannot go on {what}: {reply['broken']}")
        return reply

    def stop(self) -> None:
        """It answers ``late`` after the call that runs."""
        self._child.send(b'{"op": "stop"}')

    def kill(self) -> None:
        self._child.kill()


class Team:
    """All hands, each spoken to in a thread of its own; what these post is said in the leader's, so that ``echo`` and
    whatever counts need no locks."""

    def __init__(self, hands: Sequence[Hand], echo: Echo) -> None:
        self._hands = list(hands)
        self._echo = echo
        self._lock = Lock()
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._running = 0
        self.lost: list[str] = []
        self.interrupted: KeyboardInterrupt | None = None

    def __len__(self) -> int:
        return len(self._hands)

    def begin(self, work: Callable[[Hand, Post], None]) -> None:
        """``work`` with every hand; one that raises RecorderLostError is one less."""

        def run(hand: Hand) -> None:
            try:
                work(hand, self._events.put)
            except RecorderLostError as error:
                with self._lock:
                    self._hands.remove(hand)
                    left = len(self._hands)
                sentence = str(error)
                self._events.put(lambda: self._mourn(sentence, left))
            finally:
                self._events.put(None)

        for hand in list(self._hands):
            self._running += 1
            Thread(target=run, args=(hand,), name=hand.name, daemon=True).start()

    def finish(self) -> None:
        """Until every thread has ended."""
        while self._running:
            try:
                event = self._events.get()
                if event is None:
                    self._running -= 1
                else:
                    event()
            except KeyboardInterrupt as error:
                self._interrupt(error)

    def do(self, work: Callable[[Hand, Post], None]) -> None:
        self.begin(work)
        self.finish()

    def greet(self) -> Callable[[], DeviceInfo]:
        """Has all GPUs opened; what is returned waits for it. That raises DeviceBroken if no GPU is there, or if they
        cannot share a record file."""
        found: dict[str, DeviceInfo] = {}

        def hello(hand: Hand, post: Post) -> None:
            info = DeviceInfo.model_validate(hand.ask({"op": "hello"}, "when it was to begin", START_S)["info"])
            post(lambda: found.update({hand.name: info}))

        def common() -> DeviceInfo:
            self.finish()
            if not found:
                raise DeviceBroken(self.lost[-1] if self.lost else "there is no GPU to record on")
            (first, one), *others = [(hand.name, found[hand.name]) for hand in self._hands if hand.name in found]
            for name, other in others:
                if (what := difference(one, other)) is not None:
                    raise DeviceBroken(f"{first} and {name} cannot share a record file: {what}; record them one by one")
            return one

        self.begin(hello)
        return common

    def end(self) -> None:
        for hand in self._hands:
            hand.kill()

    def _mourn(self, sentence: str, left: int) -> None:
        self.lost.append(sentence)
        rest = f"; {left} others go on" if left > 1 else "; the other goes on" if left else ""
        self._echo(f"lost: {sentence}{rest}")

    def _interrupt(self, error: KeyboardInterrupt) -> None:
        """The first time after the running calls, the second time at once."""
        if self.interrupted is None:
            self._echo("stopping after the running calls (ctrl-C again: at once)")
        for hand in list(self._hands):
            if self.interrupted is None:
                hand.stop()
            else:
                hand.kill()
        self.interrupted = error
