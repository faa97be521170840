"""A certificate: what was measured, how, with what, and what came of it, under one SHA-256.

The digest covers everything else in the file, so that a copied, edited or cut file is noticed. It is no proof of who
measured. What a second run needs is in the file: the plan of each kernel, or its whole source where it has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from agent.errors import UsageError, refusal
from agent.files import read_text, write_atomic
from tools.records import (
    HEADLINE_REFERENCE,
    PROTOCOL_VERSION,
    BLayout,
    ClockTrace,
    CompileResult,
    DeviceInfo,
    Mode,
    Plan,
    Record,
    SanitizeResult,
    Status,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)
from tools.validation import first_error

FORMAT_VERSION = 1
EntryStatus = Literal["certified", "rejected", "incomplete"]


class CertifySettings(Record):
    """Seconds for one kernel, shape and mode. ``timed_s`` is what the kernel and each one reference are timed for
    between them; all references run in turn with the kernel, so a run lasts longer (``run_s``)."""

    warm_s: float = Field(ge=0, le=86_400, allow_inf_nan=False)
    timed_s: float = Field(gt=0, le=86_400, allow_inf_nan=False)
    modes: tuple[Mode, ...] = Field(min_length=1)

    def run_s(self, mode: Mode) -> float:
        """At least, after the warm-up: the kernel, four references in two layouts each, and in server mode an empty
        kernel share the time evenly."""
        subjects = 10 if mode == "server" else 9
        return self.timed_s * subjects / 2

    @property
    def entry_s(self) -> float:
        return sum(self.warm_s + self.run_s(mode) for mode in self.modes)


class BestOf(Record):
    """max(custom, reference): what one has who keeps the reference beside the kernel."""

    reference: str
    ratio: float
    max_ratio: float


class CertifiedTiming(Record):
    result: TimingResult
    best_of: tuple[BestOf, ...] = ()
    trace: ClockTrace | None = None


class Certified(Record):
    """One kernel at one shape. ``variant`` is there for a kernel that no family renders. ``why`` is empty iff
    certified."""

    task: Task
    variant_key: str
    variant_id: str
    label: str
    b_layout: BLayout
    plan: Plan | None = None
    variant: Variant | None = None
    source_sha256: str
    launch_sha256: str
    content_id: str | None = None  # without comments; older certificates lack it
    status: EntryStatus
    why: str = ""
    compile: CompileResult | None = None
    verify: VerifyResult | None = None
    sanitize: SanitizeResult | None = None
    timings: tuple[CertifiedTiming, ...] = ()

    def is_of(self, variant: Variant) -> bool:
        """Whether this kernel was measured, and not another source under the same plan. Without a ``content_id`` every
        character counts."""
        if self.content_id is not None:
            return self.content_id == variant.content_id
        known = (self.source_sha256, self.launch_sha256)
        return known == (sha256_text(variant.source), sha256_text(variant.launch.to_json()))

    def timing(self, mode: Mode) -> CertifiedTiming | None:
        return next((t for t in self.timings if t.result.mode == mode), None)

    def ratio(self, mode: Mode, reference: str = HEADLINE_REFERENCE) -> float | None:
        timing = self.timing(mode)
        row = timing.result.row(reference) if timing else None
        return row.ratio if row else None


class Certificate(Record):
    """``wanted`` counts the kernels that were asked for: with fewer entries the run broke off, and the same command
    goes on."""

    format_version: int = FORMAT_VERSION
    protocol_version: int = PROTOCOL_VERSION
    created_at: str
    finished_at: str
    inputs: str
    wanted: int
    settings: CertifySettings
    device: DeviceInfo
    software: dict[str, str]
    entries: tuple[Certified, ...] = ()
    sha256: str = ""

    @property
    def complete(self) -> bool:
        return len(self.entries) >= self.wanted

    def entry(self, task: Task, variant_key: str) -> Certified | None:
        return next((e for e in self.entries if e.task == task and e.variant_key == variant_key), None)

    def signed(self) -> Certificate:
        return self.model_copy(update={"sha256": digest(self.model_dump(mode="json", exclude_none=True))})


def digest(document: dict[str, Any]) -> str:
    """SHA-256 over canonical JSON of everything but the digest itself."""
    rest = {name: value for name, value in document.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def best_of(timing: TimingResult) -> tuple[BestOf, ...]:
    return tuple(BestOf(reference=r.reference, ratio=r.ratio, max_ratio=max(1.0, r.ratio)) for r in timing.rows)


def check_writable(path: Path) -> None:
    """Raises UsageError if no certificate could be written there. Asked before the minutes of measuring."""
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder: give the name of a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.is_file():
            with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent) as probe:
                probe.write(b"x")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {refusal(error, '--out')}") from error
    except ValueError as error:  # a NUL byte in the name
        raise UsageError(f"{str(path)!r} is not the name of a file") from error


def write(path: Path, certificate: Certificate) -> Certificate:
    """Signed, whole or not at all. Raises UsageError."""
    signed = certificate.signed()
    write_atomic(path, _text(signed.model_dump(mode="json", exclude_none=True)), "--out")
    return signed


def _text(document: dict[str, Any]) -> str:
    """JSON with a line for each field and each kernel: a trace has hundreds of numbers, a diff is still readable."""
    entries = ",\n".join(json.dumps(entry) for entry in document["entries"])
    fields = [
        f"{json.dumps(name)}: " + (f"[\n{entries}\n]" if name == "entries" else json.dumps(value))
        for name, value in document.items()
    ]
    return "{\n" + ",\n".join(fields) + "\n}\n"


def read(path: Path) -> Certificate:
    """Raises UsageError with one sentence: a file that is missing, no certificate, newer, or not as it was signed."""
    text = read_text(path, "the certificate")
    try:
        document = json.loads(text)
        version = document["format_version"]
        found = document["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path} is not a certificate of `agent certify`") from error
    if version != FORMAT_VERSION:
        raise UsageError(f"{path} has certificate format {version}, this program reads {FORMAT_VERSION}")
    if found != digest(document):
        raise UsageError(f"{path} is not as it was written: its SHA-256 does not fit its contents")
    try:
        return Certificate.model_validate(document)
    except ValidationError as error:
        message = first_error(error)
        raise UsageError(f"{path} is a certificate of another version of this program ({message})") from error


def rejected_or_incomplete(status: Status) -> EntryStatus:
    return "rejected" if status is Status.FAILED else "incomplete"


def entry_counts(entries: Sequence[Certified]) -> dict[str, int]:
    names: tuple[EntryStatus, ...] = ("certified", "rejected", "incomplete")
    return {name: sum(e.status == name for e in entries) for name in names}
