"""What a record file timed at the shapes near a task, for memory/shortlist.py. Reading only.

Offline, at screen budget. The task's own rows are never read: on the device that replays the file they are the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from memory.exemplars_read import nearest, recorded_at
from memory.shortlist import ASKED, Measured, measured
from tools.record_file import RecordReader
from tools.records import DeviceInfo, Family, Task


class RecordedTimes:
    """Opens the file when it is first asked, and keeps each shape that it has read (8 ms in the median). ``is_asked``:
    which shapes may be read at all. Raises DeviceBroken, in one sentence, for a file that cannot be answered from."""

    def __init__(
        self, path: Path, families: Mapping[str, Family], is_asked: Callable[[Task], bool] = lambda task: True
    ) -> None:
        self._path = path
        self._families = families
        self._is_asked = is_asked
        self._records: RecordReader | None = None
        self._known: dict[str, Measured] = {}
        self._near: dict[str, list[Measured]] = {}

    @property
    def gpu(self) -> DeviceInfo:
        return self._reader.device

    def near(self, task: Task) -> list[Measured]:
        """Closest first. A search asks at every turn."""
        if task.task_id not in self._near:
            self._near[task.task_id] = [self._at(other) for other in nearest(task, self._task_ids, ASKED)]
        return self._near[task.task_id]

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    def _at(self, task: Task) -> Measured:
        if task.task_id not in self._known:
            found = recorded_at(self._reader, self._families, task)
            self._known[task.task_id] = measured(task, found)
        return self._known[task.task_id]

    @property
    def _reader(self) -> RecordReader:
        if self._records is None:
            self._records = RecordReader(self._path)
        return self._records

    @cached_property
    def _task_ids(self) -> list[str]:
        return [task.task_id for task in self._reader.tasks() if self._is_asked(task)]
