"""A collection as an order, in one process or shared out over several. What plays a rollout beside the model is Python
of one thread, so on a GPU the processes decide how quick it is. Each has consecutive shapes, the records that these
need and a model of its own, and leaves a file; the files together, in their order, are what one process would write."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from memory.exemplars import MemorySettings
from policy.base_model import files_id
from policy.local_policy import LocalPolicy
from policy.redacting import Secrets
from policy.reward import RewardSettings
from policy.settings import PolicySettings
from tools.families import load_families
from tools.paths import home_dir
from tools.proc import Child
from tools.records import content_hash
from tools.replay import ReplayDevice
from tools.revision import commit
from tools.visible_gpus import gpus_to_share
from training.collect import Collection, collect
from training.errors import TrainingError
from training.replaying import Shape, in_split
from training.rows import Row, read_rows
from training.shelf import Shelf

Tell = Callable[[int, int], None]
_TICK_S = 0.1


class Order(BaseModel):
    """``policy`` names its places whole (policy/local_policy.py, ``located``). ``batch`` is of all parts together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicySettings
    reward: RewardSettings
    memory: MemorySettings
    source: Path
    split: str = "train"
    pruned: bool = False
    seed: int = 0
    groups: int = 4
    group_size: int = 8
    batch: int = 8
    part: int = 0
    parts: int = 1

    @property
    def width(self) -> int:
        return -(-self.batch // self.parts)

    def own(self, shapes: list[Shape]) -> list[Shape]:
        return shapes[len(shapes) * self.part // self.parts : len(shapes) * (self.part + 1) // self.parts]


def rows_of(order: Order, secrets: Secrets, tell: Tell) -> Iterator[Row]:
    """Of the order's part. The model loads while the records are read."""
    families = load_families()
    with ExitStack() as stack:
        policy = LocalPolicy(order.policy, families)
        stack.callback(policy.close)
        policy.start()
        device = ReplayDevice(order.source)
        stack.callback(device.close)
        shelf = Shelf(device.records, families)
        shapes = order.own(in_split(shelf, order.split, order.pruned))
        what = Collection(order.seed, order.groups, order.group_size, order.policy.exemplars)
        yield from collect(
            policy, shelf, families, shapes, what, order.reward, order.memory, order.width, secrets, tell
        )


def rows_of_parts(order: Order, out: Path, tell: Tell) -> Iterator[Row]:
    """Of all parts, a process each. Parts lie beside ``out`` until the last row is taken; those that an earlier run of
    the same order left are not collected again. Raises TrainingError."""
    try:
        files = part_files(order, out)
        left = [number for number, file in enumerate(files) if not file.is_file()]
        out.parent.mkdir(parents=True, exist_ok=True)
        _play({number: order.model_copy(update={"part": number}) for number in left}, files, tell)
        for file in files:
            if file.stat().st_size:  # there may be more parts than shapes
                yield from read_rows(file)
    except OSError as error:
        raise TrainingError(f"the parts of {out} cannot be kept: {error.strerror or error}") from error


def remove_parts(out: Path) -> None:
    """Of this file, whatever was asked."""
    for file in out.parent.glob(f"{_beginning(out)}-*.jsonl"):
        file.unlink(missing_ok=True)


def part_files(order: Order, out: Path) -> list[Path]:
    """Named after all that their rows depend on."""
    adapter = Path(order.policy.local.adapter) if order.policy.local.adapter else None
    records = hashlib.sha256(order.source.read_bytes()).hexdigest() if order.source.is_file() else ""
    asked = content_hash(
        [
            order.model_dump(mode="json", exclude={"part", "source"}),
            files_id(order.policy.local.base, adapter),
            records,
            commit(),
        ]
    )
    return [out.parent / f"{_beginning(out)}-{asked}-{number}.jsonl" for number in range(order.parts)]


def _beginning(out: Path) -> str:
    return f".part-{content_hash(out.name)}"


def _play(orders: Mapping[int, Order], files: list[Path], tell: Tell) -> None:
    """Every process ends with us, whatever ends us, and the first that fails ends all."""
    done, of = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env = {"OMP_NUM_THREADS": str(max(1, cores // max(1, len(orders)))), **os.environ}
    env["HGEMM_AGENT_HOME"] = str(home_dir().absolute())
    gpus = gpus_to_share()
    waiting: dict[int, Child] = {}
    with ExitStack() as stack:
        for place, (number, order) in enumerate(orders.items()):
            argv = [sys.executable, "-m", "training.collect_worker"]
            own = gpus[place % len(gpus)] if gpus and not _is_numbered(order) else {}
            child = Child(argv, env=env | own, cwd=Path(__file__).resolve().parent.parent)
            stack.callback(child.kill)
            child.send(Job(order=order, file=files[number]).model_dump_json().encode())
            waiting[number] = child
        while waiting:
            for number, child in list(waiting.items()):
                while number in waiting and (frame := child.recv(0.0)) is not None:
                    said = Said.model_validate_json(frame)
                    if said.error is not None:
                        raise TrainingError(said.error)
                    done[number], of[number] = said.done, said.of
                    if said.is_over:
                        del waiting[number]
                    if all(of[one] or one not in waiting for one in of):
                        tell(sum(done.values()), sum(of.values()))
                if number in waiting and not child.alive:
                    lines = [line.strip() for line in child.stderr_tail().splitlines() if line.strip()]
                    why = lines[-1][:300] if lines else f"code {child.returncode}"
                    raise TrainingError(f"a process that collects died ({why}); the same command goes on from there")
            time.sleep(_TICK_S)


def _is_numbered(order: Order) -> bool:
    """One GPU was asked for."""
    return ":" in order.policy.local.base.device


class Job(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    order: Order
    file: Path


class Said(BaseModel):
    """``done`` of ``of`` rollouts; ``is_over``: and the file is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    done: int = 0
    of: int = 0
    is_over: bool = False
    error: str | None = None
