"""What a recipe's run comes to (scripts/train_adapter.py): tables out of the cells that each policy's process left, and
the folder that is shipped, with its card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from policy.settings import LOCAL_QUOTA
from tools.families import load_families
from tools.records import Record, Task
from tools.replay import ReplayDevice
from tools.text_files import UnreadableFile, irregular, read_text
from tools.validation import first_problem
from training.card import Run, Stage, card
from training.errors import TrainingError
from training.evaluate import Cell
from training.evaluate_cache import read_cells
from training.evaluate_table import difference_lines, lines, table
from training.replaying import Shape, shapes_of
from training.shelf import Shelf
from training.splits import split_of
from training.writing import replacing

#: Rows of the table that are no language model's; their cells are in one file.
SEARCHES = ("random", "search", "search-records", "model", "shortlist")
ALL_SEARCHES = "searches"
#: Above the table of pruned shapes, for there the rows are not played on equal terms.
OF_PRUNED = (
    "At these shapes only likely plans are recorded. `shortlist` and the prompts of language models list no others, so "
    "that these policies hardly ever propose a plan that is not recorded; searches choose among all plans, and such a "
    "proposal costs them an evaluation. So nothing is compared with a search here."
)
OPTIMA_BYTES = 64 << 20
#: What an adapter may weigh: it travels with the repository.
ADAPTER_BYTES = 12_000_000
_WEIGHTS = "adapter_model.safetensors"
_LOGS = ("training.json", "metrics.jsonl")


def cells_of(files: Mapping[str, Path]) -> dict[str, list[Cell]]:
    """By row of the table: each file holds one policy's cells, beside those of the search that it was compared with. Of
    one that was played twice, that of the larger budget, which begins as the smaller one; of equal ones the later."""
    found: dict[str, dict[tuple[str, int, int], Cell]] = {}
    for row, path in files.items():
        name = row.partition(", ")[0]
        for cell in read_cells(path).values():
            if row == ALL_SEARCHES or cell.policy == name:
                policy = cell.policy if row == ALL_SEARCHES else row
                at = (cell.task_id, cell.seed, cell.quota)
                own = found.setdefault(policy, {})
                if at not in own or own[at].budget <= cell.budget:
                    own[at] = cell.model_copy(update={"policy": policy})
    return {policy: list(own.values()) for policy, own in found.items()}


class Optimum(Record):
    task: Task
    best: float = Field(ge=0, lt=1000, allow_inf_nan=False)
    is_complete: bool


class Optima(Record):
    """The best that was recorded at each shape that was played, and whether every plan was."""

    device: str
    shapes: tuple[Optimum, ...]

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len({one.task.task_id for one in self.shapes}) < len(self.shapes):
            raise ValueError("a shape is there twice")
        return self


def optima_of(cells: Mapping[str, Sequence[Cell]], record: Path) -> Optima:
    """Raises DeviceBroken for a record that cannot be read."""
    played = {cell.task_id for own in cells.values() for cell in own}
    device = ReplayDevice(record)
    try:
        tasks = [task for task in device.records.tasks() if task.task_id in played]
        shapes = shapes_of(Shelf(device.records, load_families()), tasks)
        found = tuple(Optimum(task=s.task, best=s.best, is_complete=s.is_complete) for s in shapes)
        return Optima(device=device.info.label, shapes=found)
    finally:
        device.close()


def kept_optima(files: Iterable[Path], cells: Mapping[str, Sequence[Cell]], record: Path) -> Optima:
    """As they were kept beside the ``files`` of cells: a record that has grown since, or families that have, must not
    move what was played before. They are made where there are none, anew where a file of cells is newer, and get what
    they lack of the cells' shapes from today's record. Raises TrainingError for damaged ones."""
    there = [file for file in files if file.is_file()]
    path = there[0].parent / "optima.json"
    if not path.exists():
        return _keep(path, optima_of(cells, record))
    if why := irregular(path):
        raise TrainingError(f"{path} {why}: move it away")
    if any(file.stat().st_mtime > path.stat().st_mtime for file in there):
        return _keep(path, optima_of(cells, record))
    try:
        kept = Optima.from_json(read_text(path, "what was recorded at the shapes", OPTIMA_BYTES))
    except ValidationError as error:
        where, message = first_problem(error)
        why = f"{where}: {message}" if where else message
        raise TrainingError(f"{path} cannot be used: {why}; delete it for today's record") from error
    except UnreadableFile as error:
        raise TrainingError(f"{error}; delete it for today's record") from error
    known = {one.task.task_id for one in kept.shapes}
    lacking = {row: [cell for cell in own if cell.task_id not in known] for row, own in cells.items()}
    more = optima_of(lacking, record).shapes if any(lacking.values()) else ()
    return _keep(path, kept.model_copy(update={"shapes": (*kept.shapes, *more)})) if more else kept


def _keep(path: Path, optima: Optima) -> Optima:
    with replacing(path) as new:
        new.write_text(optima.to_json() + "\n", encoding="utf-8")
    return optima


def tables_of(
    cells: Mapping[str, Sequence[Cell]], optima: Optima, splits: Sequence[str], budgets: Sequence[int]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Markdown by what it is of, and the same as a document. Differences from the search, from the list of the prompts
    alone, and from the adapter without reinforcement learning. Pruned shapes have a table of their own: their optimum
    is not known, and the best that is recorded stands for it; nothing is compared with the search there."""
    shapes = [Shape(one.task, {"best": one.best}, one.is_complete) for one in optima.shapes]
    document: dict[str, Any] = {"device": optima.device, "budgets": list(budgets)}
    tables = {}
    for split in splits:
        mine = [shape for shape in shapes if split in ("all", split_of(shape.task))]
        complete = [shape for shape in mine if shape.is_complete]
        if split == "all" and len(apart := {split_of(shape.task) for shape in mine if not shape.is_complete}) == 1:
            mine = complete if apart <= set(splits) else mine  # that split's table says the same
        pruned = [shape._replace(is_complete=True) for shape in mine if not shape.is_complete and shape.best > 0]
        if of_split := _in(cells, complete):
            told, document[split] = _compared(of_split, complete, budgets, "search")
            tables[f"{split}: {len(complete)} shapes with a known optimum"] = "\n".join(told)
        if of_split := _in(cells, pruned):
            told, document[f"{split}, pruned"] = _compared(of_split, pruned, budgets, None)
            heading = f"{split}: {len(pruned)} pruned shapes, against the best that is recorded"
            tables[heading] = "\n".join([OF_PRUNED, "", *told])
    return tables, document


def row_words(row: str, folder_of: Callable[[str], Path | str]) -> list[str]:
    """What `agent evaluate-policy` is asked, to play a row; ``folder_of``: an adapter's, by its name in the table."""
    name, _, part = row.partition(", no ")
    if name == ALL_SEARCHES:
        words = [word for search in SEARCHES for word in ("--policy", search)]
    elif name == "base":
        words = ["--policy", "base", "--against", "base"]
    else:
        words = ["--policy", "shortlist", "--adapter", f"{name}={folder_of(name)}", "--against", "shortlist"]
    return [*words, *(["--without", part] if part else [])]


def _in(cells: Mapping[str, Sequence[Cell]], shapes: Sequence[Shape]) -> list[Cell]:
    ids = {shape.task.task_id for shape in shapes}
    return [cell for own in cells.values() for cell in own if cell.task_id in ids]


def _compared(
    cells: Sequence[Cell], shapes: Sequence[Shape], budgets: Sequence[int], search: str | None
) -> tuple[list[str], Any]:
    """``search``: what all rows are compared with; None where that is not fair."""
    policies = dict.fromkeys(cell.policy for cell in cells)
    quota = {policy: _no_quota if policy in SEARCHES else _local_quota for policy in policies}
    rows = table(cells, shapes, budgets, quota, search)
    told = lines(rows, budgets, search, markdown=True)
    document = {"search": [row.model_dump(mode="json") for row in rows]}
    for against in ("shortlist", "sft"):  # of language models only: what is beyond the list, and beyond imitation
        rows = [row for row in table(cells, shapes, budgets, quota, against) if row.policy not in SEARCHES]
        document[against] = [row.model_dump(mode="json") for row in rows if row.difference]
        told += difference_lines(rows, budgets, against, markdown=True)
    return told, document


def _no_quota(budget: int) -> int:
    return 0


def _local_quota(budget: int) -> int:
    return min(budget, LOCAL_QUOTA)


def write_evaluation(out: Path, tables: Mapping[str, str], document: Mapping[str, Any]) -> None:
    with replacing(out / "evaluation.md") as new:
        new.write_text("\n\n".join(f"## {of}\n\n{told}" for of, told in tables.items()) + "\n", encoding="utf-8")
    with replacing(out / "evaluation.json") as new:
        new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def package(out: Path, trained: Mapping[str, Path], stages: Sequence[Stage], tables: Mapping[str, str]) -> Path:
    """The folder ``adapter``: the last one's weights, what all trainings said, the evaluation, the card. It is made
    beside and then put into its place. Raises TrainingError where there is none."""
    *before, last = trained.values()
    if not last.is_dir():
        raise TrainingError(f"{last} is not there: it was not trained")
    wanted = [(last, "adapter_config.json"), *((folder, name) for folder in (*before, last) for name in _LOGS)]
    for folder, name in wanted:
        if not (folder / name).is_file():
            raise TrainingError(f"{folder} has no {name}: it is no folder of a finished training")
    if not (last / _WEIGHTS).is_file():
        raise TrainingError(f"{last} holds no adapter's weights; with method=full the model stays where it is")
    size = (last / _WEIGHTS).stat().st_size
    new, place = out / "adapter.new", out / "adapter"
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir()
        for name in ("adapter_config.json", _WEIGHTS, *_LOGS):
            shutil.copyfile(last / name, new / name)
        for number, (stage, folder) in enumerate(list(trained.items())[:-1], 1):
            for name in _LOGS:
                shutil.copyfile(folder / name, new / f"{number}-{stage}-{name}")
        shutil.copyfile(out / "evaluation.json", new / "evaluation.json")
        runs = [Run.of(name, folder) for name, folder in trained.items()]
        (new / "MODEL_CARD.md").write_text(card("HGEMM plan adapter", runs, stages, tables, size), encoding="utf-8")
        if place.is_symlink() or place.is_file():
            place.unlink()
        shutil.rmtree(place, ignore_errors=True)
        new.rename(place)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        folders = ", ".join(str(folder) for folder in trained.values())
        raise TrainingError(f"training.json or metrics.jsonl of {folders} is damaged: copy or train it anew") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return place
