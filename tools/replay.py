"""``replay:h200``: answers from recorded measurements of a real GPU. It never invents a number.

What was not recorded is NOT_RECORDED, with a sentence; that costs the caller one evaluation and says nothing about the
candidate. A plan is known by its plan_id (the family's revision included), a raw source by its variant_id.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from tools.device import DeviceBroken
from tools.paths import records_dir
from tools.record_file import RecordReader, changed_source
from tools.records import (
    BaselineResult,
    Budget,
    CompileResult,
    Depth,
    DeviceInfo,
    Mode,
    ProfileResult,
    SanitizeResult,
    Status,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)


def default_path() -> Path:
    return records_dir() / "h200.sqlite"


def path_of(name: str | Path) -> Path:
    """Of a record file as people name it: ``h200`` is the packaged one."""
    return default_path() if str(name) == "h200" else Path(name)


class ReplayDevice:
    """A ``tools.device.Device`` over a record file. Thread-safe; a lookup takes some tens of microseconds.

    ``real_compile``, where given, answers ``compile`` in place of the record (for sources that were never recorded).
    Raises DeviceBroken for a file that is missing, damaged, newer, or measured under another protocol.
    """

    def __init__(
        self, path: Path | None = None, real_compile: Callable[[Variant], CompileResult] | None = None
    ) -> None:
        self.records = RecordReader(path or default_path())
        self._real_compile = real_compile
        measured = self.records.device
        recorded_on = self.records.meta("recorded_on") or "an unknown date"
        label = f"replayed from {measured.name}, driver {measured.driver}, {recorded_on[:10]}"
        self._info = measured.model_copy(update={"kind": "replay", "label": label, "recorded_on": recorded_on})

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def compile(self, variant: Variant) -> CompileResult:
        if self._real_compile is not None:
            return self._real_compile(variant)
        with self._sound():
            found = self.records.compiled(variant.key) if self.records.is_of(variant) else None
        detail = self._absent("compile", variant)
        return found or CompileResult(status=Status.NOT_RECORDED, detail=detail, variant_id=variant.variant_id)

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult:
        with self._sound():
            found = self.records.verified(variant.key, task.task_id, depth) if self.records.is_of(variant) else None
        return found or VerifyResult(
            status=Status.NOT_RECORDED,
            detail=self._absent(f"verify {depth}", variant, task),
            variant_key=variant.key,
            task_id=task.task_id,
            depth=depth,
        )

    def sanitize(self, variant: Variant, tasks: Sequence[Task]) -> SanitizeResult:
        """A recorded failure answers for any shapes; a pass only for shapes at which it was recorded."""
        with self._sound():
            found = self.records.sanitized(variant.key) if self.records.is_of(variant) else None
        if found is not None and (found.status is Status.FAILED or covers(found, tasks)):
            return found
        shapes = ", ".join(task.label for task in tasks)
        detail = self._absent(f"sanitize at {shapes}", variant)
        return SanitizeResult(status=Status.NOT_RECORDED, detail=detail, variant_key=variant.key)

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
        with self._sound():
            found = self.records.timed(variant.key, task.task_id, mode, budget) if self.records.is_of(variant) else None
        return found or TimingResult(
            status=Status.NOT_RECORDED,
            detail=self._absent(f"{mode} time at budget {budget}", variant, task),
            variant_key=variant.key,
            task_id=task.task_id,
            mode=mode,
            budget=budget,
        )

    def profile(self, variant: Variant, task: Task) -> ProfileResult:
        with self._sound():
            found = self.records.profiled(variant.key, task.task_id) if self.records.is_of(variant) else None
        return found or ProfileResult(
            status=Status.NOT_RECORDED,
            detail=self._absent("profile", variant, task),
            variant_key=variant.key,
            task_id=task.task_id,
        )

    def baselines(self, task: Task, mode: Mode, budget: Budget) -> BaselineResult:
        with self._sound():
            found = self.records.baselines(task.task_id, mode, budget)
        return found or BaselineResult(
            status=Status.NOT_RECORDED,
            detail=f"no {mode} baselines at budget {budget} were recorded for {task.label} on {self._measured_on()}",
            task_id=task.task_id,
            mode=mode,
            budget=budget,
        )

    def close(self) -> None:
        self.records.close()

    def _measured_on(self) -> str:
        return f"{self._info.name}, driver {self._info.driver}"

    def _absent(self, what: str, variant: Variant, task: Task | None = None) -> str:
        """One sentence: the shape, the variant, or only this measurement of it was not recorded."""
        where = f"on {self._measured_on()}"
        if task is not None and not self.records.knows_task(task.task_id):
            return f"the shape {task.label} was not recorded {where}, so there is no {what} of {variant.label}"
        if not self.records.knows_plan(variant.key):
            return f"{variant.label} was not recorded {where}, so there is no {what} of it"
        if not self.records.is_of(variant):
            return f"{what} of {variant.label} was recorded {where} of another source: {changed_source(variant)}"
        at = f" at {task.label}" if task is not None else ""
        return f"no {what} of {variant.label}{at} was recorded {where}"

    @contextmanager
    def _sound(self) -> Iterator[None]:
        try:
            yield
        except (zlib.error, struct.error, ValidationError, UnicodeDecodeError, LookupError) as error:
            raise DeviceBroken(
                f"the record file {self.records.path} is damaged inside ({type(error).__name__}): "
                "get it again (git checkout, or reinstall the package)"
            ) from error


def covers(result: SanitizeResult, tasks: Sequence[Task]) -> bool:
    """Whether the checks of ``result`` ran at every one of these shapes."""
    ran = [check.dims for check in result.checks]
    return all(task.dims in ran for task in tasks)
