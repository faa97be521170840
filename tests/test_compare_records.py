"""scripts/compare_records.py: what two record files have in common, and files that do not compare."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest
from records_kit import make_record

from scripts import compare_records


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_records.py", *words])
    compare_records.main()


def test_a_file_agrees_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_record(tmp_path / "a.sqlite", (64, 64, 64))
    run(monkeypatch, str(path), str(path), "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["offline/screen"]["common"] > 0
    assert all(row["median"] == row["worst"] == 0 and row["within_1"] == 1 for row in found.values())


def test_another_gpu_is_refused_and_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_record(tmp_path / "a.sqlite", (64, 64, 64))
    other = tmp_path / "b.sqlite"
    shutil.copy(path, other)
    with sqlite3.connect(other) as db:
        stated = json.loads(db.execute("SELECT value FROM meta WHERE key = 'device'").fetchone()[0])
        db.execute("UPDATE meta SET value = ? WHERE key = 'device'", (json.dumps({**stated, "name": "NVIDIA H100"}),))
    with pytest.raises(SystemExit, match="NVIDIA H100, protocol 2 do not compare"):
        run(monkeypatch, str(path), str(other))
    with pytest.raises(SystemExit, match="there is no record file"):
        run(monkeypatch, str(path), str(tmp_path / "none.sqlite"))
