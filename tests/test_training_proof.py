"""The recipe of scripts/train_adapter.py: from records to an adapter, its tables and its card in one command that can
be stopped; and the pure parts of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from records_kit import ROOT, make_record
from training_kit import OF_EVERY_SPLIT, needs_train

from tools.hgemm import hgemm
from training.card import Run, Stage, card
from training.evaluate import Cell
from training.evaluate_cache import appending, read_cells
from training.proof import SEARCHES, cells_of, optima_of, tables_of, write_evaluation
from training.splits import split_of


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("records") / "toy.sqlite", *OF_EVERY_SPLIT)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def command(out: Path, base: Path, record: Path, *words: str) -> list[str]:
    given = ("--out", str(out), "--scale", "tiny", "--base", str(base), "--device", "cpu", "--from", str(record))
    return [sys.executable, str(ROOT / "scripts" / "train_adapter.py"), *given, *words]


def environ(home: Path) -> dict[str, str]:
    return {**os.environ, "HGEMM_AGENT_HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(out: Path, base: Path, record: Path, *words: str) -> subprocess.CompletedProcess[str]:
    given = command(out, base, record, *words)
    return subprocess.run(given, capture_output=True, text=True, env=environ(out.parent), timeout=280, check=False)


def cell(policy: str, ratios: tuple[float | None, ...], quota: int, task: str, seed: int = 0) -> Cell:
    key = f"{policy}{ratios}{task}"
    return Cell(key=key, policy=policy, task_id=task, seed=seed, quota=quota, budget=len(ratios), ratios=ratios)


# --- pure parts -------------------------------------------------------------------------------------------------------


def test_a_rows_cells_are_those_of_its_own_policy_and_the_later_ones(tmp_path: Path) -> None:
    files = {"searches": tmp_path / "s", "sft": tmp_path / "a", "sft, no shortlist": tmp_path / "b"}
    with appending(files["searches"]) as file:
        file.add(cell("random", (0.1,), 0, "t"))
        file.add(cell("search", (0.2,), 0, "t"))
    with appending(files["sft"]) as file:
        file.add(cell("shortlist", (0.9,), 0, "t"))
        file.add(cell("sft", (0.3,), 1, "t"))
        file.add(cell("sft", (0.4,), 1, "t"))  # of an adapter that was trained anew
    with appending(files["sft, no shortlist"]) as file:
        file.add(cell("sft", (0.5,), 1, "t"))
    found = cells_of(files)
    assert {name: [one.ratios for one in own] for name, own in found.items()} == {
        "random": [(0.1,)],
        "search": [(0.2,)],
        "sft": [(0.4,)],
        "sft, no shortlist": [(0.5,)],
    }


@pytest.mark.parametrize("is_longer_first", [True, False])
def test_a_budget_is_told_by_no_cell_of_fewer_evaluations(record: Path, tmp_path: Path, is_longer_first: bool) -> None:
    task, other = hgemm(64, 64, 128).task_id, hgemm(72, 80, 96).task_id
    files = {"searches": tmp_path / "s", "sft": tmp_path / "a"}
    for row, name, quota in (("searches", "search", 0), ("sft", "sft", 4)):
        played = [cell(name, (0.1,) * 7 + (0.5,), quota, task), cell(name, (0.1,) * 4, quota, task)]
        with appending(files[row]) as file:
            for one in played if is_longer_first else played[::-1]:
                file.add(one)
            file.add(cell(name, (0.1,) * 4, quota, other))
    cells = cells_of(files)
    assert {name: [one.budget for one in own] for name, own in cells.items()} == {"search": [8, 4], "sft": [8, 4]}
    _, document = tables_of(cells, optima_of(cells, record), ["heldout", "off_grid"], [4, 8])
    for row in document["heldout"]["search"]:
        assert row["regret"]["8"]["mean"] < row["regret"]["4"]["mean"]
    for row in document["off_grid"]["search"]:
        assert row["regret"]["4"] is not None and row["regret"]["8"] is None


def test_cells_that_tell_no_budget_are_played_again(tmp_path: Path) -> None:
    old = json.loads(cell("sft", (0.3,), 1, "t").model_dump_json())
    del old["budget"]
    (tmp_path / "a").write_text(json.dumps(old) + "\n")
    assert read_cells(tmp_path / "a") == {} and cells_of({"sft": tmp_path / "a"}) == {}


def test_every_search_is_played_that_can_be_asked_for() -> None:
    from agent import evaluate_cli

    assert SEARCHES == evaluate_cli.SEARCHES


def test_tables_are_of_each_split_and_compare_models_with_the_list_and_with_imitation(
    record: Path, tmp_path: Path
) -> None:
    task_of = {split_of(hgemm(*shape)): hgemm(*shape).task_id for shape in OF_EVERY_SPLIT}
    assert set(task_of) == {"train", "heldout", "off_grid"}
    cells = {
        "search": [cell("search", (0.5,), 0, task_of["heldout"])],
        "shortlist": [cell("shortlist", (0.6,), 0, task_of["heldout"])],
        "sft": [cell("sft", (0.7,), 1, task_of["heldout"]), cell("sft", (0.7,), 1, task_of["off_grid"])],
        "sft + grpo": [cell("sft + grpo", (0.8,), 1, task_of["heldout"])],
    }
    tables, document = tables_of(cells, optima_of(cells, record), ["heldout", "off_grid"], [1])
    write_evaluation(tmp_path, tables, document)
    assert list(tables) == [
        "heldout: 1 shapes with a known optimum",
        "off_grid: 1 shapes with a known optimum",
    ]
    heldout = json.loads((tmp_path / "evaluation.json").read_text())["heldout"]
    means = {row["policy"]: row["regret"]["1"]["mean"] for row in heldout["search"]}
    apart = {row["policy"]: row["difference"]["1"]["mean"] for row in heldout["sft"]}
    assert apart == {"sft + grpo": pytest.approx(means["sft + grpo"] - means["sft"])}
    assert {row["policy"] for row in heldout["shortlist"]} == {"sft", "sft + grpo"}
    text = (tmp_path / "evaluation.md").read_text()
    assert "| sft + grpo |" in text and "Regret less that of shortlist" in text and "off_grid" in text


def test_the_card_says_what_was_done_and_nothing_that_is_not_known() -> None:
    settings = {"method": "lora", "epochs": 2.0, "learning_rate": 2e-4, "max_steps": None, "kl": 0.02,
                "credit": "turn", "scale": "all"}  # fmt: skip
    made = {
        "kind": "sft",
        "base": {"name": "tiny", "fingerprint": "f00d"},
        "rows": {"file": "rows.jsonl", "sha256": "ab" * 32},
        "settings": {"sft": settings, "lora": {"rank": 16, "alpha": 32, "targets": "all-linear"}},
        "result": {"rows": 10, "steps": 4, "elapsed_s": 2.0, "left_out": {"held out": 3}},
        "formats": {"prompt": 2},
        "versions": {"torch": "2", "trl": ""},
        "commit": "",
    }
    metrics = [
        {"step": 1, "loss": 2.0, "elapsed_s": 1.0, "model_fraction": 0.5},
        {"step": 4, "loss": 1.0, "elapsed_s": 3.0, "model_fraction": 0.9},
    ]
    told = card(
        "An adapter", [Run("sft", made, metrics)], [Stage("sft", 2.4, ["agent", "train"])], {"x": "| t |"}, 10**6
    )
    for words in ("1.0 MB", "3 held out", "| learning_rate | 0.0002 |", "| credit | turn |", "| scale | all |",
                  "| steps a second | 2.00 |", "| 80 % |",
                  "| loss, first → last | 2 → 1 |", "    agent train", "### x\n\n| t |", "commit unknown"):  # fmt: skip
        assert words in told
    assert "max_steps" not in told and "eval_loss" not in told and "trl " not in told


# --- the whole of it --------------------------------------------------------------------------------------------------


@needs_train
@pytest.mark.slow
def test_from_records_to_an_adapter_and_its_card(base: Path, record: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--jobs", "2", "--parts", "shortlist")
    done = run(out, base, record, *words)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (out / "adapter").iterdir()) == [
        "1-sft-metrics.jsonl", "1-sft-training.json", "MODEL_CARD.md", "adapter_config.json",
        "adapter_model.safetensors", "evaluation.json", "metrics.jsonl", "training.json",
    ]  # fmt: skip
    for path in (out / "adapter").iterdir():
        text = path.read_text(errors="replace")
        assert str(tmp_path) not in text and str(base.parent) not in text and str(record.parent) not in text, path.name
    document = json.loads((out / "evaluation.json").read_text())
    rows = {row["policy"]: row for row in document["heldout"]["search"]}
    assert list(rows) == [
        "random",
        "search",
        "search-records",
        "model",
        "shortlist",
        "base",
        "sft",
        "sft + grpo",
        "sft + grpo, no shortlist",
    ]
    assert all(row["invalid"] == 0 and row["regret"]["4"] is not None for row in rows.values())
    assert set(document) == {"device", "budgets", "heldout", "off_grid"}
    told = (out / "adapter" / "MODEL_CARD.md").read_text()
    assert "| collect1 |" in told and "agent train grpo collected1.jsonl --out grpo1 --base tiny" in told
    again = run(out, base, record, *words)
    assert again.returncode == 0 and again.stdout.count("finished before") == 5
    other = run(out, base, record, *words, "--seed", "1")
    assert other.returncode == 1 and "export was asked otherwise: take another --out, or --fresh" in other.stderr


@needs_train
@pytest.mark.slow
def test_stopped_it_goes_on_from_the_checkpoint(base: Path, record: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    long = ("--until", "sft", "--set", "sft.max_steps=5000", "--set", "sft.eval_rows=0")
    process = subprocess.Popen(
        command(out, base, record, *long), env=environ(tmp_path), stderr=subprocess.PIPE, text=True
    )
    metrics = out / "sft" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.is_file() and len(metrics.read_text().splitlines()) > 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143 and "the same command goes on" in told and "Traceback" not in told
    (checkpoint,) = (out / "sft" / "checkpoints").iterdir()
    assert int(checkpoint.name.rpartition("-")[2]) >= 3
    stages = json.loads((out / "stages.json").read_text())
    assert stages["export"]["finished"] and not stages["sft"]["finished"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--from", "/nowhere.sqlite"), "export: "),
        (("--parts", "words"), "--parts are of exemplars, profiles, shortlist, not 'words'"),
        (("--rounds", "-1"), "--rounds is 0 or more"),
    ],
)
def test_what_cannot_be_is_one_sentence(words: tuple[str, ...], told: str, record: Path, tmp_path: Path) -> None:
    done = run(tmp_path / "run", tmp_path, record, *words)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert told in done.stderr and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
