"""training/stages.py, side by side: what was stopped or failed is remembered, and how long it took."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from training.stages import Failed, Running, Stages, file_name


class Scripted(Stages):
    """Its commands are Python."""

    def start(self, name: str, words: Sequence[str]) -> Running:
        (self.out / "logs" / f"{file_name(name)}.log").touch()
        return Running(name, subprocess.Popen([sys.executable, "-c", *words]), time.monotonic())


def opened(out: Path) -> Scripted:
    stages = Scripted(out, jobs=2)
    stages.open(False)
    return stages


def test_a_stage_that_failed_goes_on_and_counts_all_its_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    once = f"import sys, pathlib; p = pathlib.Path({str(mark)!r}); sys.exit(0 if p.exists() else p.touch() or 3)"
    words = {"a": [once], "b": ["import time; time.sleep(60)"]}
    with pytest.raises(Failed) as caught:
        opened(tmp_path / "run").each(words, 2)
    path = tmp_path / "run" / "stages.json"
    state = json.loads(path.read_text())
    assert caught.value.code == 3 and {name: one["finished"] for name, one in state.items()} == {"a": False, "b": False}
    state["a"]["seconds"] = 100.0
    path.write_text(json.dumps(state))
    opened(tmp_path / "run").each({**words, "b": ["pass"]}, 2)  # what was stopped may be asked otherwise
    state = json.loads(path.read_text())
    assert 100 < state["a"]["seconds"] < 150 and state["b"]["seconds"] < 60
    assert all(one["finished"] for one in state.values())
    capsys.readouterr()
    opened(tmp_path / "run").each({"a": words["a"]}, 2)
    assert capsys.readouterr().out == "a: finished before\n"
    with pytest.raises(Failed, match="stage b was asked otherwise"):
        opened(tmp_path / "run").each({"b": words["b"]}, 2)


def test_evaluations_side_by_side_are_no_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = opened(tmp_path / "run")
    stages.side_by_side({"x": ["pass"], "y": ["pass"], "z": ["pass"]})
    told = capsys.readouterr().out.splitlines()
    assert sorted(line.partition(":")[0] for line in told) == ["  evaluate x", "  evaluate y", "  evaluate z"]
    assert stages.state == {}
    with pytest.raises(Failed, match="evaluate x: nothing was said"):
        stages.side_by_side({"x": ["raise SystemExit(2)"]})
