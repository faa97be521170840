"""The process that collects one part of an order (training/collect_parts.py).

``python -m training.collect_worker --in-fd N --out-fd M``: reads one job, says how far it is, and ends.
"""

from __future__ import annotations

import os

from policy.base import PolicyError
from policy.redacting import Secrets
from tools.device import DeviceBroken
from tools.families import ManifestError
from tools.frames import exit_on_hangup, read_frame, worker_parser, write_frame
from training.collect_parts import Job, Said, rows_of
from training.errors import TrainingError
from training.writing import write_rows


def main() -> None:
    options = worker_parser().parse_args()
    exit_on_hangup(options.out_fd)
    frame = read_frame(options.in_fd)
    if frame is None:
        return
    job, count = Job.model_validate_json(frame), 0

    def say(said: Said) -> None:
        write_frame(options.out_fd, said.model_dump_json().encode())

    def tell(done: int, of: int) -> None:
        nonlocal count
        count = of
        say(Said(done=done, of=of))

    try:
        write_rows(job.file, rows_of(job.order, Secrets.of(os.environ), tell))
    except (PolicyError, TrainingError, DeviceBroken, ManifestError) as error:
        say(Said(error=str(error)))
        return
    say(Said(done=count, of=count, is_over=True))


if __name__ == "__main__":
    main()
