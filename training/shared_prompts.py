"""Rows of one prompt as one sequence: the prompt once, then each row's own tokens, which see it and themselves alone.

The rollouts of a group begin with the same thousand tokens and add some hundred each, of which a tenth count. Read one
by one and padded to the longest, a step holds three times as many tokens. What counts comes out the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from training.samples import Sample

#: What kernels for masked attention want the number of keys to be a multiple of.
_KEYS = 8


class Bundle(NamedTuple):
    """A prompt but for its last token, and rows that each begin with that one."""

    begin: int
    shared: int  # tokens of the prompt, from ``begin``
    end: int
    places: Any  # of the rows' tokens among [rows x longest]
    rows: int
    longest: int
    hidden: Any  # [longest, shared + longest], to be added to scores


class Pack(NamedTuple):
    """Tensors of [1, tokens]; ``labels`` are what comes next, -100 where it does not count. Where it does, ``scored``
    are its places, and ``rows`` and ``columns`` those in a table of completions."""

    ids: Any
    positions: Any
    labels: Any
    bundles: Sequence[Bundle]
    scored: Any
    rows: Any
    columns: Any


def pack(samples: Sequence[Sample], dtype: Any, device: Any) -> Pack:
    """Rows of which nothing counts are left out, and so is all that comes after what counts last."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, sample in enumerate(samples):
        if any(sample.mask):
            by_prompt.setdefault(sample.prompt_ids, []).append(number)
    if not by_prompt:  # something has to be computed with
        by_prompt[samples[0].prompt_ids] = [0]
    ids: list[int] = []
    positions: list[int] = []
    labels: list[int] = []
    bundles, scored, rows, columns = [], [], [], []
    for prompt, numbers in by_prompt.items():
        begin, shared = len(ids), len(prompt) - 1
        ids += prompt[:-1]
        positions += range(shared)
        labels += [-100] * shared
        lengths = []
        for number in numbers:
            sample = samples[number]
            last = max((i for i, use in enumerate(sample.mask) if use), default=0)
            counted = [i for i in range(last + 1) if sample.mask[i]]
            scored += [len(ids) + i for i in counted]
            rows += [number] * len(counted)
            columns += counted
            ids += [prompt[-1], *sample.completion_ids[:last]]
            positions += range(shared, shared + last + 1)
            labels += [sample.completion_ids[i] if sample.mask[i] else -100 for i in range(last + 1)]
            lengths.append(last + 1)
        bundles.append(_bundle(begin, shared, lengths, dtype, device))

    def tensor(values: Sequence[int]) -> Any:
        return torch.tensor(values, dtype=torch.long, device=device)

    told = [tensor(values)[None] for values in (ids, positions, labels)]
    return Pack(told[0], told[1], told[2], bundles, tensor(scored), tensor(rows), tensor(columns))


def _bundle(begin: int, shared: int, lengths: Sequence[int], dtype: Any, device: Any) -> Bundle:
    longest = max(lengths)
    longest += -(shared + longest) % _KEYS
    places = [row * longest + i for row, length in enumerate(lengths) for i in range(length)]
    seen = torch.ones(longest, shared + longest, dtype=torch.bool, device=device).tril(shared)
    hidden = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
    where = torch.tensor(places, dtype=torch.long, device=device)
    return Bundle(begin, shared, begin + shared + len(places), where, len(lengths), longest, hidden)


def unpacked(values: Any, packed: Pack, shape: tuple[int, int]) -> Any:
    """[1, tokens] → a table of completions, 0 where nothing counts."""
    table = values.new_zeros(shape)
    return table.index_put((packed.rows, packed.columns), values[0].index_select(0, packed.scored))


class SharedAttention:
    """Attention within the pack that was given last, in a transformers model; what is no pack is attended to as ever. A
    pack stays until the next one, for whoever computes a layer again on the way back."""

    name = "hgemm_agent_shared_prompts"

    def __init__(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        self._pack: Pack | None = None

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
            packed = self._pack
            if packed is None or query.shape[0] != 1 or query.shape[2] != packed.ids.shape[1]:
                return sdpa_attention_forward(module, query, key, value, mask, **given)
            return _attended(query, key, value, packed, given.get("scaling")), None

        AttentionInterface.register(self.name, attend)
        AttentionMaskInterface.register(self.name, sdpa_mask)

    def begin(self, model: Any, packed: Pack) -> None:
        """``model`` is a transformers model, without what is around it."""
        if model.config._attn_implementation != self.name:
            model.set_attn_implementation(self.name)
        self._pack = packed


def is_possible(config: Any) -> bool:
    """Not for a model that looks back so far and no further, or remembers otherwise than by attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None


def _attended(query: Any, key: Any, value: Any, packed: Pack, scaling: float | None) -> Any:
    """[1, heads, tokens, width] → [1, tokens, heads, width]."""
    attention = torch.nn.functional.scaled_dot_product_attention
    group = query.shape[1] // key.shape[1]
    parts = (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
    found = []
    for bundle in packed.bundles:
        first = bundle.begin + bundle.shared
        shared = [part[:, :, bundle.begin : first] for part in parts]
        if bundle.shared:
            found.append(attention(*shared, is_causal=True, scale=scaling)[0].transpose(0, 1))
        own = [_in_rows(part[0, :, first : bundle.end].transpose(0, 1), bundle) for part in parts]
        keys, values = (
            torch.cat([before.expand(bundle.rows, -1, -1, -1), new], 2)
            for before, new in zip(shared[1:], own[1:], strict=True)
        )
        there = attention(own[0], keys, values, attn_mask=bundle.hidden, scale=scaling)
        found.append(there.transpose(1, 2).flatten(0, 1).index_select(0, bundle.places))
    return torch.cat(found)[None]


def _in_rows(tokens: Any, bundle: Bundle) -> Any:
    """[tokens, heads, width] → [rows, heads, longest, width]."""
    room = tokens.new_zeros(bundle.rows * bundle.longest, *tokens.shape[1:])
    return room.index_copy(0, bundle.places, tokens).unflatten(0, (bundle.rows, bundle.longest)).transpose(1, 2)
