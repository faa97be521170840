"""What a family's manifest is read from: its YAML and its CUDA source with local includes, within bounds.

A source goes into prompts and onto other machines, so it and everything that it includes must lie in the family's own
folder or in ``kernels/include``, wherever symbolic links lead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tools.sourcecheck import MAX_SOURCE_BYTES
from tools.text_files import UnreadableFile, read_text

MAX_MANIFEST_BYTES = 256 << 10
MAX_NODES = 20_000  # of a manifest, each alias counted as what it stands for
MAX_DEPTH = 32
MAX_INCLUDE_DEPTH = 32

_LOCAL_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)


class ManifestError(ValueError):
    """A manifest is broken; the message names the file and what to change."""


class _Loader(yaml.SafeLoader):
    """Refuses a field that is given twice, where YAML takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest's fields. Raises ManifestError."""
    try:
        text = read_text(path, "the manifest", MAX_MANIFEST_BYTES)
        data = yaml.load(text, _Loader)
    except UnreadableFile as error:
        raise ManifestError(str(error)) from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ManifestError(f"{path} is not valid YAML: {line}{error.problem or 'it cannot be read'}") from error
    except yaml.YAMLError as error:
        raise ManifestError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise ManifestError(f"{path} is nested too deeply to be a manifest") from error
    except (ValueError, OverflowError) as error:  # a number or date that Python cannot make
        raise ManifestError(f"{path} holds a value that is no number or date: {str(error)[:80]}") from error
    if not isinstance(data, dict):
        raise ManifestError(f"{path} must be a mapping of manifest fields")
    if not all(isinstance(name, str) for name in data):
        raise ManifestError(f"{path} must be a mapping of manifest fields, whose names are words")
    _check_size(data, path)
    return data


def _check_size(data: dict[str, Any], path: Path) -> None:
    """Aliases make a few lines stand for billions of values, or a value contain itself."""
    nodes, waiting = 0, [(0, data)]
    while waiting:
        depth, value = waiting.pop()
        nodes += 1
        if nodes > MAX_NODES or depth > MAX_DEPTH:
            raise ManifestError(f"{path} has more than {MAX_NODES} values or is nested more than {MAX_DEPTH} deep")
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | set | tuple) else ()
        waiting += [(depth + 1, item) for item in inner]


def inline_includes(path: Path, search: tuple[Path, ...]) -> str:
    """The text of ``path`` with every ``#include "local"`` replaced by that file, once. Angle includes stay. ``search``
    are the folders that it may come from. Raises ManifestError."""
    return _inlined(path, search, tuple(folder.resolve() for folder in search), set(), 0)


def _inlined(path: Path, search: tuple[Path, ...], roots: tuple[Path, ...], seen: set[Path], depth: int) -> str:
    if depth > MAX_INCLUDE_DEPTH:
        raise ManifestError(f"{path} is included more than {MAX_INCLUDE_DEPTH} levels deep: include fewer at a time")
    text = _source_text(path, roots, seen)

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        plain = ".." not in Path(name).parts and not Path(name).is_absolute()
        found = next((d / name for d in search if _is_file(d / name)), None) if plain else None
        if found is None:
            raise ManifestError(f"{path}: cannot find the included file '{name}' beside it or in kernels/include")
        if found.resolve() in seen:
            return ""
        return _inlined(found, search, roots, seen, depth + 1)

    text = _LOCAL_INCLUDE.sub(replace, text).replace("#pragma once\n", "")
    if len(text) > MAX_SOURCE_BYTES:
        raise ManifestError(f"{path} with all that it includes is larger than {MAX_SOURCE_BYTES >> 10} KiB")
    return text


def _source_text(path: Path, roots: tuple[Path, ...], seen: set[Path]) -> str:
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle; a NUL in the name
        raise ManifestError(f"the kernel source {str(path)!r} is not the name of a file") from error
    if not any(real.is_relative_to(root) for root in roots):
        raise ManifestError(
            f"the kernel source {path} lies outside kernels/{roots[0].name} and kernels/include: sources and what they "
            "include must lie there themselves, also where links lead"
        )
    seen.add(real)
    try:
        return read_text(path, "the kernel source", MAX_SOURCE_BYTES)
    except UnreadableFile as error:
        raise ManifestError(str(error)) from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long a name, no permission
        return False
