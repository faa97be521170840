"""Rows into a file that is either whole or not there: JSONL line by line, Parquet through `datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools import whole_files
from training.errors import TrainingError
from training.rows import Row, features, format_of


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """How many. What was there stays until the new file is whole. Raises TrainingError."""
    if path.is_dir():
        raise TrainingError(f"{path} is a folder: give the name of a file")
    write = _write_parquet if format_of(path) == ".parquet" else _write_jsonl
    with replacing(path) as new:
        return write(new, rows)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """tools.whole_files.replacing, with folders made and a TrainingError for whatever the system refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_files.replacing(path) as new:
            yield new
    except OSError as error:
        why = error.strerror or str(error)
        raise TrainingError(f"{path} cannot be written ({why}): free some space or give another place") from error


def _write_jsonl(path: Path, rows: Iterable[Row]) -> int:
    count = 0
    with path.open("w", encoding="utf-8", errors="replace") as file:
        for row in rows:
            file.write(row.to_json() + "\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterable[Row]) -> int:
    """All rows are in memory at once: Parquet is written by columns."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    listed = [row.model_dump(mode="json") for row in rows]
    Dataset.from_list(listed, features=features()).to_parquet(path)
    return len(listed)
