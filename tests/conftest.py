"""Shared by all tests: no deadline for a single generated example, which a busy machine would miss now and then."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("default", deadline=None)
settings.load_profile("default")
