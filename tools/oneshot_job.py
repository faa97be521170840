"""The job file and command line of ``tools.gpu.oneshot``, the child that compute-sanitizer and ncu watch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.records import Task, Variant

#: The child's exit code when the candidate, not the machinery, failed: a launch error, a refused launch spec.
EXIT_CANDIDATE_FAILED = 3

#: A candidate and the cubin it was compiled to, at one shape.
Launchable = tuple[Variant, Task, Path]

_SECRET_SUFFIXES = ("_API_KEY", "_TOKEN", "_SECRET")


def write_job(path: Path, ordinal: int, jobs: Sequence[Launchable]) -> None:
    """Write the job file: every candidate is launched once, in this order, on GPU ``ordinal``."""
    items = [
        {"cubin": str(cubin), "variant": variant.model_dump(mode="json"), "task": task.model_dump(mode="json")}
        for variant, task, cubin in jobs
    ]
    path.write_text(json.dumps({"ordinal": ordinal, "jobs": items}), encoding="utf-8")


def done_line(launches: int) -> str:
    """The child's last words: every candidate was launched, and the GPU has finished."""
    return f"oneshot: launches done: {launches}"


def oneshot_argv(job: Path) -> list[str]:
    return [sys.executable, "-m", "tools.gpu.oneshot", str(job)]


def child_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a process that runs candidates gets: this checkout on its path, and no API keys."""
    environ = os.environ if environ is None else environ
    root = str(Path(__file__).resolve().parent.parent)
    kept = {name: value for name, value in environ.items() if not name.endswith(_SECRET_SUFFIXES)}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, (root, environ.get("PYTHONPATH"))))}


def last_line(text: str) -> str:
    """The last line a child printed itself (not compute-sanitizer's or ncu's), for an error sentence."""
    lines = (line.strip() for line in text.splitlines())
    own = [line for line in lines if line and not line.startswith("==")]
    return own[-1][:300] if own else "it printed nothing"
