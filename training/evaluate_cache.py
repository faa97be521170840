"""The cells that were played, a JSON line each: what is in the file is not played again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from tools.text_files import irregular
from training.errors import TrainingError
from training.evaluate import Cell


def read_cells(path: Path) -> dict[str, Cell]:
    """By key. Lines that a kill cut off, or that are of another format, are as if they were not there."""
    found: dict[str, Cell] = {}
    if what := irregular(path):
        raise TrainingError(f"{path} {what}: give another file with --cache")
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    cell = Cell.model_validate_json(line)
                except ValidationError:
                    continue
                found[cell.key] = cell
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TrainingError(f"{path} cannot be read ({error.strerror}): give another file with --cache") from error
    return found


class CellFile:
    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path

    def add(self, cell: Cell) -> None:
        try:
            self._file.write(cell.model_dump_json().encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written ({error.strerror}): free some space and give the same command again"
            ) from error


@contextmanager
def appending(path: Path) -> Iterator[CellFile]:
    """Raises TrainingError if it cannot be opened."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file:
            size = file.seek(0, 2)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":  # the rest of a line that was cut off
                    file.write(b"\n")
            yield CellFile(file, path)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written ({error.strerror}): give another file with --cache") from error
