"""The README keeps up with the tree, and names no command that does not exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_tree_is_the_tree() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "readme_tree.py"))
    assert script["embedded"](README) == script["tree"](), "run: python scripts/readme_tree.py --write"


def test_every_command_named_exists() -> None:
    typer = pytest.importorskip("typer")
    from agent.cli import app

    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"^ {4}agent ([\w-]+)", README, re.MULTILINE)) <= known


def test_every_script_named_exists() -> None:
    for name in re.findall(r"scripts/\w+\.py", README):
        assert (ROOT / name).is_file(), name
