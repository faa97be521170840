"""``agent certify``: the paper's protocol for chosen kernels at chosen shapes, into a certificate.

Each kernel is compiled, verified in full depth with fresh seeds, sanitized, and timed against all references in one
interleaved run a mode. Nothing is taken from a database: a certificate stands on its own measurements. The file is
written after every kernel, so that a run that was killed goes on with the same command.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from agent.certify_record import (
    Certificate,
    Certified,
    CertifiedTiming,
    CertifySettings,
    best_of,
    read,
    rejected_or_incomplete,
    sha256_text,
    write,
)
from agent.errors import UsageError
from tools.device import CertifyTimer, Device
from tools.gate import MemoryResults, Toolbox, device_scope
from tools.records import (
    BaselineResult,
    Budget,
    ClockTrace,
    CompileResult,
    Depth,
    DeviceInfo,
    Family,
    Mode,
    Outcome,
    ProfileResult,
    SanitizeResult,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)

_PACKAGES = ("hgemm-agent", "numpy", "torch", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "nvidia-ml-py")


@dataclass(frozen=True)
class Candidate:
    """A kernel to certify at one shape."""

    task: Task
    variant: Variant


@dataclass(frozen=True)
class Event:
    """``entry`` is there when a kernel is through."""

    text: str
    done: int
    wanted: int
    entry: Certified | None = None


class CertifyDevice:
    """A device whose certify budget takes the given seconds. One that cannot be told (a recording) answers with what it
    has at that budget. ``traces`` keeps the clocks of each timing."""

    def __init__(self, device: Device, settings: CertifySettings) -> None:
        self._device = device
        self._settings = settings
        self.traces: dict[tuple[str, str, Mode], ClockTrace] = {}

    @property
    def info(self) -> DeviceInfo:
        return self._device.info

    def compile(self, variant: Variant) -> CompileResult:
        return self._device.compile(variant)

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult:
        return self._device.verify(variant, task, depth)

    def sanitize(self, variant: Variant, tasks: Sequence[Task]) -> SanitizeResult:
        return self._device.sanitize(variant, tasks)

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
        if budget != "certify" or not isinstance(self._device, CertifyTimer):
            return self._device.time(variant, task, mode, budget)
        result, trace = self._device.time_certify(
            variant, task, mode, warm_s=self._settings.warm_s, aim_s=self._settings.timed_s
        )
        if trace is not None:
            self.traces[variant.key, task.task_id, mode] = trace
        return result

    def profile(self, variant: Variant, task: Task) -> ProfileResult:
        return self._device.profile(variant, task)

    def baselines(self, task: Task, mode: Mode, budget: Budget) -> BaselineResult:
        return self._device.baselines(task, mode, budget)

    def close(self) -> None:
        """The device is its opener's."""


def certify(
    device: Device,
    candidates: Sequence[Candidate],
    settings: CertifySettings,
    out: Path,
    *,
    inputs: str,
    families: Mapping[str, Family],
    observer: Callable[[Event], None] = lambda event: None,
) -> Certificate:
    """All of ``candidates``, or what is left of them. Raises UsageError if ``out`` holds another certificate, and
    DeviceBroken; what was certified until then is in ``out``."""
    certificate = _begun(out, device.info, settings, inputs, candidates)
    todo = [c for c in candidates if certificate.entry(c.task, c.variant.key) is None]
    if len(todo) < len(candidates):
        observer(Event(f"{out} holds {len(candidates) - len(todo)} of them", len(certificate.entries), len(candidates)))
    for candidate in todo:
        done = len(certificate.entries)

        def say(stage: str, candidate: Candidate = candidate, done: int = done) -> None:
            text = f"{candidate.task.label} {candidate.variant.label}: {stage}"
            observer(Event(text, done, len(candidates)))

        entry = certify_one(device, candidate, settings, families, say)
        certificate = write(
            out,
            certificate.model_copy(update={"entries": (*certificate.entries, entry), "finished_at": _now()}),
        )
        observer(Event(entry.why or "certified", len(certificate.entries), len(candidates), entry))
    return certificate


def certify_one(
    device: Device,
    candidate: Candidate,
    settings: CertifySettings,
    families: Mapping[str, Family],
    say: Callable[[str], None] = lambda stage: None,
) -> Certified:
    """Through the whole gate, as far as it passes."""
    task, variant = candidate.task, candidate.variant
    through = CertifyDevice(device, settings)
    toolbox = Toolbox(through, MemoryResults(), families)
    found = _Found()

    def failed(stage: str, outcome: Outcome) -> Certified | None:
        if outcome.ok:
            return None
        because = f"{outcome.reason.value}: " if outcome.reason else ""
        return found.entry(candidate, rejected_or_incomplete(outcome.status), f"{stage}: {because}{outcome.detail}")

    say("compile")
    found.compile = toolbox.compile(variant).model_copy(update={"log": ""})
    if bad := failed("compile", found.compile):
        return bad
    say("verify, full")
    found.verify = toolbox.verify(variant, task, "full")
    if bad := failed("verify", found.verify):
        return bad
    say("sanitize")
    found.sanitize = toolbox.sanitize(variant, task)
    if bad := failed("sanitize", found.sanitize):
        return bad
    for mode in settings.modes:
        say(f"time {mode}, {settings.warm_s + settings.run_s(mode):.0f} s")
        timing = toolbox.time(variant, task, mode, "certify")
        trace = through.traces.get((variant.key, task.task_id, mode))
        found.timings.append(CertifiedTiming(result=timing, best_of=best_of(timing), trace=trace))
        if bad := failed(f"time {mode}", timing):
            return bad
    return found.entry(candidate, "certified", "")


@dataclass
class _Found:
    compile: CompileResult | None = None
    verify: VerifyResult | None = None
    sanitize: SanitizeResult | None = None
    timings: list[CertifiedTiming] = field(default_factory=list)

    def entry(self, candidate: Candidate, status: str, why: str) -> Certified:
        variant = candidate.variant
        return Certified.model_validate(
            {
                "task": candidate.task,
                "variant_key": variant.key,
                "variant_id": variant.variant_id,
                "label": variant.label,
                "b_layout": variant.b_layout,
                "plan": variant.plan,
                "variant": None if variant.plan else variant,
                "source_sha256": sha256_text(variant.source),
                "launch_sha256": sha256_text(variant.launch.to_json()),
                "content_id": variant.content_id,
                "status": status,
                "why": why,
                "compile": self.compile,
                "verify": self.verify,
                "sanitize": self.sanitize,
                "timings": tuple(self.timings),
            }
        )


def _begun(
    out: Path, info: DeviceInfo, settings: CertifySettings, inputs: str, candidates: Sequence[Candidate]
) -> Certificate:
    """What ``out`` holds of this same run, or a fresh certificate."""
    fresh = Certificate(
        created_at=_now(),
        finished_at=_now(),
        protocol_version=info.protocol_version,
        inputs=inputs,
        wanted=len(candidates),
        settings=settings,
        device=info,
        software=software(),
    )
    if not out.exists():
        return fresh
    before = read(out)
    wanted = {(c.task.task_id, c.variant.key): c.variant for c in candidates}
    entries = [(e, wanted.get((e.task.task_id, e.variant_key))) for e in before.entries]
    same = (
        before.settings == settings
        and device_scope(before.device) == device_scope(info)
        and before.software == fresh.software
        and all(variant is not None and entry.is_of(variant) for entry, variant in entries)
    )
    if not same:
        raise UsageError(
            f"{out} holds a certificate of another run (other kernels or sources, settings, device or software): "
            "give another --out"
        )
    # What could not be measured then is tried again.
    kept = tuple(e for e in before.entries if e.status != "incomplete")
    return before.model_copy(update={"wanted": len(candidates), "entries": kept})


def software() -> dict[str, str]:
    """Versions of everything that measures, as far as it is here, and the commit of a checkout."""
    from tools.revision import commit
    from tools.toolchain import find_toolchain

    found = {"python": platform.python_version(), "platform": f"{sys.platform} {platform.machine()}"}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    compiler = find_toolchain().compiler
    if compiler is not None:
        found["compiler"] = compiler
    if revision := commit():
        found["commit"] = revision
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
