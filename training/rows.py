"""The trajectory format: one row a rollout, versioned, in JSONL or Parquet. docs/training.md describes the fields.

Flat enough for `datasets` to load as it is: what has no fixed fields (tool schemas, a call's arguments) is JSON text.
A row without tokens was made by a policy that does not tell them; training makes them from the messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tools.records import content_hash
from tools.validation import first_error
from training.errors import TrainingError

if TYPE_CHECKING:
    from datasets import Features

#: Bumped whenever a field changes its meaning.
ROW_VERSION = 1
Split = Literal["train", "heldout", "off_grid"]
#: What came of the variant that the reward is of. ``none``: the rollout evaluated nothing.
RowStatus = Literal["ok", "failed", "not_recorded", "none"]
SUFFIXES = (".jsonl", ".parquet")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PromptMessage(_Part):
    role: Literal["system", "user"]
    content: str


class RowCall(_Part):
    id: str
    name: str
    arguments: str  # JSON


class Turn(_Part):
    """``trained``: whether a loss may cover it; false for what is not the policy's, and for turns all of whose calls
    were answered "not recorded", which say nothing of the plan."""

    role: Literal["assistant", "tool", "user"]
    content: str = ""
    tool_calls: tuple[RowCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    trained: bool = False


class RowTokens(_Part):
    """The rollout as it was sampled. ``mask``: 1 where the model chose the token, 0 in a tool's answer and where a
    grammar left no choice. ``logprobs`` are at ``temperature``; 0 where ``mask`` is 0. ``starts``: where each of the
    policy's turns begins in the completion; empty in files that do not say so."""

    model: str
    tokenizer: str
    temperature: float = Field(gt=0)
    prompt_ids: tuple[int, ...] = Field(min_length=1)
    completion_ids: tuple[int, ...] = Field(min_length=1)
    mask: tuple[Literal[0, 1], ...]
    logprobs: tuple[float, ...]
    starts: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if not len(self.completion_ids) == len(self.mask) == len(self.logprobs):
            raise ValueError("completion_ids, mask and logprobs must be of one length")
        if not all(map(math.isfinite, self.logprobs)):
            raise ValueError("a log-probability is not a finite number")
        ends = (0, *self.starts, len(self.completion_ids))
        if any(begin > end for begin, end in pairwise(ends)):
            raise ValueError("starts must ascend within completion_ids")
        return self


class RewardParts(_Part):
    """Of policy/reward.py; ``group`` is the group-normalised reward that was logged."""

    speed: float | None = None
    deviation: float | None = None
    length: float | None = None
    compile_failure: float | None = None
    group: float | None = None


class Provenance(_Part):
    source: Literal["session", "records"]
    session: str = ""
    policy: str = ""
    model: str = ""
    device: str = ""
    protocol: int
    commit: str = ""
    recorded_on: str = ""
    prompt_version: int = 0  # of policy/compact.py; 0: the prompt is another
    round: int = 0
    index: int = 0  # within the group
    ended_by: str = ""


class Row(_Part):
    version: int = ROW_VERSION
    row_id: str
    group_id: str
    split: Split
    task_id: str
    dims: dict[str, int]
    prompt: tuple[PromptMessage, ...] = Field(min_length=1)
    tools: str  # JSON: a list of {name, description, parameters}
    turns: tuple[Turn, ...] = Field(min_length=1)
    tokens: RowTokens | None = None
    reward: float | None = None  # None: nothing is known, and the row is masked in reinforcement learning
    reward_parts: RewardParts = RewardParts()
    status: RowStatus = "none"
    provenance: Provenance

    @property
    def known_reward(self) -> float | None:
        """None also for NaN and infinities, which somebody else's file may hold."""
        return self.reward if self.reward is not None and math.isfinite(self.reward) else None

    @property
    def content_id(self) -> str:
        """Two rows of equal content teach the same, wherever they come from."""
        told = [self.tools, [m.model_dump() for m in self.prompt], [t.model_dump() for t in self.turns]]
        return content_hash([*told, self.reward])

    def to_json(self) -> str:
        return self.model_dump_json()


# --- reading ----------------------------------------------------------------------------------------------------------


def format_of(path: Path) -> str:
    """``.jsonl`` or ``.parquet``. Raises TrainingError."""
    if path.suffix not in SUFFIXES:
        raise TrainingError(f"{path} must end in .jsonl or .parquet, which says how it is written")
    return path.suffix


def read_rows(path: Path) -> list[Row]:
    """Raises TrainingError: no file, cut off, of a newer version, not of this format."""
    rows = list(_parquet(path) if format_of(path) == ".parquet" else _jsonl(path))
    if not rows:
        raise TrainingError(f"{path} holds no trajectories: export some with agent export-trajectories")
    return rows


def _jsonl(path: Path) -> Iterator[Row]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _row(line, f"{path} line {number}", cut=not line.endswith(b"\n"))
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror}") from error


def _row(line: bytes, where: str, cut: bool) -> Row:
    try:
        return Row.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            told = "the file was cut off in the middle" if cut else "it is not JSON"
            raise TrainingError(f"{where}: {told}: export it again, or delete that line") from error
        raise TrainingError(_misfit(where, error, json.loads(line))) from error


def _misfit(where: str, error: ValidationError, data: Any) -> str:
    found = data.get("version") if isinstance(data, dict) else None
    if isinstance(found, int) and found > ROW_VERSION:
        return f"{where} is of format {found}, newer than the {ROW_VERSION} that this program reads: update hgemm-agent"
    return f"{where} is no trajectory of format {ROW_VERSION}: {first_error(error)}"


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except FileNotFoundError as error:
        raise TrainingError(f"{path} does not exist") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise TrainingError(
            f"{path} is no Parquet file, or was cut off ({_first_line(error)}): export it again"
        ) from error
    for number, fields in enumerate(table.to_pylist(), 1):
        try:
            yield Row.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise TrainingError(_misfit(f"{path} row {number}", error, fields)) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


# --- the same as columns ----------------------------------------------------------------------------------------------


def features() -> Features:
    """For ``datasets.load_dataset("json", data_files=…, features=features())``: without them it guesses the types of
    a file from its first 10 MB, where a field may be empty throughout."""
    from datasets import Features, Value

    def many(of: Any) -> Any:
        from datasets import List

        return List(of)

    text, integer, number = Value("string"), Value("int64"), Value("float64")
    call = dict.fromkeys(RowCall.model_fields, text)
    turn = dict.fromkeys(("role", "content", "tool_call_id", "name"), text)
    tokens = {"model": text, "tokenizer": text, "temperature": number}
    ids = {name: many(integer) for name in ("prompt_ids", "completion_ids", "mask", "starts")}
    provenance = {name: integer if name in _COUNTS else text for name in Provenance.model_fields}
    return Features(
        {
            "version": integer,
            **dict.fromkeys(("row_id", "group_id", "split", "task_id"), text),
            "dims": dict.fromkeys("MNK", integer),
            "prompt": many({"role": text, "content": text}),
            "tools": text,
            "turns": many({**turn, "tool_calls": many(call), "trained": Value("bool")}),
            "tokens": {**tokens, **ids, "logprobs": many(number)},
            "reward": number,
            "reward_parts": dict.fromkeys(RewardParts.model_fields, number),
            "status": text,
            "provenance": provenance,
        }
    )


_COUNTS = frozenset({"protocol", "prompt_version", "round", "index"})
