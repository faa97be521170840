"""Which commit this code is, read without git."""

from __future__ import annotations

from pathlib import Path


def commit() -> str:
    """HEAD of the checkout; empty for an installed package."""
    git = Path(__file__).resolve().parent.parent / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        ref = head.removeprefix("ref: ")
        if (git / ref).is_file():
            return (git / ref).read_text(encoding="utf-8").strip()
        packed = (git / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {ref}")), "")
    except OSError:
        return ""
