"""training/stages.py, side by side: what was stopped or failed is remembered, and how long it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import tools.visible_gpus
from tools.visible_gpus import VisibleGpu, gpus_to_share
from training.stages import Failed, Running, Stages, file_name


class Scripted(Stages):
    """Its commands are Python."""

    def start(self, name: str, words: Sequence[str], gpu: Mapping[str, str] | None = None) -> Running:
        (self.out / "logs" / f"{file_name(name)}.log").touch()
        code = words[-1] if words[0] in ("collect", "train", "evaluate-policy") else words[0]
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **(gpu or {})})
        return Running(name, process, time.monotonic(), gpu)


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


@pytest.mark.parametrize("processes", [1, 2])
def test_what_runs_side_by_side_is_shared_out_over_the_gpus(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-5f")

    def seen(name: str) -> str:
        return (
            f"import os, pathlib; pathlib.Path({str(tmp_path / name)!r}).write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
        )

    stages = Scripted(tmp_path / "run", jobs=2, processes=processes)
    stages.open(False)
    words = {name: ["train", seen(name)] for name in "abcd"} | {"rows": ["collect", seen("rows")]}
    words["numbered"] = ["evaluate-policy", "--set", "policy.local.base.device=cuda:1", seen("numbered")]
    stages.each(words, 6)
    told = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert told["rows"] == told["numbered"] == "4, GPU-5f"
    if processes == 1:
        assert sorted(told[name] for name in "abcd") == ["4", "4", "GPU-5f", "GPU-5f"]
    else:
        assert {told[name] for name in "abcd"} == {"4, GPU-5f"}, "a GPU for each process of one training"


def test_one_gpu_is_nothing_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in ("", "3", "-1", "3,-1", "3,,4", ","):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
        assert gpus_to_share() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, GPU-5f,-1,2")
    assert gpus_to_share() == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "GPU-5f"}]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(tools.visible_gpus, "visible_gpus", lambda: [VisibleGpu(n, "H200", (9, 0)) for n in range(2)])
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpus_to_share() == [{"CUDA_VISIBLE_DEVICES": "0", **by_bus}, {"CUDA_VISIBLE_DEVICES": "1", **by_bus}]
