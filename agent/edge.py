"""What a user sees of an error: one sentence and an exit code; of a bug of ours, also the file its traceback is in.

``guarded`` is around the body of every command, ``leave_with`` around the whole program. With HGEMM_AGENT_DEBUG=1 every
error shows its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import typer

from agent.errors import ADVICE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, AgentError, interrupted_code, refusal
from agent.streams import OutputLost

DEBUG = "HGEMM_AGENT_DEBUG"
_KEPT = 20


def sentences() -> tuple[type[Exception], ...]:
    """Errors whose message is written for the user."""
    from memory.store import StoreError
    from policy.base import PolicyError
    from retrieval.errors import RetrievalError
    from tools.device import DeviceBroken
    from tools.families import ManifestError
    from tools.hgemm import ShapeError
    from tools.paths import HomeError
    from training.errors import TrainingError

    return (
        AgentError,
        StoreError,
        PolicyError,
        DeviceBroken,
        ManifestError,
        ShapeError,
        RetrievalError,
        HomeError,
        TrainingError,
    )


def sentence(error: BaseException) -> str | None:
    """For the user; None where the error is a bug of ours."""
    if isinstance(error, sentences()):
        return str(error)
    import sqlite3

    if isinstance(error, sqlite3.Error) and isinstance(getattr(error, "sqlite_errorcode", None), int):
        from tools.sqlite_errors import explain

        return explain(error, "a database of hgemm-agent")
    if isinstance(error, OSError) and (error.errno in ADVICE):
        what = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
        return f"{what}{refusal(error)}"
    if isinstance(error, MemoryError):
        return "the machine has no memory left for this: end other programs, or choose a smaller budget"
    return None


@contextmanager
def guarded() -> Iterator[None]:
    """No traceback for what a user can do or a machine can lack."""
    try:
        yield
    except KeyboardInterrupt as error:
        complain("interrupted")
        raise typer.Exit(interrupted_code(error)) from None
    except Exception as error:
        if (found := sentence(error)) is None:
            raise
        complain(f"error: {found}", error)
        raise typer.Exit(EXIT_ERROR) from None


def complain(text: str, error: BaseException | None = None) -> None:
    if error is not None and os.environ.get(DEBUG) == "1":
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    print(text, file=sys.stderr, flush=True)


def leave_with(command: Callable[[], object]) -> int:
    """The exit code of ``command``, whatever it raises. A reader of stdout that has left had what it wanted."""
    try:
        code = command()
        sys.stdout.flush()
    except OutputLost as lost:
        if lost.reader_left:
            return EXIT_OK
        complain(f"error: stdout cannot be written to: {lost}", lost)
        return EXIT_ERROR
    except typer.Exit as left:
        return left.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt as error:
        return interrupted_code(error)
    except Exception as error:
        complain(f"error: {_told(error)}", error)
        return EXIT_ERROR
    return code if isinstance(code, int) else EXIT_OK


def _told(error: Exception) -> str:
    try:
        return sentence(error) or _crashed(error)
    except Exception:  # an installation so broken that its errors cannot be told apart
        return f"{type(error).__name__}: {error} (set {DEBUG}=1 to see where)"


# --- bugs of ours -----------------------------------------------------------------------------------------------------


def _crashed(error: Exception) -> str:
    import platform
    import traceback

    said = " ".join(str(error).split())[:200]
    what = _without_keys(f"this is a bug of hgemm-agent ({type(error).__name__}{f': {said}' if said else ''})")
    machine = f"hgemm-agent {_version()}, Python {platform.python_version()}, {platform.platform()}"
    path = _written(_without_keys(f"{machine}\n\n{''.join(traceback.format_exception(error))}"))
    if path is None:
        return f"{what}, and its traceback could not be written to a file: set {DEBUG}=1 to see it"
    return f"{what}: nothing that was measured is lost; please report it with the file {path}"


def _without_keys(text: str) -> str:
    from policy.redacting import Secrets

    return Secrets.of(os.environ).message(text)


def _written(text: str) -> Path | None:
    """In the home, or where files for a while go; None if neither takes it."""
    import tempfile

    name = f"{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (_home_crashes, lambda: Path(tempfile.gettempdir()) / "hgemm-agent-crashes"):
        try:
            path = folder() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="replace")
            for old in sorted(path.parent.glob("*.txt"))[:-_KEPT]:
                old.unlink(missing_ok=True)
            return path
        except (OSError, RuntimeError):
            continue
    return None


def _home_crashes() -> Path:
    from tools.paths import home_dir

    return home_dir() / "crashes"


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hgemm-agent")
    except PackageNotFoundError:
        return "(a checkout)"
