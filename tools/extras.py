"""The exact command that adds an optional part of this package to the Python that is running."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def install_command(extra: str) -> str:
    """From the checkout with its tested versions where there is one, by name otherwise."""
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "constraints.txt").is_file():
        root = shlex.quote(str(_ROOT))
        return f"{pip} -c {root}/constraints.txt -e '{_ROOT}[{extra}]'"
    return f"{pip} 'hgemm-agent[{extra}]'"
