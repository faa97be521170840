"""Requests for several candidates at once: what they share is done once, and blame is not laid.

Whatever goes wrong, the answer is only that they are to be asked for one by one, where it is seen who is at fault. So
nothing is recorded of a candidate that another one spoilt. For a recorder of families, whose candidates are ours: an
output that is right may lie in memory while the next candidate runs.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import cupy as cp

from tools.gpu.blas import BlasError
from tools.gpu.driver import CudaError
from tools.gpu.timing import time_candidates
from tools.gpu.verify import fits
from tools.launching import LaunchError
from tools.records import Reason, Task, Variant
from tools.verdicts import Rejected

if TYPE_CHECKING:
    from tools.gpu.worker import Worker

TOGETHER = ("time_many", "verify_many")


def answer_together(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    """``{"record": {"results": …, "baselines": …}, "restart": …}`` or ``{"declined": sentence, "restart": …}``."""
    task = Task.model_validate(request["task"])
    asked = [(Variant.model_validate(one["variant"]), str(one["cubin"])) for one in request["candidates"]]
    if (too_large := fits(task, worker.gpu)) is not None:
        return {"declined": too_large, "restart": False}
    try:
        if request["op"] == "verify_many":
            results: list[Any] = list(worker.verify_candidates(asked, task, request["depth"]))
            baselines = None
        else:
            timed = time_candidates(worker, asked, task, request["mode"], request["budget"])
            results, baselines = list(timed.results), timed.baselines
    except (Rejected, LaunchError) as error:
        return {"declined": str(error), "restart": error.reason is Reason.HANG}
    except (cp.cuda.memory.OutOfMemoryError, MemoryError) as error:
        return {"declined": f"out of GPU memory: {error}", "restart": True}
    except (CudaError, cp.cuda.runtime.CUDARuntimeError, cp.cuda.driver.CUDADriverError, BlasError) as error:
        return {"declined": str(error), "restart": True}
    except Exception as error:  # ours; alone they show it again, if it is more than being together
        traceback.print_exc()
        return {"declined": f"the worker failed: {type(error).__name__}: {error}", "restart": True}
    record = {
        "results": [result.model_dump(mode="json") for result in results],
        "baselines": baselines.model_dump(mode="json") if baselines else None,
    }
    return {"record": record, "restart": False}
