"""Builds on disk, by content: ``<source_id>.json`` says what came of a source, ``<sha256>.cubin`` is the code.

Both are written to a temporary file, flushed and renamed, the cubin first, so a reader never sees half of either and
two processes that build the same source merely do it twice. Anything unreadable counts as absent and is built again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from pathlib import Path

from pydantic import Field, ValidationError

from tools.cubin import ANALYSIS_VERSION
from tools.device import DeviceBroken
from tools.records import CompileResult, Reason, Record, content_hash


class FunctionUse(Record):
    """ptxas's report of one function; ``registers`` only for entries. Spills are stores + loads."""

    registers: int | None = None
    smem_static_bytes: int = 0
    spill_bytes: int = 0
    #: Parameter sizes in bytes, in order; None when the cubin does not state them.
    params: tuple[int, ...] | None = None


class Build(Record):
    """What nvcc made of one source, before any variant's launch spec or limit is held against it.

    ``reason`` is set when there is no code: a compile error, say. ``entries`` are the kernels, ``functions`` what else
    was compiled out of line."""

    compiler: str
    reason: Reason | None = None
    detail: str = ""
    elapsed_s: float = 0.0
    cubin_sha256: str | None = None
    entries: dict[str, FunctionUse] = Field(default_factory=dict)
    functions: dict[str, FunctionUse] = Field(default_factory=dict)
    mma: dict[str, int] = Field(default_factory=dict)
    mutable_globals: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()
    constant_address_taken: bool = False
    warnings: tuple[str, ...] = ()
    log: str = Field(default="", max_length=1 << 16)


def source_id(source: str, flags: tuple[str, ...], compiler: str) -> str:
    """Identity of a build and of what is read from it; ``flags`` are all that the compiler gets. Variants that differ
    only in how they are launched share one."""
    return content_hash([source, list(flags), compiler, ANALYSIS_VERSION])


class CompileCache:
    """Safe for several processes at once. Raises DeviceBroken, in one sentence, when the folder cannot be written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def cubin(self, result: CompileResult) -> bytes | None:
        """The code of an ok result, verified against its hash; None when it is not (or no longer) there."""
        return self._cubin(result.cubin_sha256) if result.ok and result.cubin_sha256 else None

    def get(self, key: str) -> Build | None:
        """The build, with its cubin present and intact, or None."""
        try:
            build = Build.from_json((self.root / f"{key}.json").read_bytes())
        except (OSError, ValidationError):
            return None
        return build if build.cubin_sha256 is None or self._cubin(build.cubin_sha256) is not None else None

    def put(self, key: str, build: Build, cubin: bytes | None) -> None:
        """Keep a build; ``cubin`` is what ``build.cubin_sha256`` names, or None when there is none."""
        if cubin is not None:
            self._write(self.root / f"{build.cubin_sha256}.cubin", cubin)
        self._write(self.root / f"{key}.json", build.to_json().encode())

    def _cubin(self, sha256: str) -> bytes | None:
        try:
            data = (self.root / f"{sha256}.cubin").read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def _write(self, path: Path, data: bytes) -> None:
        temporary: Path | None = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".tmp-", dir=self.root)
            temporary = Path(name)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink()
            raise DeviceBroken(storage_sentence("the compile cache", self.root, error)) from error


def storage_sentence(what: str, path: Path, error: OSError) -> str:
    """One sentence for a folder that cannot be written."""
    why = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission is denied",
    }.get(error.errno or 0, error.strerror or str(error))
    return f"cannot write {what} in {path}: {why}"
