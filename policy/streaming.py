"""Answers that come as a stream of events: the SDKs put them together, and fail in their own ways on broken ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from policy.tidying import BadAnswer, Garbled
from policy.transport import Overrun


def is_event_stream(headers: Mapping[str, str]) -> bool:
    """Some servers do not stream and answer as a whole, and a proxy answers with a page of its own."""
    return "event-stream" in headers.get("content-type", "")


@contextmanager
def assembling(connection_errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Whatever an SDK's helper stumbles over is a garbled answer: worth another attempt."""
    known: tuple[type[Exception], ...] = (BadAnswer, Overrun, *connection_errors)
    try:
        yield
    except known:
        raise
    except Exception as error:
        raise Garbled(
            f"sent a stream that cannot be put together ({type(error).__name__}); --set policy.stream=false asks for "
            "whole answers"
        ) from None
