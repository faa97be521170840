"""The folder of a training: what it was asked, its checkpoints, its metrics, and in the end an adapter or a model.

<out>/run.json          settings, data and base, as they were at the start: the same command goes on with them
      metrics.jsonl     one line a logged step
      checkpoints/      checkpoint-N, whole where it holds ``complete``
      training.json     when it is finished: what made it, with which figures
      adapter_model.safetensors …   the result
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from policy.base_model import CARD
from training.errors import TrainingError
from training.writing import replacing

COMPLETE = "complete"
#: Of run.json, what may be changed on the way: how far, how often, and what is held in memory at a time.
MAY_CHANGE = frozenset({"max_steps", "epochs", "save_steps", "log_steps", "keep_checkpoints"}) | {
    "batch_size",
    "accumulate",
    "gradient_checkpointing",
}


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"

    @property
    def is_finished(self) -> bool:
        return (self.path / CARD).is_file()

    def begin(self, asked: Mapping[str, Any], fresh: bool) -> None:
        """Raises TrainingError if the folder holds something else, or a training that was asked otherwise."""
        if self.path.exists() and not self.path.is_dir():
            raise TrainingError(f"{self.path} is a file: give the name of a folder with --out")
        before = self._asked()
        if before is None and self.path.is_dir() and any(p.name != "lock" for p in self.path.iterdir()):
            raise TrainingError(f"{self.path} is not empty and holds no training: choose another --out")
        if before is not None and fresh:
            self._clear()
        elif before is not None and (other := _differences(before, asked)):
            raise TrainingError(
                f"{self.path} holds a training with another {', '.join(other)}: choose another --out, or --fresh to "
                "begin anew"
            )
        self.write_json("run.json", asked)

    def resume_from(self) -> Path | None:
        """The newest checkpoint that was written to its end; others, which a kill left, are removed."""
        found: list[tuple[int, Path]] = []
        for path in self.checkpoints.glob("checkpoint-*") if self.checkpoints.is_dir() else ():
            if (path / COMPLETE).is_file() and path.name.rpartition("-")[2].isdigit():
                found.append((int(path.name.rpartition("-")[2]), path))
            else:
                shutil.rmtree(path, ignore_errors=True)
        return max(found)[1] if found else None

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        with replacing(self.path / name) as new:
            new.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Two processes of one folder would overwrite each other's checkpoints."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TrainingError(f"the folder {self.path} cannot be made or written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise TrainingError(f"another process is training into {self.path}: wait for it, or end it") from error
        finally:
            os.close(lock)

    def _asked(self) -> dict[str, Any] | None:
        path = self.path / "run.json"
        if not path.is_file():
            return None
        try:
            asked = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrainingError(f"{path} is damaged: choose another --out") from error
        return asked if isinstance(asked, dict) else None

    def _clear(self) -> None:
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "lock":
                path.unlink()


def _differences(before: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Dotted names of what is asked otherwise, apart from what may change."""
    found = []
    for name in sorted({*before, *asked}):
        old, new = before.get(name), asked.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += [f"{name}.{inner}" for inner in _differences(old, new)]
        elif old != new and name not in MAY_CHANGE:
            found.append(name)
    return found
