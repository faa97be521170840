"""compute-sanitizer's output → verdicts, and its children: a scripted sanitizer where there is no GPU."""

from __future__ import annotations

import importlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.fakes import raw_variant
from tests.nvcc import small_variant
from tools.hgemm import hgemm
from tools.oneshot_job import EXIT_CANDIDATE_FAILED, child_environment, done_line, last_line, write_job
from tools.records import Reason, SanitizeResult, Status, Task, Variant
from tools.sanitize_shapes import sanitize_tasks
from tools.sanitizing import (
    TOOLS,
    SanitizerReport,
    SanitizerTool,
    combine,
    parse_sanitizer_log,
    planned,
    sanitize_command,
    sanitize_many,
    sanitize_variant,
)
from tools.toolchain import Tool, Toolchain, find_toolchain

OUT_OF_BOUNDS = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at gemm+0x2f0
=========     by thread (3,0,0) in block (4,3,0)
=========     Address 0x7f2b0c003c00 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2b0c000000 of size 15,360 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x2dfe6f] in libcuda.so.1
=========
========= Invalid __global__ write of size 2 bytes
=========     at gemm+0x2f0
=========     by thread (4,0,0) in block (4,3,0)
=========     Address 0x7f2b0c003c02 is out of bounds
=========
oneshot: cuCtxSynchronize: CUDA_ERROR_LAUNCH_FAILED
========= Target application returned an error
========= ERROR SUMMARY: 1,024 errors
========= ERROR SUMMARY: 1022 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at gemm+0x90
=========     and Read access at gemm+0x100 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
RACE_WARNINGS = """\
========= COMPUTE-SANITIZER
========= Warning: Race reported between Read access at gemm+0x260
=========     and Write access at gemm+0x200 [294291 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)
"""
UNINITIALISED = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at gemm+0x70
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= ERROR SUMMARY: 1 error
"""
BARRIER = """\
========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block
=========     at gemm+0xf0
=========     by thread (37,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
WGMMA = """\
========= COMPUTE-SANITIZER
========= Warpgroup MMA sequence error detected. Mismatching warpgroup instruction pc between warps
=========     at gemm+0x1f0
=========
========= ERROR SUMMARY: 4 errors
"""
CLUSTER = """\
========= COMPUTE-SANITIZER
========= Potential invalid __shared__ read of size 4 bytes
=========     at RemoteAccess(int *, int)+0x170 in RaceCluster.cu:10
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x1000400 is located in a block that might have already exited
=========
========= ERROR SUMMARY: 1 error
"""
DONE = f"{done_line(1)}\n"
CLEAN = f"========= COMPUTE-SANITIZER\n{DONE}========= ERROR SUMMARY: 0 errors\n"
CLEAN_RACE = (
    f"========= COMPUTE-SANITIZER\n{DONE}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
)
FAILED_AND_WARNED = """\
========= COMPUTE-SANITIZER
========= Warning: Race reported between Read access at gemm+0x260
=========     and Write access at gemm+0x200 [4 hazards]
=========
oneshot: cuCtxSynchronize: CUDA_ERROR_LAUNCH_FAILED
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""
UNSUPPORTED = """\
========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section of the sanitizer documentation
=========
oneshot: cuMemAlloc: CUDA_ERROR_UNKNOWN
========= ERROR SUMMARY: 1 error
"""
NEVER_ATTACHED = """\
========= COMPUTE-SANITIZER
/usr/bin/python3: No module named tools.gpu.oneshot
========= Error: process didn't terminate successfully
=========     The application may have hit an error when dereferencing Unified Memory from the host.
========= Error: Target application terminated before first instrumented API call
"""
INTERNAL = """\
========= COMPUTE-SANITIZER
========= Internal Sanitizer Error: The Sanitizer encountered an error while launching gemm and didn't track the launch.
========= ERROR SUMMARY: 0 errors
"""
LAUNCH_FAILED = """\
========= COMPUTE-SANITIZER
oneshot: cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""
NO_MEMORY = LAUNCH_FAILED.replace("cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE", "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")
CRASHED = "========= COMPUTE-SANITIZER\nTraceback:\nValueError: boom\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("tool", "text", "code", "status", "reason", "errors", "words"),
    [
        (
            "memcheck",
            OUT_OF_BOUNDS,
            3,
            "failed",
            Reason.MEMCHECK,
            1024,
            "write of size 2 bytes at gemm+0x2f0 by thread",
        ),
        ("memcheck", OUT_OF_BOUNDS, 3, "failed", Reason.MEMCHECK, 1024, "is out of bounds"),
        ("racecheck", RACE, 86, "failed", Reason.RACE, 1, "Race reported between Write access at gemm+0x90 and Read"),
        (
            "racecheck",
            RACE_WARNINGS,
            0,
            "failed",
            Reason.RACE,
            2,
            "Race reported between Read access at gemm+0x260 and",
        ),
        ("racecheck", RACE_WARNINGS + DONE, 86, "failed", Reason.RACE, 2, "(2 errors in all)"),
        ("racecheck", FAILED_AND_WARNED, 86, "failed", Reason.RACE, 1, "Race reported"),
        ("racecheck", CLEAN_RACE.replace(DONE, ""), 0, "unavailable", None, 0, "broke off: it printed nothing"),
        ("memcheck", CLEAN.replace(DONE, done_line(2) + "\n"), 0, "unavailable", None, 0, "broke off"),
        ("racecheck", CLUSTER, 86, "failed", Reason.RACE, 1, "might have already exited"),
        (
            "initcheck",
            UNINITIALISED,
            86,
            "failed",
            Reason.UNINITIALISED_READ,
            1,
            "Uninitialized __global__ memory read",
        ),
        ("synccheck", BARRIER, 86, "failed", Reason.SYNC_ERROR, 1, "Divergent thread(s) in block"),
        ("synccheck", WGMMA, 86, "failed", Reason.SYNC_ERROR, 4, "Warpgroup MMA sequence error"),
        ("memcheck", CLEAN, 0, "ok", None, 0, ""),
        ("racecheck", CLEAN_RACE, 0, "ok", None, 0, ""),
        ("memcheck", UNSUPPORTED, 3, "unavailable", None, 0, "Device not supported"),
        ("memcheck", NEVER_ATTACHED, 255, "unavailable", None, 0, "No module named tools.gpu.oneshot"),
        ("memcheck", INTERNAL, 0, "unavailable", None, 0, "Internal Sanitizer Error"),
        ("memcheck", LAUNCH_FAILED, 3, "failed", Reason.LAUNCH_FAILED, 1, "CUDA_ERROR_INVALID_VALUE"),
        ("racecheck", NO_MEMORY, 3, "unavailable", None, 1, "not enough GPU memory"),
        ("memcheck", CRASHED, 1, "unavailable", None, 0, "ValueError: boom"),
        ("memcheck", "", 0, "unavailable", None, 0, "no summary"),
        ("memcheck", "hello\n", 0, "unavailable", None, 0, "no summary"),
        ("memcheck", "", -9, "unavailable", None, 0, "ended with code -9"),
    ],
)
def test_logs(
    tool: SanitizerTool, text: str, code: int, status: str, reason: Reason | None, errors: int, words: str
) -> None:
    report = parse_sanitizer_log(tool, text, code)
    assert (report.status, report.reason, report.errors) == (Status(status), reason, errors)
    assert words in report.detail
    assert "\n" not in report.detail
    assert "Host Frame" not in report.detail
    assert len(report.detail) < 450


@pytest.mark.parametrize("tool", TOOLS)
def test_only_a_clean_summary_and_a_good_exit_pass(tool: SanitizerTool) -> None:
    clean = CLEAN_RACE if tool == "racecheck" else CLEAN
    assert parse_sanitizer_log(tool, clean, 0).status is Status.OK
    for code in (1, 3, 86, 255, -11):
        assert parse_sanitizer_log(tool, clean, code).status is not Status.OK
    for text in (OUT_OF_BOUNDS, RACE, UNINITIALISED, BARRIER, WGMMA, CLUSTER, UNSUPPORTED, NEVER_ATTACHED, INTERNAL):
        assert parse_sanitizer_log(tool, text, 0).status is not Status.OK


def test_a_group_passes_only_when_all_of_it_was_launched() -> None:
    assert parse_sanitizer_log("memcheck", CLEAN.replace(DONE, done_line(3) + "\n"), 0, launches=3).status is Status.OK
    assert parse_sanitizer_log("memcheck", CLEAN, 0, launches=3).status is Status.UNAVAILABLE


def test_command_line() -> None:
    command = sanitize_command(Path("/x/compute-sanitizer"), "memcheck", Path("/j/0.json"))
    assert command[:3] == ["/x/compute-sanitizer", "--tool", "memcheck"]
    assert command[-3:] == ["-m", "tools.gpu.oneshot", "/j/0.json"]
    assert int(command[command.index("--padding") + 1]) >= 256
    assert "--report-api-errors" not in sanitize_command(Path("x"), "racecheck", Path("j"))


def test_combination_puts_failures_first() -> None:
    small, tail = hgemm(64, 64, 64), hgemm(72, 80, 88)
    ok, bad = SanitizerReport(Status.OK, 0, ""), SanitizerReport(Status.FAILED, 2, "it writes", Reason.MEMCHECK)
    absent = SanitizerReport(Status.UNAVAILABLE, 0, "no device")
    result = combine("key", [("memcheck", small, ok), ("racecheck", small, absent), ("memcheck", tail, bad)])
    assert (result.status, result.reason) == (Status.FAILED, Reason.MEMCHECK)
    assert result.detail == "memcheck at 72x80x88: it writes"
    assert [c.ok for c in result.checks] == [True, False]
    assert combine("key", [("memcheck", small, ok), ("racecheck", small, absent)]).status is Status.UNAVAILABLE
    assert combine("key", [("memcheck", small, ok)]).ok
    assert combine("key", []).status is Status.UNAVAILABLE


# --- children ------------------------------------------------------------------------------------------------------

VARIANT = small_variant("int x;")
TASKS = (hgemm(64, 64, 64), hgemm(72, 80, 88))


def scripted(folder: Path, body: str) -> Toolchain:
    """A compute-sanitizer that is a shell script; ``$tool`` and ``$job`` are set."""
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\ntool=$2\nfor job; do :; done\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return Toolchain(sanitizer=Tool("compute-sanitizer", path))


def sanitized(folder: Path, body: str, **options: float) -> SanitizeResult:
    toolchain = scripted(folder, body)
    return sanitize_variant(VARIANT, TASKS, folder / "k.cubin", toolchain=toolchain, jobs=4, **options)  # type: ignore[arg-type]


PASS = f"""
case $tool in racecheck) printf '%s' '{CLEAN_RACE}';; *) printf '%s' '{CLEAN}';; esac
"""


def test_all_tools_at_all_shapes(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    result = sanitized(tmp_path, f"echo $tool >> {calls}\n{PASS}")
    assert result.ok, result.detail
    assert [(c.tool, c.dims["M"]) for c in result.checks] == [(t, m) for m in (64, 72) for t in TOOLS]
    assert sorted(calls.read_text().split()) == sorted(TOOLS * 2)
    assert result.elapsed_s > 0


def test_shared_memory_is_followed_only_at_shapes_that_end_in_time() -> None:
    small, own = hgemm(256, 256, 256), hgemm(4096, 4096, 4096)
    everything = [(tool, small) for tool in TOOLS]
    assert planned([small, own]) == [*everything, ("memcheck", own), ("initcheck", own)]
    assert planned([hgemm(512, 512, 512)]) == [(tool, hgemm(512, 512, 512)) for tool in TOOLS]
    assert planned([own]) == [(tool, own) for tool in TOOLS], "a kernel of one shape is not let off"
    assert planned([]) == []


def test_a_cooperative_kernel_is_sanitized_at_a_small_and_a_tail_shape() -> None:
    """Its CTAs must be resident together, which 64 of them are on an H200."""
    raw = raw_variant()
    launch = raw.launch.launches[0].model_copy(update={"grid": (64, "ceil_div(M + N + K, 1048576)", 1)})
    together = raw.model_copy(
        update={"launch": raw.launch.model_copy(update={"launches": (launch,), "cooperative": True})}
    )
    tasks = sanitize_tasks(together, hgemm(4096, 4096, 4096))
    assert len(tasks) == 3 and tasks[0].dims["M"] < 4096


@pytest.mark.parametrize("rejected", [False, True])
def test_a_large_shape_is_run_with_the_cheap_tools(tmp_path: Path, rejected: bool) -> None:
    """`if (M == 4096) cheat` is clean at every smaller shape."""
    log, calls = tmp_path / "bounds.txt", tmp_path / "calls"
    log.write_text(OUT_OF_BOUNDS)
    cheat = f'if [ $tool = memcheck ] && grep -q \'"M": 4096\' "$job"; then cat {log}; exit 86; fi\n'
    body = f"echo $tool $job >> {calls}\n{cheat if rejected else ''}{PASS}"
    tasks = sanitize_tasks(raw_variant(), hgemm(4096, 4096, 4096))
    result = sanitize_variant(raw_variant(), tasks, tmp_path / "k.cubin", toolchain=scripted(tmp_path, body), jobs=4)
    assert result.reason is (Reason.MEMCHECK if rejected else None)
    assert [c.tool for c in result.checks if c.dims["M"] == 4096] == ["memcheck", "initcheck"]
    assert len(calls.read_text().splitlines()) == len(result.checks) == 10


def test_many_are_run_in_one_process_and_taken_apart_on_a_finding(tmp_path: Path) -> None:
    log, calls = tmp_path / "race.txt", tmp_path / "calls"
    log.write_text(RACE)
    own = hgemm(4096, 4096, 4096)
    other = raw_variant("races")
    items = [(raw_variant(), [TASKS[0], own], tmp_path / "k.cubin"), (other, [TASKS[0]], tmp_path / "k.cubin")]
    # As many "launches done" as the job holds launches.
    counted = PASS.replace("launches done: 1", "launches done: '$(grep -o '\"cubin\"' \"$job\" | wc -l)'")
    toolchain = scripted(tmp_path, f"echo $tool >> {calls}\n{counted}")
    results = sanitize_many(items, toolchain=toolchain, jobs=2)
    assert [r.status for r in results] == [Status.OK, Status.OK], results
    assert [len(r.checks) for r in results] == [6, 4]
    assert sorted(calls.read_text().split()) == sorted(TOOLS)
    racing = f'if [ $tool = racecheck ] && grep -q races "$job"; then cat {log}; exit 86; fi\n{counted}'
    results = sanitize_many(items, toolchain=scripted(tmp_path, racing), jobs=2)
    assert [r.reason for r in results] == [None, Reason.RACE]


def test_the_job_reaches_the_child(tmp_path: Path) -> None:
    sanitized(tmp_path, f'if [ $tool = memcheck ]; then cp "$job" {tmp_path}/; fi\n{PASS}')
    jobs = [json.loads((tmp_path / f"{number}.json").read_text()) for number in (0, 1)]
    assert [job["jobs"][0]["task"]["dims"]["M"] for job in jobs] == [64, 72]
    assert {job["ordinal"] for job in jobs} == {0}
    assert jobs[0]["jobs"][0]["cubin"] == str(tmp_path / "k.cubin")


def test_one_failing_tool_decides(tmp_path: Path) -> None:
    log = tmp_path / "race.txt"
    log.write_text(RACE)
    result = sanitized(tmp_path, f"if [ $tool = racecheck ]; then cat {log}; exit 86; fi\n{PASS}")
    assert result.reason is Reason.RACE
    assert result.detail.startswith("racecheck at 64x64x64: Race reported")
    assert sum(not c.ok for c in result.checks) == 2
    assert len(result.checks) == 8


def test_a_hanging_kernel_is_ended(tmp_path: Path) -> None:
    started = time.monotonic()
    result = sanitized(tmp_path, f"if [ $tool = synccheck ]; then sleep 60; fi\n{PASS}", deadline_s=1.0)
    assert result.reason is Reason.HANG
    assert "1 s under synccheck" in result.detail
    assert time.monotonic() - started < 30


def test_no_sanitizer_is_unavailable() -> None:
    result = sanitize_variant(VARIANT, TASKS, Path("k.cubin"), toolchain=Toolchain())
    assert result.status is Status.UNAVAILABLE
    assert "pip install" in result.detail


def test_children_get_no_secrets_and_find_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-not-for-kernels")
    monkeypatch.setenv("HF_TOKEN", "hf-not-for-kernels")
    seen = tmp_path / "env"
    sanitized(tmp_path, f"env > {seen}\n{PASS}")
    assert "not-for-kernels" not in seen.read_text()
    environment = child_environment()
    assert (Path(environment["PYTHONPATH"].split(os.pathsep)[0]) / "tools" / "gpu" / "oneshot.py").is_file()


def test_last_line_is_the_childs_own() -> None:
    assert last_line(LAUNCH_FAILED) == "oneshot: cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE"
    assert last_line(CLEAN.replace(DONE, "")) == "it printed nothing"


@pytest.fixture
def oneshot(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The child's module, with a driver that does nothing."""
    driver = ModuleType("tools.gpu.driver")
    for name in ("Launcher", "Gpu", "Module", "check", "memset8"):
        setattr(driver, name, lambda *_: None)
    driver.CudaError = type("CudaError", (Exception,), {})  # type: ignore[attr-defined]
    bindings = ModuleType("cuda.bindings")
    bindings.driver = None  # type: ignore[attr-defined]
    fakes = {"cuda": ModuleType("cuda"), "cuda.bindings": bindings, "tools.gpu.driver": driver}
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("tools.gpu.oneshot", None)
    yield importlib.import_module("tools.gpu.oneshot")
    del sys.modules["tools.gpu.oneshot"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_child_says_that_all_was_launched_only_if_it_was(
    oneshot: ModuleType,
    fails: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "k.cubin").write_bytes(b"")
    write_job(tmp_path / "job.json", 0, [(VARIANT, task, tmp_path / "k.cubin") for task in TASKS])

    def launch(gpu: object, cubin: bytes, variant: Variant, task: Task) -> None:
        if fails and task == TASKS[-1]:
            raise oneshot.CudaError("cuCtxSynchronize: CUDA_ERROR_LAUNCH_FAILED")

    monkeypatch.setattr(oneshot, "run", launch)
    monkeypatch.setattr(sys, "argv", ["oneshot", str(tmp_path / "job.json")])
    assert oneshot.main() == (EXIT_CANDIDATE_FAILED if fails else 0)
    assert (done_line(2) in capsys.readouterr().out.splitlines()) is not fails


def test_the_real_sanitizer_without_a_gpu_is_unavailable(tmp_path: Path) -> None:
    """Whatever it prints on this machine, a child that never reached CUDA is not a pass."""
    toolchain = find_toolchain()
    if toolchain.sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here")
    result = sanitize_variant(VARIANT, TASKS[:1], tmp_path / "missing.cubin", toolchain=toolchain)
    assert result.status is Status.UNAVAILABLE
