"""Shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# For a single generated example: a busy machine would miss it now and then.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

# What `auto` stands for depends on what is installed; tests of that say so themselves.
os.environ.setdefault("HGEMM_AGENT_POLICY__NAME", "search")


@pytest.fixture(scope="session", autouse=True)
def programs_hear_signals() -> Iterator[None]:
    """Also where the tests themselves run under nohup or in the background of a script, and so were started with these
    signals ignored: programs inherit that, but no handler."""
    ignored = [s for s in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
