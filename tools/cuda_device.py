"""``cuda:N``: compile here, measure in a worker process that owns the GPU, sanitize and profile in children.

A candidate that hangs, faults or kills the worker costs that process alone; the next request gets a fresh one. This
module imports no CUDA package, so it can be imported anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.build_cache import CompileCache
from tools.compiling import compile_many, compile_variant
from tools.device import DeviceBroken
from tools.launching import accepts
from tools.oneshot_job import child_environment
from tools.paths import home_dir
from tools.proc import Child
from tools.profiling import profile_jobs
from tools.records import (
    BaselineResult,
    Budget,
    ClockTrace,
    CompileResult,
    Depth,
    DeviceInfo,
    Mode,
    ProfileResult,
    Reason,
    SanitizeResult,
    Status,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
)
from tools.sanitizing import sanitize_many, sanitize_variant
from tools.toolchain import Toolchain, find_toolchain

START_TIMEOUT_S = 180.0  # importing CuPy and torch on a cold disk
VERIFY_TIMEOUT_S = 300.0
TIME_TIMEOUT_S: dict[Budget, float] = {"screen": 180.0, "final": 300.0, "certify": 1800.0}
#: A certify run has nine subjects, so it takes 4.5 times the seconds of a pair, and more for what is outside the clock.
CERTIFY_STRETCH = 40.0
LOCK_TIMEOUT_S = 3600.0  # another process may be timing; the seconds above are counted from when it lets go


@dataclass(frozen=True)
class Lost:
    """A worker that had begun and gave no answer within ``timeout_s``: it died, or was killed for taking so long."""

    died: bool
    timeout_s: float

    @property
    def what(self) -> str:
        return "died" if self.died else f"gave no answer within {self.timeout_s:.0f} s"


class CudaDevice:
    """One GPU. ``cache_dir`` holds compiled cubins (default ``<home>/cubins``). Close it to end the worker.

    Raises DeviceBroken where no answer can be had: no driver, no CUDA packages, a worker that will not start.
    """

    def __init__(
        self,
        ordinal: int = 0,
        cache_dir: Path | None = None,
        toolchain: Toolchain | None = None,
        jobs: int | None = None,
    ) -> None:
        self.ordinal = ordinal
        self.toolchain = toolchain or find_toolchain()
        self.cache = CompileCache(cache_dir or home_dir() / "cubins")
        self.jobs = jobs or os.cpu_count() or 1
        self._compiled: dict[str, CompileResult] = {}
        self._child: Child | None = None
        self._lock = threading.Lock()  # one exchange at a time; compiling goes on beside it
        self._info: DeviceInfo | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="hgemm-agent-")
        self._written: set[Path] = set()  # of cubins there: a look at the disk can cost a millisecond

    # --- Device ----------------------------------------------------------------------------------------------------

    @property
    def info(self) -> DeviceInfo:
        if self._info is None:
            self._info = DeviceInfo.model_validate(self._record({"op": "info"}, START_TIMEOUT_S))
        return self._info

    def compile(self, variant: Variant) -> CompileResult:
        known = self._compiled.get(variant.variant_id)
        if known is None:
            known = compile_variant(variant, toolchain=self.toolchain, cache=self.cache)
            self._remember(known)
        return known

    def compile_many(self, variants: Sequence[Variant], jobs: int | None = None) -> list[CompileResult]:
        """All of ``variants``, ``jobs`` at once, in order."""
        results = []
        for _, result in compile_many(variants, jobs or self.jobs, toolchain=self.toolchain, cache=self.cache):
            self._remember(result)
            results.append(result)
        return results

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult:
        common = {"variant_key": variant.key, "task_id": task.task_id, "depth": depth}
        request = {"op": "verify", "depth": depth}
        return VerifyResult.model_validate(self._measure(variant, task, request, common, VERIFY_TIMEOUT_S))

    def time(self, variant: Variant, task: Task, mode: Mode, budget: Budget) -> TimingResult:
        common = {"variant_key": variant.key, "task_id": task.task_id, "mode": mode, "budget": budget}
        request = {"op": "time", "mode": mode, "budget": budget}
        return TimingResult.model_validate(self._measure(variant, task, request, common, TIME_TIMEOUT_S[budget]))

    def time_certify(
        self, variant: Variant, task: Task, mode: Mode, *, warm_s: float, aim_s: float
    ) -> tuple[TimingResult, ClockTrace | None]:
        common = {"variant_key": variant.key, "task_id": task.task_id, "mode": mode, "budget": "certify"}
        request = {"op": "time", "mode": mode, "budget": "certify", "warm_s": warm_s, "aim_s": aim_s, "trace": True}
        trace: list[dict[str, Any]] = []
        timeout_s = warm_s + CERTIFY_STRETCH * aim_s + TIME_TIMEOUT_S["certify"]
        result = TimingResult.model_validate(self._measure(variant, task, request, common, timeout_s, trace.append))
        return result, ClockTrace.model_validate(trace[0]) if trace else None

    def verify_many(self, variants: Sequence[Variant], task: Task, depth: Depth) -> list[VerifyResult] | None:
        """Candidates of one layout of B on the same operands, against one reference. None: ask for them one by one."""
        request = {"op": "verify_many", "depth": depth}
        found = self._together(variants, task, request, VERIFY_TIMEOUT_S)
        return None if found is None else [VerifyResult.model_validate(result) for result in found["results"]]

    def time_many(
        self, variants: Sequence[Variant], task: Task, mode: Mode, budget: Budget
    ) -> tuple[list[TimingResult], BaselineResult | None] | None:
        """Candidates in one interleaved run with the references, and at the final budget what these took in it. None:
        ask for them one by one."""
        request = {"op": "time_many", "mode": mode, "budget": budget}
        found = self._together(variants, task, request, TIME_TIMEOUT_S[budget])
        if found is None:
            return None
        baselines = found["baselines"] and BaselineResult.model_validate(found["baselines"])
        return [TimingResult.model_validate(result) for result in found["results"]], baselines

    def sanitize(self, variant: Variant, tasks: Sequence[Task]) -> SanitizeResult:
        compiled = self.compile(variant)
        if not compiled.ok:
            return SanitizeResult.model_validate(_inherited(compiled, {"variant_key": variant.key}))
        return sanitize_variant(
            variant, tasks, self._cubin_path(compiled), toolchain=self.toolchain, ordinal=self.ordinal, jobs=self.jobs
        )

    def sanitize_many(self, items: Sequence[tuple[Variant, Sequence[Task]]]) -> list[SanitizeResult]:
        """Several candidates to a process; results in the order asked."""
        results: list[SanitizeResult | None] = []
        runs: list[tuple[Variant, Sequence[Task], Path]] = []
        for variant, tasks in items:
            compiled = self.compile(variant)
            if compiled.ok:
                runs.append((variant, tasks, self._cubin_path(compiled)))
                results.append(None)
            else:
                results.append(SanitizeResult.model_validate(_inherited(compiled, {"variant_key": variant.key})))
        sanitized = iter(sanitize_many(runs, toolchain=self.toolchain, ordinal=self.ordinal, jobs=self.jobs))
        return [result if result is not None else next(sanitized) for result in results]

    def profile(self, variant: Variant, task: Task) -> ProfileResult:
        return self.profile_many([(variant, task)])[0]

    def profile_many(self, pairs: Sequence[tuple[Variant, Task]]) -> list[ProfileResult]:
        """All pairs under one ncu process, whose start costs more than a kernel's replays."""
        results: list[ProfileResult | None] = []
        jobs: list[tuple[Variant, Task, Path]] = []
        for variant, task in pairs:
            compiled = self.compile(variant)
            if (why := accepts(variant, task, self.info.sm_count)) is not None:
                results.append(
                    ProfileResult(
                        status=Status.FAILED,
                        reason=Reason.NOT_ACCEPTED,
                        detail=why,
                        variant_key=variant.key,
                        task_id=task.task_id,
                    )
                )
            elif compiled.ok:
                jobs.append((variant, task, self._cubin_path(compiled)))
                results.append(None)
            else:
                common = {"variant_key": variant.key, "task_id": task.task_id}
                results.append(ProfileResult.model_validate(_inherited(compiled, common)))
        profiled = iter(profile_jobs(jobs, toolchain=self.toolchain, ordinal=self.ordinal) if jobs else [])
        return [result if result is not None else next(profiled) for result in results]

    def baselines(self, task: Task, mode: Mode, budget: Budget) -> BaselineResult:
        request = {"op": "baselines", "task": task.model_dump(mode="json"), "mode": mode, "budget": budget}
        return BaselineResult.model_validate(self._record(request, TIME_TIMEOUT_S[budget]))

    def close(self) -> None:
        self._stop()
        self._scratch.cleanup()

    def __enter__(self) -> CudaDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- pieces ----------------------------------------------------------------------------------------------------

    def _remember(self, result: CompileResult) -> None:
        if result.status in (Status.OK, Status.FAILED):
            self._compiled[result.variant_id] = result

    def _cubin_path(self, compiled: CompileResult) -> Path:
        """A file with the cubin for a child to load; written once per content."""
        path = Path(self._scratch.name) / f"{compiled.cubin_sha256}.cubin"
        if path not in self._written:
            cubin = self.cache.cubin(compiled)
            if cubin is None:
                raise DeviceBroken(
                    f"the compile cache {self.cache.root} lost a cubin while it was in use: run the command again"
                )
            partial = path.with_suffix(".partial")
            partial.write_bytes(cubin)
            partial.replace(path)
            self._written.add(path)
        return path

    def _measure(
        self,
        variant: Variant,
        task: Task,
        request: dict[str, Any],
        common: dict[str, Any],
        timeout_s: float,
        on_trace: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """The worker's record for a candidate, with every way a worker can die turned into one."""
        compiled = self.compile(variant)
        if not compiled.ok:
            return _inherited(compiled, common)
        request |= {
            "variant": variant.model_dump(mode="json"),
            "task": task.model_dump(mode="json"),
            "cubin": str(self._cubin_path(compiled)),
        }
        reply = self._ask(request, timeout_s)
        if isinstance(reply, Lost):
            reason = Reason.CRASH if reply.died else Reason.HANG
            detail = f"under {variant.label} the worker {reply.what}"
            return {"status": Status.FAILED, "reason": reason, "detail": detail, **common}
        if on_trace is not None and reply.get("trace"):
            on_trace(reply["trace"])
        record: dict[str, Any] = reply["record"]
        return record

    def _together(
        self, variants: Sequence[Variant], task: Task, request: dict[str, Any], timeout_s: float
    ) -> dict[str, Any] | None:
        """None where one of them does not compile, or whatever went wrong in the run: alone it is seen who did it."""
        compiled = [self.compile(variant) for variant in variants]
        if not all(result.ok for result in compiled):
            return None
        request |= {
            "task": task.model_dump(mode="json"),
            "candidates": [
                {"variant": variant.model_dump(mode="json"), "cubin": str(self._cubin_path(result))}
                for variant, result in zip(variants, compiled, strict=True)
            ],
        }
        reply = self._ask(request, timeout_s)
        return None if isinstance(reply, Lost) else reply.get("record")

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | Lost:
        """One exchange: the worker says that it has begun, having the GPU's lock, and then what came of it.

        Raises DeviceBroken where it says that it cannot, or was lost before it began: no candidate has run then.
        """
        with self._lock:
            child = self._running()
            began = child.recv(LOCK_TIMEOUT_S) if child.send(json.dumps(request).encode()) else None
            if began is None:
                why = f"has waited {LOCK_TIMEOUT_S / 60:.0f} min for the GPU" if child.alive else "died before it began"
                tail = child.stderr_tail().strip().splitlines()
                self._stop()
                raise DeviceBroken(
                    f"cuda:{self.ordinal} cannot answer: its worker {why}" + (f" ({tail[-1][:200]})" if tail else "")
                )
            frame = child.recv(timeout_s)
            if frame is None:
                lost = Lost(died=not child.alive, timeout_s=timeout_s)
                self._stop()
                return lost
            reply: dict[str, Any] = json.loads(frame)
            if reply["restart"]:
                self._stop()
        if "broken" in reply:
            raise DeviceBroken(f"cuda:{self.ordinal} cannot answer: {reply['broken']}")
        return reply

    def _record(self, request: dict[str, Any], timeout_s: float) -> Any:
        """What a request comes to in which no candidate runs."""
        reply = self._ask(request, timeout_s)
        if isinstance(reply, Lost):
            raise DeviceBroken(f"cuda:{self.ordinal} cannot answer: the worker {reply.what}")
        return reply["record"]

    def _worker(self) -> list[str]:
        return [sys.executable, "-m", "tools.gpu.worker", "--ordinal", str(self.ordinal)]

    def _running(self) -> Child:
        if self._child is not None and self._child.alive:
            return self._child
        self._stop()
        try:
            child = Child(self._worker(), env=child_environment())
        except OSError as error:
            raise DeviceBroken(f"the GPU worker could not be started: {error}") from error
        frame = child.recv(START_TIMEOUT_S)
        hello: dict[str, Any] = json.loads(frame) if frame else {}
        if not hello.get("ready"):
            tail = child.stderr_tail().strip().splitlines()
            child.kill()
            why = hello.get("broken") or (tail[-1] if tail else "it gave no answer")
            raise DeviceBroken(
                f"the worker for cuda:{self.ordinal} did not start: {why}; 'agent doctor' says what to do"
            )
        self._child = child
        return child

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._stop()


def _inherited(compiled: CompileResult, common: dict[str, Any]) -> dict[str, Any]:
    """A result of another tool that is what the compile was."""
    return {"status": compiled.status, "reason": compiled.reason, "detail": compiled.detail, **common}
