"""Length-prefixed messages over a private pipe: 4 bytes little-endian length, then the payload.

The worker uses this end; ``tools.proc.Child`` is the other. Standard output is never a channel: a library that prints,
or a candidate that finds a way to, must not be able to forge a reply.
"""

from __future__ import annotations

import argparse
import os
import select
import struct
import threading

HEADER = struct.Struct("<I")
#: Larger than any reply; a length above it means that the stream is not ours any more.
MAX_FRAME_BYTES = 256 << 20


class FrameError(RuntimeError):
    """The stream broke inside a message, or announced an absurd length."""


def _read_exactly(fd: int, count: int) -> bytes:
    """``count`` bytes, fewer only at end of file."""
    chunks = []
    while count > 0:
        chunk = os.read(fd, min(count, 1 << 20))
        if not chunk:
            break
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


def read_frame(fd: int) -> bytes | None:
    """The next message, waiting for it; None when the other end closed between messages. Raises FrameError."""
    header = _read_exactly(fd, HEADER.size)
    if not header:
        return None
    if len(header) < HEADER.size:
        raise FrameError("the stream ended inside a message header")
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {length} bytes was announced; the limit is {MAX_FRAME_BYTES}")
    payload = _read_exactly(fd, length)
    if len(payload) < length:
        raise FrameError(f"the stream ended after {len(payload)} of {length} bytes of a message")
    return payload


def worker_parser() -> argparse.ArgumentParser:
    """Of a worker's command line, which ``tools.proc.Child`` ends with the two descriptors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-fd", type=int, required=True)
    parser.add_argument("--out-fd", type=int, required=True)
    return parser


def encode_frame(payload: bytes) -> bytes:
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(payload)) + payload


def write_frame(fd: int, payload: bytes) -> None:
    """Write one message to a blocking descriptor. Raises FrameError (too long) or BrokenPipeError (nobody reads)."""
    view = memoryview(encode_frame(payload))
    while view:
        view = view[os.write(fd, view) :]


def exit_on_hangup(fd: int, code: int = 1) -> None:
    """End this process as soon as the other end of ``fd`` is closed, even while a kernel hangs in the main thread.

    For workers: a parent killed with SIGKILL cannot clean up, and a worker stuck in a launch never reads end of file.
    """

    def watch() -> None:
        poller = select.poll()
        poller.register(fd, 0)  # no events asked for: only hang-up and errors are reported, unread data is not
        while True:
            if any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in poller.poll()):
                os._exit(code)

    threading.Thread(target=watch, name="exit-on-hangup", daemon=True).start()
