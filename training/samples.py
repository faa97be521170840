"""Rows → samples of tokens; samples → groups of one size with their advantages. Pure, but for asking a tokenizer."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from policy.base_model import Base
from policy.chat import ChatError, Message, call_message, encode
from training.errors import TrainingError
from training.rows import Row, Turn
from training.settings import GrpoSettings, SftSettings


@dataclass(frozen=True)
class Sample:
    """``mask``: 1 where a loss may cover the completion's token. ``logprobs`` is None where they were not logged.
    ``starts``: where each of the policy's turns begins in the completion; empty if that is not known. ``advantages``:
    of the completion's tokens."""

    row_id: str
    group_id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    temperature: float = 1.0
    starts: tuple[int, ...] = ()
    advantages: tuple[float, ...] = ()

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def labels(self) -> list[int]:
        """For a language model's loss: -100 where it is not to learn."""
        own = (token if use else -100 for token, use in zip(self.completion_ids, self.mask, strict=True))
        return [-100] * len(self.prompt_ids) + list(own)


def messages_of_row(row: Row) -> list[Message]:
    prompt: list[Message] = [{"role": m.role, "content": m.content} for m in row.prompt]
    return [*prompt, *map(_message, row.turns)]


def _message(turn: Turn) -> Message:
    message: Message = {"role": turn.role, "content": turn.content}
    if turn.tool_calls:
        message["tool_calls"] = [call_message(c.id, c.name, json.loads(c.arguments)) for c in turn.tool_calls]
    if turn.role == "tool":
        message |= {"tool_call_id": turn.tool_call_id, "name": turn.name}
    return message


def sample_of(row: Row, base: Base) -> Sample:
    """The tokens it was sampled as, where they are this tokenizer's; made from the messages otherwise."""
    tokens = row.tokens
    if tokens is not None and tokens.tokenizer == base.tokenizer_id:
        return Sample(
            row.row_id,
            row.group_id,
            tokens.prompt_ids,
            tokens.completion_ids,
            tokens.mask,
            tokens.logprobs,
            tokens.temperature,
            tokens.starts,
        )
    try:
        tools = [{"type": "function", "function": tool} for tool in json.loads(row.tools)]
        trained = [turn.trained for turn in row.turns if turn.role == "assistant"]
        found = encode(base.tokenizer, messages_of_row(row), tools, base.template, trained)
    except (ChatError, ValueError) as error:
        raise TrainingError(f"row {row.row_id}: {error}") from error
    begin = found.prompt_length
    return Sample(
        row.row_id,
        row.group_id,
        tuple(found.ids[:begin]),
        tuple(found.ids[begin:]),
        tuple(found.mask[begin:]),
    )


def samples_of(rows: Iterable[Row], base: Base, max_length: int, dropped: Counter[str]) -> Iterator[Sample]:
    for row in rows:
        sample = sample_of(row, base)
        if sample.length > max_length:
            dropped["too long"] += 1
        elif not any(sample.mask):
            dropped["nothing to learn"] += 1
        else:
            yield sample


# --- supervised -------------------------------------------------------------------------------------------------------


def imitated(rows: Sequence[Row], settings: SftSettings, dropped: Counter[str]) -> list[Row]:
    """Rows worth imitating: of training shapes, of what passed, and only the best of each group."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in in_split(rows, settings.split, dropped):
        if row.known_reward is None:
            dropped["no reward"] += 1
        elif row.status == "failed":
            dropped["failed"] += 1
        elif settings.min_reward is not None and row.known_reward < settings.min_reward:
            dropped["reward too low"] += 1
        else:
            groups[row.group_id].append(row)
    kept = []
    for members in groups.values():
        ordered = sorted(members, key=lambda row: (-(row.known_reward or 0.0), row.provenance.index))
        best = _distinct(ordered)[: settings.best_of_group]
        dropped["not among the best"] += len(members) - len(best)
        kept += best
    return kept


def _distinct(rows: Sequence[Row]) -> list[Row]:
    return list({row.content_id: row for row in reversed(rows)}.values())[::-1]


def in_split(rows: Sequence[Row], split: str, dropped: Counter[str]) -> list[Row]:
    kept = [row for row in rows if split == "all" or row.split == "train"]
    dropped["held out"] += len(rows) - len(kept)
    return kept


# --- groups -----------------------------------------------------------------------------------------------------------


def credited(sample: Sample, turns: Sequence[float]) -> Sample | None:
    """With an advantage for each of its turns, or one for all. None if it is not known where its turns begin."""
    length = len(sample.completion_ids)
    if len(turns) == 1:
        return replace(sample, advantages=(turns[0],) * length)
    if len(sample.starts) != len(turns):
        return None
    ends = (*sample.starts[1:], length)
    before = [0.0] * sample.starts[0]
    spread = [turn for turn, begin, end in zip(turns, sample.starts, ends, strict=True) for _ in range(begin, end)]
    return replace(sample, advantages=(*before, *spread))


def grouped(samples: Iterable[Sample], settings: GrpoSettings, dropped: Counter[str]) -> list[Sample]:
    """Consecutive groups of exactly ``group_size``. A larger group becomes several, whose advantages stay those of the
    whole; a smaller one is filled up with copies of which no token counts."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.logprobs is None and settings.behaviour == "logged":
            dropped["no log-probabilities"] += 1
        else:
            groups[sample.group_id].append(sample)
    found: list[Sample] = []
    for members in groups.values():
        for begin in range(0, len(members), settings.group_size):
            part = members[begin : begin + settings.group_size]
            filler = replace(part[0], mask=(0,) * len(part[0].mask))
            found += [*part, *([filler] * (settings.group_size - len(part)))]
    return found


def one_temperature(samples: Sequence[Sample]) -> float:
    """Ratios mean nothing between two temperatures. Raises TrainingError."""
    found = sorted({sample.temperature for sample in samples if sample.logprobs is not None})
    if len(found) > 1:
        raise TrainingError(
            f"the rows were sampled at temperatures {', '.join(map(str, found))}: export those of one temperature"
        )
    return found[0] if found else 1.0
