"""Turns sampled from a causal language model, several at once, each held to a grammar.

What the model has read of a conversation is kept for its next turn (policy/key_values.py). On a CPU, where a step costs
what it reads, the rows of a batch share the keys of their common beginning, so G rollouts of one prompt cost one
prompt. What a grammar leaves no choice about is fed as it stands, without a step of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policy.base import PolicyError
from policy.grammar import SLICES
from policy.key_values import KeyValues
from policy.picking import Sampling, pick

#: Bytes of keys and values of one batch, which bound its memory; on a GPU this part of what is free when it is loaded.
CPU_BYTES = 600 << 20
GPU_PART = 0.3
#: Beyond the context, for a turn.
TURN_TOKENS = 1024
#: Tokens of one row that pass through the model at a time.
CHUNK = 256
#: Compiled grammars that are kept beyond a batch, a megabyte each: another list of calls is another grammar.
GRAMMARS = 256


class Row(NamedTuple):
    """``conversation``: rows of the same one continue each other, if their contexts do."""

    context: Sequence[int]
    grammar: str
    seed: str
    conversation: str = ""


class Drawn(NamedTuple):
    """``logprobs`` are the model's own at the temperature, over all tokens; 0 where ``mask`` is 0: where the grammar
    left no choice."""

    ids: list[int]
    logprobs: list[float]
    mask: list[int]


class Sampler:
    """``model`` is a transformers model, with or without an adapter on. Not for several threads at once."""

    def __init__(self, model: Any, tokenizer: Any, is_shared: bool | None = None) -> None:
        """``is_shared``: whether the common beginning of a batch is held once; None decides by the device."""
        import llguidance
        import llguidance.hf

        # An adapter is inside the base's layers, so that the base itself computes with it.
        self._model = getattr(model, "get_base_model", lambda: model)().eval()
        self._is_shared = self._model.device.type == "cpu" if is_shared is None else is_shared
        self._eos = int(tokenizer.eos_token_id)
        self._vocabulary = int(model.config.vocab_size)
        self._limit = int(getattr(model.config, "max_position_embeddings", 0) or 1 << 30)
        self._batch_tokens = max(2 * TURN_TOKENS, _room_bytes(self._model) // _token_bytes(self._model))
        self._tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=self._vocabulary, slices=SLICES)
        self._executor = llguidance.LLExecutor()
        self._matchers: dict[str, Any] = {}
        self._kept = _Kept(KeyValues(self._model))
        #: Turns that were left unfinished, by seed and context.
        self._begun: dict[tuple[str, tuple[int, ...]], _Turn] = {}

    @property
    def tokens_read(self) -> int:
        """By the model so far, for those who want to know what was kept."""
        return self._kept.tokens_read

    def draw(self, rows: Sequence[Row], sampling: Sampling) -> list[Drawn]:
        """One turn of each, in order. Raises as ``draw_most`` does."""
        found = self.draw_most(rows, sampling, 1.0)
        return [drawn for drawn in found if drawn is not None]

    def draw_most(self, rows: Sequence[Row], sampling: Sampling, share: float) -> list[Drawn | None]:
        """One turn of each, in order; None for those that are not over when this share of a batch is, and that go on
        when the same row is asked for again: a step costs much the same for few rows as for many. Raises PolicyError
        for a context that is longer than the model can read. Which rows share a batch changes the logits, in bfloat16
        enough to change tokens: on a GPU the same seeds give the same turns only in the same batches."""
        import torch

        longest = max((len(row.context) for row in rows), default=0)
        if longest + TURN_TOKENS > self._limit:
            raise PolicyError(
                f"the conversation has {longest} tokens, and the base reads {self._limit}: lower policy.exemplars, or "
                "take another base"
            )
        self._compile([row.grammar for row in rows])
        found: list[Drawn | None] = []
        with torch.inference_mode():
            for part in _parts(rows, self._batch_tokens, self._is_shared):
                found += self._batch(part, sampling, share)
        return found

    def _batch(self, rows: Sequence[Row], sampling: Sampling, share: float) -> list[Drawn | None]:
        keys = [(row.seed, tuple(row.context)) for row in rows]
        begun = [self._begun.pop(key, None) for key in keys]
        turns = [
            turn if turn is not None else _Turn(row.seed, self._matcher(row.grammar), self._eos)
            for row, turn in zip(rows, begun, strict=True)
        ]
        # Of a turn that goes on, what it said so far is read already, or is found to be unread.
        rows = [
            row._replace(context=[*row.context, *turn.ids]) if turn is not None else row
            for row, turn in zip(rows, begun, strict=True)
        ]
        is_whole, left = False, len(rows) - math.ceil(share * len(rows))
        try:
            pending = self._kept.arranged(rows, _common(rows) if self._is_shared else 0)
            for new, turn, before in zip(pending, turns, begun, strict=True):
                forced = turn.pending if before is None else []
                turn.pending = [*new, *forced] if not turn.is_over else []
            while len(active := [i for i, turn in enumerate(turns) if not turn.is_over]) > left:
                self._read_ahead(turns)
                logits = self._kept.read([turn.pending for turn in turns], active)
                masks = self._masks([turns[i] for i in active])
                uniforms = [turns[i].uniform() for i in active]
                for i, taken in zip(active, pick(logits, masks, sampling, uniforms), strict=True):
                    turns[i].take(*taken)
            is_whole = True
        finally:
            if not is_whole:  # nothing that was half done is gone on with
                self._kept.clear()
                self._begun.clear()
        self._begun |= {key: turn for key, turn in zip(keys, turns, strict=True) if not turn.is_over}
        return [Drawn(turn.ids, turn.logprobs, turn.mask) if turn.is_over else None for turn in turns]

    def _read_ahead(self, turns: Sequence[_Turn]) -> None:
        """All but the last tokens of what is long, so that no forward holds more than a chunk of a row."""
        while any(len(turn.pending) > CHUNK for turn in turns):
            ahead = [turn.pending[: min(CHUNK, len(turn.pending) - 1)] if turn.pending else [] for turn in turns]
            ahead = [part if len(turn.pending) > CHUNK else [] for part, turn in zip(ahead, turns, strict=True)]
            self._kept.read(ahead)
            for part, turn in zip(ahead, turns, strict=True):
                turn.pending = turn.pending[len(part) :]

    def _masks(self, turns: Sequence[_Turn]) -> NDArray[np.int32]:
        """Bits of the tokens that the grammars allow, [rows, vocabulary / 32]."""
        masks = np.zeros((len(turns), -(-self._vocabulary // 32)), np.int32)
        listed = [(turn.matcher, place) for place, turn in enumerate(turns)]
        self._executor.unsafe_compute_mask_ptr(listed, masks.ctypes.data, masks.shape[1] * 4, len(turns))
        return masks

    def _compile(self, grammars: Sequence[str]) -> None:
        import llguidance

        asked = dict.fromkeys(grammars)
        new = [grammar for grammar in asked if grammar not in self._matchers]
        if len(self._matchers) + len(new) > GRAMMARS:
            self._matchers = {grammar: matcher for grammar, matcher in self._matchers.items() if grammar in asked}

        def compiled(grammar: str) -> Any:
            return llguidance.LLMatcher(self._tokens, llguidance.LLMatcher.grammar_from_lark(grammar))

        if len(new) > 1:
            with ThreadPoolExecutor() as pool:
                self._matchers |= zip(new, pool.map(compiled, new), strict=True)
        elif new:
            self._matchers[new[0]] = compiled(new[0])

    def _matcher(self, grammar: str) -> Any:
        matcher = self._matchers[grammar].deep_copy()
        if matcher.is_error():
            raise PolicyError(f"the grammar of the calls cannot be used: {' '.join(matcher.get_error().split())[:200]}")
        return matcher


class _Turn:
    """One row on its way. ``pending`` are tokens that the model has not read yet."""

    def __init__(self, seed: str, matcher: Any, eos: int) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[int] = []
        self.matcher = matcher
        self.is_over = False
        self._eos = eos
        self._rng = random.Random(seed)
        self.pending = self._force()  # of a grammar that begins without a choice
        self._end_if_over()  # of one that has none at all: nothing is left to be asked

    def uniform(self) -> float:
        return self._rng.random()

    def take(self, token: int, logprob: float, allowed: int) -> None:
        """The next token, after ``pending`` was read, and all that then follows without a choice."""
        self._add(token, logprob if allowed > 1 else 0.0, int(allowed > 1))
        self.matcher.consume_token(token)
        self.pending = [token, *self._force()]
        if self.matcher.is_error():
            raise PolicyError(f"the grammar refused a token: {' '.join(self.matcher.get_error().split())[:200]}")
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self.matcher.is_stopped():
            self._add(self._eos, 0.0, 0)
            self.pending, self.is_over = [], True

    def _force(self) -> list[int]:
        forced = [int(token) for token in self.matcher.compute_ff_tokens()]
        if forced:
            self.matcher.consume_tokens(forced)
        for token in forced:
            self._add(token, 0.0, 0)
        return forced

    def _add(self, token: int, logprob: float, chosen: int) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.mask.append(chosen)


class _Kept:
    """What the model has read of the last batch's rows. Their next turns go on from it; whatever else is asked is read
    anew, so nothing depends on what was kept but the time that it takes."""

    def __init__(self, keys_values: KeyValues) -> None:
        self._keys_values = keys_values
        self._prefix: list[int] = []
        self._own: list[list[int]] = []
        self._names: list[str] = []
        self.tokens_read = 0

    def clear(self) -> None:
        self._keys_values.crop_prefix(0)
        self._prefix, self._own, self._names = [], [], []

    def arranged(self, rows: Sequence[Row], common: int) -> list[list[int]]:
        """Keys and values for these rows; what of their contexts is still to be read. ``common``: tokens that all rows
        begin with and that may be held once."""
        contexts = [list(row.context) for row in rows]
        places = {name: i for i, name in enumerate(self._names) if name}
        sources = [places.get(row.conversation, -1) for row in rows]
        shared = min(_agreeing(self._prefix, context[:-1]) for context in contexts)
        shared = shared if _is_worth_it(shared, contexts) else 0
        common = common if _is_worth_it(common, contexts) else 0
        known = [
            _agreeing([*self._prefix, *self._own[at]], context[:-1]) if at >= 0 else shared
            for at, context in zip(sources, contexts, strict=True)
        ]
        beginning = _agreeing(self._prefix, contexts[0][:common])
        anew = common - beginning + sum(len(context) - common for context in contexts)
        if sum(map(len, contexts)) - sum(known) <= anew:
            self._go_on(sources, [n - shared for n in known], shared)
        else:
            known = [common] * len(rows)
            self._begin(contexts[0][:common], beginning, len(rows))
        self._names = [row.conversation for row in rows]
        self._own = [context[len(self._prefix) : n] for context, n in zip(contexts, known, strict=True)]
        return [context[n:] for context, n in zip(contexts, known, strict=True)]

    def _go_on(self, sources: Sequence[int], lengths: Sequence[int], shared: int) -> None:
        """``lengths``: of each row's own, behind the first ``shared`` tokens of the prefix."""
        if shared < len(self._prefix):
            if self._own:
                self._keys_values.hand_down(shared)
            else:
                self._keys_values.crop_prefix(shared)
            self._prefix = self._prefix[:shared]
        if any(lengths):
            used = [at if n else -1 for at, n in zip(sources, lengths, strict=True)]
            self._keys_values.take_rows(used, lengths)
        else:
            self._keys_values.begin_rows(len(sources))

    def _begin(self, prefix: list[int], kept: int, rows: int) -> None:
        """Anew, but for the first ``kept`` tokens of the prefix."""
        self._keys_values.crop_prefix(kept)
        self._keys_values.read_prefix(prefix[kept:])
        self._prefix = prefix
        self.tokens_read += len(prefix) - kept
        self._keys_values.begin_rows(rows)

    def read(self, tokens: Sequence[Sequence[int]], wanted: Sequence[int] = ()) -> Any:
        logits = self._keys_values.read(tokens, wanted)
        for own, new in zip(self._own, tokens, strict=True):
            own += new
        self.tokens_read += sum(map(len, tokens))
        return logits


def _is_worth_it(common: int, contexts: Sequence[Sequence[int]]) -> bool:
    """Two parts are attended to more slowly than one: they must save most of it."""
    return 2 * common >= max(map(len, contexts))


def _parts(rows: Sequence[Row], batch_tokens: int, is_shared: bool) -> Iterator[Sequence[Row]]:
    """Consecutive rows that fit into one batch, at least one."""
    begin = 0
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and _size(rows[begin : end + 1], is_shared) <= batch_tokens:
            end += 1
        yield rows[begin:end]
        begin = end


def _size(rows: Sequence[Row], is_shared: bool) -> int:
    """In tokens: each row has as many slots as the longest."""
    common = _common(rows) if is_shared else 0
    return common + len(rows) * (max(len(row.context) for row in rows) - common + TURN_TOKENS // 4)


def _common(rows: Sequence[Row]) -> int:
    """Tokens that all begin with, at least one of each left over: its logits are wanted."""
    first, shortest = rows[0].context, min(len(row.context) for row in rows)
    common = min(_agreeing(first, row.context) for row in rows)
    return min(common, shortest - 1)


def _agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _token_bytes(model: Any) -> int:
    """Of keys and values of one token."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)


def _room_bytes(model: Any) -> int:
    if model.device.type != "cuda":
        return CPU_BYTES
    import torch

    free, _ = torch.cuda.mem_get_info(model.device)
    return int(GPU_PART * free)
