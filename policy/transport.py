"""Bounds on what a server may send back: bytes, and the seconds that one whole answer may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

MAX_ANSWER_BYTES = 8 * 2**20


class Overrun(RuntimeError):
    """An answer went over its bound. The message goes on from the server's name."""


def bounded(timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> Callable[[Any], None]:
    """A response hook for an SDK's HTTP client. A read timeout alone never ends an answer that drips."""
    # The SDKs bring httpx2 along; imported late, like them.
    from httpx2 import SyncByteStream

    class Bounded(SyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __iter__(self) -> Iterator[bytes]:
            seen, end = 0, time.monotonic() + timeout_s
            for chunk in self._stream:
                seen += len(chunk)
                if seen > max_bytes:
                    raise Overrun(f"sent an answer of more than {max_bytes >> 20} MiB; check --base-url")
                if time.monotonic() > end:
                    raise Overrun(f"was not done with its answer after {timeout_s:g} s (policy.timeout_s)")
                yield chunk

        def close(self) -> None:
            self._stream.close()

    def hook(response: Any) -> None:
        response.stream = Bounded(response.stream)

    return hook
