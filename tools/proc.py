"""The one module that starts processes. Every child has its own process group, a deadline, and output that is drained
while it runs, so a full pipe never blocks it; the whole group is killed at the end, and partial output is kept. A child
also ends with us when we are killed with SIGKILL; what it has started itself then ends as it may (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tools.frames import FrameError, encode_frame, read_frame

OUTPUT_LIMIT_BYTES = 4 << 20
_TICK_S = 0.05
#: How long output of a process that has ended may still trickle in from something it left behind.
_GRACE_S = 0.25
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Completed:
    """What a process left. ``returncode`` is negative for a signal, 127 when it could not be started at all."""

    returncode: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    elapsed_s: float
    cancelled: bool = False

    @property
    def text(self) -> str:
        """Both streams, stdout first, undecodable bytes replaced."""
        return (self.stdout + self.stderr).decode(errors="replace")


class _Bounded:
    """The first and the last half of ``limit`` bytes: errors come first in a compiler's output, summaries last."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._dropped = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        if rest := data[room:] if room > 0 else data:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
        while self._tail_bytes - len(self._tail[0] if self._tail else b"") >= self._half:
            gone = self._tail.popleft()
            self._tail_bytes -= len(gone)
            self._dropped += len(gone)

    def value(self) -> bytes:
        mark = f"\n[... {self._dropped} bytes left out ...]\n".encode() if self._dropped else b""
        return bytes(self._head) + mark + b"".join(self._tail)


def _with_memory_limit(argv: Sequence[str], memory_bytes: int | None) -> list[str]:
    """``argv`` under RLIMIT_AS. By way of the shell: a preexec function is unsafe in a program with threads."""
    if memory_bytes is None:
        return list(argv)
    return ["/bin/sh", "-c", 'ulimit -v "$1" || exit 126; shift; exec "$@"', "sh", str(memory_bytes // 1024), *argv]


#: Bound before any fork: the child must not look anything up. PyDLL, so that it has no lock to give up and take.
_PRCTL: Callable[[int, int], int] | None = (
    getattr(ctypes.PyDLL(None), "prctl", None) if sys.platform == "linux" else None
)
_PR_SET_PDEATHSIG = 1


def _dies_with_us() -> Callable[[], None] | None:
    """For the child, between fork and exec. A preexec function is unsafe in a program with threads where it takes a
    lock; this one makes system calls only. The kernel sends the signal when the *thread* that forked ends."""
    if _PRCTL is None:
        return None
    prctl, us, kill, parent = _PRCTL, os.getpid(), os.kill, os.getppid

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent() != us:  # we died before the child could ask
            kill(os.getpid(), signal.SIGKILL)

    return ask


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _has_exited(pid: int) -> bool:
    """Whether the child has ended, without reaping it: until it is reaped its group id cannot be reused."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def run(
    argv: Sequence[str],
    *,
    deadline_s: float,
    memory_bytes: int | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    cancel: threading.Event | None = None,
) -> Completed:
    """Run to the end, the deadline or ``cancel``, whichever is first. Never raises for anything the process does.

    ``memory_bytes`` bounds the address space of each process in the group (not for CUDA programs, which reserve
    hundreds of GB). ``output_limit_bytes`` is per stream; beyond it the middle is left out.
    """
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            _with_memory_limit(argv, memory_bytes),
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=None if env is None else dict(env),
            start_new_session=True,
            preexec_fn=_dies_with_us(),
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: a NUL byte in an argument
        return Completed(127, b"", f"cannot start {argv[0]}: {error}\n".encode(), False, 0.0)
    streams = [s for s in (process.stdin, process.stdout, process.stderr) if s is not None]
    output = _Bounded(output_limit_bytes), _Bounded(output_limit_bytes)
    timed_out = cancelled = False
    try:
        timed_out, cancelled = _pump(process, output, stdin or b"", started + deadline_s, cancel)
    finally:  # also on KeyboardInterrupt: nothing outlives its caller
        _kill_group(process.pid)
        process.wait()
        for stream in streams:
            with contextlib.suppress(OSError):
                stream.close()
    return Completed(
        process.returncode,
        output[0].value(),
        output[1].value(),
        timed_out,
        time.monotonic() - started,
        cancelled,
    )


def _pump(
    process: subprocess.Popen[bytes],
    output: tuple[_Bounded, _Bounded],
    to_send: bytes,
    end: float,
    cancel: threading.Event | None,
) -> tuple[bool, bool]:
    """Feed stdin and drain both streams until the process has ended. Returns (timed out, cancelled)."""
    assert process.stdout is not None and process.stderr is not None
    exited_at: float | None = None
    with selectors.DefaultSelector() as selector:
        for stream, sink in ((process.stdout, output[0]), (process.stderr, output[1])):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, sink)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE, None)
        while True:
            now = time.monotonic()
            if cancel is not None and cancel.is_set():
                return False, True
            if now >= end:
                return True, False
            if exited_at is None and _has_exited(process.pid):
                exited_at = now
            if exited_at is not None and (not selector.get_map() or now - exited_at > _GRACE_S):
                return False, False
            if not selector.get_map():  # both streams closed, the process not yet gone: usually within a millisecond
                time.sleep(0.001)
                continue
            for key, _ in selector.select(min(_TICK_S, end - now)):
                if key.data is None:
                    to_send = _feed(selector, process.stdin, to_send)
                    continue
                try:
                    data = os.read(key.fd, _CHUNK)
                except BlockingIOError:
                    continue
                if data:
                    key.data.add(data)
                else:
                    selector.unregister(key.fileobj)


def _feed(selector: selectors.BaseSelector, stdin: IO[bytes] | None, to_send: bytes) -> bytes:
    assert stdin is not None
    try:
        to_send = to_send[os.write(stdin.fileno(), to_send[:_CHUNK]) :] if to_send else b""
    except BlockingIOError:
        return to_send
    except BrokenPipeError:
        to_send = b""
    if not to_send:
        selector.unregister(stdin)
        stdin.close()
    return to_send


class Child:
    """A long-lived worker that exchanges frames over two private pipes.

    The child is started as ``argv --in-fd N --out-fd M`` and speaks ``tools.frames`` over those descriptors. Its
    standard output and error go, mixed, to a bounded tail kept for error messages. Use from one thread at a time.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        tail_bytes: int = 1 << 16,
    ) -> None:
        """Raises OSError if the program cannot be started."""
        child_in, self._to_child = os.pipe()
        self._from_child, child_out = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*argv, "--in-fd", str(child_in), "--out-fd", str(child_out)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(child_in, child_out),
                cwd=cwd,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._to_child)
            os.close(self._from_child)
            raise
        finally:
            os.close(child_in)
            os.close(child_out)
        os.set_blocking(self._to_child, False)
        self._closed = False
        self._broken: str | None = None
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._tail: deque[bytes] = deque()
        self._tail_limit = tail_bytes
        self._tail_lock = threading.Lock()
        self._reader = threading.Thread(target=self._read_frames, name="child-frames", daemon=True)
        self._logger = threading.Thread(target=self._read_log, name="child-log", daemon=True)
        self._reader.start()
        self._logger.start()

    def _read_frames(self) -> None:
        try:
            while (frame := read_frame(self._from_child)) is not None:
                self._frames.put(frame)
            self._broken = "the child closed its channel"
        except (FrameError, OSError) as error:
            self._broken = str(error)
        self._frames.put(None)

    def _read_log(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(stream.fileno(), _CHUNK):
                with self._tail_lock:
                    self._tail.append(data)
                    while sum(map(len, self._tail)) - len(self._tail[0]) >= self._tail_limit:
                        self._tail.popleft()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether another exchange is possible."""
        return not self._closed and self._broken is None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def stderr_tail(self) -> str:
        """The end of what the child printed, at most ``tail_bytes``."""
        if not self.alive:  # all of it has been written, or is about to be; let the thread catch up
            self._logger.join(_GRACE_S)
        with self._tail_lock:
            data = b"".join(self._tail)
        return data[-self._tail_limit :].decode(errors="replace")

    def send(self, payload: bytes, timeout_s: float = 30.0) -> bool:
        """Whether the whole message was taken within the time; after False the child should be killed."""
        view = memoryview(encode_frame(payload))
        end = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            if self._closed:
                return False
            selector.register(self._to_child, selectors.EVENT_WRITE)
            while view:
                remaining = end - time.monotonic()
                if remaining <= 0 or not self.alive:
                    return False
                if not selector.select(min(remaining, _TICK_S)):
                    continue
                try:
                    view = view[os.write(self._to_child, view) :]
                except BlockingIOError:
                    continue
                except OSError:  # the child closed its end
                    return False
        return True

    def recv(self, timeout_s: float) -> bytes | None:
        """The next message; None after ``timeout_s``, or promptly when none can come any more (see ``alive``)."""
        end = time.monotonic() + timeout_s
        died_at: float | None = None
        while True:
            now = time.monotonic()
            try:
                frame = self._frames.get(timeout=max(0.0, min(_TICK_S, end - now)))
            except queue.Empty:
                if self._process.poll() is not None:
                    # Something it started may hold the pipe open; what is in the pipe still gets through.
                    died_at = died_at or now
                    if now - died_at > _GRACE_S:
                        return None
                if now >= end:
                    return None
                continue
            if frame is None:
                self._frames.put(None)  # the next call learns it too
            return frame

    def kill(self) -> None:
        """Kill the whole process group and release everything. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        _kill_group(self._process.pid)
        self._process.wait()
        os.close(self._to_child)
        self._reader.join(_GRACE_S)
        self._logger.join(_GRACE_S)
        # A descriptor may only be closed when no thread can still read from it: its number may be reused.
        if not self._reader.is_alive():
            os.close(self._from_child)
        if not self._logger.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
