"""Does a search of 24 evaluations end at the recorded winner? Every recorded shape of the paper's grid, searched anew.

    python scripts/check_winners.py [--json]                              # policy search: a minute or two on two cores
    python scripts/check_winners.py --policy local --shape 8192,8192,8192 # a minute a shape

A shape is searched as by `agent optimize` on the device that replays the record: the same nodes, gate and finish, in
memory. What it ends with is compared to the record's winner (`agent report`): the offline ratio at the final budget.
A shape misses where that is more than --within percent lower, or where nothing passed the whole gate; then the exit
code is 1. Shapes where few plans are recorded say little: a search finds their winner among these, or hardly any.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402

from agent.config import LOCAL_EVALUATIONS, Settings, load_settings, parse_assignment  # noqa: E402
from agent.deps import Deps  # noqa: E402
from agent.errors import EXIT_INTERRUPTED, AgentError  # noqa: E402
from agent.reporting.source import load  # noqa: E402
from agent.reporting.winners import choose  # noqa: E402
from agent.sweep_cell import drive  # noqa: E402
from memory.store import Store  # noqa: E402
from policy.base import Policy, PolicyError  # noqa: E402
from policy.factory import make_policy  # noqa: E402
from policy.local_policy import located  # noqa: E402
from policy.prompts import load_templates  # noqa: E402
from tools.device import DeviceBroken  # noqa: E402
from tools.families import load_families  # noqa: E402
from tools.gate import Toolbox  # noqa: E402
from tools.hgemm import grid, hgemm, parse_shape  # noqa: E402
from tools.records import Task  # noqa: E402
from tools.replay import ReplayDevice, path_of  # noqa: E402
from training.shelf import Shelf  # noqa: E402


@dataclass(frozen=True)
class Recorded:
    """A shape's winner, None where no kernel of it passed the whole gate; ``is_complete``: every plan is recorded."""

    task: Task
    winner: str | None
    ratio: float | None
    is_complete: bool


@dataclass(frozen=True)
class Found:
    """What a search ended with; ``loss`` is how much lower its ratio is than the winner's, 1 where it found none."""

    shape: str
    is_complete: bool
    kernel: str
    ratio: float | None
    recorded_ratio: float | None
    is_winner: bool
    loss: float | None  # None: there is no recorded winner
    evaluations: int
    not_recorded: int

    def misses(self, within_pct: float) -> bool:
        return self.loss is not None and 100 * self.loss > within_pct


def recorded(path: Path, shapes: Sequence[Task] | None) -> list[Recorded]:
    """Of these shapes, or of all that the file and the grid share, in the file's order. Raises SystemExit for a shape
    that is not in the file."""
    measured = load(path)
    winners = choose(measured)
    device = ReplayDevice(path)
    shelf = Shelf(device.records, load_families())
    known = {task.task_id: task for task in device.records.tasks()}
    if shapes is None:
        of_grid = {hgemm(*dims).task_id for dims in grid()}
        shapes = [task for task_id, task in known.items() if task_id in of_grid]
    found = []
    for task in shapes:
        if task.task_id not in known:
            sys.exit(f"error: {path} has no record of {task.label}")
        key = winners[task.task_id].best if task.task_id in winners else None
        row = measured.timings[task.task_id, key]["offline"].row() if key is not None else None
        found.append(Recorded(task, key, row.ratio if row is not None else None, shelf.is_complete(task)))
    device.close()
    return found


# --- one shape --------------------------------------------------------------------------------------------------------


class Searcher:
    """Searches shape after shape; one a process."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._device = ReplayDevice(path)
        self._families = load_families()
        self._settings = settings
        self._policy: Policy = make_policy(settings.policy, self._families, os.environ)
        self._templates = load_templates()

    def found(self, at: Recorded) -> Found:
        dims = ",".join(str(size) for size in at.task.dims.values())
        session = self._settings.session.model_copy(update={"shape": dims})
        with Store(Path(":memory:")) as store:
            deps = Deps(
                session_id="check",
                folder=Path(),  # the finish's last node, which writes there, does not run
                settings=self._settings.model_copy(update={"session": session}),
                task=at.task,
                families=self._families,
                policy=self._policy,
                toolbox=Toolbox(self._device, store, self._families),
                store=store,
                templates=self._templates,
            )
            _, summary = drive(deps)
        best = summary.best
        ratio = best.final_ratio if best is not None else None
        return Found(
            shape=at.task.label,
            is_complete=at.is_complete,
            kernel=best.label if best is not None else "",
            ratio=ratio,
            recorded_ratio=at.ratio,
            is_winner=best is not None and best.key == at.winner,
            loss=None if at.ratio is None else 1 - (ratio or 0.0) / at.ratio,
            evaluations=summary.evaluations,
            not_recorded=summary.not_recorded,
        )

    def close(self) -> None:
        self._policy.close()
        self._device.close()


_searcher: Searcher | None = None


def _begin(path: Path, settings: Settings) -> None:
    global _searcher
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's reaches workers too: it is for the parent to end them
    _searcher = Searcher(path, settings)


def _work(at: Recorded) -> Found:
    assert _searcher is not None
    return _searcher.found(at)


def searched(path: Path, settings: Settings, shapes: Sequence[Recorded], jobs: int) -> Generator[Found, None, None]:
    """In the order in which they are done."""
    if jobs == 1 or len(shapes) == 1:
        searcher = Searcher(path, settings)
        try:
            yield from map(searcher.found, shapes)
        finally:
            searcher.close()
        return
    pool = ProcessPoolExecutor(min(jobs, len(shapes)), initializer=_begin, initargs=(path, settings))
    try:
        with _ctrl_c_waits():
            waiting = [pool.submit(_work, at) for at in shapes]
        yield from (future.result() for future in as_completed(waiting))
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """For the end of the block: raised between the fork of a worker and its entry among the children, it would leave
    the worker behind. Blocking the signal is not enough: any thread may take it, and Python still raises in this one.
    """
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


# --- what is told -----------------------------------------------------------------------------------------------------


def row(found: Sequence[Found], within_pct: float) -> dict[str, Any]:
    """Counts over shapes with a recorded winner."""
    known = [one for one in found if one.loss is not None]
    worst = max(known, key=lambda one: one.loss or 0.0, default=None)
    return {
        "shapes": len(known),
        "at_the_winner": sum(one.is_winner for one in known),
        "within": sum(not one.misses(within_pct) for one in known),
        "mean_loss": sum(one.loss or 0.0 for one in known) / len(known) if known else None,
        "worst_loss": worst.loss if worst is not None else None,
        "worst_at": worst.shape if worst is not None else None,
        "not_recorded_evaluations": sum(one.not_recorded for one in known) / len(known) if known else None,
    }


def rows(found: Sequence[Found], within_pct: float) -> dict[str, dict[str, Any]]:
    parts = {
        "every plan recorded": [one for one in found if one.is_complete],
        "likely plans recorded": [one for one in found if not one.is_complete],
        "all": found,
    }
    return {name: row(part, within_pct) for name, part in parts.items()}


def lines(found: Sequence[Found], within_pct: float) -> Iterator[str]:
    yield f"{'':<22} {'shapes':>6} {'winner':>7} {f'<= {within_pct:g} %':>8} {'mean':>8}   worst"
    for name, part in rows(found, within_pct).items():
        if part["shapes"]:
            worst = f"{100 * part['worst_loss']:.2f} % at {part['worst_at']}"
            counts = f"{part['shapes']:>6} {part['at_the_winner']:>7} {part['within']:>8}"
            yield f"{name:<22} {counts} {100 * part['mean_loss']:6.3f} %   {worst}"
    for one in sorted(found, key=lambda one: -(one.loss or 0.0)):
        if one.misses(within_pct):
            ended = f"{one.ratio:.4f} with {one.kernel}" if one.ratio is not None else "no kernel that passed the gate"
            yield f"misses {one.shape}: {one.recorded_ratio:.4f} recorded, found {ended}"
    for one in found:
        if one.loss is None:
            yield f"{one.shape} has no recorded winner"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", default="h200", help="a record file (default: the packaged one)")
    parser.add_argument("--policy", default="search", help="search (default), random, local, …")
    parser.add_argument("--evaluations", type=int, default=LOCAL_EVALUATIONS)
    parser.add_argument("--within", type=float, default=2.0, metavar="PERCENT")
    parser.add_argument("--shape", action="append", metavar="M,N,K", help="only this one; repeatable")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", dest="settings")
    parser.add_argument("--jobs", type=int, help="processes (default: cores; 1 for the policy local)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    path = path_of(options.records)
    try:
        flags = {"policy.name": options.policy, "budget.evaluations": options.evaluations}
        overrides = dict(parse_assignment(text) for text in options.settings) | flags
        settings = load_settings(None, os.environ, overrides)
        settings = settings.model_copy(update={"policy": located(settings.policy)})
        shapes = [hgemm(*parse_shape(text)) for text in options.shape] if options.shape else None
        known = recorded(path, shapes)
        jobs = options.jobs or (1 if options.policy == "local" else os.cpu_count() or 1)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with (
            Progress(*columns, console=Console(stderr=True)) as progress,
            closing(searched(path, settings, known, jobs)) as of_all,
        ):
            found = list(progress.track(of_all, total=len(known), description=options.policy))
    except (AgentError, DeviceBroken, PolicyError, BrokenProcessPool, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted: the search was not finished, so there is nothing to tell", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    order = {at.task.label: place for place, at in enumerate(known)}
    found.sort(key=lambda one: order[one.shape])
    missing = [one for one in found if one.misses(options.within)]
    if options.json:
        told = {
            "policy": options.policy,
            "evaluations": options.evaluations,
            "within_pct": options.within,
            "rows": rows(found, options.within),
            "shapes": [asdict(one) for one in found],
        }
        print(json.dumps(told))
    else:
        print("\n".join(lines(found, options.within)))
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
