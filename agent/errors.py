"""Errors that end a command: one sentence, and the exit code that goes with it."""

from __future__ import annotations

import errno

EXIT_OK = 0
EXIT_ERROR = 1  # wrong input, or the machinery broke
EXIT_REJECTED = 2  # the machinery worked, and no kernel passed
EXIT_INTERRUPTED = 130  # ctrl-C; 128 + the number of another signal: 143 for SIGTERM, 129 for SIGHUP


class AgentError(RuntimeError):
    """The message is what the user reads."""


class UsageError(AgentError):
    """The user can put it right: a wrong shape, an unknown setting, a missing file."""


class SessionError(AgentError):
    """The session cannot go on now, and can be resumed."""


class Stopped(AgentError):
    """Ctrl-C or another signal: raised between two tool calls, so nothing that was measured is lost."""

    exit_code = EXIT_INTERRUPTED


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command, heard while no session runs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def interrupted_code(error: KeyboardInterrupt) -> int:
    return error.exit_code if isinstance(error, Interrupted) else EXIT_INTERRUPTED


#: What the machine refuses and the user can change. Other errors of the system are bugs of ours until shown otherwise.
ADVICE = {
    errno.ENOSPC: "free some space and run the command again",
    errno.EDQUOT: "free some space of your quota and run the command again",
    errno.EFBIG: "the limit on the size of files (ulimit -f) is too low",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.EROFS: "choose another place",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "the machine has no more: end other programs",
    errno.ENOMEM: "the machine has no memory left: end other programs",
    errno.EAGAIN: "the limit on processes or threads (ulimit -u) is reached",
    errno.EIO: "the disk or its connection is broken",
    errno.ESTALE: "the network file system went away",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "its symbolic links go in a circle",
    errno.EISDIR: "it is a folder; a file is needed",
    errno.ENOTDIR: "a part of it is a file; a folder is needed",
    errno.ENOENT: "it, or its folder, does not exist",
}


#: What another place would not help against.
_EVERYWHERE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENAMETOOLONG, errno.EFBIG})


def refusal(error: OSError, chosen_with: str = "") -> str:
    """What the system said, and what to do about it. ``chosen_with``: the option or variable that says where the file
    is to be, named where another place would do."""
    said = error.strerror or str(error)
    advice = [ADVICE[error.errno]] if error.errno in ADVICE else []
    if chosen_with and error.errno not in _EVERYWHERE:
        elsewhere = ADVICE[errno.EROFS]
        advice = [*(one for one in advice if one != elsewhere), f"{elsewhere} with {chosen_with}"]
    return "; ".join([said, ", or ".join(advice)]) if advice else said
