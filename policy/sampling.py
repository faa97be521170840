"""Turns sampled from a causal language model, several at once, each held to a grammar.

All rows of a batch share one sequence of keys and values: their common beginning once, then each row's own tokens, and
a mask that hides the rows from each other. So G rollouts of one prompt cost one prompt, rows may be of any length, and
what a grammar leaves no choice about is fed as it stands, without a step of its own.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policy.base import PolicyError

#: Tokens of one batch, which bound its memory: 46 KB a token of the default base.
BATCH_TOKENS = 6144
#: Beyond the context, for a turn.
TURN_TOKENS = 1024


class Row(NamedTuple):
    context: Sequence[int]
    grammar: str
    seed: str


class Drawn(NamedTuple):
    """``logprobs`` are the model's own at the temperature, over all tokens; 0 where ``mask`` is 0: where the grammar
    left no choice."""

    ids: list[int]
    logprobs: list[float]
    mask: list[int]


class Sampling(NamedTuple):
    temperature: float
    top_p: float = 1.0


class Sampler:
    """``model`` is a transformers model, with or without an adapter on. Not for several threads at once."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        import llguidance.hf

        # An adapter is inside the base's layers, so that the base itself computes with it.
        self._model = getattr(model, "get_base_model", lambda: model)().eval()
        _attend_grouped(self._model)
        takes = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        self._eos = int(tokenizer.eos_token_id)
        self._limit = int(getattr(model.config, "max_position_embeddings", 0) or 1 << 30)
        self._tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=int(model.config.vocab_size))
        self._matchers: dict[str, Any] = {}
        self._prefix: list[int] = []
        self._cache: Any = None

    def draw(self, rows: Sequence[Row], sampling: Sampling) -> list[Drawn]:
        """One turn of each, in order. Raises PolicyError for a context that is longer than the model can read. Which
        rows share a batch changes the logits, in bfloat16 enough to change tokens: on a GPU the same seeds give the
        same turns only in the same batches."""
        import torch

        longest = max((len(row.context) for row in rows), default=0)
        if longest + TURN_TOKENS > self._limit:
            raise PolicyError(
                f"the conversation has {longest} tokens, and the base reads {self._limit}: lower policy.exemplars, or "
                "take another base"
            )
        found: list[Drawn] = []
        with torch.inference_mode():
            for part in _parts(rows):
                found += self._batch(part, sampling)
        return found

    def _batch(self, rows: Sequence[Row], sampling: Sampling) -> list[Drawn]:
        common = _common(rows)
        self._prefill(list(rows[0].context[:common]))
        turns = [_Turn(row, common, self._matcher(row.grammar), self._eos) for row in rows]
        owners = np.full(common, -1)
        try:
            while active := [(i, turn) for i, turn in enumerate(turns) if turn.pending]:
                fed = [(i, token, turn.position + n) for i, turn in active for n, token in enumerate(turn.pending)]
                owner = np.array([i for i, _, _ in fed])
                owners = np.concatenate([owners, owner])
                ends = np.cumsum([len(turn.pending) for _, turn in active]) - 1
                logits = self._forward([t for _, t, _ in fed], [p for _, _, p in fed], _visible(owners, owner), ends)
                for (_, turn), row_logits in zip(active, logits, strict=True):
                    turn.take(row_logits, sampling)
        finally:
            self._crop(common)
        return [Drawn(turn.ids, turn.logprobs, turn.mask) for turn in turns]

    def _prefill(self, prefix: list[int]) -> None:
        """Keys and values of the common beginning; what the last batch left is used as far as it goes."""
        from transformers import DynamicCache

        if self._cache is None:
            self._cache = DynamicCache()
        kept = _agreeing(self._prefix, prefix)
        self._crop(kept)
        self._prefix = prefix[:kept]
        if rest := prefix[kept:]:
            owners = np.full(len(prefix), -1)
            positions = list(range(kept, len(prefix)))
            visible = np.arange(len(prefix))[None, :] <= np.array(positions)[:, None]
            self._forward(rest, positions, visible & (owners == -1), np.array([len(rest) - 1]))
            self._prefix = prefix

    def _crop(self, length: int) -> None:
        if surplus := self._cache.get_seq_length() - length:
            self._cache.crop(-surplus)

    def _forward(
        self, ids: list[int], positions: list[int], visible: NDArray[np.bool_], wanted: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Appends the tokens to the cache. Logits after the ``wanted`` ones."""
        import torch

        device = self._model.device
        # To be added to scores, which every implementation of attention understands.
        hidden = torch.zeros(visible.shape, dtype=self._model.dtype, device=device)
        hidden.masked_fill_(~torch.from_numpy(visible).to(device), torch.finfo(self._model.dtype).min)
        answer = self._model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=hidden[None, None],
            use_cache=True,
            logits_to_keep=torch.from_numpy(wanted).to(device),
            **{self._cache_name: self._cache},
        )
        found: NDArray[np.float32] = answer.logits[0].float().cpu().numpy()
        return found

    def _matcher(self, grammar: str) -> Any:
        import llguidance

        if grammar not in self._matchers:
            if len(self._matchers) > 256:
                self._matchers.clear()
            self._matchers[grammar] = llguidance.LLMatcher(
                self._tokens, llguidance.LLMatcher.grammar_from_lark(grammar)
            )
        matcher = self._matchers[grammar].deep_copy()
        if matcher.is_error():
            raise PolicyError(f"the grammar of the calls cannot be used: {' '.join(matcher.get_error().split())[:200]}")
        return matcher


class _Turn:
    """One row on its way. ``pending`` are tokens that the model has not read yet; empty when the turn is over."""

    def __init__(self, row: Row, common: int, matcher: Any, eos: int) -> None:
        self.pending = list(row.context[common:])
        self.position = common
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[int] = []
        self._matcher = matcher
        self._eos = eos
        self._rng = random.Random(row.seed)
        self.pending += self._force()  # of a grammar that begins without a choice
        self._end_if_over()  # of one that has none at all: nothing is left to be asked

    def take(self, logits: NDArray[np.float32], sampling: Sampling) -> None:
        """The next token, after ``pending`` was read, and all that then follows without a choice."""
        self.position += len(self.pending)
        allowed = self._allowed()
        token, logprob = pick(logits, allowed, sampling, self._rng.random())
        self._add(token, logprob, int(len(allowed) > 1))
        self._matcher.consume_token(token)
        self.pending = [token, *self._force()]
        if self._matcher.is_error():
            raise PolicyError(f"the grammar refused a token: {' '.join(self._matcher.get_error().split())[:200]}")
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._matcher.is_stopped():
            self._add(self._eos, 0.0, 0)
            self.pending = []

    def _force(self) -> list[int]:
        forced = [int(token) for token in self._matcher.compute_ff_tokens()]
        if forced:
            self._matcher.consume_tokens(forced)
        for token in forced:
            self._add(token, 0.0, 0)
        return forced

    def _add(self, token: int, logprob: float, chosen: int) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.mask.append(chosen)

    def _allowed(self) -> NDArray[np.int64]:
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.flatnonzero(np.unpackbits(words, bitorder="little"))


def pick(
    logits: NDArray[np.float32], allowed: NDArray[np.int64], sampling: Sampling, uniform: float
) -> tuple[int, float]:
    """A token out of ``allowed``, and its log-probability among *all* tokens at the temperature (at 1 where that is 0,
    which takes the likeliest). ``uniform`` is in [0, 1)."""
    scaled = logits.astype(np.float64) / (sampling.temperature or 1.0)
    top = scaled.max()
    everything = top + np.log(np.exp(scaled - top).sum())
    own = scaled[allowed]
    if sampling.temperature == 0:
        place = int(np.argmax(own))
    else:
        weights = np.exp(own - own.max())
        if sampling.top_p < 1:
            weights = _nucleus(weights, sampling.top_p)
        sums = np.cumsum(weights)
        place = min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(own) - 1)
    return int(allowed[place]), float(own[place] - everything)


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """The fewest likeliest tokens whose share is at least ``top_p``; the others get 0."""
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = order[before < top_p * weights.sum()]
    found = np.zeros_like(weights)
    found[kept] = weights[kept]
    return found


def _attend_grouped(model: Any) -> None:
    """Where several heads share keys and values, transformers copies these for each head when there is a mask; with all
    rows in one sequence that is most of a step. Queries are arranged by the heads that they share instead."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        AttentionInterface.register(_GROUPED, _grouped_attention)
        AttentionMaskInterface.register(_GROUPED, sdpa_mask)
        model.set_attn_implementation(_GROUPED)


_GROUPED = "hgemm_agent_grouped"


def _grouped_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Any, None]:
    import torch

    batch, heads, length, width = query.shape
    shared = key.shape[1]
    grouped = query.reshape(batch, shared, heads // shared * length, width)
    if attention_mask is None:  # somebody else's call of the model: causal
        attention_mask = torch.ones(1, 1, length, key.shape[2], dtype=torch.bool, device=query.device)
        attention_mask = attention_mask.tril(key.shape[2] - length)
    mask = attention_mask.repeat(1, 1, heads // shared, 1)
    found = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return found.reshape(batch, heads, length, width).transpose(1, 2).contiguous(), None


def _visible(owners: NDArray[np.int64], new: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[new tokens, all tokens]: the common beginning, and what came before in the same row."""
    slots = np.arange(len(owners))
    mine = (owners[None, :] == -1) | (owners[None, :] == new[:, None])
    visible: NDArray[np.bool_] = mine & (slots[None, :] <= slots[len(owners) - len(new) :, None])
    return visible


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Consecutive rows that fit into one batch, at least one."""
    begin = 0
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and _size(rows[begin : end + 1]) <= BATCH_TOKENS:
            end += 1
        yield rows[begin:end]
        begin = end


def _size(rows: Sequence[Row]) -> int:
    common = _common(rows)
    return common + sum(len(row.context) - common for row in rows)


def _common(rows: Sequence[Row]) -> int:
    """Tokens that all begin with, at least one of each left over: its logits are wanted."""
    first, shortest = rows[0].context, min(len(row.context) for row in rows)
    common = min(_agreeing(first, row.context) for row in rows)
    return min(common, shortest - 1)


def _agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
