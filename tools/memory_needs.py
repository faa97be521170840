"""What an HGEMM needs of the GPU's memory, known before anything runs. Pure."""

from __future__ import annotations

from tools.records import Task

#: The FP64 products are made this much at a time.
BLOCK_BYTES = 2 << 30
#: The context, compiled modules and the allocator need the rest.
USABLE = 0.95


def verify_bytes(task: Task) -> int:
    """A, B and two C in FP16, a second B, B and |B| in FP64, and two blocks of rows of the FP64 products."""
    m, n, k = task.dims["M"], task.dims["N"], task.dims["K"]
    return 2 * (m * k + k * n + 2 * m * n) + 18 * k * n + 2 * BLOCK_BYTES


def too_large(task: Task, memory_bytes: int) -> str | None:
    """None, or the sentence that says why this shape cannot be verified in a GPU's memory."""
    need = verify_bytes(task)
    if need <= USABLE * memory_bytes:
        return None
    there = f"the GPU has {memory_bytes / 2**30:.0f} GiB of memory"
    return f"{task.label} needs about {need / 2**30:.0f} GiB to verify; {there}"
