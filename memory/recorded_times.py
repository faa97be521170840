"""What a record file timed at the shapes near a task, for memory/shortlist.py. Reading only.

Offline, at screen budget. The task's own rows are never read: on the device that replays the file they are the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from memory.exemplars_read import nearest
from memory.shortlist import ASKED, Measured
from tools.families import variants
from tools.record_file import RecordReader
from tools.records import Family, Status, Task, Variant


class RecordedTimes:
    """Opens the file when it is first asked, and keeps each shape that it has read (2 ms). ``is_asked``: which shapes
    may be read at all. Raises DeviceBroken, in one sentence, for a file that cannot be answered from."""

    def __init__(
        self, path: Path, families: Mapping[str, Family], is_asked: Callable[[Task], bool] = lambda task: True
    ) -> None:
        self._path = path
        self._families = families
        self._is_asked = is_asked
        self._records: RecordReader | None = None
        self._known: dict[str, Measured] = {}

    def near(self, task: Task, count: int = ASKED) -> list[Measured]:
        """Closest first."""
        return [self._at(other) for other in nearest(task, self._task_ids, count)]

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    def _at(self, task: Task) -> Measured:
        if task.task_id not in self._known:
            times = {key: self._time_us(key, task) for key in self._reader.screened(task.task_id)}
            self._known[task.task_id] = Measured(task, {key: us for key, us in times.items() if us is not None})
        return self._known[task.task_id]

    def _time_us(self, key: str, task: Task) -> float | None:
        """None for a plan of another revision or an edited source, and for one that turned out wrong."""
        records, variant = self._reader, self._variants.get(key)
        if variant is None or not records.is_of(variant):
            return None
        timing = records.timed(key, task.task_id, "offline", "screen")
        verified = records.verified(key, task.task_id, "full")
        row = timing.row() if timing is not None else None
        is_wrong = verified is not None and verified.status is Status.FAILED
        return row.time_us if row is not None and not is_wrong else None

    @property
    def _reader(self) -> RecordReader:
        if self._records is None:
            self._records = RecordReader(self._path)
        return self._records

    @cached_property
    def _task_ids(self) -> list[str]:
        return [task.task_id for task in self._reader.tasks() if self._is_asked(task)]

    @cached_property
    def _variants(self) -> dict[str, Variant]:
        return {variant.key: variant for family in self._families.values() for variant in variants(family)}
