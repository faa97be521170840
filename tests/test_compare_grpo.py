"""scripts/compare_grpo.py: one collection, several trainings, one table; what pruned shapes show and are counted as."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from records_kit import ROOT, make_record
from training_kit import OF_EVERY_SPLIT, needs_train

from memory.exemplars import MemorySettings
from tools.families import load_families
from tools.hgemm import hgemm
from tools.record_file import RecordReader
from training.errors import TrainingError
from training.evaluate import Cell
from training.proof import OF_PRUNED, optima_of, package, tables_of
from training.rows import read_rows
from training.shelf import Shelf
from training.stages import Failed, Stages


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("records") / "toy.sqlite", *OF_EVERY_SPLIT)


def run(out: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HGEMM_AGENT_HOME": str(out.parent), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    given = [sys.executable, ROOT / "scripts" / "compare_grpo.py", "--out", out, *words]
    return subprocess.run(
        [str(word) for word in given], capture_output=True, text=True, env=environ, timeout=280, check=False
    )


# --- pruned shapes ----------------------------------------------------------------------------------------------------


def pruned(reader: RecordReader, *shapes: tuple[int, int, int], kept: int = 24) -> Shelf:
    """As if of these shapes only every seventh plan had been recorded."""
    tasks = {hgemm(*shape).task_id for shape in shapes}
    shelf = Shelf(reader, load_families())
    whole = shelf.at

    def at(task: Any) -> Any:
        found = whole(task)
        return dict(list(found.items())[::7][:kept]) if task.task_id in tasks else found

    shelf.at = at  # type: ignore[method-assign]
    shelf.is_complete = lambda task: task.task_id not in tasks  # type: ignore[method-assign]
    return shelf


def test_a_pruned_shapes_list_holds_only_what_is_recorded(record: Path) -> None:
    reader = RecordReader(record)
    task = hgemm(64, 64, 64)
    try:
        shelf = pruned(reader, (64, 64, 64))
        for is_varied in (True, False):
            told = shelf.told(task, [], 4, 0, 2, MemorySettings(), is_varied=is_varied)
            assert len(told.listed) == 8 and all(one.plan.plan_id in shelf.at(task) for one in told.listed)
        other = hgemm(128, 128, 128)
        assert len(shelf.expected(other)) == len(shelf.plans(other)) > len(shelf.expected(task))
    finally:
        reader.close()


def test_pruned_shapes_have_a_table_of_their_own(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import training.proof

    real = training.proof.shapes_of
    off_grid = hgemm(72, 80, 96).task_id
    monkeypatch.setattr(
        training.proof,
        "shapes_of",
        lambda *given: [s._replace(is_complete=s.task.task_id != off_grid) for s in real(*given)],
    )
    tasks = [hgemm(64, 64, 128).task_id, off_grid]
    cells = {
        name: [
            Cell(key=f"{name}{t}", policy=name, task_id=t, seed=0, quota=quota, budget=1, ratios=(ratio,))
            for t in tasks
        ]
        for name, ratio, quota in (("search", 0.4, 0), ("shortlist", 0.5, 0), ("sft", 0.5, 1), ("turn", 0.6, 1))
    }
    tables, document = tables_of(cells, optima_of(cells, record), ["all"], [1])
    assert list(tables) == [
        "all: 1 shapes with a known optimum",
        "all: 1 pruned shapes, against the best that is recorded",
    ]
    assert set(document) == {"device", "budgets", "all", "all, pruned"}
    (apart,) = (row for row in document["all, pruned"]["sft"] if row["policy"] == "turn")
    assert apart["difference"]["1"]["mean"] < 0
    known, of_pruned = tables.values()
    assert "Regret less that of search " in known and "not recorded; searches" not in known
    assert of_pruned.startswith(OF_PRUNED + "\n\n|") and "that of search " not in of_pruned
    assert "Regret less that of shortlist " in of_pruned and "Regret less that of sft " in of_pruned
    assert not any(row["difference"] for row in document["all, pruned"]["search"])


# --- the whole of it --------------------------------------------------------------------------------------------------


@needs_train
@pytest.mark.slow
def test_variants_of_one_collection_are_trained_and_played(record: Path, tmp_path: Path) -> None:
    from tiny_model import make_tiny_model

    base = make_tiny_model(tmp_path / "tiny")
    environ = {**os.environ, "HGEMM_AGENT_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    small = ("--set", "sft.max_steps=2", "--set", "sft.max_length=8000", "--set", "lora.rank=2")
    for words in (
        ("export-trajectories", "--from-records", record, "--out", "rows.jsonl", "--groups", "1", "--group-size", "2"),
        ("train", "sft", "rows.jsonl", "--base", base, "--out", "sft", "--set", "base.device=cpu", *small),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "agent", *map(str, words)],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    out = tmp_path / "run"
    given = ("--sft", tmp_path / "sft", "--scale", "tiny", "--base", base, "--device", "cpu", "--from", record,
             "--budgets", "1,4", "--seeds", "1", "--jobs", "2", "--trainings", "2")  # fmt: skip
    given = (*given, "--wide", tmp_path / "rows.jsonl", "--set", "lora.rank=2")
    first = run(out, *given, "--variants", "turn", "--until", "train")
    assert first.returncode == 0, first.stderr
    rows = read_rows(out / "collected.jsonl")
    assert rows and all(r.tokens is not None and len(r.tokens.starts) > 1 for r in rows)
    assert {r.provenance.policy for r in rows} == {"local:sft"}
    settings = json.loads((out / "turn" / "training.json").read_text())["settings"]
    assert settings["grpo"]["credit"] == "turn" and settings["reward"]["min_std"] == pytest.approx(1e-6)
    again = run(out, *given, "--variants", "turn,gain", "--full", "gain", "--pruned-seeds", "1")
    assert again.returncode == 0, again.stderr
    assert "collect: finished before" in again.stdout and "turn: finished before" in again.stdout
    document = json.loads((out / "evaluation.json").read_text())
    assert [row["policy"] for row in document["all"]["search"]] == [
        "random", "search", "search-records", "model", "shortlist", "sft", "sft-wide", "turn", "gain", "base",
        "gain, no exemplars", "gain, no profiles", "gain, no shortlist",
    ]  # fmt: skip
    assert {row["policy"] for row in document["all"]["sft"]} >= {"turn", "gain", "sft-wide"}
    assert all(row["invalid"] == 0 for row in document["all"]["search"])
    more = ("--budgets", "1,4,8", "--variants", "turn,gain", "--full", "gain", "--tell", "--package", "gain")
    told = run(out, *given, *more)
    assert told.returncode == 0 and "evaluate" not in told.stdout, told.stderr
    card = (out / "adapter" / "MODEL_CARD.md").read_text()
    assert (
        "| gain | " in card
        and "\n    agent train grpo collected.jsonl --out gain " in card
        and "/" not in told_places(card)
    )
    assert {path.name for path in (out / "adapter").iterdir()} == {
        "1-sft-metrics.jsonl", "1-sft-training.json", "MODEL_CARD.md", "adapter_config.json",
        "adapter_model.safetensors", "evaluation.json", "metrics.jsonl", "training.json",
    }  # fmt: skip


def told_places(card: str) -> str:
    """What follows --adapter, --out and the rows in the commands of a card."""
    words = " ".join(line for line in card.splitlines() if line.startswith("    agent ")).split()
    return " ".join(word for before, word in pairwise(words) if before in ("--adapter", "--out", "--from", "--base"))


def settings_of(words: Sequence[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for sign, text in pairwise(words) if sign == "--set")


def test_groups_that_differ_by_noise_teach_nothing_in_either_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    compare_grpo, train_adapter = (importlib.import_module(name) for name in ("compare_grpo", "train_adapter"))
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), "--sft", str(tmp_path)])
    told = {
        name: settings_of(words) for name, words in compare_grpo.Comparison(compare_grpo.parsed()).trainings().items()
    }
    assert set(told) == set(compare_grpo.VARIANTS)
    assert {own["reward.min_std"] for own in told.values()} == {"0.003"}
    assert told["all"].items() - told["best"].items() == {("grpo.scale", "all")}
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), "--scale", "full"])
    stages = train_adapter.Recipe(train_adapter.parsed()).stages()
    of = {name: settings_of(words).get("reward.min_std") for name, words in stages.items()}
    assert {name for name, value in of.items() if value == "0.003"} == {"grpo1"}


@pytest.mark.parametrize(
    ("also", "told"),
    [
        ("other", "--also is NAME=FOLDER, not 'other'"),
        ("other=", "--also is NAME=FOLDER, not 'other='"),
        ("=folder", "--also is NAME=FOLDER, not '=folder'"),
        ("sft=folder", "--also sft: there is a policy of that name already, take another"),
        ("search=folder", "--also search: there is a policy of that name already, take another"),
    ],
)
def test_another_adapter_has_a_folder_and_a_name_of_its_own(also: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    done = run(tmp_path / "run", "--sft", tmp_path, "--also", also, "--until", "collect", "--from", tmp_path / "none")
    assert (done.returncode, done.stderr) == (1, f"error: {told}\n") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--variants", "winner"), "--variants are of "),
        ((), "holds no adapter"),
        (("--variants", "turn", "--package", "gain"), "--package is of turn, not 'gain'"),
        (("--package", "turn", "--until", "train"), "--package ships what was played"),
        (("--tell", "--fresh"), "--tell is of what was played: without --fresh and --until"),
        (("--processes", "2", "--trainings", "2"), "give --processes or --trainings, not both"),
        (("--jobs", "0"), "--jobs, --trainings and --processes are 1 or more"),
    ],
)
def test_what_cannot_be_is_one_sentence(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    done = run(tmp_path / "run", "--sft", tmp_path, *words)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert told in done.stderr and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


@pytest.fixture
def played(tmp_path: Path) -> Path:
    """What travels with the packaged adapter; its own weights stand for all."""
    import tarfile

    packaged = ROOT / "adapters" / "hgemm-smollm2-135m"
    with tarfile.open(packaged / "run.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    (tmp_path / "run" / "best" / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path / "run"


def tell(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(out, "--sft", out / "sft", "--tell", "--variants", "best", "--budgets", "1,4", *words)


def refused(done: subprocess.CompletedProcess[str], told: str) -> None:
    assert done.returncode == 1 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1, (
        done.stderr
    )
    assert told in done.stderr


def test_what_holds_the_adapter_to_begin_with_is_not_deleted(played: Path) -> None:
    refused(run(played, "--sft", played / "sft", "--variants", "best", "--fresh"), "--fresh would delete ")
    assert (played / "sft" / "adapter_config.json").is_file() and (played / "evaluate" / "best.jsonl").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--budgets", "1,,4"), "--budgets are numbers from 1 on with commas between, not '1,,4'"),
        (("--budgets", "0"), "--budgets are numbers"),
        (("--split", "nonsense"), "--split is heldout, off_grid, train or all, not 'nonsense'"),
        (("--from", "/nonexistent"), "there is no record file /nonexistent"),
    ],
)
def test_what_cannot_be_told_leaves_what_was_told(words: tuple[str, ...], told: str, played: Path) -> None:
    (played / "evaluation.md").write_text("old")
    refused(tell(played, *words), told)
    assert (played / "evaluation.md").read_text() == "old"


def test_where_nothing_was_played_nothing_is_told(played: Path) -> None:
    for file in (played / "evaluate").iterdir():
        file.write_text("cut off")
    done = tell(played)
    assert done.returncode == 1 and "holds nothing that was played" in done.stderr
    assert not (played / "evaluation.md").exists()
    mistyped = played.parent / "mistyped"
    refused(run(mistyped, "--sft", played / "sft", "--tell"), "mistyped holds nothing that was played")
    assert not mistyped.exists()


def test_what_was_played_is_told_against_the_record_that_it_was_played_on(played: Path) -> None:
    """A record that grows, or families that do, must not move a table that documents quote."""
    kept = played / "evaluate" / "optima.json"
    document = json.loads(kept.read_text())
    first = tell(played)
    assert first.returncode == 0, first.stderr
    of = next(one for one in document["shapes"] if one["is_complete"])
    of["best"] *= 2
    kept.write_text(json.dumps(document))
    assert tell(played).stdout != first.stdout
    for damage, why in (('{"device"', "is not JSON"), (json.dumps({**document, "shapes": [of, of]}), "there twice")):
        kept.write_text(damage)
        refused(tell(played), why)
    of["best"] = -1.0
    kept.write_text(json.dumps(document))
    refused(tell(played), "at least 0")
    of["best"] = 1.0
    kept.write_text(json.dumps({**document, "shapes": document["shapes"][:3]}))
    assert tell(played).returncode == 0
    assert len(json.loads(kept.read_text())["shapes"]) == len(document["shapes"]), "the rest is of today's record"
    newer = kept.stat().st_mtime + 5
    os.utime(played / "evaluate" / "best.jsonl", (newer, newer))
    assert tell(played).returncode == 0 and kept.stat().st_mtime != newer - 5, "played anew, told anew"
    kept.unlink()
    again = tell(played)
    assert again.returncode == 0 and kept.is_file(), "of today's record"
    assert tell(played).stdout == again.stdout


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("best/training.json", None, "best has no training.json"),
        ("best/adapter_config.json", None, "best has no adapter_config.json"),
        ("best/adapter_model.safetensors", None, "best holds no adapter's weights"),
        ("sft/training.json", None, "sft has no training.json"),
        ("best/training.json", "[]", "is damaged"),
        ("best/metrics.jsonl", "[]\n", "is damaged"),
        ("sft/metrics.jsonl", '{"step"', "is damaged"),
    ],
)
def test_a_damaged_training_is_not_shipped(file: str, content: str | None, told: str, played: Path) -> None:
    path = played / file
    path.unlink() if content is None else path.write_text(content)
    (played / "evaluation.json").write_text("{}")
    with pytest.raises(TrainingError, match=told):
        package(played, {"sft": played / "sft", "best": played / "best"}, [], {})
    assert not (played / "adapter.new").exists() and not (played / "adapter").exists()


@pytest.mark.parametrize("content", ["[1, 2]", '{"best": 3}', "{"])
def test_stages_that_are_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text(content)
    with pytest.raises(Failed, match=r"stages.json is damaged: take another --out"):
        Stages(tmp_path).open(False)


def test_a_file_in_the_place_of_the_folder_makes_way(played: Path) -> None:
    (played / "adapter").write_text("in the way")
    done = tell(played, "--package", "best")
    assert done.returncode == 0, done.stderr
    assert (played / "adapter" / "1-sft-training.json").is_file()
