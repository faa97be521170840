"""Variant → cubin: source check, nvcc under a deadline and a memory limit, judgement of what came out, cache.

A compile that fails is a CompileResult like any other. The judgement is apart from the build: one build serves every
variant that shares its source, whatever their launch specs.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from signal import SIGXFSZ

from tools.build_cache import Build, CompileCache, FunctionUse, source_id, storage_sentence
from tools.cubin import (
    CubinError,
    disqualifying,
    fp16_accumulators,
    other_inputs,
    ptxas_usage,
    ptxas_warnings,
    read_cubin,
    without_paths,
)
from tools.device import DeviceBroken
from tools.proc import Completed, run
from tools.records import NOT_LASTING, ArgSpec, CompileResult, Reason, Status, Variant, content_hash
from tools.sourcecheck import check_flags, check_kernels, check_source, uses_cutlass
from tools.toolchain import HOW_TO_INSTALL, Toolchain, how_to_install

DEADLINE_S = 120.0
MEMORY_BYTES = 8 << 30
LOG_LIMIT = 8 << 10
SOURCE_NAME = "kernel.cu"

BASE_FLAGS = ("-cubin", "-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-DNDEBUG")


@dataclass(frozen=True)
class Limits:
    """``deadline_s`` and ``memory_bytes`` (address space of each compiler process) bound one build;
    ``max_spill_bytes`` counts stores + loads over all launched kernels and the functions they call."""

    deadline_s: float = DEADLINE_S
    memory_bytes: int = MEMORY_BYTES
    max_spill_bytes: int = 0
    allow_fp16_accumulate: bool = False


def compile_variant(
    variant: Variant,
    *,
    toolchain: Toolchain,
    cache: CompileCache,
    limits: Limits = Limits(),
    cancel: threading.Event | None = None,
) -> CompileResult:
    """Compile, or answer from the cache. Raises DeviceBroken when the cache or temporary folder cannot be written."""
    started = time.monotonic()
    found = _obtain(variant, toolchain, cache, limits, cancel)
    return _result(variant, found, limits).model_copy(update={"elapsed_s": time.monotonic() - started})


def compile_many(
    variants: Sequence[Variant],
    jobs: int | None = None,
    *,
    toolchain: Toolchain,
    cache: CompileCache,
    limits: Limits = Limits(),
) -> Iterator[tuple[Variant, CompileResult]]:
    """Results in the order of ``variants``, as they become available; ``jobs`` compilers at once (default: one a core).

    A source that several variants share is built once. Closing the iterator early kills what still runs.
    """
    cancel = threading.Event()
    pool = ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0)), thread_name_prefix="compile")
    builds: dict[tuple[str, tuple[str, ...]], Future[_Found]] = {}
    try:
        for variant in variants:
            if (variant.source, variant.flags) not in builds:
                future = pool.submit(_obtain, variant, toolchain, cache, limits, cancel)
                builds[variant.source, variant.flags] = future
        for variant in variants:
            found = builds[variant.source, variant.flags].result()
            yield variant, _result(variant, found, limits)
    finally:
        cancel.set()
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class _Refused:
    """Why there is no point in starting a compiler."""

    status: Status
    detail: str
    reason: Reason | None = None


_Found = Build | _Refused


def _obtain(
    variant: Variant, toolchain: Toolchain, cache: CompileCache, limits: Limits, cancel: threading.Event | None
) -> _Found:
    compiler = _precheck(variant, toolchain)
    if isinstance(compiler, _Refused):
        return compiler
    key = source_id(variant.source, (*BASE_FLAGS, *variant.flags), compiler)
    build = cache.get(key)
    if build is None:
        build, cubin = _build(variant, compiler, toolchain, limits, cancel)
        if build.reason not in NOT_LASTING and _unusable_toolchain(build) is None:
            cache.put(key, build, cubin)
    return build


def _result(variant: Variant, found: _Found, limits: Limits) -> CompileResult:
    if isinstance(found, Build):
        return judge(variant, found, limits)
    return CompileResult(status=found.status, reason=found.reason, detail=found.detail, variant_id=variant.variant_id)


# --- before nvcc ---------------------------------------------------------------------------------------------------


def _precheck(variant: Variant, toolchain: Toolchain) -> _Refused | str:
    """The compiler's identity, or why compiling is pointless."""
    if problem := check_source(variant.source) or check_kernels(variant.source):
        return _Refused(Status.FAILED, problem.detail, problem.reason)
    if forbidden := check_flags(variant.flags):
        return _Refused(Status.FAILED, forbidden, Reason.COMPILE_ERROR)
    if toolchain.nvcc is None:
        return _Refused(Status.UNAVAILABLE, how_to_install("nvcc"))
    compiler = f"nvcc {toolchain.nvcc.version}"
    if uses_cutlass(variant.source):
        if toolchain.cutlass is None:
            detail = f"the source includes CUTLASS headers; install them with: {HOW_TO_INSTALL['cutlass']}"
            return _Refused(Status.UNAVAILABLE, detail)
        compiler += f", CUTLASS {toolchain.cutlass.version}"
    return compiler


# --- nvcc ----------------------------------------------------------------------------------------------------------


def nvcc_command(variant: Variant, toolchain: Toolchain) -> list[str]:
    """The command, to be run in a folder that holds only kernel.cu. ``toolchain.nvcc`` must be there."""
    if toolchain.nvcc is None:
        raise ValueError("there is no nvcc")
    include = ["-I", str(toolchain.cutlass.path)] if toolchain.cutlass and uses_cutlass(variant.source) else []
    base = [f for f in BASE_FLAGS if not (f.startswith("-std=") and any(v.startswith("-std=") for v in variant.flags))]
    return [str(toolchain.nvcc.path), *base, *variant.flags, *include, SOURCE_NAME, "-o", "kernel.cubin"]


def _build(
    variant: Variant, compiler: str, toolchain: Toolchain, limits: Limits, cancel: threading.Event | None
) -> tuple[Build, bytes | None]:
    try:
        with tempfile.TemporaryDirectory(prefix="hgemm-agent-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            (folder / SOURCE_NAME).write_bytes(variant.source.encode())
            (folder / "tmp").mkdir()
            done = run(
                nvcc_command(variant, toolchain),
                deadline_s=limits.deadline_s,
                memory_bytes=limits.memory_bytes,
                cwd=folder,
                env={**toolchain.environment, "TMPDIR": str(folder / "tmp")},
                cancel=cancel,
            )
            output = folder / "kernel.cubin"
            cubin = without_paths(output.read_bytes()) if done.returncode == 0 and output.is_file() else None
    except OSError as error:
        raise DeviceBroken(storage_sentence("temporary files", Path(tempfile.gettempdir()), error)) from error
    log = tidy_log(done.text, folder)
    if done.cancelled:
        raise DeviceBroken("the compile was cancelled")
    too_large = f"died due to signal {SIGXFSZ}" if done.returncode in (-SIGXFSZ, 128 + SIGXFSZ) else ""
    machines_own = "" if cubin is not None or blames_source(log) else log
    said = machines_own + too_large
    if cannot := next((why for sign, why in _CANNOT_WRITE.items() if sign in said), None):
        raise DeviceBroken(f"cannot write temporary files in {tempfile.gettempdir()}: {cannot}")
    build = Build(
        compiler=compiler, elapsed_s=done.elapsed_s, log=trim_log(log), warnings=ptxas_warnings(log)[:_MAX_WARNINGS]
    )
    if cubin is None:
        reason, detail = classify_failure(done, log, limits)
        return build.model_copy(update={"reason": reason, "detail": detail}), None
    try:
        facts = read_cubin(cubin)
    except CubinError as error:
        raise DeviceBroken(f"nvcc reported success but left {error}") from error
    reported = ptxas_usage(log)
    if missing := [name for name in facts.entries if name not in reported]:
        raise DeviceBroken(f"ptxas did not report the registers of {missing[0]}; is this another nvcc than 12 or 13?")
    usage = {
        name: FunctionUse(
            registers=use.registers,
            smem_static_bytes=use.smem_static_bytes,
            spill_bytes=use.spill_bytes,
            params=facts.entries.get(name),
        )
        for name, use in reported.items()
    }
    update = {
        "cubin_sha256": hashlib.sha256(cubin).hexdigest(),
        "entries": {name: usage[name] for name in facts.entries},
        "functions": {name: use for name, use in usage.items() if name not in facts.entries},
        "mma": dict(facts.mma),
        "mutable_globals": facts.mutable_globals,
        "unresolved": facts.unresolved,
        "constant_address_taken": facts.constant_address_taken,
    }
    return build.model_copy(update=update), cubin


_MAX_WARNINGS = 20
#: What the compilers say when their own files cannot be written, and what that means.
_CANNOT_WRITE = {
    "No space left on device": "the disk is full",
    "Disk quota exceeded": "the disk quota is used up",
    "File size limit exceeded": "the limit on the size of files (ulimit -f) is too low",
    f"died due to signal {SIGXFSZ}": "the limit on the size of files (ulimit -f) is too low",
}
_ERROR_LINE = re.compile(r"\berror\b\s*(#[\w-]+\s*)?:|\bfatal\b|catastrophic error|\d+ errors? detected", re.IGNORECASE)
_SOURCES_FAULT = re.compile(
    rf"^{re.escape(SOURCE_NAME)}(\(\d+\)|:\d+:\d+): (fatal )?error\b|^ptxas \S+, line \d+; (error|fatal)", re.MULTILINE
)
_KILLED = re.compile(r"died due to signal 9\b|^Killed$| signal terminated program", re.MULTILINE)
#: Begins the detail of a failure in which no compiler said what is wrong with the source.
_SILENT = "nvcc failed without an error in the source"
_OUT_OF_MEMORY = re.compile(r"out of memory|bad_alloc|cannot allocate memory|virtual memory exhausted", re.IGNORECASE)


def tidy_log(text: str, folder: Path) -> str:
    """The compiler's output without what differs from run to run: the temporary folder's name, ptxas's own timing."""
    text = re.sub(r"^ptxas info\s*: Compile time = .*\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"[^\s'\"(]*tmpxft_[0-9a-f]+_[0-9a-f]+-\d+_", "", text)
    return text.replace(f"{folder}/tmp/", "").replace(f"{folder}/", "")


def blames_source(log: str) -> bool:
    """Whether a compiler names an error in the source. Then nothing else in the log is believed: a candidate can print
    what it likes there, in lines of its own (``static_assert(false, "\\nNo space left on device")``)."""
    return _SOURCES_FAULT.search(log) is not None


def trim_log(log: str) -> str:
    """At most LOG_LIMIT characters: the beginning and the end."""
    if len(log) <= LOG_LIMIT:
        return log
    half = LOG_LIMIT // 2
    return f"{log[:half]}\n[... {len(log) - 2 * half} characters left out ...]\n{log[-half:]}"


def classify_failure(done: Completed, log: str, limits: Limits) -> tuple[Reason, str]:
    """Reason and sentence for an nvcc that left no cubin. Pure."""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    first = next((line for line in lines if _ERROR_LINE.search(line)), None)
    said = (first or (lines[-1] if lines else "nothing was said"))[:300]
    if done.timed_out:
        return Reason.COMPILE_TIMEOUT, f"nvcc did not finish within {limits.deadline_s:g} s"
    own = "" if blames_source(log) else log
    if _OUT_OF_MEMORY.search(own):
        return Reason.COMPILE_MEMORY, f"nvcc needed more than {limits.memory_bytes / 2**30:.3g} GiB of memory"
    if "uses too much shared data" in log:
        return Reason.TOO_MUCH_SHARED_MEMORY, said
    if "Unresolved extern" in log or "nvlink error" in log:
        return Reason.UNRESOLVED_SYMBOL, said
    if _KILLED.search(own) or done.returncode in (-9, 137):
        return Reason.COMPILE_ERROR, f"{_SILENT}: it was killed, most likely because this machine ran out of memory"
    if first is None:
        return Reason.COMPILE_ERROR, f"{_SILENT}: it ended with code {done.returncode}, {said}"
    return Reason.COMPILE_ERROR, said


# --- judgement -----------------------------------------------------------------------------------------------------


def judge(variant: Variant, build: Build, limits: Limits) -> CompileResult:
    """What a build means for a variant: OK, or FAILED with the first thing wrong. Pure."""
    launched = {launch.entry: build.entries.get(launch.entry) for launch in variant.launch.launches}
    present = [use for use in launched.values() if use is not None]
    spill = sum(use.spill_bytes for use in (*present, *build.functions.values()))
    unusable = _unusable_toolchain(build)
    problem = None if unusable else _problem(variant, build, limits, launched, spill)
    registers = [use.registers for use in present if use.registers is not None]
    return CompileResult(
        status=Status.UNAVAILABLE if unusable else Status.FAILED if problem else Status.OK,
        reason=problem[0] if problem else None,
        detail=unusable or (problem[1] if problem else ""),
        variant_id=variant.variant_id,
        build_id=content_hash([variant.variant_id, build.compiler]),
        compiler=build.compiler,
        cubin_sha256=build.cubin_sha256,
        registers=max(registers, default=None),
        spill_bytes=spill if present else None,
        smem_static_bytes=max((use.smem_static_bytes for use in present), default=None),
        mma=build.mma,
        warnings=build.warnings,
        log=build.log,
    )


def _unusable_toolchain(build: Build) -> str | None:
    """The sentence when it is this machine's nvcc, not the candidate, that cannot compile."""
    if build.reason is None:
        return None
    if build.detail.startswith(_SILENT):
        return f"{build.detail}; `agent doctor` says which nvcc this is"
    own = "" if blames_source(build.log) else build.log
    if "Unsupported gpu architecture" in own:
        return f"{build.compiler} does not know sm_90a; {how_to_install('nvcc')}"
    if re.search(r"(gcc|g\+\+|cc1plus|host compiler).*(not found|No such file|Failed to preprocess)", own) or (
        "Failed to preprocess host compiler" in own
    ):
        return f"nvcc finds no host C++ compiler; install one with: {HOW_TO_INSTALL['g++']}"
    return None


def _problem(
    variant: Variant, build: Build, limits: Limits, launched: dict[str, FunctionUse | None], spill: int
) -> tuple[Reason, str] | None:
    if build.reason is not None:
        return build.reason, build.detail
    if build.mutable_globals:
        name = build.mutable_globals[0]
        what = f"the string literal {name}" if name.startswith(("$str", "__unnamed")) else f"the variable '{name}'"
        return (
            Reason.MUTABLE_GLOBAL,
            f"{what} lies in writable device memory and could keep state between calls; use shared memory, the "
            "workspace or __constant__",
        )
    if build.constant_address_taken:
        return (
            Reason.MUTABLE_GLOBAL,
            "the address of a __constant__ variable is used as a pointer, through which it could be written; "
            "read the variable by its name",
        )
    if build.unresolved:
        names = ", ".join(build.unresolved[:4])
        return Reason.UNRESOLVED_SYMBOL, f"the kernel calls {names}, which a cubin cannot bring along"
    for entry, use in launched.items():
        if use is None:
            there = ", ".join(build.entries) or "none"
            return (
                Reason.MISSING_ENTRY,
                f"the launch spec names the kernel '{entry}', but the cubin has {there}; "
                'declare it extern "C" __global__',
            )
    if mismatch := _argument_mismatch(variant, launched):
        return Reason.BAD_LAUNCH_SPEC, mismatch
    if warning := disqualifying(build.warnings):
        return Reason.PTXAS_WARNING, warning
    if spill > limits.max_spill_bytes:
        return (
            Reason.REGISTER_SPILL,
            f"{spill} bytes of registers are spilled (stores + loads); the limit is {limits.max_spill_bytes}",
        )
    if other := other_inputs(build.mma):
        return (
            Reason.PRECISION_DOWNGRADE,
            f"the machine code multiplies other numbers than FP16 ({other[0]}); this task asks for products of FP16",
        )
    if not limits.allow_fp16_accumulate and (half := fp16_accumulators(build.mma)):
        return (
            Reason.FP16_ACCUMULATE,
            f"the machine code accumulates in FP16 ({half[0]}); this task asks for FP32 accumulation",
        )
    return None


def _argument_mismatch(variant: Variant, launched: dict[str, FunctionUse | None]) -> str | None:
    """Argument count and sizes against the kernel's parameters: the driver would read past what it is given."""
    for launch in variant.launch.launches:
        use = launched[launch.entry]
        if use is None or use.params is None:
            continue
        given = [_argument_bytes(arg) for arg in launch.args]
        if len(given) != len(use.params):
            return f"the kernel {launch.entry} takes {len(use.params)} parameters; the launch spec gives {len(given)}"
        for number, (size, wanted) in enumerate(zip(given, use.params, strict=True)):
            if size != wanted:
                return (
                    f"parameter {number} of the kernel {launch.entry} has {wanted} bytes, "
                    f"but the launch spec gives {size}"
                )
    return None


def _argument_bytes(arg: ArgSpec) -> int:
    return 128 if arg.tensor_map is not None else 4 if arg.i32 is not None else 8
