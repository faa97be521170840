"""sanitize: compute-sanitizer's four tools over one launch of a candidate, each in a process of its own.

The child (tools/gpu/oneshot.py) allocates exactly what the task needs. Message formats are those of "Compute Sanitizer"
2023–2026, NVIDIA's manual of the tool. A run counts as passed only if the tool printed its own summary with no errors
*and* the child said that all was launched: a tool that could not attach also ends with code 0.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from tools.build_cache import storage_sentence
from tools.device import DeviceBroken
from tools.oneshot_job import EXIT_CANDIDATE_FAILED, child_environment, done_line, last_line, oneshot_argv, write_job
from tools.proc import run
from tools.records import Reason, SanitizeCheck, SanitizeResult, Status, Task, Variant
from tools.toolchain import Toolchain, how_to_install

SanitizerTool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
TOOLS: tuple[SanitizerTool, ...] = ("memcheck", "racecheck", "initcheck", "synccheck")
REASONS: dict[SanitizerTool, Reason] = {
    "memcheck": Reason.MEMCHECK,
    "racecheck": Reason.RACE,
    "initcheck": Reason.UNINITIALISED_READ,
    "synccheck": Reason.SYNC_ERROR,
}
#: Cheap enough for any shape: they follow global memory alone.
AT_EVERY_SHAPE: frozenset[SanitizerTool] = frozenset({"memcheck", "initcheck"})
#: The others follow every access to shared memory and every barrier. Up to this product of the dims, 512^3 for HGEMM, a
#: kernel that reads both factors of each product from shared memory ends within the deadline at 10^7 accesses a second.
MAX_VOLUME = 512**3
#: Bytes that memcheck keeps free behind each allocation, so that an access past one does not land in the next.
PADDING_BYTES = 4096
DEADLINE_S = 180.0
ERROR_EXIT_CODE = 86
#: Candidates that ``sanitize_many`` launches in one process.
GROUP = 8
#: Each run talks to its child over a port out of ten that compute-sanitizer tries.
MAX_PARALLEL = 8


@dataclass(frozen=True)
class SanitizerReport:
    """What one run says. ``errors`` are compute-sanitizer's, racecheck's warnings included: a race is a race."""

    status: Status
    errors: int
    detail: str
    reason: Reason | None = None


def planned(tasks: Sequence[Task]) -> list[tuple[SanitizerTool, Task]]:
    """Which tool runs at which shape: AT_EVERY_SHAPE, and the others up to MAX_VOLUME, or at the smallest if all are
    larger. Pure."""
    volumes = [prod(task.dims.values()) for task in tasks]
    limit = max(MAX_VOLUME, min(volumes, default=0))
    return [
        (tool, task)
        for task, volume in zip(tasks, volumes, strict=True)
        for tool in TOOLS
        if tool in AT_EVERY_SHAPE or volume <= limit
    ]


def sanitize_command(sanitizer: Path, tool: SanitizerTool, job: Path) -> list[str]:
    """The command line. Failing API calls are left to the child, which checks each of them itself."""
    options = ["--tool", tool, "--error-exitcode", str(ERROR_EXIT_CODE), "--print-limit", "20"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no", "--padding", str(PADDING_BYTES)]
    return [str(sanitizer), *options, *oneshot_argv(job)]


_ERRORS = re.compile(r"^=+ ERROR SUMMARY: ([\d,]+) errors?\s*$", re.MULTILINE)
_HAZARDS = re.compile(
    r"^=+ RACECHECK SUMMARY: ([\d,]+) hazards? displayed \(([\d,]+) errors?, ([\d,]+) warnings?\)", re.MULTILINE
)
_CANNOT_RUN = re.compile(
    r"^=+ .*(Device not supported|Internal Sanitizer Error|Unable to|Failed to initialize|Could not connect"
    r"|No attachable process|not supported on|driver version|terminated before first instrumented).*$",
    re.MULTILINE,
)
_HEAD = re.compile(r"^=+ (?! )(?P<head>\S.*)$")
_NOT_A_FINDING = re.compile(
    r"COMPUTE-SANITIZER|\w+ SUMMARY:|Target application returned|Error: process didn't terminate"
    r"|(?i:warning:(?!.*\brace\b))"
)


def parse_sanitizer_log(tool: SanitizerTool, text: str, returncode: int, launches: int = 1) -> SanitizerReport:
    """The verdict of one run from its output and exit code. ``launches``: how many the child should have made. Pure."""
    if match := _CANNOT_RUN.search(text):
        said = re.sub(r"^=+ (Error: )?", "", match.group())[:200]
        detail = f"compute-sanitizer cannot work here: {said} ({last_line(text)})"
        return SanitizerReport(Status.UNAVAILABLE, 0, detail)
    errors = sum(_number(m.group(1)) for m in _ERRORS.finditer(text))
    errors += sum(_number(count) for m in _HAZARDS.finditer(text) for count in m.group(2, 3))
    findings = _findings(text)
    if errors and findings:
        more = f" ({errors} errors in all)" if errors > 1 else ""
        return SanitizerReport(Status.FAILED, errors, findings[0] + more, REASONS[tool])
    if returncode == EXIT_CANDIDATE_FAILED:
        detail = f"the launch failed: {last_line(text)}"
        if "OUT_OF_MEMORY" in text:  # the tools need memory of their own
            return SanitizerReport(Status.UNAVAILABLE, errors, f"not enough GPU memory under {tool}: {last_line(text)}")
        return SanitizerReport(Status.FAILED, errors, detail, Reason.LAUNCH_FAILED)
    if errors:
        return SanitizerReport(Status.FAILED, errors, f"{tool} counted {errors} errors", REASONS[tool])
    if returncode != 0:
        detail = f"the process under {tool} ended with code {returncode}: {last_line(text)}"
        return SanitizerReport(Status.UNAVAILABLE, 0, detail)
    if not _ERRORS.search(text) and not _HAZARDS.search(text):
        return SanitizerReport(Status.UNAVAILABLE, 0, f"{tool} printed no summary, so nothing is known")
    if done_line(launches) not in text.splitlines():
        return SanitizerReport(Status.UNAVAILABLE, 0, f"the process under {tool} broke off: {last_line(text)}")
    return SanitizerReport(Status.OK, 0, "")


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _findings(text: str) -> list[str]:
    """Each finding as one line: its headline and the indented lines below it, without the host backtrace."""
    found: list[str] = []
    collecting = False
    for line in text.splitlines():
        if match := _HEAD.match(line):
            head = match["head"].strip()
            collecting = not _NOT_A_FINDING.match(head)
            if collecting:
                found.append(re.sub(r"^(error|warning):\s*", "", head, flags=re.IGNORECASE))
        elif collecting and re.match(r"^=+ {2,}\S", line) and "backtrace" not in line and "Host Frame" not in line:
            found[-1] += " " + " ".join(line.lstrip("=").split())
        else:
            collecting = False
    return [f[:300] for f in found]


def sanitize_variant(
    variant: Variant,
    tasks: Sequence[Task],
    cubin: Path,
    *,
    toolchain: Toolchain,
    ordinal: int = 0,
    jobs: int = 4,
    deadline_s: float = DEADLINE_S,
) -> SanitizeResult:
    """The ``planned`` runs at ``tasks``, ``jobs`` at once.

    ``deadline_s`` bounds each run. Raises DeviceBroken when no temporary file can be written.
    """
    started = time.monotonic()
    if toolchain.sanitizer is None:
        detail = how_to_install("compute-sanitizer")
        return SanitizeResult(status=Status.UNAVAILABLE, detail=detail, variant_key=variant.key)
    sanitizer = toolchain.sanitizer.path
    runs = planned(tasks)
    try:
        with tempfile.TemporaryDirectory(prefix="hgemm-agent-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            jobs_at = {task.task_id: folder / f"{number}.json" for number, task in enumerate(tasks)}
            for task in tasks:
                write_job(jobs_at[task.task_id], ordinal, [(variant, task, cubin)])

            def one(item: tuple[SanitizerTool, Task]) -> SanitizerReport:
                tool, task = item
                done = run(
                    sanitize_command(sanitizer, tool, jobs_at[task.task_id]),
                    deadline_s=deadline_s,
                    cwd=folder,
                    env=child_environment(),
                )
                if done.timed_out:
                    detail = f"the launch did not end within {deadline_s:g} s under {tool}"
                    return SanitizerReport(Status.FAILED, 0, detail, Reason.HANG)
                return parse_sanitizer_log(tool, done.text, done.returncode)

            with ThreadPoolExecutor(max(1, min(jobs, MAX_PARALLEL, len(runs)))) as pool:
                reports = list(pool.map(one, runs))
    except OSError as error:
        raise DeviceBroken(storage_sentence("temporary files", Path(tempfile.gettempdir()), error)) from error
    return combine(variant.key, [(tool, task, r) for (tool, task), r in zip(runs, reports, strict=True)]).model_copy(
        update={"elapsed_s": time.monotonic() - started}
    )


def sanitize_many(
    items: Sequence[tuple[Variant, Sequence[Task], Path]],
    *,
    toolchain: Toolchain,
    ordinal: int = 0,
    jobs: int = MAX_PARALLEL,
    deadline_s: float = DEADLINE_S,
) -> list[SanitizeResult]:
    """``sanitize_variant`` of many, GROUP candidates to a process: starting one costs more than most launches.

    A group that passes without a remark has passed whole; any other is taken apart, so that a finding is laid at the
    right door. Results in the order of ``items``.
    """
    groups = [items[i : i + GROUP] for i in range(0, len(items), GROUP)]
    clean: set[int] = set()
    if toolchain.sanitizer is not None:
        sanitizer = toolchain.sanitizer.path
        try:
            with tempfile.TemporaryDirectory(prefix="hgemm-agent-", ignore_cleanup_errors=True) as name:
                folder = Path(name)

                def passed(run_of: tuple[int, SanitizerTool]) -> bool:
                    number, tool = run_of
                    launches = [
                        (variant, task, cubin)
                        for variant, tasks, cubin in groups[number]
                        for one, task in planned(tasks)
                        if one == tool
                    ]
                    job = folder / f"{number}-{tool}.json"
                    write_job(job, ordinal, launches)
                    done = run(
                        sanitize_command(sanitizer, tool, job),
                        deadline_s=deadline_s,
                        cwd=folder,
                        env=child_environment(),
                    )
                    report = parse_sanitizer_log(tool, done.text, done.returncode, len(launches))
                    return not done.timed_out and report.status is Status.OK

                runs = [(number, tool) for number in range(len(groups)) for tool in TOOLS]
                with ThreadPoolExecutor(max(1, min(jobs, MAX_PARALLEL))) as pool:
                    verdicts = dict(zip(runs, pool.map(passed, runs), strict=True))
        except OSError as error:
            raise DeviceBroken(storage_sentence("temporary files", Path(tempfile.gettempdir()), error)) from error
        clean = {n for n in range(len(groups)) if all(verdicts[n, tool] for tool in TOOLS)}
    ok = SanitizerReport(Status.OK, 0, "")
    results: list[SanitizeResult] = []
    for number, group in enumerate(groups):
        for variant, tasks, cubin in group:
            if number in clean and tasks:
                results.append(combine(variant.key, [(tool, task, ok) for tool, task in planned(tasks)]))
            else:
                results.append(
                    sanitize_variant(
                        variant, tasks, cubin, toolchain=toolchain, ordinal=ordinal, jobs=jobs, deadline_s=deadline_s
                    )
                )
    return results


def combine(variant_key: str, reports: Sequence[tuple[SanitizerTool, Task, SanitizerReport]]) -> SanitizeResult:
    """One result of all runs: the first failure decides, then the first that could not be run. Pure."""
    checks = tuple(
        SanitizeCheck(tool=tool, dims=task.dims, ok=r.status is Status.OK, errors=r.errors, detail=r.detail)
        for tool, task, r in reports
        if r.status in (Status.OK, Status.FAILED)
    )
    for status in (Status.FAILED, Status.UNAVAILABLE):
        worst = next(((tool, task, r) for tool, task, r in reports if r.status is status), None)
        if worst is not None:
            tool, task, report = worst
            return SanitizeResult(
                status=status,
                reason=report.reason,
                detail=f"{tool} at {task.label}: {report.detail}",
                variant_key=variant_key,
                checks=checks,
            )
    if not checks:
        return SanitizeResult(
            status=Status.UNAVAILABLE, detail="no shape was given to sanitize at", variant_key=variant_key
        )
    return SanitizeResult(status=Status.OK, variant_key=variant_key, checks=checks)
