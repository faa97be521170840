"""Which commit a checkout is at, read without git."""

from __future__ import annotations

from pathlib import Path


def commit(folder: Path | None = None) -> str:
    """HEAD of the checkout whose top is ``folder``, a worktree or submodule too; empty if it is none, or unreadable.
    By default of this code: empty for an installed package."""
    top = folder if folder is not None else Path(__file__).resolve().parent.parent
    git = top / ".git"
    try:
        if git.is_file():  # a worktree or submodule: "gitdir: …"
            git = (top / git.read_text(encoding="utf-8").partition(":")[2].strip()).resolve()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        return _resolved(git, head.removeprefix("ref:").strip()) if head.startswith("ref:") else head
    except (OSError, UnicodeDecodeError):
        return ""


def _resolved(git: Path, ref: str) -> str:
    """A worktree's branches lie in the folder that ``commondir`` names."""
    common = git / "commondir"
    roots = [git, (git / common.read_text(encoding="utf-8").strip()).resolve()] if common.is_file() else [git]
    for root in roots:
        if (root / ref).is_file():
            return (root / ref).read_text(encoding="utf-8").strip()
        packed = root / "packed-refs"
        for line in packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else ():
            if line.endswith(f" {ref}"):
                return line.split(" ", 1)[0]
    return ""
