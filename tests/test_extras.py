"""The commands that a user is told to type: they name this Python, the tested versions and this checkout."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from retrieval.errors import RetrievalError
from retrieval.minilm import MiniLm
from tools.extras import install_command, install_packages, restore_command
from tools.toolchain import HOW_TO_INSTALL

ROOT = Path(__file__).resolve().parent.parent
PIP = f"{shlex.quote(sys.executable)} -m pip install"
#: An install line without the Python it is for; what a person types in a shell of their own is in docs/ and the README.
BARE = re.compile(r"(?<!-m )pip install")


def test_a_checkout_brings_its_tested_versions() -> None:
    assert shlex.split(install_command("retrieval"))[1:] == [
        *("-m", "pip", "install", "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[retrieval]")
    ]
    assert shlex.split(install_packages("--no-deps", "a>=1,<2"))[-2:] == ["--no-deps", "a>=1,<2"]
    assert install_packages("a").startswith(f"{PIP} -c ")


def test_without_a_checkout_everything_is_by_name(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("__init__.py", "extras.py"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    code = (
        "from tools.extras import *\nprint(install_command('ui'), install_packages('a'), restore_command(), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"{PIP} 'hgemm-agent[ui]'",
        f"{PIP} a",
        f"{PIP} --force-reinstall --no-deps hgemm-agent",
    ]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="records come back from git only in a checkout of it")
def test_damaged_records_come_back_from_git() -> None:
    assert shlex.split(restore_command()) == ["git", "-C", str(ROOT), "checkout", "--", "records"]


def test_every_command_for_a_python_package_is_made_here() -> None:
    for name, command in HOW_TO_INSTALL.items():
        assert command.startswith((PIP, "apt-get install ")), name
    packages = ("agent", "inspection", "training", "policy", "memory", "retrieval", "tools")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if path != ROOT / "tools" / "extras.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if BARE.search(line)
    ]
    assert not found


def test_an_index_without_its_extra_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=re.escape(install_command("retrieval"))):
        MiniLm(tmp_path)
