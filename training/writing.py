"""Rows into a file that is either whole or not there: JSONL line by line, Parquet through `datasets`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
    """The name of a file beside ``path`` that takes its place when the block ends well. Raises TrainingError."""
    target = Path(os.path.realpath(path))
    new: str | None = None
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, new = tempfile.mkstemp(dir=target.parent, prefix=".new-", suffix=target.suffix)
            os.close(handle)
            yield Path(new)
            with open(new, "rb") as written:  # noqa: PTH123
                os.fsync(written.fileno())
            os.chmod(new, 0o666 & ~_umask())  # noqa: PTH101
            os.replace(new, target)  # noqa: PTH105
        except OSError as error:
            why = error.strerror or str(error)
            raise TrainingError(f"{path} cannot be written ({why}): free some space or give another place") from error
    except BaseException:
        if new is not None:
            with contextlib.suppress(OSError):
                os.unlink(new)  # noqa: PTH108
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


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
    try:
        Dataset.from_list(listed, features=features()).to_parquet(path)
    except OSError:
        raise
    return len(listed)
