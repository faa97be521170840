"""Regimes, the spread and shape files."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path

import pytest

from tools.hgemm import ShapeError, grid, hgemm
from tools.shapes import HEAVY_MNK, LANDMARKS, MAX_HEAVY, parse_shapes_csv, regime, spread


def test_regimes_divide_the_grid_as_counted_by_hand() -> None:
    # The counts of the table of regimes from which the families were planned.
    assert Counter(regime(hgemm(*shape)) for shape in grid()) == {
        "tiny": 27,
        "launch-bound": 341,
        "few-tiles": 201,
        "memory-bound": 98,
        "compute-short": 104,
        "compute-long": 229,
    }


@pytest.mark.parametrize("n", [120, 128, 200])
def test_a_spread_holds_the_landmarks_and_every_regime(n: int) -> None:
    shapes = spread(n)
    assert len(shapes) == len(set(shapes)) == n
    assert set(LANDMARKS) <= set(shapes) <= set(grid())
    assert sum(prod(shape) >= HEAVY_MNK for shape in shapes) == MAX_HEAVY
    assert min(Counter(regime(hgemm(*shape)) for shape in shapes).values()) >= 14


def test_a_prefix_of_the_spread_has_breadth() -> None:
    assert len({regime(hgemm(*shape)) for shape in spread()[:6]}) == 6
    assert all(prod(shape) >= HEAVY_MNK for shape in spread()[-MAX_HEAVY:])


def test_the_whole_grid_is_a_spread() -> None:
    assert set(spread(1000)) == set(grid())
    with pytest.raises(ValueError, match="1 to 1000"):
        spread(1001)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        "64,64,128\n4096,4096,64\n",
        "M,N,K\n64,64,128\n\n# comment\n4096,4096,64\n64,64,128\n",
        "\ufeffname,k,m,n\r\na,128,64,64\r\nb,64,4096,4096\r\n",
        "64x64x128\n4096 , 4096 , 64\n",
    ],
    ids=["plain", "header", "named-columns-crlf-bom", "with-x"],
)
def test_shape_files(tmp_path: Path, text: str) -> None:
    assert parse_shapes_csv(write(tmp_path / "s.csv", text)) == [(64, 64, 128), (4096, 4096, 64)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("M,N,K\n64,64,64\n64,0,64\n", "s.csv line 3: '64,0,64' is not a shape"),
        ("64,64,x\n", "s.csv line 1"),
        ("64,64,64\n64,64\n", "s.csv line 2: '64,64' has 2 columns"),
        ("", "holds no shapes"),
        ("M,N,K\n", "holds no shapes"),
    ],
)
def test_shape_files_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        parse_shapes_csv(write(tmp_path / "s.csv", text))


def test_shape_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="does not exist"):
        parse_shapes_csv(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ShapeError, match="is not a text file"):
        parse_shapes_csv(tmp_path / "bytes.csv")
