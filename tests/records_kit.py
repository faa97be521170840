"""A record file of the packaged families for tests, made on the scripted device; and an agent that keeps a diary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from fakes import ScriptedDevice

from tools.families import load_families
from tools.recording import Scope, record

ROOT = Path(__file__).resolve().parent.parent
AGENT = [sys.executable, "-m", "agent.cli"]

#: `agent` on a replay device that writes every call it answers to $DIARY, as tool|key|task|setting, before it answers.
DIARY_AGENT = """
import os, tools.replay
class Diary(tools.replay.ReplayDevice):
    def note(self, *words):
        with open(os.environ["DIARY"], "a") as file:
            file.write("|".join(words) + "\\n")
    def compile(self, variant):
        self.note("compile", variant.key, "", "")
        return super().compile(variant)
    def verify(self, variant, task, depth):
        self.note("verify", variant.key, task.task_id, depth)
        return super().verify(variant, task, depth)
    def sanitize(self, variant, tasks):
        self.note("sanitize", variant.key, "", "")
        return super().sanitize(variant, tasks)
    def time(self, variant, task, mode, budget):
        self.note("time", variant.key, task.task_id, f"{mode}/{budget}")
        return super().time(variant, task, mode, budget)
    def profile(self, variant, task):
        self.note("profile", variant.key, task.task_id, "")
        return super().profile(variant, task)
    def baselines(self, task, mode, budget):
        self.note("baselines", "", task.task_id, f"{mode}/{budget}")
        return super().baselines(task, mode, budget)
tools.replay.ReplayDevice = Diary
from agent.cli import main
"""

#: Loads everything once, then forks a diary agent for every line of JSON arguments: a run costs no second of imports.
NURSERY = (
    DIARY_AGENT
    + """
import json, signal, sys
import agent.graph, agent.live, agent.session, memory.store, optuna, policy.factory
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(order["environ"])
        sys.argv[1:] = order["arguments"]
        main()
        os._exit(99)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
)


class Nursery:
    """Diary agents in quick succession. ``begin`` answers with the process id, ``end`` waits for the exit code."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            cwd=ROOT,
            env=environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, home: Path, diary: Path, out: Path, *arguments: str) -> int:
        assert self._process.stdin is not None
        environ = {"HGEMM_AGENT_HOME": str(home), "DIARY": str(diary)}
        self._process.stdin.write(json.dumps({"arguments": arguments, "environ": environ, "out": str(out)}) + "\n")
        self._process.stdin.flush()
        return self._line()

    def end(self) -> int:
        return self._line()

    def _line(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def make_record(path: Path, *shapes: tuple[int, int, int], device: ScriptedDevice | None = None) -> Path:
    device = device or ScriptedDevice()
    record(device, load_families(), shapes, path, deadline_s=120, scope=Scope(1000), echo=lambda line: None)
    return path


def environment(home: Path, **more: str) -> dict[str, str]:
    """Of a child process: its own home, no keys, no settings of ours but the policy, which would depend on what is
    installed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HGEMM_AGENT", "ANTHROPIC", "OPENAI"))}
    return {**kept, "HGEMM_AGENT_HOME": str(home), "HGEMM_AGENT_POLICY__NAME": "search", "COLUMNS": "160", **more}


def agent(home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [*AGENT, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(home, **more), timeout=120, check=False
    )
