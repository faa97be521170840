"""A child for compute-sanitizer and ncu: load cubins, launch each once on exact-size allocations, say so, exit 0.

``python -m tools.gpu.oneshot JOB.json`` with ``{"ordinal": 0, "jobs": [{"cubin", "variant", "task"}, …]}``. No guard
bands and an untouched workspace: both would hide what the sanitizer looks for. Only the candidate launches kernels here
(inputs come by copy), so that launch number i under ncu is job i's first kernel. Light on purpose: no CuPy, no torch.
"""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path

import numpy as np
from cuda.bindings import driver as cu

from tools.gpu.driver import CudaError, Gpu, Launcher, Module, check, memset8
from tools.launching import LaunchError, resolve, tensor_dims
from tools.oneshot_job import EXIT_CANDIDATE_FAILED, done_line
from tools.records import Task, Variant

_CHUNK_WORDS = 1 << 22


def run(gpu: Gpu, cubin: bytes, variant: Variant, task: Task) -> None:
    """One launch of ``variant`` at ``task`` on random operands."""
    module = Module(gpu, cubin)
    spec = resolve(variant, task, gpu.sm_count, module.occupancy)
    rng = np.random.default_rng(7)
    chunk = rng.standard_normal(_CHUNK_WORDS, np.float32).astype(np.float16)
    buffers: dict[str, int] = {}
    for tensor in task.tensors:
        words = prod(tensor_dims(task, tensor.role, variant.b_layout))
        address = int(check(cu.cuMemAlloc(2 * words), "cuMemAlloc"))
        buffers[tensor.role] = address
        if not tensor.output:
            for start in range(0, words, _CHUNK_WORDS):
                size = min(_CHUNK_WORDS, words - start)
                check(cu.cuMemcpyHtoD(address + 2 * start, chunk.ctypes.data, 2 * size), "cuMemcpyHtoD")
    workspace = 0
    if spec.workspace_bytes:
        workspace = int(check(cu.cuMemAlloc(spec.workspace_bytes), "cuMemAlloc"))
        memset8(workspace, spec.state_fill, spec.state_bytes, 0)
    gpu.synchronize()
    Launcher(module, spec).bind(buffers, workspace).enqueue(0)
    gpu.synchronize()
    for address in [*buffers.values(), *([workspace] if workspace else [])]:
        check(cu.cuMemFree(address), "cuMemFree")
    module.unload()


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        gpu = Gpu(job.get("ordinal", 0))
        for item in job["jobs"]:
            run(
                gpu,
                Path(item["cubin"]).read_bytes(),
                Variant.model_validate(item["variant"]),
                Task.model_validate(item["task"]),
            )
    except (CudaError, LaunchError) as error:
        print(f"oneshot: {error}", file=sys.stderr)
        return EXIT_CANDIDATE_FAILED
    print(done_line(len(job["jobs"])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
