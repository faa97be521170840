"""Reads configs/published.yaml and configs/roofline.yaml: other people's numbers, with their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agent.errors import UsageError
from agent.files import read_text
from agent.reporting.model import KnownPeaks, Peaks, PublishedWork
from tools.paths import configs_dir
from tools.validation import first_error


def load_published(path: Path | None = None) -> PublishedWork:
    """Raises UsageError with the file and the field."""
    path = path or configs_dir() / "published.yaml"
    try:
        return PublishedWork.model_validate(_yaml(path))
    except ValidationError as error:
        raise UsageError(f"{path}: {first_error(error)}") from error


def load_peaks(device_name: str, path: Path | None = None) -> Peaks | None:
    """Of the first entry whose ``device`` is how the device's name begins. None for a device that is not listed."""
    path = path or configs_dir() / "roofline.yaml"
    try:
        known = KnownPeaks.model_validate(_yaml(path)).devices
    except ValidationError as error:
        raise UsageError(f"{path}: {first_error(error)}") from error
    return next((entry for entry in known if device_name.startswith(entry.device)), None)


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(read_text(path, "the file"))
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error
