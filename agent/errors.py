"""Errors that end a command: one sentence, and the exit code that goes with it."""

from __future__ import annotations

EXIT_OK = 0
EXIT_ERROR = 1  # wrong input, or the machinery broke
EXIT_REJECTED = 2  # the machinery worked, and no kernel passed
EXIT_INTERRUPTED = 130


class AgentError(RuntimeError):
    """The message is what the user reads."""


class UsageError(AgentError):
    """The user can put it right: a wrong shape, an unknown setting, a missing file."""


class SessionError(AgentError):
    """The session cannot go on now, and can be resumed."""


class Stopped(AgentError):
    """Ctrl-C: raised between two tool calls, so nothing that was measured is lost."""
