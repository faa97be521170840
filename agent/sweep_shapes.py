"""Which shapes a sweep goes over: the paper's grid, a CSV, a language model's layers, or what a recording has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agent.errors import UsageError
from agent.files import read_text
from tools.hgemm import ShapeError, grid, hgemm
from tools.paths import configs_dir
from tools.records import Task
from tools.shapes import Shape, parse_shapes_csv
from tools.validation import first_error

Note = Callable[[str], None]


class Layer(BaseModel):
    """One GEMM of a model: the output and input width of its weight."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    N: int = Field(ge=1)
    K: int = Field(ge=1)


Models = Mapping[str, Mapping[str, Layer]]


def load_models(path: Path | None = None) -> dict[str, dict[str, Layer]]:
    """``configs/models.yaml``: model → layer → sizes. Raises UsageError."""
    import yaml

    path = path or configs_dir() / "models.yaml"
    try:
        data = yaml.safe_load(read_text(path, "the file of models", 1 << 20))
        return TypeAdapter(dict[str, dict[str, Layer]]).validate_python(data)
    except (yaml.YAMLError, ValidationError, RecursionError) as error:
        why = first_error(error) if isinstance(error, ValidationError) else " ".join(str(error).split())
        raise UsageError(f"{path} is not a file of models (model: {{layer: {{N: …, K: …}}}}): {why[:300]}") from error


def model_shapes(models: Models, name: str, batches: Sequence[int]) -> list[Shape]:
    """Every layer at every batch (M), smallest batch first; layers of equal size once. Raises UsageError."""
    if name not in models:
        raise UsageError(f"there is no model '{name}'; there are {', '.join(models)}")
    if not batches:
        raise UsageError("a model's shapes need --batch, the numbers of tokens: for example --batch 1,16,4096")
    shapes = {(m, layer.N, layer.K): None for m in batches for layer in models[name].values()}
    return list(shapes)


def parse_batches(text: str) -> list[int]:
    """``"1,16,4096"`` → [1, 16, 4096], repeats dropped. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 11 and 0 < int(part) < 2**31 for part in parts):
        raise UsageError(f"'{text[:80]}' are no batches: give positive integers, for example --batch 1,16,4096")
    return list(dict.fromkeys(int(part) for part in parts))


def csv_shapes(path: Path, note: Note) -> list[Shape]:
    """A user's file; each repeated line is told to ``note``. Raises ShapeError with the file and line."""
    repeats: list[tuple[int, Shape]] = []
    shapes = parse_shapes_csv(path, lambda line, shape: repeats.append((line, shape)))
    for line, shape in repeats[:5]:
        note(f"{path} line {line} repeats {'x'.join(map(str, shape))}: it is swept once")
    if len(repeats) > 5:
        note(f"{path} has {len(repeats) - 5} more repeats")
    return shapes


def choose(
    *,
    grid_name: str | None,
    csv: Path | None,
    model: str | None,
    batches: str | None,
    recorded: Sequence[Task] | None,
    accumulate: Literal["float32", "float16"],
    limit: int | None,
    note: Note,
) -> list[Task]:
    """The tasks of exactly one shape set. ``recorded`` is what a replay device has, where ``--records`` asked for it.
    Raises UsageError or ShapeError for a set that is unknown, empty or not unique."""
    given = [grid_name is not None, csv is not None, model is not None, recorded is not None]
    if sum(given) != 1:
        raise UsageError("give exactly one set of shapes: --grid paper, --shapes FILE, --model NAME or --records")
    if batches is not None and model is None:
        raise UsageError("--batch goes with --model: for example --model llama3-70b --batch 1,16,4096")
    if recorded is not None:
        tasks = [task for task in recorded if task.op == "hgemm" and task.accumulate == accumulate]
    else:
        tasks = [hgemm(*shape, accumulate=accumulate) for shape in _shapes(grid_name, csv, model, batches, note)]
    if not tasks:
        raise UsageError("the set of shapes is empty: there is nothing to sweep")
    return tasks[:limit]


def _shapes(grid_name: str | None, csv: Path | None, model: str | None, batches: str | None, note: Note) -> list[Shape]:
    if csv is not None:
        return csv_shapes(csv, note)
    if model is not None:
        return model_shapes(load_models(), model, parse_batches(batches) if batches else [])
    if grid_name != "paper":
        raise UsageError(f"there is no grid '{grid_name}'; there is --grid paper, the 1000 shapes of CUDA-L2")
    return grid()


__all__ = ["Layer", "ShapeError", "choose", "csv_shapes", "load_models", "model_shapes", "parse_batches"]
