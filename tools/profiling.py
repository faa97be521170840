"""profile: Nsight Compute around one launch of each candidate; the child (tools/gpu/oneshot.py) launches nothing else.

Metric names are ncu's own for compute capability 9.0 (``ncu --query-metrics --chips gh100``). One that this ncu does
not know is left out and the rest is measured; records hold what was measured, under the names of ``METRICS``.
"""

from __future__ import annotations

import csv
import io
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.build_cache import storage_sentence
from tools.device import DeviceBroken
from tools.oneshot_job import Launchable, child_environment, last_line, oneshot_argv, write_job
from tools.proc import run
from tools.records import ProfileResult, Reason, Status, Task, Variant
from tools.sentences import sentences
from tools.toolchain import Toolchain, how_to_install

_PEAK = "avg.pct_of_peak_sustained"
#: Name in the record → ncu's names, best first. Percentages are of the hardware's peak.
METRICS: dict[str, tuple[str, ...]] = {
    "time_us": ("gpu__time_duration.sum",),
    "tensor_pipe_pct": (
        f"sm__pipe_tensor_cycles_active.{_PEAK}_elapsed",
        f"sm__inst_executed_pipe_tensor.{_PEAK}_elapsed",
    ),
    "sm_pct": (f"sm__throughput.{_PEAK}_elapsed",),
    "issue_slots_pct": (f"smsp__issue_active.{_PEAK}_active",),
    "dram_pct": (f"gpu__dram_throughput.{_PEAK}_elapsed", f"dram__throughput.{_PEAK}_elapsed"),
    "l2_pct": (f"lts__throughput.{_PEAK}_elapsed",),
    "l1_pct": (f"l1tex__throughput.{_PEAK}_active",),
    "shared_pct": (f"l1tex__data_pipe_lsu_wavefronts_mem_shared.{_PEAK}_elapsed",),
    "l1_hit_pct": ("l1tex__t_sector_hit_rate.pct",),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
    "dram_bytes_read": ("dram__bytes_read.sum",),
    "dram_bytes_written": ("dram__bytes_write.sum",),
    "occupancy_pct": (f"sm__warps_active.{_PEAK}_active",),
    "occupancy_limit_pct": ("sm__maximum_warps_per_active_cycle_pct",),
    "registers": ("launch__registers_per_thread",),
    "waves": ("launch__waves_per_multiprocessor",),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "shared_wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
}
#: Reasons for which a resident warp does not issue, in warps per cycle in which an instruction was issued.
STALLS: tuple[str, ...] = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle"),
    *("long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected"),
    *("selected", "short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
STALLS_KEPT = 5
#: Recorded as a sum over the launches of one call; the rest is averaged over them by time, or the largest.
_SUMMED = frozenset(
    ("time_us", "dram_bytes_read", "dram_bytes_written", "bank_conflicts", "shared_wavefronts", "waves")
)
_LARGEST = frozenset(("registers",))

DEADLINE_S = 120.0
PER_JOB_DEADLINE_S = 20.0
_MAX_RETRIES = 8


def _stall_metric(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


def wanted_metrics(unknown: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """What to ask ncu for, when it does not know the names in ``unknown``."""
    named = [next((n for n in names if n not in unknown), None) for names in METRICS.values()]
    return tuple(n for n in (*named, *map(_stall_metric, STALLS)) if n is not None and n not in unknown)


def ncu_command(ncu: Path, job: Path, out_csv: Path, metrics: Sequence[str]) -> list[str]:
    """Profile every launch of the child into ``out_csv``, one row each, in launch order.

    Clocks are left as they are, and caches as the child's copies and ncu's replay leave them: the comparison is with
    back-to-back launches whose operands are hot.
    """
    options = ["--clock-control", "none", "--cache-control", "none", "--target-processes", "all", "--csv"]
    options += ["--page", "raw", "--print-units", "base", "--log-file", str(out_csv)]
    return [str(ncu), *options, "--metrics", ",".join(metrics), *oneshot_argv(job)]


# --- reading ncu's output ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchProfile:
    """One kernel launch: ``values`` by ncu's metric name, in base units (ns, bytes, %)."""

    kernel: str
    values: Mapping[str, float]


#: Factors to nanoseconds; ncu 2024 and before writes the long names.
_TIME = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
_BYTES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def parse_ncu_csv(text: str) -> list[LaunchProfile]:
    """Rows of ``--csv --page raw``, in launch order. Lines around the table and cells without a number are skipped."""
    rows = [row for row in csv.reader(io.StringIO(text)) if len(row) > 2 and not row[0].startswith("==")]
    header_at = next((i for i, row in enumerate(rows) if row[0] == "ID" and "Kernel Name" in row), None)
    if header_at is None or header_at + 1 >= len(rows):
        return []
    header = rows[header_at]
    units = dict(zip(header, rows[header_at + 1], strict=False))
    kernel_at = header.index("Kernel Name")
    found = []
    for row in rows[header_at + 2 :]:
        if len(row) != len(header) or not row[0].isdigit():
            continue
        values = {
            name: value * _to_base(name, units.get(name, ""))
            for name, cell in zip(header, row, strict=True)
            if "__" in name and (value := _number(cell)) is not None
        }
        found.append(LaunchProfile(row[kernel_at], values))
    return found


def _number(cell: str) -> float | None:
    try:
        value = float(cell.replace(",", ""))
    except ValueError:  # "n/a", "(!) nan", empty
        return None
    return value if math.isfinite(value) else None


def _to_base(name: str, unit: str) -> float:
    """Factor to nanoseconds or bytes; 1 for percentages, ratios and counts."""
    if name.startswith("gpu__time_duration"):
        return _TIME.get(unit, 1.0)
    return _BYTES.get(unit.split("/")[0], 1.0)


def missing_metrics(text: str) -> tuple[str, ...]:
    """Metrics that ncu says it does not know: ``Failed to find metric NAME`` or ``… regex:^NAME\\.(sum|…)$``."""
    names = re.findall(r"Failed to find metric[s]?:? (?:regex:\^)?([^\s$]+)", text)
    return tuple(dict.fromkeys(re.sub(r"\\\.\(.*|\\|\.{2,}$", "", name).rstrip(".") for name in names))


def ncu_failure(text: str, returncode: int) -> tuple[Status, Reason | None, str] | None:
    """Status, reason and sentence when ncu's run gave nothing; None when it looks well. Pure."""
    if "ERR_NVGPUCTRPERM" in text:
        detail = (
            "this user may not read the GPU's performance counters; run as root, or: echo 'options nvidia "
            "NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf, and reboot"
        )
        return Status.UNAVAILABLE, None, detail
    errors = [line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")]
    if any("application returned an error" in error for error in errors) or "oneshot:" in text:
        return Status.FAILED, Reason.LAUNCH_FAILED, f"the launch failed under ncu: {last_line(text)}"
    if errors:
        return Status.UNAVAILABLE, None, f"ncu cannot profile here: {errors[0][:300]}"
    if returncode != 0:
        return Status.UNAVAILABLE, None, f"ncu ended with code {returncode}: {last_line(text)}"
    return None


def summarise(launches: Sequence[LaunchProfile]) -> tuple[dict[str, float], dict[str, float]]:
    """(metrics, top stalls) of one call, which may be several launches: ``METRICS`` names, time in µs. Pure."""
    weights = [launch.values.get("gpu__time_duration.sum", 0.0) or 1.0 for launch in launches]
    metrics = {}
    for name, candidates in METRICS.items():
        values = [next((x.values[c] for c in candidates if c in x.values), None) for x in launches]
        if (value := _combined(name, values, weights)) is not None:
            metrics[name] = round(value / 1e3, 4) if name == "time_us" else round(value, 4)
    stalls = {}
    for reason in STALLS:
        value = _combined(reason, [x.values.get(_stall_metric(reason)) for x in launches], weights)
        if value and reason != "selected":  # a warp that issues is not stalled
            stalls[reason] = round(value, 4)
    top = sorted(stalls.items(), key=lambda item: (-item[1], item[0]))[:STALLS_KEPT]
    return metrics, dict(top)


def _combined(name: str, values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    if not known:
        return None
    if name in _SUMMED:
        return sum(value for value, _ in known)
    if name in _LARGEST:
        return max(value for value, _ in known)
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known)


# --- running -------------------------------------------------------------------------------------------------------


def profile_jobs(
    jobs: Sequence[Launchable], *, toolchain: Toolchain, ordinal: int = 0, deadline_s: float | None = None
) -> list[ProfileResult]:
    """One result a job, in order, from one ncu process: its start costs more than a kernel's replays.

    A candidate that fails takes those after it down with it, so what is left is profiled again without it.
    ``deadline_s`` bounds each ncu process (default 120 s, and 20 s more a job). Raises DeviceBroken when no temporary
    file can be written.
    """
    if toolchain.ncu is None:
        return [_answer(job, Status.UNAVAILABLE, None, how_to_install("ncu")) for job in jobs]
    results: list[ProfileResult] = []
    unknown: frozenset[str] = frozenset()
    while len(results) < len(jobs):
        rest = jobs[len(results) :]
        limit_s = deadline_s or DEADLINE_S + PER_JOB_DEADLINE_S * len(rest)
        run_ = _run_ncu(toolchain.ncu.path, rest, ordinal, unknown, limit_s)
        unknown = run_.unknown
        whole = _split(rest, run_.launches)
        # Each job's share of the process, so that a sum over results is the time spent.
        share_s = run_.elapsed_s / max(1, len(whole) + (1 if run_.failure else 0))
        for job, launches in zip(rest, whole, strict=False):
            values, stalls = summarise(launches)
            if "time_us" not in values:
                detail = "ncu saw the launch but measured nothing: the kernel faulted"
                results.append(_answer(job, Status.FAILED, Reason.LAUNCH_FAILED, detail))
                continue
            results.append(
                ProfileResult(
                    status=Status.OK,
                    variant_key=job[0].key,
                    task_id=job[1].task_id,
                    metrics=values,
                    stalls=stalls,
                    sentences=sentences(values, stalls),
                    elapsed_s=share_s,
                )
            )
        if len(whole) < len(rest):
            status, reason, detail = run_.failure or (Status.UNAVAILABLE, None, "ncu profiled no kernel")
            guilty = status is Status.FAILED  # only a candidate's own failure lets the others have another try
            stopped = rest[len(whole) : len(whole) + 1] if guilty else rest[len(whole) :]
            results += [
                _answer(job, status, reason, detail).model_copy(update={"elapsed_s": share_s}) for job in stopped
            ]
    return results


@dataclass(frozen=True)
class _NcuRun:
    launches: list[LaunchProfile]
    unknown: frozenset[str]
    failure: tuple[Status, Reason | None, str] | None
    elapsed_s: float


def _run_ncu(ncu: Path, jobs: Sequence[Launchable], ordinal: int, unknown: frozenset[str], limit_s: float) -> _NcuRun:
    """Run ncu, and again without those metrics that it turns out not to know."""
    started = time.monotonic()
    for _ in range(_MAX_RETRIES):
        metrics = wanted_metrics(unknown)
        try:
            with tempfile.TemporaryDirectory(prefix="hgemm-agent-", ignore_cleanup_errors=True) as name:
                job, out = Path(name) / "job.json", Path(name) / "out.csv"
                write_job(job, ordinal, jobs)
                command = ncu_command(ncu, job, out, metrics)
                done = run(command, deadline_s=limit_s, cwd=Path(name), env=child_environment())
                table = out.read_text(errors="replace") if out.exists() else ""
        except OSError as error:
            raise DeviceBroken(storage_sentence("temporary files", Path(tempfile.gettempdir()), error)) from error
        text = table + done.text
        launches = parse_ncu_csv(table)
        named = missing_metrics(text)
        refused = {m for m in metrics if any(m == name or m.startswith(f"{name}.") for name in named)}
        if refused and not launches:
            unknown |= refused
            continue
        failure = ncu_failure(text, done.returncode)
        if done.timed_out:
            failure = (Status.FAILED, Reason.HANG, f"the launch did not end within {limit_s:g} s under ncu")
        return _NcuRun(launches, unknown, failure, time.monotonic() - started)
    detail = f"ncu does not know the metrics it is asked for, {min(unknown)} among them"
    return _NcuRun([], unknown, (Status.UNAVAILABLE, None, detail), time.monotonic() - started)


def _split(jobs: Sequence[Launchable], launches: Sequence[LaunchProfile]) -> list[Sequence[LaunchProfile]]:
    """The launches of each job that was profiled to its end."""
    found, at = [], 0
    for variant, _, _ in jobs:
        count = len(variant.launch.launches)
        if at + count > len(launches):
            break
        found.append(launches[at : at + count])
        at += count
    return found


def _answer(job: tuple[Variant, Task, Path], status: Status, reason: Reason | None, detail: str) -> ProfileResult:
    variant, task, _ = job
    return ProfileResult(status=status, reason=reason, detail=detail, variant_key=variant.key, task_id=task.task_id)
