"""Stages of a run in a folder, each one or several `agent` commands, for the scripts that train. What is finished is
not done again; a stage that was stopped goes on by its own command's means. What the commands say is in logs/."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.device import DeviceBroken
from tools.visible_gpus import gpus_to_share
from training.errors import TrainingError
from training.writing import replacing

ROOT = Path(__file__).resolve().parent.parent


class Running(NamedTuple):
    name: str
    process: subprocess.Popen[bytes]
    begun: float
    gpu: Mapping[str, str] | None = None


class Failed(TrainingError):
    """One sentence, and the exit code."""

    def __init__(self, sentence: str, code: int = 1) -> None:
        super().__init__(sentence)
        self.code = code


class Stages:
    """``jobs``: processes side by side, ``processes``: of one training, one a GPU. What runs side by side is shared out
    over the GPUs that there are."""

    def __init__(self, out: Path, jobs: int = 1, processes: int = 1) -> None:
        self.out, self.jobs, self.processes = out.absolute(), jobs, processes
        self.state: dict[str, Any] = {}

    def open(self, is_fresh: bool) -> None:
        path = self.out / "stages.json"
        try:
            if is_fresh and path.is_file():
                shutil.rmtree(self.out)
            (self.out / "logs").mkdir(parents=True, exist_ok=True)
            self.state = json.loads(path.read_text()) if path.is_file() else {}
            if not isinstance(self.state, dict) or not all(isinstance(one, dict) for one in self.state.values()):
                raise ValueError(path)
        except OSError as error:
            raise Failed(f"the folder {self.out} cannot be made or read: {error.strerror}") from error
        except ValueError as error:
            raise Failed(f"{path} is damaged: take another --out, or begin anew with --fresh") from error

    @staticmethod
    def sets(told: Iterable[str], asked: Iterable[str], *sections: str) -> list[str]:
        """What is asked for on the command line comes last, so that it counts."""
        asked = (text for text in asked if text.partition(".")[0] in sections)
        return [word for text in (*told, *asked) for word in ("--set", text)]

    def path(self, *parts: str) -> str:
        return str(self.out.joinpath(*parts))

    def shown(self, words: Any, base: str | None, source: Path | None, **places: Path) -> list[str]:
        """A stage's command, if it is one, without this machine's places; ``places``: others, by their name there."""
        if not isinstance(words, list):
            return []
        names = {f"{self.out}/": "", **{str(place.absolute()): name for name, place in places.items()}}
        names |= {str(source.absolute()): "RECORDS"} if source is not None else {}
        names |= {base: Path(base).name} if base else {}
        for place, name in names.items():
            words = [word.replace(place, name) for word in words]
        return ["agent", *words]

    def run(self, name: str, words: Sequence[str]) -> None:
        """One command as a stage."""
        self.stage(name, words, lambda: self.wait([self.start(name, words)]))

    def stage(self, name: str, words: Any, work: Callable[[], None]) -> None:
        """Unless it is finished."""
        if self._is_finished(name, words):
            return
        told = " ".join(words) if isinstance(words, list) else f"{len(words)} processes, {self.jobs} at a time"
        print(f"{name}: {told}", flush=True)
        begun, is_finished = time.monotonic(), False
        try:
            work()
            is_finished = True
        finally:
            self._record(name, words, begun, is_finished)

    def each(self, words: Mapping[str, Sequence[str]], at_a_time: int) -> None:
        """Commands that are stages of their own, side by side. One that was stopped may be asked otherwise: the folder
        holds other stages that are worth keeping, and the command itself knows what it can go on from."""
        left = {name: list(own) for name, own in words.items() if not self._is_finished(name, list(own), True)}

        def over(one: Running, is_finished: bool) -> None:
            self._record(one.name, left[one.name], one.begun, is_finished)

        self._alongside(left, at_a_time, lambda name: print(f"{name}: {' '.join(left[name])}", flush=True), over)

    def _is_finished(self, name: str, words: Any, may_change: bool = False) -> bool:
        """``may_change``: unless it is finished."""
        known = self.state.get(name)
        if known is not None and known["words"] != words and (known["finished"] or not may_change):
            raise Failed(
                f"{self.out} holds a run whose stage {name} was asked otherwise: take another --out, or --fresh"
            )
        if known is not None and known["finished"]:
            print(f"{name}: finished before", flush=True)
            return True
        return False

    def _record(self, name: str, words: Any, begun: float, is_finished: bool) -> None:
        """The seconds of all times that it was asked so."""
        known = self.state.get(name)
        before = known["seconds"] if known is not None and known["words"] == words else 0.0
        seconds = round(before + time.monotonic() - begun, 1)
        self.state[name] = {"words": words, "seconds": seconds, "finished": is_finished}
        self._save()
        if is_finished:
            print(f"{name}: {seconds:.0f} s", flush=True)

    def start(self, name: str, words: Sequence[str], gpu: Mapping[str, str] | None = None) -> Running:
        launch = [sys.executable, "-m", "agent"]
        if words[0] == "collect" and self.jobs > 1:  # no part of what was asked: a stopped run may take others
            words = [*words, "--jobs", str(self.jobs)]
        if words[0] == "train" and self.processes > 1:
            count = ("--nproc-per-node", str(self.processes))
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", *count, "-m", "agent"]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environ |= gpu or {}
        with (self.out / "logs" / f"{file_name(name)}.log").open("ab") as log:
            # In a session of its own: it hears of ctrl-C from here, once, and ends with a checkpoint.
            process = subprocess.Popen(
                [*launch, *words], stdout=log, stderr=log, env=environ, cwd=self.out, start_new_session=True
            )
        return Running(name, process, time.monotonic(), gpu)

    def wait(self, running: Sequence[Running]) -> None:
        try:
            for one in running:
                one.process.wait()
        finally:
            end(running)
        for one in running:
            if code := one.process.returncode:
                lines = (self.out / "logs" / f"{file_name(one.name)}.log").read_text(errors="replace").splitlines()
                why = next(
                    (line.removeprefix("error: ") for line in reversed(lines) if line.strip()), "nothing was said"
                )
                raise Failed(f"{one.name}: {why[:300]} (all that it said is in {self.out / 'logs'})", abs(code))

    def side_by_side(self, words: Mapping[str, Sequence[str]]) -> None:
        """Evaluations by name, at most ``jobs`` at a time. What was played before is in the caches."""
        (self.out / "evaluate").mkdir(exist_ok=True)

        def over(one: Running, is_finished: bool) -> None:
            if is_finished:
                print(f"  {one.name}: {time.monotonic() - one.begun:.0f} s", flush=True)

        named = {f"evaluate {row}": own for row, own in words.items()}
        self._alongside(named, self.jobs, lambda name: None, over)

    def _alongside(
        self,
        words: Mapping[str, Sequence[str]],
        at_a_time: int,
        begins: Callable[[str], None],
        over: Callable[[Running, bool], None],
    ) -> None:
        """``over`` hears of each that ended, and whether it is finished: not if it failed or was stopped."""
        left = list(words.items())
        gpus = gpus_to_share()
        running: list[Running] = []
        try:
            while left or running:
                while left and len(running) < at_a_time:
                    name, own = left.pop(0)
                    begins(name)
                    running.append(self.start(name, own, self._gpu(own, gpus, running)))
                for one in [one for one in running if one.process.poll() is not None]:
                    self.wait([one])
                    running.remove(one)
                    over(one, True)
                time.sleep(0.05)
        finally:
            end(running)
            for one in running:
                over(one, False)

    def _gpu(
        self, words: Sequence[str], gpus: Sequence[Mapping[str, str]], running: Sequence[Running]
    ) -> Mapping[str, str] | None:
        """The least busy, where one is to be taken: a collection shares itself out, as does a training of several
        processes, and a numbered device says which."""
        takes_all = words[0] == "collect" or (words[0] == "train" and self.processes > 1)
        if not gpus or takes_all or any("base.device=cuda:" in word for word in words):
            return None
        return min(gpus, key=[one.gpu for one in running].count)

    def _save(self) -> None:
        with replacing(self.out / "stages.json") as new:
            new.write_text(json.dumps(self.state, indent=1) + "\n")


def end(running: Sequence[Running]) -> None:
    """A training writes a checkpoint first."""
    for one in running:
        if one.process.poll() is None:
            one.process.terminate()
    for one in running:
        one.process.wait()


def file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def ran(work: Callable[[], None]) -> int:
    """The exit code of a script: what failed is one sentence, and a signal stops it in order."""
    code = 130

    def stop(number: int, _: object) -> None:
        nonlocal code
        code = 128 + number
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        work()
        sys.stdout.flush()
    except (TrainingError, DeviceBroken) as failed:
        print(f"error: {failed}", file=sys.stderr)
        return getattr(failed, "code", 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}; the same command goes on from there", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it cannot be written either
        return 1
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from there", file=sys.stderr)
        return code
    return 0
