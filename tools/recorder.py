"""One process of a recording: does on one GPU what it is told, and keeps what it measures in a part of its own.

``python -m tools.recorder --ordinal 0 --in-fd N --out-fd M``, started by tools/recording_farm.py. A request is answered
by what came of it, by ``{"late": true}`` when its time was up or an end is wanted, or by ``{"broken": sentence}`` when
this GPU cannot go on. When the process that started it dies, so does it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

from tools.device import Device, DeviceBroken
from tools.families import ManifestError, load_families, plans, render
from tools.frames import FrameError, read_frame, worker_parser, write_frame
from tools.hgemm import hgemm
from tools.record_file import RecordReader
from tools.recording_device import RecordingDevice
from tools.recording_parts import PartWriter
from tools.recording_scope import Deadline, Job, OutOfTimeError, Scope
from tools.recording_shape import Profiles, record_shape
from tools.records import Family, Task, Variant
from tools.sanitize_shapes import sanitize_tasks

Reply = dict[str, Any]

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Recorder:
    """Between ``open`` and ``close`` it has a part; what ``base`` holds is not measured again."""

    def __init__(self, device: Device, families: Mapping[str, Family], stop: Event, name: str) -> None:
        self._device = device
        self._name = name
        self._families = families
        self._stop = stop
        rendered = (render(family, plan) for family in families.values() for plan in plans(family))
        self._variants = {variant.key: variant for variant in rendered}
        self._part: PartWriter | None = None
        self._base: RecordReader | None = None

    def answer(self, request: dict[str, Any]) -> Reply:
        does: Mapping[str, Callable[[dict[str, Any]], Reply]] = {
            "hello": lambda _: {"info": self._device.info.model_dump(mode="json")},
            "open": self._open,
            "compile": self._compile,
            "sanitize": self._sanitize,
            "shape": self._shape,
            "close": self._close,
        }
        try:
            return does[request["op"]](request)
        except OutOfTimeError:
            return {"late": True, "measured": self._through.measured}
        except (DeviceBroken, OSError) as error:
            return {"broken": str(error).replace("cuda:0", self._name)}  # the only one that this process sees

    def _open(self, request: dict[str, Any]) -> Reply:
        self._part = PartWriter(Path(request["part"]), self._device.info)
        self._part.put_meta({"commit": request["commit"]})
        self._base = RecordReader(Path(request["base"]))
        self._scope = Scope(**{**request["scope"], "modes": tuple(request["scope"]["modes"])})
        together = self._scope.together
        self._through = RecordingDevice(self._device, self._part, self._base, commit_every_s=0.0, together=together)
        self._profiles = Profiles(self._through, self._families, Deadline(request["left_s"], self._stop))
        return {}

    def _compile(self, request: dict[str, Any]) -> Reply:
        variants = self._named(request["keys"])
        if not self._through.compile_many(variants, request["jobs"]):
            for variant in variants:
                self._through.compile(variant)
        return {"measured": self._through.measured}

    def _sanitize(self, request: dict[str, Any]) -> Reply:
        task = _task(request)
        self._through.sanitize_many(
            [(v, sanitize_tasks(v, task, self._families)) for v in self._named(request["keys"])]
        )
        return {"measured": self._through.measured}

    def _shape(self, request: dict[str, Any]) -> Reply:
        assert self._part is not None
        variants = tuple(self._named(request["keys"]))
        job = Job(_task(request), variants, request["digest"], variants)
        found = record_shape(self._through, self._families, job, self._scope, Deadline(request["left_s"], self._stop))
        if found.complete:
            self._part.mark_done(job.task, job.digest, found.best)
            self._part.commit()
        if found.best is not None and self._scope.profiles:
            with contextlib.suppress(OutOfTimeError):  # ``close`` takes those that wait
                self._profiles.add(found.best, job.task)
        return {"line": found.line, "seconds": found.seconds, "measured": self._through.measured}

    def _close(self, request: dict[str, Any]) -> Reply:
        """Ends the part. What waits for a profile gets it, late or not."""
        if self._part is None or self._base is None:
            return {"measured": 0}
        try:
            if not request["at_once"]:
                self._profiles.flush(late=True)
        finally:
            self._part.close()
            self._base.close()
            self._part = self._base = None
        return {"measured": self._through.measured}

    def _named(self, keys: Sequence[str]) -> list[Variant]:
        if unknown := [key for key in keys if key not in self._variants]:
            raise DeviceBroken(f"the kernels changed while they were recorded: there is no plan {unknown[0]} any more")
        return [self._variants[key] for key in keys]


def serve(device: Device, families: Mapping[str, Family], in_fd: int, out_fd: int, name: str = "cuda:0") -> None:
    """Answers one request after another until the other end closes; ``stop`` is heard at any time. ``name``: what the
    GPU is called where there are others."""
    stop = Event()
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while (frame := read_frame(in_fd)) is not None:
                request: dict[str, Any] = json.loads(frame)
                if request["op"] == "stop":
                    stop.set()
                else:
                    requests.put(request)
        except (FrameError, OSError):
            pass
        os._exit(1)  # nobody is there any more; what is committed stays, and the next recording merges it

    recorder = Recorder(device, families, stop, name)
    Thread(target=listen, name="requests", daemon=True).start()
    while True:
        reply = recorder.answer(requests.get())
        write_frame(out_fd, json.dumps(reply).encode())


def only(ordinal: int, visible: str | None) -> str:
    """What lets a process see GPU ``ordinal`` of those it sees now as its only one, so that no library can take another
    for its default. Raises DeviceBroken if it is not among them."""
    if visible is None:
        return str(ordinal)
    names = [name.strip() for name in visible.split(",")]
    if ordinal >= len(names) or names[ordinal] in ("", "-1"):
        raise DeviceBroken(f"there is no cuda:{ordinal}: {VISIBLE}={visible} shows others only")
    return names[ordinal]


def _task(request: dict[str, Any]) -> Task:
    m, n, k = request["dims"]
    return hgemm(m, n, k)


def main() -> None:
    parser = worker_parser()
    parser.add_argument("--ordinal", type=int, required=True)
    parser.add_argument("--jobs", type=int)
    options = parser.parse_args()
    try:
        os.environ[VISIBLE] = only(options.ordinal, os.environ.get(VISIBLE))
        families = load_families()
    except (DeviceBroken, ManifestError) as error:
        sys.exit(f"error: {error}")
    from tools.cuda_device import CudaDevice

    device = CudaDevice(0, jobs=options.jobs)
    serve(device, families, options.in_fd, options.out_fd, f"cuda:{options.ordinal}")


if __name__ == "__main__":
    main()
