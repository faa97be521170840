"""A file that is replaced: whole or as it was, with its mode, through a link; nothing is left behind."""

import os
import stat
from pathlib import Path

import pytest

from tools.whole_files import replacing


def test_what_was_there_stays_until_the_new_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), replacing(path) as new:
        new.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    with replacing(path) as new:
        new.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "nowhere" / "a.txt"):
        pass


def test_a_new_file_is_made_like_any_other_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        for mode in (0o640, 0o600):
            with replacing(tmp_path / "a.txt") as new:
                new.write_text("text")
            assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == mode
            (tmp_path / "a.txt").chmod(0o600)
    finally:
        os.umask(umask)
