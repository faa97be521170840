"""A sweep for tests and benchmarks: scripted devices in the workers that note every call in a file; a driver to kill.

Run as a script it is that driver: ``python sweep_kit.py OPTIONS_JSON`` prints the table as CSV.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from fakes import ScriptedDevice, toy_families  # noqa: E402

from agent.config import Settings, load_settings  # noqa: E402
from agent.sweep import Outcome, Sweep, run  # noqa: E402
from agent.sweep_farm import Place  # noqa: E402
from agent.sweep_progress import Progress  # noqa: E402
from agent.sweep_table import to_csv  # noqa: E402
from agent.sweep_worker import Tools  # noqa: E402
from policy.base import Policy  # noqa: E402
from policy.factory import make_policy  # noqa: E402
from tools.hgemm import hgemm  # noqa: E402
from tools.records import Family, Reason, Status, Task, Variant  # noqa: E402


@dataclass(frozen=True)
class Options:
    """``log``: where the devices note their calls. ``specs``: one worker each."""

    db: str
    log: str
    shapes: list[list[int]]
    specs: tuple[str, ...] = ("fake", "fake")
    policy: str = "random"
    evaluations: int = 6
    sleep_s: float = 0.0
    scheduler: str | None = None
    quiet: bool = True
    settings: dict[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Options:
        fields = json.loads(text)
        return cls(**{**fields, "specs": tuple(fields["specs"])})


class LoggingDevice(ScriptedDevice):
    """Appends ``pid tool key task setting`` when a call has its answer: the first line that a killed process did not
    write is the first measurement that it did not finish."""

    def __init__(self, log: str, sleep_s: float, name: str = "Scripted GPU") -> None:
        super().__init__(script=_script, sleep_s=sleep_s, name=name)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _called(self, tool: str, variant: Variant, task: Task | None, *given: str) -> dict[str, object] | None:
        answer = super()._called(tool, variant, task, *given)
        self._note(tool, variant.key, task.task_id if task else "-", "/".join(given) or "-")
        return answer

    def baselines(self, task, mode, budget):  # type: ignore[no-untyped-def]
        answer = super().baselines(task, mode, budget)
        self._note("baselines", "-", task.task_id, f"{mode}/{budget}")
        return answer

    def _note(self, *words: str) -> None:
        os.write(self._log, (" ".join([str(os.getpid()), *words]) + "\n").encode())


def _script(tool: str, variant: Variant, task: Task | None) -> Reason | Status | None:
    """Something of everything: a plan that does not compile, one that is wrong at some shapes, one with a race."""
    knobs = variant.plan.knobs if variant.plan else {}
    if tool == "compile" and knobs.get("BM") == 32 and knobs.get("BN") == 128:
        return Reason.REGISTER_SPILL
    if tool == "verify" and task is not None and knobs.get("BM") == 64 and task.dims["K"] % 128:
        return Reason.WRONG_RESULT
    if tool == "sanitize" and knobs.get("BN") == 32 and variant.b_layout == "kn":
        return Reason.RACE
    return None


def open_logged(log: str, sleep_s: float, spec: str) -> LoggingDevice:
    return LoggingDevice(log, sleep_s, "Other GPU" if spec == "other" else "Scripted GPU")


def policy_of(chosen: Settings, families: Mapping[str, Family]) -> Policy:
    return make_policy(chosen.policy, families, {})


def tools_of(options: Options) -> Tools:
    return Tools(partial(open_logged, options.log, options.sleep_s), toy_families, policy_of)


def run_options(options: Options, progress: Progress | None = None) -> Outcome:
    given = {"policy.name": options.policy, "budget.evaluations": options.evaluations, **options.settings}
    chosen = load_settings(None, {}, given)
    specs = () if options.scheduler else options.specs
    sweep = Sweep(
        [hgemm(*shape) for shape in options.shapes],
        chosen,
        Path(options.db),
        Place(specs, scheduler=options.scheduler, default_spec="fake"),
        tools_of(options),
    )
    with progress or Progress(options.quiet) as watching:
        return run(sweep, watching)


def calls_of(log: Path) -> list[tuple[int, str]]:
    """(process, the call) in the order in which they had their answers."""
    found = []
    for line in log.read_text().splitlines():
        pid, _, call = line.partition(" ")
        found.append((int(pid), call))
    return found


def shapes(count: int) -> list[list[int]]:
    return [[64 * (1 + i % 5), 64 * (1 + i // 5), 64 * (1 + i % 3)] for i in range(count)]


def main(arguments: Sequence[str]) -> int:
    from agent.errors import AgentError
    from memory.store import StoreError

    started = time.perf_counter()
    try:
        outcome = run_options(Options.from_json(arguments[0]))
    except (AgentError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(to_csv(outcome.rows), end="")
    print(f"{time.perf_counter() - started:.2f} s, {outcome.results} results", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
