"""Keys and values of several conversations at once, and attention over them, in a transformers model of any kind.

Tokens of all rows pass through the model as one sequence, so that rows of any length cost what they hold; only
attention, which is replaced by the one here, tells the rows apart. A common beginning may be held once for all rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policy.base import PolicyError

#: Slots are added so many at a time, and held in multiples of it, which the kernels of a GPU want.
SLOTS = 64


class Feed(NamedTuple):
    """Tokens of some rows, row after row, on their way through the layers. Tensors, on the model's device."""

    rows: Any  # [tokens]
    places: Any  # [tokens], among the row's own keys
    queries: Any  # [tokens], among the row's new ones
    longest: int  # new tokens of one row, at most
    hidden: Any  # [rows, 1, longest, slots], to be added to scores
    grouped: dict[int, Any]  # the same for queries of so many heads, one after the other

    def hidden_of(self, group: int) -> Any:
        """Made once for all layers."""
        if group not in self.grouped:
            self.grouped[group] = self.hidden.repeat(1, 1, group, 1)
        return self.grouped[group]


class KeyValues:
    """``prefix`` is of all rows, ``own`` of each. Layers are added as they are met, so no config has to be read."""

    def __init__(self, model: Any) -> None:
        import torch

        self._torch = torch
        self._model = model
        self.prefix_length = 0
        self.lengths = np.zeros(0, np.int64)
        self._prefix: dict[int, tuple[Any, Any]] = {}  # [kv heads, length, width]
        self._own: dict[int, tuple[Any, ...]] = {}  # [rows, kv heads, slots, width]
        self._feed: Feed | None = None  # None while the prefix is read
        self._is_reading = False
        self._name = f"hgemm_agent_{id(self)}"
        self._register()

    # --- what is held --------------------------------------------------------------------------------------------

    def crop_prefix(self, length: int) -> None:
        """Drops the rows' own, and of the prefix what is behind ``length``."""
        self.prefix_length = length
        cropped = {layer: (k[:, :length], v[:, :length]) for layer, (k, v) in self._prefix.items()}
        self._prefix = cropped if length else {}
        self._own = {}
        self.lengths = np.zeros(0, np.int64)

    def hand_down(self, length: int) -> None:
        """What of the prefix is behind ``length`` becomes each row's own: a row is to come that does not begin so."""
        own = {}
        for layer, parts in self._prefix.items():
            rests = (part[None, :, length:].expand(len(self.lengths), -1, -1, -1) for part in parts)
            held = self._own.get(layer, ())
            own[layer] = tuple(self._torch.cat([rest, *held[i : i + 1]], 2) for i, rest in enumerate(rests))
        lengths = self.lengths + self.prefix_length - length
        self.crop_prefix(length)
        self._own, self.lengths = own, lengths

    def begin_rows(self, count: int) -> None:
        self._own = {}
        self.lengths = np.zeros(count, np.int64)

    def take_rows(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Rows in a new order, each cropped; a row of -1 is a new one, whose length must be 0."""
        if list(rows) != list(range(len(self.lengths))):
            index = self._torch.tensor([max(row, 0) for row in rows], device=self._model.device)
            for layer, (k, v) in self._own.items():  # one after the other: twice all of them may be too much
                self._own[layer] = (k[index], v[index])
        self.lengths = np.array(lengths, np.int64)

    # --- reading -------------------------------------------------------------------------------------------------

    def read_prefix(self, ids: Sequence[int]) -> None:
        """Appends to the common beginning; no row may have begun."""
        if ids:
            positions = range(self.prefix_length, self.prefix_length + len(ids))
            self._forward(list(ids), list(positions), None, [len(ids) - 1])
            self.prefix_length += len(ids)

    def read(self, tokens: Sequence[Sequence[int]], wanted: Sequence[int] = ()) -> Any:
        """New tokens of each row, none or several. Logits [wanted, vocabulary] after the last one of the ``wanted``
        rows, each of which must have some."""
        counts = np.array([len(row) for row in tokens])
        if not counts.sum():
            return None
        feed = self._feed_of(counts)
        flat = [token for row in tokens for token in row]
        starts = self.prefix_length + self.lengths
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        ends = np.cumsum(counts) - 1
        logits = self._forward(flat, positions.tolist(), feed, [int(ends[row]) for row in wanted] or [len(flat) - 1])
        self.lengths = self.lengths + counts
        return logits if len(wanted) else None

    def _feed_of(self, counts: NDArray[np.int64]) -> Feed:
        torch, device = self._torch, self._model.device
        rows = np.repeat(np.arange(len(counts)), counts)
        queries = np.concatenate([np.arange(n) for n in counts])
        longest, slots = int(counts.max()), _rounded(int((self.lengths + counts).max()))
        last = torch.from_numpy(self.lengths).to(device)[:, None, None] + torch.arange(longest, device=device)[:, None]
        unseen = torch.arange(slots, device=device) > last  # [rows, longest, slots]
        hidden = torch.zeros(unseen.shape, dtype=self._model.dtype, device=device)
        hidden.masked_fill_(unseen, torch.finfo(self._model.dtype).min)
        there = (torch.from_numpy(i).to(device) for i in (rows, self.lengths[rows] + queries, queries))
        return Feed(next(there), next(there), next(there), longest, hidden[:, None], {})

    def _forward(self, ids: list[int], positions: list[int], feed: Feed | None, wanted: list[int]) -> Any:
        torch, device = self._torch, self._model.device
        if self._model.config._attn_implementation != self._name:  # at first, or somebody else's since
            self._model.set_attn_implementation(self._name)
        self._feed, self._is_reading = feed, True
        try:
            answer = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                # Four dimensions are taken as they are: nothing is made of them, and nothing is read from them here.
                attention_mask=torch.zeros(1, 1, 1, 1, dtype=self._model.dtype, device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, device=device),
            )
        finally:
            self._is_reading = False
        return answer.logits[0]

    # --- attention -----------------------------------------------------------------------------------------------

    def _register(self) -> None:
        """To be set in the place of the model's own. Held weakly: the registry lives as long as the process."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        mine = weakref.ref(self)

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> tuple[Any, None]:
            keys_values = mine()
            if keys_values is None or not keys_values._is_reading:
                return _plain(query, key, value, mask, given.get("scaling")), None
            return keys_values._attend(module.layer_idx, query, key, value, given), None

        AttentionInterface.register(self._name, attend)
        AttentionMaskInterface.register(self._name, sdpa_mask)

    def _attend(self, layer: int, query: Any, key: Any, value: Any, given: Any) -> Any:
        """[1, heads, tokens, width] → [1, tokens, heads, width]."""
        window, reach = given.get("sliding_window"), self.prefix_length + int(self.lengths.max(initial=0))
        if window is not None and reach + query.shape[2] > window:
            raise PolicyError(
                f"the base looks back {window} tokens at most, and the conversation is longer: take another base, or "
                "lower policy.exemplars"
            )
        if self._feed is None:
            return self._attend_prefix(layer, query, key, value, given.get("scaling"))
        return self._attend_rows(layer, query[0], key[0], value[0], self._feed, given.get("scaling"))

    def _attend_prefix(self, layer: int, query: Any, key: Any, value: Any, scaling: float | None) -> Any:
        if layer in self._prefix:
            before = self._prefix[layer]
            key, value = (self._torch.cat([b, new[0]], 1)[None] for b, new in zip(before, (key, value), strict=True))
        self._prefix[layer] = (key[0], value[0])
        return _plain(query, key, value, None, scaling)

    def _attend_rows(self, layer: int, query: Any, key: Any, value: Any, feed: Feed, scaling: float | None) -> Any:
        keys, values = self._stored(layer, key, value, feed)
        rows, shared = keys.shape[:2]
        heads, _, width = query.shape
        padded = query.new_zeros(rows, feed.longest, heads, width)
        padded[feed.rows, feed.queries] = query.transpose(0, 1)
        # Queries are arranged by the heads that share keys, so that these need not be copied for each.
        group = heads // shared
        asked = padded.transpose(1, 2).reshape(rows, shared, group * feed.longest, width)
        hidden = feed.hidden_of(group)
        slots = feed.hidden.shape[-1]
        own = (keys[:, :, :slots], values[:, :, :slots])
        if self.prefix_length:
            found = _attend_both(asked, self._prefix[layer], own, hidden, scaling)
        else:
            attention = self._torch.nn.functional.scaled_dot_product_attention
            found = attention(asked, *own, attn_mask=hidden, scale=scaling)
        found = found.reshape(rows, heads, feed.longest, -1).transpose(1, 2)
        return found[feed.rows, feed.queries][None]

    def _stored(self, layer: int, key: Any, value: Any, feed: Feed) -> tuple[Any, ...]:
        slots = feed.hidden.shape[-1]
        held = self._own.get(layer)
        if held is None or held[0].shape[2] < slots:
            grown = []
            for i, new in enumerate((key, value)):
                room = new.new_zeros(len(self.lengths), new.shape[0], slots + SLOTS, new.shape[-1])
                if held is not None:
                    room[:, :, : held[i].shape[2]] = held[i]
                grown.append(room)
            self._own[layer] = held = (grown[0], grown[1])
        for room, new in zip(held, (key, value), strict=True):
            room[feed.rows, :, feed.places] = new.transpose(0, 1)
        return held


def _attend_both(asked: Any, prefix: tuple[Any, Any], own: tuple[Any, Any], hidden: Any, scaling: float | None) -> Any:
    """Over the common beginning, which all see whole, and each row's own. Scores are float32, as in the kernels that
    torch has for one sequence."""
    import torch

    rows, shared, count, width = asked.shape
    keys, values = prefix
    asked = asked.float() * (scaling if scaling is not None else width**-0.5)
    together = asked.transpose(0, 1).reshape(shared, rows * count, width)
    of_prefix = torch.matmul(together, keys.float().transpose(1, 2)).reshape(shared, rows, count, -1).transpose(0, 1)
    of_own = torch.matmul(asked, own[0].float().transpose(2, 3)) + hidden.float()
    shares = torch.softmax(torch.cat([of_prefix, of_own], -1), -1)
    length = keys.shape[1]
    first = shares[..., :length].transpose(0, 1).reshape(shared, rows * count, length)
    found = torch.matmul(first, values.float()).reshape(shared, rows, count, -1).transpose(0, 1)
    found = found + torch.matmul(shares[..., length:], own[1].float())
    return found.to(values.dtype)


def _plain(query: Any, key: Any, value: Any, mask: Any, scaling: float | None) -> Any:
    """Of one sequence after another; causal where there is no mask. [batch, tokens, heads, width]."""
    import torch

    batch, heads, length, width = query.shape
    shared = key.shape[1]
    if mask is None:
        mask = torch.ones(1, 1, length, key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[2] - length)
    grouped = query.reshape(batch, shared, heads // shared * length, width)
    mask = mask.repeat(1, 1, heads // shared, 1)
    found = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return found.reshape(batch, heads, length, -1).transpose(1, 2).contiguous()


def _rounded(length: int) -> int:
    return -(-length // SLOTS) * SLOTS
