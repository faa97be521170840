"""Files that somebody else wrote: none of them blocks, fills the memory or gives a traceback."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.errors import UsageError
from agent.files import read_text as of_a_user
from agent.reporting.source import load as load_measured
from memory.store import Store, StoreError
from tools.device import DeviceBroken
from tools.hgemm import ShapeError
from tools.record_file import RecordReader
from tools.shapes import parse_shapes_csv
from tools.text_files import UnreadableFile, read_json, read_text
from training.errors import TrainingError
from training.evaluate_cache import read_cells

LIMIT = 1 << 16


def pipe(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 << 30)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist"),
        (Path.mkdir, "is a folder, not a file"),
        (pipe, "is a pipe or a device"),
        (lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device"),
        (lambda path: path.symlink_to(path), "cannot be read"),
        (sparse, "is larger than 64 KiB"),
        (lambda path: path.write_bytes(b"\xff\xfe\0"), "is not a text file"),
    ],
)
def test_what_is_not_read(make: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(UnreadableFile, match=words) as caught:
        read_text(path, "the kernel", LIMIT)
    assert str(caught.value).startswith(f"the kernel {path} ") and "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=words):
        of_a_user(path, "the kernel", LIMIT)


@pytest.mark.parametrize("name", ["a\0b", "\udcff\0", "x" * 300])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UnreadableFile):
        read_text(Path(name), "the kernel", LIMIT)


def test_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("\ufeffa\r\nb\rü\n".encode())
    assert read_text(tmp_path / "file", "it", LIMIT) == "a\nb\nü\n"
    (tmp_path / "full").write_text("x" * LIMIT)
    assert len(read_text(tmp_path / "full", "it", LIMIT)) == LIMIT


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1,", "is not JSON: .* line 1 column"),
        ("", "is not JSON"),
        ("[" * 20_000, "nested too deeply"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested too deeply"),
        ("1" * 5000, "number of too many digits"),
    ],
)
def test_what_is_not_json(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(UnreadableFile, match=words):
        read_json(tmp_path / "file", "the launch spec", LIMIT)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_whoever_opens_a_users_file_does_not_wait_for_a_pipe(tmp_path: Path, what: str) -> None:
    path = Path(what)
    if what == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    openers: list[Callable[[Path], object]] = [
        RecordReader,
        Store,
        lambda path: Store(path, read_only=True),
        parse_shapes_csv,
        read_cells,
        load_measured,
    ]
    for opener in openers:
        with pytest.raises(
            (DeviceBroken, StoreError, ShapeError, TrainingError, UsageError),
            match="is a pipe or a device, not a regular file",
        ):
            opener(path)
