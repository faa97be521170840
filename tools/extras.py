"""The exact command that adds an optional part of this package, or another package, to the Python that is running."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def install_command(extra: str) -> str:
    """From the checkout with its tested versions where there is one, by name otherwise."""
    if _is_checkout():
        return f"{_pip()} -e {shlex.quote(f'{_ROOT}[{extra}]')}"
    return f"{_pip()} {shlex.quote(f'hgemm-agent[{extra}]')}"


def install_packages(*arguments: str) -> str:
    """Of other packages: requirements, and options of `pip install`; the tested versions where there is a checkout."""
    return f"{_pip()} {shlex.join(arguments)}"


def restore_command() -> str:
    """That brings back the records which travel with this package."""
    if (_ROOT / ".git").exists():
        return f"git -C {shlex.quote(str(_ROOT))} checkout -- records"
    return install_packages("--force-reinstall", "--no-deps", "hgemm-agent")


def _pip() -> str:
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    return f"{pip} -c {shlex.quote(str(_ROOT / 'constraints.txt'))}" if _is_checkout() else pip


def _is_checkout() -> bool:
    return (_ROOT / "pyproject.toml").is_file() and (_ROOT / "constraints.txt").is_file()
