"""A recorder on a scripted GPU, as a process of its own: what tests/test_recording_farm.py leads, stops and kills.

Its device writes every call to a diary before it answers. At the first call of a kind of a test's choice, whichever of
the processes of a recording makes it, it says so on a named pipe and waits, for ever or to be told to go on: tests wait
for what happens and for no time.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fakes import BatchingDevice, toy_families
from tools.device import DeviceBroken
from tools.recorder import serve
from tools.records import BaselineResult, Budget, Mode, Reason, SanitizeResult, Task, TimingResult, Variant

ROOT = Path(__file__).resolve().parent.parent


def argv(diary: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "tests.recorder_process", "--diary", str(diary), *more]


class ManyDevice(BatchingDevice):
    def sanitize_many(self, items: Sequence[tuple[Variant, Sequence[Task]]]) -> list[SanitizeResult]:
        return [self.sanitize(variant, tasks) for variant, tasks in items]


class DiaryDevice(ManyDevice):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(self._note, driver=options.driver)
        self._options = options
        self._diary = os.open(options.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _note(self, tool: str, variant: Variant | None, task: Task | None) -> Reason | None:
        options, line = self._options, "|".join(self.calls[-1])
        os.write(self._diary, f"{line}\n".encode())
        if options.broken_at and re.match(options.broken_at, line):
            raise DeviceBroken("the worker cannot be started")
        if options.pause_at and re.match(options.pause_at, line) and _first(options.reached):
            options.reached.write_text(f"{os.getpid()}\n")
            if options.go_on:
                options.go_on.read_text()
            else:
                signal.pause()
        return Reason.WRONG_RESULT if options.wrong and self.calls[-1].setting == options.wrong else None

    def baselines(self, task: Task, mode: Mode, budget: Budget) -> BaselineResult:
        found = super().baselines(task, mode, budget)
        self._note("baselines", None, task)
        return found

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
        found = super().time(variant, task, mode, budget)
        factor = self._options.factor
        rows = tuple(row.model_copy(update={"ratio": factor * row.ratio}) for row in found.rows)
        return found.model_copy(update={"rows": rows})


def _first(reached: Path) -> bool:
    try:
        reached.with_suffix(".once").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--driver", default="1.0")
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--pause-at", metavar="REGEX", help="of tool|key|task|setting")
    parser.add_argument("--reached", type=Path, metavar="PIPE")
    parser.add_argument("--go-on", type=Path, metavar="PIPE")
    parser.add_argument("--broken-at", metavar="REGEX")
    parser.add_argument("--wrong", metavar="DEPTH")
    parser.add_argument("--file-bytes", type=int)
    parser.add_argument("--in-fd", type=int, required=True)
    parser.add_argument("--out-fd", type=int, required=True)
    options = parser.parse_args()
    if options.file_bytes is not None:  # a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_bytes, options.file_bytes))
    serve(DiaryDevice(options), toy_families(), options.in_fd, options.out_fd)


if __name__ == "__main__":
    main()
