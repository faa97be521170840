"""Sets of shapes: the grid, CSV files and their mistakes, models' layers, recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agent.cli import app
from agent.errors import UsageError
from agent.sweep_shapes import choose, csv_shapes, load_models, model_shapes, parse_batches
from tools.hgemm import ShapeError, hgemm
from tools.records import Task


def pick(**given: Any) -> list[Task]:
    fields: dict[str, Any] = {
        "grid_name": None, "csv": None, "model": None, "batches": None, "recorded": None,
        "accumulate": "float32", "limit": None, "note": lambda text: None,
    }  # fmt: skip
    return choose(**{**fields, **given})


def test_the_grid_has_a_thousand_shapes() -> None:
    tasks = pick(grid_name="paper")
    assert len(tasks) == len({task.task_id for task in tasks}) == 1000
    assert len(pick(grid_name="paper", limit=7)) == 7


def test_every_repeat_is_told_and_swept_once(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("M,N,K\n64,64,64\n128,64,64\n\n# mine\n64,64,64\n")
    notes: list[str] = []
    assert csv_shapes(path, notes.append) == [(64, 64, 64), (128, 64, 64)]
    assert notes == [f"{path} line 6 repeats 64x64x64: it is swept once"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("64,64,64\n64,x,64\n", "line 2"),
        ("M,N,K\n64,64\n", "line 2"),
        ("64,64,0\n", "line 1"),
        ("", "holds no shapes"),
        ("M,N,K\n# nothing\n", "holds no shapes"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(ShapeError, match=words) as error:
        pick(csv=path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_models_layers_at_each_batch() -> None:
    shapes = model_shapes(load_models(), "llama3-70b", [1, 16])
    assert (1, 10240, 8192) in shapes and (16, 8192, 28672) in shapes, "fused QKV, down projection"
    assert len(shapes) == len(set(shapes)) == 10
    assert [m for m, _, _ in shapes] == [1] * 5 + [16] * 5


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "qwen2.5-7b", "qwen2.5-72b", "deepseek-v3"])
def test_widths_of_a_model_fit_together(name: str) -> None:
    """What enters a layer comes out of another: the hidden size is the width of most, and gate/up is twice down."""
    layers = load_models()[name]
    hidden = layers["lm_head"].K
    prefix = "dense_" if name == "deepseek-v3" else ""
    up, down = layers[f"{prefix}gate_up_proj"], layers[f"{prefix}down_proj"]
    assert (2 * down.K, hidden, hidden) == (up.N, up.K, down.N)
    assert hidden == layers["o_proj"].N
    assert all(layer.N % 8 == 0 and layer.K % 8 == 0 for layer in layers.values()), "16-byte rows"


def test_batches() -> None:
    assert parse_batches("1, 16,4096,16") == [1, 16, 4096]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one"),
        ({"grid_name": "paper", "model": "llama3-8b"}, "exactly one"),
        ({"grid_name": "small"}, "no grid 'small'"),
        ({"model": "gpt-2", "batches": "1"}, "no model 'gpt-2'; there are llama3-8b"),
        ({"model": "llama3-8b"}, "need --batch"),
        ({"model": "llama3-8b", "batches": "1,0"}, "no batches"),
        ({"model": "llama3-8b", "batches": "many"}, "no batches"),
        ({"grid_name": "paper", "batches": "1"}, "goes with --model"),
        ({"recorded": []}, "empty"),
        ({"recorded": [hgemm(64, 64, 64, "float16")]}, "empty"),
    ],
)
def test_sets_that_are_none(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pick(**given)


def test_recorded_shapes_keep_their_order() -> None:
    recorded = [hgemm(128, 64, 64), hgemm(64, 64, 64)]
    assert pick(recorded=recorded) == recorded


@pytest.mark.parametrize("text", ["a: [", "a: {b: {N: 1}}", "a: {b: {N: 0, K: 1}}", "[]"])
def test_a_broken_file_of_models(tmp_path: Path, text: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"models\.yaml"):
        load_models(path)


# --- the command ------------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["shapes", *arguments])


def test_the_shapes_of_models_are_printed_as_the_csv_that_others_take(tmp_path: Path) -> None:
    """Layers that two models share come once."""
    done = invoke("--model", "llama3-70b", "--model", "qwen2.5-72b", "--batch", "16,100")
    (tmp_path / "s.csv").write_text(done.stdout)
    models = load_models()
    wanted = {s for name in ("llama3-70b", "qwen2.5-72b") for s in model_shapes(models, name, [16, 100])}
    found = csv_shapes(tmp_path / "s.csv", lambda text: pytest.fail(text))
    assert len(found) == len(wanted) and set(found) == wanted


def test_all_models_and_the_grid() -> None:
    every = invoke("--model", "all", "--batch", "16").stdout.splitlines()
    assert len(every) == 1 + len({shape for name in load_models() for shape in model_shapes(load_models(), name, [16])})
    assert invoke("--grid", "paper").stdout.count("\n") == 1001


@pytest.mark.parametrize(
    "arguments", ["", "--grid paper --model all", "--model x --batch 1", "--model all", "--grid paper --batch 1"]
)
def test_no_set_of_shapes_is_one_sentence(arguments: str) -> None:
    done = invoke(*arguments.split())
    assert done.exit_code == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
