"""The adapter that travels with this program, and whether it can be used here. Nothing heavy is imported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from policy.base import PolicyError
from policy.base_model import DEFAULT_BASE, base_source
from policy.settings import PolicyName
from tools.paths import adapters_dir

#: What a model in this process's Python needs (the extra ``local``).
NEEDED = ("torch", "transformers", "llguidance", "peft")
_NAME = "hgemm-smollm2-135m"


def packaged_adapter() -> Path | None:
    """Its folder; None where it was left out of the installation."""
    folder = adapters_dir() / _NAME
    return folder if (folder / "adapter_config.json").is_file() else None


def missing_packages() -> list[str]:
    return [name for name in NEEDED if find_spec(name) is None]


def default_policy() -> PolicyName:
    """``local`` where its packages, its base and the packaged adapter are there, else ``search``."""
    if packaged_adapter() is None or missing_packages():
        return "search"
    try:
        base_source(DEFAULT_BASE, None)
    except PolicyError:
        return "search"
    return "local"
