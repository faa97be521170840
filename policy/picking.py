"""The next token of every row, out of those that its grammar allows: computed where the logits are, one answer for all
rows. Log-probabilities are the model's own, over all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Sampling(NamedTuple):
    temperature: float
    top_p: float = 1.0


class Picked(NamedTuple):
    """``logprob`` is at the temperature; at 1 where that is 0, which takes the likeliest. ``allowed``: how many tokens
    there were to choose from."""

    token: int
    logprob: float
    allowed: int


def pick(logits: Any, masks: NDArray[np.int32], sampling: Sampling, uniforms: Sequence[float]) -> list[Picked]:
    """``logits`` [rows, vocabulary], a tensor; ``masks`` a bit a token, lowest first; ``uniforms`` in [0, 1)."""
    import torch

    scaled = logits.float() / (sampling.temperature or 1.0)
    everything = torch.logsumexp(scaled, -1)
    allowed = _bits(torch.from_numpy(masks).to(scaled.device), scaled.shape[1])
    own = scaled.masked_fill(~allowed, -torch.inf)
    if sampling.temperature == 0:
        tokens = own.argmax(-1)
    else:
        shares = torch.softmax(own.double(), -1)  # in float32 sums over a vocabulary would lose the unlikely
        if sampling.top_p < 1:
            shares = _nucleus(shares, sampling.top_p)
        sums = shares.cumsum(-1)
        wanted = torch.tensor(uniforms, dtype=torch.float64, device=scaled.device)[:, None] * sums[:, -1:]
        likely = torch.arange(shares.shape[1], device=scaled.device) * (shares > 0)
        tokens = torch.minimum(torch.searchsorted(sums, wanted, right=True)[:, 0], likely.amax(-1))
    logprobs = scaled.gather(1, tokens[:, None])[:, 0] - everything
    told = torch.stack([tokens.double(), logprobs.double(), allowed.sum(-1).double()], 1).cpu().tolist()
    return [Picked(int(token), logprob, int(count)) for token, logprob, count in told]


def _bits(words: Any, count: int) -> Any:
    import torch

    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> places) & 1).bool().flatten(1)[:, :count]


def _nucleus(shares: Any, top_p: float) -> Any:
    """The fewest likeliest tokens whose share is at least ``top_p``; the others get 0."""
    import torch

    ordered, order = torch.sort(shares, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.where(before < top_p * shares.sum(-1, keepdim=True), ordered, 0.0)
    return torch.zeros_like(shares).scatter(1, order, kept)
