"""Which earlier variants a prompt contrasts: pure, seeded, and independent of the order in which variants are given.

``contrastive`` is CUDA-L1's choice (arXiv 2507.14111): variants into buckets by score, two *distinct* buckets drawn
with P(bucket) ∝ exp((mean score of the bucket - global mean) / temperature), one variant uniformly inside each. The
global mean cancels in the normalised probabilities, so it is not computed. ``islands``, ``best-k`` and ``random`` are
there to compare with; docs/memory.md has the figures.

A score is the offline ratio against the headline reference: higher is better.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from tools.records import content_hash

StrategyName = Literal["contrastive", "islands", "best-k", "random"]


class MemorySettings(BaseModel):
    """How much of what was tried goes into a prompt, and which of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    strategy: StrategyName = Field(default="contrastive", description="How exemplars are chosen.")
    temperature: float = Field(default=0.1, ge=0, description="Of the softmax over scores; 0 takes the best.")
    buckets: int = Field(default=8, ge=2, le=1000, description="contrastive: equal intervals of the score.")
    islands: int = Field(default=4, ge=1, le=1000, description="islands: how many populations.")
    failures: int = Field(default=3, ge=0, le=100, description="Rejected variants shown as negative examples.")
    min_variants: int = Field(default=2, ge=0, le=1000, description="With fewer scored ones, nearest shapes are asked.")
    nearest: int = Field(default=2, ge=0, le=1000, description="How many nearest shapes may be asked.")
    earlier_sessions: bool = Field(default=True, description="Also what other sessions of the same store tried.")
    from_records: bool = Field(default=False, description="Also the record file, as prior knowledge.")
    prompt_tokens: int = Field(
        default=12_000, ge=0, le=1_000_000, description="Budget of the whole section, by our estimate."
    )


class Scored(NamedTuple):
    key: str
    score: float


class Strategy(Protocol):
    """Up to ``count`` different variants. ``scored`` comes sorted by key, so that only the set and ``rng`` decide."""

    def __call__(
        self, scored: Sequence[Scored], count: int, rng: random.Random, settings: MemorySettings
    ) -> list[Scored]: ...


def choose(scored: Sequence[Scored], count: int, seed: object, settings: MemorySettings) -> list[str]:
    """Keys of the chosen exemplars, best first. ``seed`` is any JSON value; the same one chooses the same."""
    ordered = sorted(dict(scored).items())
    if not ordered or count < 1:
        return []
    rng = random.Random(content_hash(["exemplars", settings.strategy, seed]))
    chosen = STRATEGIES[settings.strategy]([Scored(*pair) for pair in ordered], count, rng, settings)
    return [one.key for one in sorted(chosen, key=lambda s: (-s.score, s.key))]


def buckets(scored: Sequence[Scored], count: int) -> list[list[Scored]]:
    """Equal intervals from the lowest to the highest score, empty ones left out, lowest first. Two different scores
    always make at least two buckets: the lowest and the highest score are never in one."""
    low, high = min(s.score for s in scored), max(s.score for s in scored)
    if low == high:
        return [list(scored)]
    found: dict[int, list[Scored]] = {}
    for one in scored:
        place = min(count - 1, int((one.score - low) / (high - low) * count))
        found.setdefault(place, []).append(one)
    return [found[place] for place in sorted(found)]


def contrastive(scored: Sequence[Scored], count: int, rng: random.Random, settings: MemorySettings) -> list[Scored]:
    """One variant each from ``count`` distinct buckets; fewer where there are fewer buckets."""
    groups = buckets(scored, settings.buckets)
    means = [sum(s.score for s in group) / len(group) for group in groups]
    return [rng.choice(groups[i]) for i in softmax_draw(means, count, settings.temperature, rng)]


def islands(scored: Sequence[Scored], count: int, rng: random.Random, settings: MemorySettings) -> list[Scored]:
    """Evolution on islands, without a state of its own: a variant's key says on which island it lives, and the best one
    of all also lives on the worse half of them (migration). One island is drawn uniformly, its parents by softmax."""
    homes: dict[int, list[Scored]] = {}
    for one in scored:
        homes.setdefault(int(content_hash(one.key), 16) % settings.islands, []).append(one)
    ranked = sorted(homes.values(), key=lambda home: (-max(s.score for s in home), home[0].key))
    best = max(scored, key=lambda s: (s.score, s.key))
    for home in ranked[(len(ranked) + 1) // 2 :]:
        if best not in home:  # as good as the best of a better island, and its own
            home.append(best)
    home = rng.choice(ranked)
    return [home[i] for i in softmax_draw([s.score for s in home], count, settings.temperature, rng)]


def best_k(scored: Sequence[Scored], count: int, rng: random.Random, settings: MemorySettings) -> list[Scored]:
    return sorted(scored, key=lambda s: (-s.score, s.key))[:count]


def uniform(scored: Sequence[Scored], count: int, rng: random.Random, settings: MemorySettings) -> list[Scored]:
    return rng.sample(list(scored), min(count, len(scored)))


STRATEGIES: Mapping[StrategyName, Strategy] = {
    "contrastive": contrastive,
    "islands": islands,
    "best-k": best_k,
    "random": uniform,
}


def softmax_draw(scores: Sequence[float], count: int, temperature: float, rng: random.Random) -> list[int]:
    """``count`` different indices, one after the other with P ∝ exp(score / temperature) among those that are left. At
    temperature 0 the highest scores, at infinity any."""
    left = list(range(len(scores)))
    drawn: list[int] = []
    while left and len(drawn) < count:
        # Relative to the best that is left: its weight is 1, so the weights never all vanish, however cold it is.
        top = max(scores[i] for i in left)
        weights = [_weight(scores[i] - top, temperature) for i in left]
        (place,) = rng.choices(range(len(left)), weights)
        drawn.append(left.pop(place))
    return drawn


def _weight(below_top: float, temperature: float) -> float:
    if below_top == 0 or math.isinf(temperature):
        return 1.0
    return math.exp(below_top / temperature) if temperature > 0 else 0.0
