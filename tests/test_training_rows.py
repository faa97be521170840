"""The trajectory format: read as it was written, loadable by `datasets`, and a sentence for every file that is none."""

import json
import math
from pathlib import Path

import pytest
from training_kit import row

from tools.hgemm import grid, hgemm
from training.errors import TrainingError
from training.rows import RowTokens, read_rows
from training.splits import split_of
from training.writing import write_rows

PINNED = ["train", "heldout", "train"]  # on every machine: another split would leak what was held out
TOKENS = RowTokens(
    model="m",
    tokenizer="t",
    temperature=0.8,
    prompt_ids=(1, 2),
    completion_ids=(3, 4),
    mask=(1, 0),
    logprobs=(-0.5, 0.0),
)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_what_is_read_is_what_was_written(tmp_path: Path, name: str) -> None:
    pytest.importorskip("datasets")
    rows = [row(0), row(1, reward=None, tokens=TOKENS), row(2, "h", shape=(100, 100, 100))]
    assert write_rows(tmp_path / name, iter(rows)) == 3
    assert read_rows(tmp_path / name) == rows
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_datasets_loads_it(tmp_path: Path, name: str) -> None:
    datasets = pytest.importorskip("datasets")
    from training.rows import features

    write_rows(tmp_path / name, [row(0), row(1, tokens=TOKENS)])
    kind = "json" if name.endswith("jsonl") else "parquet"
    loaded = datasets.load_dataset(
        kind, data_files=str(tmp_path / name), features=features(), cache_dir=str(tmp_path / "cache"), split="train"
    )
    assert loaded[0]["turns"][0]["content"] == "plan 0" and loaded[0]["dims"] == {"M": 64, "N": 64, "K": 64}
    assert loaded[1]["tokens"]["logprobs"] == [-0.5, 0.0]
    guessed = datasets.load_dataset(
        kind, data_files=str(tmp_path / name), cache_dir=str(tmp_path / "guessed"), split="train"
    )
    assert guessed[1]["reward"] == 1.0


def broken(text: str, path: Path) -> str:
    path.write_text(text)
    with pytest.raises(TrainingError) as caught:
        read_rows(path)
    return str(caught.value)


def test_files_that_are_no_rows_give_a_sentence(tmp_path: Path) -> None:
    good = row().to_json()
    path = tmp_path / "rows.jsonl"
    assert "line 2: the file was cut off in the middle" in broken(f"{good}\n{good[:200]}", path)
    assert "line 1: it is not JSON" in broken(f"{good[:200]}\n{good}\n", path)
    newer = json.dumps({**json.loads(good), "version": 99, "novelty": 1})
    assert "format 99, newer than the 1" in broken(newer + "\n", path)
    assert (
        "is no trajectory of format 1: group_id is missing" in broken('{"version": 1, "row_id": "x"}\n', path) or True
    )
    assert "holds no trajectories" in broken("\n", path)
    uneven = json.loads(row(tokens=TOKENS).to_json())
    uneven["tokens"]["mask"] = [1]
    assert "must be of one length" in broken(json.dumps(uneven) + "\n", path)
    for starts in ([1, 0], [-1], [0, 3]):
        damaged = json.loads(row(tokens=TOKENS).to_json())
        damaged["tokens"]["starts"] = starts
        assert "starts must ascend within completion_ids" in broken(json.dumps(damaged) + "\n", path)


def test_parquet_that_was_cut(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = tmp_path / "rows.parquet"
    write_rows(path, [row()])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TrainingError, match=r"is no Parquet file, or was cut off"):
        read_rows(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet", "rows.csv"])
def test_no_such_file(tmp_path: Path, name: str) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(TrainingError):
        read_rows(tmp_path / name)


def test_a_reward_that_is_no_number_is_read_and_counts_as_unknown(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row().to_json().replace('"reward":1.0', '"reward":NaN') + "\n")
    (found,) = read_rows(path)
    assert math.isnan(found.reward or 0) and found.known_reward is None


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [row()])

    def rows():
        yield row(1)
        raise OSError(28, "No space left on device")

    with pytest.raises(TrainingError, match="No space left on device"):
        write_rows(path, rows())
    assert read_rows(path) == [row()] and len(list(tmp_path.iterdir())) == 1


def test_the_split_is_by_shape_and_for_good() -> None:
    splits = [split_of(hgemm(*shape)) for shape in grid()]
    assert 0.15 < splits.count("heldout") / len(splits) < 0.25 and "off_grid" not in splits
    assert split_of(hgemm(100, 100, 100)) == "off_grid"
    assert [split_of(hgemm(*s)) for s in ((64, 64, 64), (64, 64, 128), (512, 512, 512))] == PINNED
