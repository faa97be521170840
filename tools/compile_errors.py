"""A compiler's log trimmed to the lines that matter to whoever repairs the source. Pure.

nvcc's front end (EDG) writes ``file(line): error: text`` followed by the source line and a caret; gcc, ptxas and
nvlink have their own forms. Warnings, remarks and repeats go; of a template's instantiation trace the two ends stay,
where it failed and whose line asked for it.
"""

from __future__ import annotations

import re

MAX_ERRORS = 5
MAX_EXCERPT_LINES = 3
MAX_BYTES = 2000

_DIAGNOSTIC = re.compile(
    r"^(?:\S.*?\(\d+\): |\S+:\d+(?::\d+)?: |(?:ptxas|nvlink|nvcc|cicc)\b(?:[^;]*;)?\s*)?"
    r"(?P<kind>(?:fatal |catastrophic |internal )?error|fatal|warning|remark|note|info)\b[^:]*:",
    re.IGNORECASE,
)
_TRACE = re.compile(r"^\s*(?:detected during|instantiation of|processing of|\[ ?\d+ instantiation contexts)")
_COUNT = re.compile(r"^\d+ errors? detected", re.IGNORECASE)


def relevant_lines(log: str, max_bytes: int = MAX_BYTES) -> str:
    """The first errors with the source lines they point at, at most ``max_bytes`` of UTF-8. A log without anything that
    looks like an error gives its beginning."""
    blocks = _errors(log)
    if not blocks:
        return _cut(log.strip(), max_bytes)
    texts: dict[str, list[str]] = {}
    for block in blocks:
        texts.setdefault(block[0], block)
    kept = list(texts.values())[:MAX_ERRORS]
    left_out = len(texts) - len(kept)
    lines = [line for block in kept for line in block]
    if left_out:
        lines.append(f"[{left_out} more errors]")
    return _cut("\n".join(lines), max_bytes)


def _errors(log: str) -> list[list[str]]:
    blocks: list[list[str]] = []
    current: list[str] | None = None
    for line in log.splitlines():
        found = _DIAGNOSTIC.match(line)
        if found:
            kind = found["kind"].lower()
            current = [line.rstrip()] if "error" in kind or kind == "fatal" else None
            if current is not None:
                blocks.append(current)
        elif not line.strip() or _COUNT.match(line):
            current = None
        elif current is not None:
            current.append(line.rstrip())
    return [_trimmed(block) for block in blocks]


def _trimmed(block: list[str]) -> list[str]:
    head, *rest = block
    trace = [line for line in rest if _TRACE.match(line)]
    excerpt = [line for line in rest if not _TRACE.match(line)][:MAX_EXCERPT_LINES]
    ends = [line for line in trace if not line.strip().endswith(":")]
    return [head, *excerpt, *(ends if len(ends) < 3 else (ends[0], ends[-1]))]


def _cut(text: str, max_bytes: int) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode()
    note = "\n[cut]"
    return data[: max(0, max_bytes - len(note))].decode("utf-8", "ignore") + note if max_bytes > len(note) else ""
