"""Shared by all tests: no deadline for a single generated example, which a busy machine would miss now and then."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.load_profile("default")


@pytest.fixture
def hears_hangups() -> Iterator[None]:
    """Programs started meanwhile do so also where the tests themselves run under nohup, which they would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
