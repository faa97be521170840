"""What a candidate's source and compiler flags may be, judged from their text: allowed headers, device code only. Pure.

``nvcc -cubin`` throws host code away, so nothing rejected here could ever run; the point is a clear sentence instead of
a kernel that silently lacks what its author wrote, and that no file outside the header allow-list can be read into an
error message. The text is scanned as the preprocessor sees it: line splices joined, comments gone, literals set aside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tools.records import Reason

MAX_SOURCE_BYTES = 1 << 20

#: Exact names, and folders ending in "/" of which everything is allowed. All are device-usable headers of the CUDA
#: toolkit, its C++ library (CCCL), CUTLASS, or the freestanding part of the C++ library.
ALLOWED_HEADERS: tuple[str, ...] = (
    *("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp8.h", "cuda_fp8.hpp"),
    *("cuda.h", "cuda_runtime.h", "cuda_awbarrier.h", "cuda_awbarrier_primitives.h"),
    *("cuda_pipeline.h", "cuda_pipeline_primitives.h", "cooperative_groups.h", "cooperative_groups/"),
    *("mma.h", "math_constants.h", "vector_types.h", "vector_functions.h", "device_launch_parameters.h"),
    *("cuda/", "cub/block/", "cub/warp/", "cute/", "cutlass/"),
    *("cstdint", "stdint.h", "cstddef", "stddef.h", "climits", "limits.h", "limits", "cfloat", "float.h"),
    *("type_traits", "utility", "tuple", "array", "initializer_list", "functional", "numeric", "bit", "concepts"),
    *("cmath", "math.h", "cassert", "assert.h", "algorithm"),
)

_PRAGMAS = re.compile(
    r"once$|(no)?unroll\b|nv_exec_check_disable$|hd_warning_disable$|(nv_)?diag_|nv_diagnostic|push_macro|pop_macro"
)

#: Names that only host code uses, most telling first. Each is matched as a whole word that no member access precedes.
_HOST_CALLS: tuple[tuple[str, str], ...] = (
    (r"main\s*\(", "a main function"),
    (
        r"cuda(?!GridDependencySynchronize\b|TriggerProgrammaticLaunchCompletion\b)[A-Z]\w*\s*\(",
        "a CUDA runtime call ({})",
    ),
    (
        r"cu(Init|Ctx|Mem|Module|Launch|Stream|Event|Device|Graph|Func|Tensor[Mm]ap|Link|Library|Kernel|GetProc|Driver"
        r"|Pointer|Array|Occupancy|Ipc|Import|External|Green|Multicast)\w*\s*\(",
        "a CUDA driver call ({})",
    ),
    (r"(cublas|cusparse|cudnn|cufft|curand|cusolver|nvrtc|nvml|nvJitLink)\w*", "a call into a library ({})"),
    (r"(torch|at|c10|pybind11|thrust)\s*::", "a host library ({})"),
    (
        r"std\s*::\s*(thread|jthread|async|mutex|vector|string|map|cout|cerr|ifstream|ofstream|fstream|filesystem"
        r"|chrono|shared_ptr|unique_ptr|function)\b",
        "host-only C++ ({})",
    ),
    (
        r"(system|popen|fopen|freopen|dlopen|dlsym|getenv|setenv|putenv|v?fork|exec[lv]\w*|pthread_\w+|mmap|mprotect"
        r"|ptrace|syscall|socket|sched_\w+)\s*\(",
        "an operating system call ({})",
    ),
)
_HOST_PATTERNS = tuple((re.compile(rf"(?<![\w.>]){pattern}"), what) for pattern, what in _HOST_CALLS)

_QUALIFIER = r"(?:\s|\b(?:static|inline|constexpr|explicit|virtual|__forceinline__|__noinline__|__inline__)\b)*"
_HOST_DEVICE = re.compile(rf"__device__{_QUALIFIER}__host__|__host__{_QUALIFIER}__device__")
_EXTERN_C = re.compile(r'\bextern\s*"(\d+)"\s*(?!\s*\{)([^;{}]*)[;{]')
_DEVICE_WORD = re.compile(r"\b(__global__|__device__|__shared__|__constant__)\b")


#: What a variant may add to the command line; every flag is one word.
ALLOWED_FLAGS = (
    r"-{1,2}maxrregcount=\d{1,3}",
    r"-{1,2}use_fast_math",
    r"-{1,2}(ftz|fmad|prec-div|prec-sqrt)=(true|false)",
    r"-{1,2}extra-device-vectorization",
    r"-{1,2}expt-relaxed-constexpr",
    r"-{1,2}extended-lambda",
    r"-std=c\+\+(17|20)",
    r"-Xptxas=(-O[0-3]|-dlcm=c[agsv]|-dscm=(wb|cg|cs|wt)|--allow-expensive-optimizations=(true|false)"
    r"|--(no-)?warn-on-\w+)",
    r"-D[A-Za-z_]\w*(=[\w.+-]*)?",
)
_ALLOWED_FLAG = re.compile("|".join(f"(?:{flag})" for flag in ALLOWED_FLAGS))


@dataclass(frozen=True)
class SourceProblem:
    """Why a source is rejected. ``detail`` is one sentence that names the line."""

    reason: Reason
    detail: str
    line: int


@dataclass(frozen=True)
class _Scanned:
    """``code`` has comments as blanks and the n-th string as ``"n"``; ``lines[i]`` is the source line on which its
    i-th line starts; ``strings`` are what the strings held."""

    code: str
    lines: tuple[int, ...]
    strings: tuple[str, ...]

    def line_at(self, position: int) -> int:
        return self.lines[self.code.count("\n", 0, position)]

    def logical_lines(self) -> Iterator[tuple[int, str]]:
        return zip(self.lines, self.code.split("\n"), strict=True)


_SPLICE = re.compile(r"\\[ \t\r\f\v]*\n")
#: A splice inside a comment mark or a raw string's prefix; only an attempt to hide something looks like this.
_SPLIT_MARK = re.compile(r"[/*](?:\\[ \t\r\f\v]*\n)+[/*]|R(?:\\[ \t\r\f\v]*\n)+\"")
_TOKEN = re.compile(
    r"""(?P<splice>\\[ \t\r\f\v]*\n)
      | (?P<raw>(?:u8|[uUL])?R"(?P<delim>[^()\\\s"]{0,16})\((?P<rawtext>.*?)\)(?P=delim)")
      | (?P<plain>(?:(?!(?:u8|[uUL])?R")[A-Za-z_]\w*|\.?\d(?:'?[\w.]|(?<=[eEpP])[+-])*
                    |[^\S\n]+|[^\w\s"'/\\.]+|\.(?!\d))+)
      | (?P<line>//)
      | (?P<block>/\*)
      | (?P<quote>["'])
      | (?P<newline>\n)
      | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=64)
def _scan(source: str) -> _Scanned:
    """One pass over the text as translation phases 2 and 3 do it, with string and character literals taken out."""
    code: list[str] = []
    strings: list[str] = []
    lines = [1]
    at, line = 0, 1
    while match := _TOKEN.match(source, at):
        start, at = at, match.end()
        kind = match.lastgroup
        if match.group("raw") is not None:
            code.append(f'"{len(strings)}"')
            strings.append(match.group("rawtext"))
        elif kind == "splice":
            pass
        elif kind == "line":
            at = _until(source, at, "\n")
        elif kind == "block":  # one blank, which joins the lines that it spans
            end = source.find("*/", at)
            at = len(source) if end < 0 else end + 2
            code.append(" ")
        elif kind == "quote":
            quote = match.group()
            end = _until(source, at, quote + "\n")
            code.append(f'"{len(strings)}"' if quote == '"' else "' '")
            if quote == '"':
                strings.append(_SPLICE.sub("", source[at:end]))
            at = end + 1 if source[end : end + 1] == quote else end
        elif kind == "newline":
            code.append("\n")
            line += 1
            lines.append(line)
            continue
        else:
            code.append(match.group())
            continue
        line += source.count("\n", start, at)
    return _Scanned("".join(code), tuple(lines), tuple(strings))


#: What can hold neither a stop nor the beginning of a splice or an escape.
_PLAIN_UNTIL = {stops: re.compile(rf"[^\\{stops}]*") for stops in ("\n", '"\n', "'\n")}


def _until(source: str, at: int, stops: str) -> int:
    """The first of ``stops`` from ``at`` that is neither spliced away nor (in a literal) escaped."""
    while at < len(source):
        plain = _PLAIN_UNTIL[stops].match(source, at)
        assert plain is not None  # it may be empty
        at = plain.end()
        if at == len(source):
            break
        if splice := _SPLICE.match(source, at):
            at = splice.end()
        elif source[at] in stops:
            return at
        elif source[at] == "\\" and len(stops) > 1:  # an escape takes the next character, whatever is spliced between
            at += 1
            while splice := _SPLICE.match(source, at):
                at = splice.end()
            at += 1
        else:
            at += 1
    return len(source)


def check_source(source: str) -> SourceProblem | None:
    """The first problem of ``source``, includes first, or None. Says nothing about whether it compiles."""
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        return SourceProblem(Reason.COMPILE_ERROR, "the source is not valid Unicode text", 1)
    if size > MAX_SOURCE_BYTES:
        return SourceProblem(Reason.COMPILE_ERROR, f"the source is larger than {MAX_SOURCE_BYTES >> 10} KiB", 1)
    if "\0" in source:
        return SourceProblem(Reason.COMPILE_ERROR, "the source contains a NUL character", 1)
    if match := re.search(r"\?\?[=/]", source) or _SPLIT_MARK.search(source):
        line = source.count("\n", 0, match.start()) + 1
        return SourceProblem(Reason.HOST_CODE, f"line {line}: trigraphs and split comment marks are not allowed", line)
    scanned = _scan(source)
    return _directives(scanned) or _host_code(scanned) or _strings(scanned)


def check_kernels(source: str, entries: Sequence[str] = ()) -> SourceProblem | None:
    """Whether anything in it can be launched; ``entries`` are names that must occur. Only for sources that passed
    ``check_source``. With CUTLASS a kernel may come from a header."""
    if uses_cutlass(source):
        return None
    words = set(re.findall(r"[A-Za-z_$][\w$]*", _scan(source).code))
    if "__global__" not in words:
        return SourceProblem(Reason.MISSING_ENTRY, "the source has no __global__ function that could be launched", 1)
    if missing := [entry for entry in entries if entry not in words]:
        return SourceProblem(Reason.MISSING_ENTRY, f"the source has no __global__ function '{missing[0]}'", 1)
    return None


def check_flags(flags: Sequence[str]) -> str | None:
    """The sentence for the first flag that is not allowed, or None."""
    for flag in flags:
        if not _ALLOWED_FLAG.fullmatch(flag):
            return (
                f"the compiler flag {flag[:80]!a} is not allowed; a variant may set -maxrregcount=N, "
                "-use_fast_math, -std=c++17/20, -DNAME=VALUE, -Xptxas=-O3 and the like"
            )
    return None


def headers(source: str) -> tuple[str, ...]:
    """What a source includes, in order. Only for sources that passed ``check_source``."""
    return tuple(name for _, name in _includes(_scan(source)) if name is not None)


def uses_cutlass(source: str) -> bool:
    """Whether the source includes CuTe or CUTLASS headers, which come from a package of their own."""
    return any(name.startswith(("cute/", "cutlass/")) for name in headers(source))


def allowed_header(name: str) -> bool:
    """Whether ``name`` is on the allow-list; no path tricks."""
    if ".." in name.split("/") or "\\" in name or name.startswith("/") or "//" in name:
        return False
    return any(name.startswith(a) if a.endswith("/") else name == a for a in ALLOWED_HEADERS)


_DIRECTIVE = re.compile(r"\s*(?:#|%:)\s*(\w*)\s*(.*?)\s*$")
_DIRECTIVES = frozenset(
    ("", "define", "undef", "if", "ifdef", "ifndef", "elif", "elifdef", "elifndef", "else", "endif", "error", "warning")
)


def _includes(scanned: _Scanned) -> Iterator[tuple[int, str | None]]:
    """(line, header) of every #include; None where the header is not named in the plain form."""
    for line, text in scanned.logical_lines():
        if (match := _DIRECTIVE.match(text)) and match.group(1) == "include":
            header = re.fullmatch(r'<([^<>]+)>|"(\d+)"', match.group(2))
            if header is None:
                yield line, None
            else:
                yield line, header.group(1) or scanned.strings[int(header.group(2))]


def _directives(scanned: _Scanned) -> SourceProblem | None:
    for line, header in _includes(scanned):
        if header is None:
            detail = f"line {line}: #include must name its header in the plain form, #include <header>, on one line"
            return SourceProblem(Reason.FORBIDDEN_INCLUDE, detail, line)
        if not allowed_header(header):
            detail = (
                f"line {line}: the header '{header[:100]}' is not on the allow-list (cuda_fp16.h, cuda/…, cute/…, "
                "cutlass/…, mma.h, cstdint, type_traits and other device headers)"
            )
            return SourceProblem(Reason.FORBIDDEN_INCLUDE, detail, line)
    for line, text in scanned.logical_lines():
        if re.search(r"\b__has_(include|embed)", text):
            detail = f"line {line}: __has_include is not allowed: it asks about files of this machine"
            return SourceProblem(Reason.FORBIDDEN_INCLUDE, detail, line)
        if (match := _DIRECTIVE.match(text)) is None:
            continue
        name, rest = match.groups()
        if name in ("include_next", "import", "embed"):
            return SourceProblem(Reason.FORBIDDEN_INCLUDE, f"line {line}: #{name} is not allowed", line)
        if name not in _DIRECTIVES and name not in (
            "include",
            "pragma",
        ):  # #line would make the compiler quote any file in its messages
            return SourceProblem(Reason.HOST_CODE, f"line {line}: the directive #{name[:30]} is not allowed", line)
        if name == "pragma" and not _PRAGMAS.match(rest):
            detail = f"line {line}: '#pragma {rest[:60]}' is not allowed; unroll, once and diagnostics are"
            return SourceProblem(Reason.HOST_CODE, detail, line)
    return None


def _host_code(scanned: _Scanned) -> SourceProblem | None:
    code = scanned.code
    if match := re.search(r"\b__managed__\b", code):
        line = scanned.line_at(match.start())
        detail = f"line {line}: a __managed__ variable keeps state between calls"
        return SourceProblem(Reason.MUTABLE_GLOBAL, detail, line)
    if (position := code.find("<<<")) >= 0:
        line = scanned.line_at(position)
        detail = f"line {line}: a kernel launch <<<…>>> is host code; the launch spec says how kernels are launched"
        return SourceProblem(Reason.HOST_CODE, detail, line)
    for pattern, what in _HOST_PATTERNS:
        if match := pattern.search(code):
            line = scanned.line_at(match.start())
            what = what.format(re.sub(r"\s*\($", "", match.group()))
            detail = f"line {line}: the source contains {what}; it must be device code only"
            return SourceProblem(Reason.HOST_CODE, detail, line)
    unmarked = _HOST_DEVICE.sub(lambda m: " " * len(m.group()), code)
    if (position := unmarked.find("__host__")) >= 0:
        line = scanned.line_at(position)
        detail = f"line {line}: a __host__ function without __device__ is host code"
        return SourceProblem(Reason.HOST_CODE, detail, line)
    for match in _EXTERN_C.finditer(code):
        if scanned.strings[int(match.group(1))] == "C" and not _DEVICE_WORD.search(match.group(2)):
            line = scanned.line_at(match.start())
            detail = f'line {line}: an extern "C" declaration that is neither __global__ nor __device__ is host code'
            return SourceProblem(Reason.HOST_CODE, detail, line)
    return _file_scope_asm(scanned)


def _file_scope_asm(scanned: _Scanned) -> SourceProblem | None:
    """asm outside every brace. Conditional compilation can unbalance braces; then nothing is said."""
    depth = 0
    for line, text in scanned.logical_lines():
        if _DIRECTIVE.match(text):
            continue
        for token in re.finditer(r"[{}]|\b(?:asm|__asm__|__asm)\b", text):
            if token.group() == "{":
                depth += 1
            elif token.group() == "}":
                depth -= 1
                if depth < 0:
                    return None
            elif depth == 0:
                return SourceProblem(Reason.HOST_CODE, f"line {line}: asm outside a function is host code", line)
    return None


def _strings(scanned: _Scanned) -> SourceProblem | None:
    for number, text in enumerate(scanned.strings):
        if match := re.search(r"\.(incbin|include)\b", text):
            line = scanned.line_at(max(0, scanned.code.find(f'"{number}"')))
            detail = f"line {line}: the assembler directive .{match.group(1)} reads a file"
            return SourceProblem(Reason.FORBIDDEN_INCLUDE, detail, line)
    for match in re.finditer(r'\b_Pragma\b(?:\s*\(\s*"(\d+)"\s*\))?', scanned.code):
        content = scanned.strings[int(match.group(1))].strip() if match.group(1) else ""
        if not _PRAGMAS.match(content):
            line = scanned.line_at(match.start())
            return SourceProblem(Reason.HOST_CODE, f"line {line}: _Pragma of '{content[:60]}' is not allowed", line)
    return None
