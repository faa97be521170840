"""A collection that several processes share: who has which shapes, what a part's file is called after, and what ends
them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from records_kit import ROOT, agent, make_record

for needed in ("torch", "transformers", "llguidance", "peft"):
    pytest.importorskip(needed, reason="needs the extra train")

from tiny_model import make_tiny_model  # noqa: E402

from memory.exemplars import MemorySettings  # noqa: E402
from policy.base_model import BaseSettings  # noqa: E402
from policy.reward import RewardSettings  # noqa: E402
from policy.settings import LocalSettings, PolicySettings  # noqa: E402
from tools.hgemm import hgemm  # noqa: E402
from tools.proc import Child  # noqa: E402
from training import collect_parts  # noqa: E402
from training.collect_parts import Order, part_files, remove_parts  # noqa: E402
from training.replaying import Shape  # noqa: E402


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("records") / "toy.sqlite", (64, 64, 64), (64, 128, 256))


def order(tiny: Path, source: Path, **given: object) -> Order:
    local = LocalSettings.model_validate({"base": {"name": str(tiny), "device": "cpu"}, "adapter": None})
    fields = {"policy": PolicySettings(name="local", local=local), "reward": RewardSettings(), "source": source}
    return Order.model_validate({**fields, "memory": MemorySettings(), "batch": 10, **given})


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_parts_are_the_shapes_in_their_order(tiny: Path, parts: int) -> None:
    shapes = [Shape(hgemm(64, 64, 64 * (n + 1)), {}, True) for n in range(5)]
    given = [order(tiny, Path("x"), part=number, parts=parts) for number in range(parts)]
    assert [shape for one in given for shape in one.own(shapes)] == shapes
    sizes = [len(one.own(shapes)) for one in given]
    assert max(sizes) - min(sizes) <= 1
    assert given[0].width * parts >= 10 > (given[0].width - 1) * parts


def test_a_part_is_called_after_all_that_its_rows_depend_on(tiny: Path, path: Path, tmp_path: Path) -> None:
    given = order(tiny, path, parts=2)
    out = tmp_path / "rows.jsonl"
    files = part_files(given, out)
    assert len(set(files)) == 2 and part_files(given.model_copy(update={"part": 1}), out) == files
    for changed in ({"seed": 1}, {"group_size": 4}, {"split": "all"}, {"batch": 11}):
        assert not set(files) & set(part_files(given.model_copy(update=changed), out)), changed
    assert not set(files) & set(part_files(given, tmp_path / "other.jsonl"))
    files[0].touch()
    (tmp_path / "mine.jsonl").touch()
    remove_parts(tmp_path / "other.jsonl")
    assert files[0].exists()
    remove_parts(out)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.jsonl"]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_processes_are_shared_out_over_the_gpus(
    device: str, tiny: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    class Refused(Exception):
        pass

    def start(argv: list[str], env: dict[str, str], cwd: Path) -> Child:
        seen.append(env.get("CUDA_VISIBLE_DEVICES"))
        if len(seen) == 3:
            raise Refused
        return Child([sys.executable, "-c", ""], env=env, cwd=cwd)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(collect_parts, "Child", start)
    given = order(tiny, path, parts=3)
    local = given.policy.local.model_copy(update={"base": BaseSettings(name=str(tiny), device=device)})
    given = given.model_copy(update={"policy": given.policy.model_copy(update={"local": local})})
    with pytest.raises(Refused):
        list(collect_parts.rows_of_parts(given, tmp_path / "rows.jsonl", lambda done, of: None))
    assert seen == (["4", "5", "4"] if device == "cpu" else ["4,5"] * 3), "a numbered GPU is the one that was asked for"
    seen[:] = [None]  # two are left: the third raises
    part_files(given, tmp_path / "rows.jsonl")[1].touch()
    with pytest.raises(Refused):
        list(collect_parts.rows_of_parts(given, tmp_path / "rows.jsonl", lambda done, of: None))
    assert seen[1:] == (["4", "5"] if device == "cpu" else ["4,5"] * 2), "what is left is shared out"


def words(tiny: Path, source: Path, out: Path) -> list[str]:
    base = ["--set", f"policy.local.base.name={tiny}", "--set", "policy.local.base.device=cpu"]
    return ["collect", "--from", str(source), "--out", str(out), "--split", "all", "--jobs", "2", *base]


def test_what_a_process_cannot_do_is_one_sentence(tiny: Path, tmp_path: Path) -> None:
    done = agent(tmp_path, *words(tiny, Path("/nowhere.sqlite"), tmp_path / "rows.jsonl"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and "/nowhere.sqlite" in done.stderr.replace("\n", " ")
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(tiny: Path, path: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "agent", *words(tiny, path, tmp_path / "rows.jsonl"), "--groups", "500"]
    mark = f"mark-{os.getpid()}-{number}"
    env = {**os.environ, "HGEMM_AGENT_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "MARK": mark}
    running = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while len(marked(mark)) < 5 and time.monotonic() < until:  # itself, two that collect, and their models
            time.sleep(0.1)
        assert len(marked(mark)) >= 5
        running.send_signal(number)
        assert running.wait(30) in (143, -9)
        until = time.monotonic() + 30
        while marked(mark) and time.monotonic() < until:
            time.sleep(0.1)
        assert not marked(mark)
    finally:
        running.kill()
        running.wait()
    assert not list(tmp_path.glob("*.jsonl"))


def marked(mark: str) -> list[str]:
    """Processes that have it in their environment, zombies aside."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={mark}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(place.name)
        except OSError:
            continue
    return found
