"""Groups of rollouts of a local model at recorded shapes, as rows: what offline GRPO learns from, with the tokens and
log-probabilities that they were sampled with. Every rollout of a group begins with the same prompt and knows nothing of
the others; all groups are played side by side."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from memory.exemplars import MemorySettings
from memory.exemplars_read import Tried
from policy.base import Policy, Trial
from policy.redacting import Secrets
from policy.reward import Reward, RewardSettings, reward, smooth
from policy.settings import LOCAL_QUOTA
from tools.families import render
from tools.records import Family, Status, Trajectory, content_hash
from tools.revision import commit
from training.export import row_of
from training.replaying import Rollout, Shape, side_by_side
from training.rows import Row
from training.shelf import Shelf
from training.synthesise import Kind, earlier

#: One group of a shape after the other.
KINDS = (Kind(False, LOCAL_QUOTA), Kind(False, 1), Kind(True, LOCAL_QUOTA), Kind(True, 1))


class Model(Policy, Protocol):
    def identity(self) -> str:
        """Of the weights that are asked, whose rows are no others' group."""
        ...


@dataclass(frozen=True)
class Collection:
    """What is collected."""

    seed: int = 0
    groups_per_shape: int = 4
    group_size: int = 8
    exemplars: int = 2


def collect(
    policy: Model,
    shelf: Shelf,
    families: Mapping[str, Family],
    shapes: Sequence[Shape],
    what: Collection,
    settings: RewardSettings,
    memory: MemorySettings,
    batch: int,
    secrets: Secrets,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Iterator[Row]:
    """Group after group, when all are played. ``tell`` hears how many rollouts are over, and of how many."""
    groups = [
        _Group(shelf, families, shape, number, what, memory)
        for shape in shapes
        for number in range(what.groups_per_shape)
    ]
    waiting = [(one, one.turns()) for group in groups for one in group.rollouts]
    for done, _ in enumerate(side_by_side(policy, waiting, batch), 1):
        tell(done, len(waiting))
    for group in groups:
        yield from group.rows(policy.name, policy.identity(), settings, secrets)


class _Group:
    def __init__(
        self,
        shelf: Shelf,
        families: Mapping[str, Family],
        shape: Shape,
        number: int,
        what: Collection,
        memory: MemorySettings,
    ) -> None:
        self._shelf, self._families, self._shape = shelf, families, shape
        self._number, self._what = number, what
        kind = KINDS[number % len(KINDS)]
        rng = random.Random(content_hash(["collect", what.seed, shape.task.task_id, number]))
        own = earlier(shelf, shape.task, rng) if kind.is_later else []
        self._quota = kind.evaluations
        seed = [what.seed, number, rng.random()]
        head = shelf.told(shape.task, own, kind.evaluations, seed, what.exemplars, memory, kind.without, True).head
        self.rollouts = [
            Rollout(
                shelf,
                families,
                shape,
                head,
                [_trial(one) for one in own],
                kind.evaluations,
                what.seed,
                number * what.group_size + index,
                asks_submit=True,
            )
            for index in range(what.group_size)
        ]

    def rows(self, policy: str, model: str, settings: RewardSettings, secrets: Secrets) -> Iterator[Row]:
        rewards = [self._reward(rollout, settings) for rollout in self.rollouts]
        relative = smooth([one.value if one is not None else None for one in rewards], settings)
        config = {"commit": commit()}
        for index, (rollout, own, group) in enumerate(zip(self.rollouts, rewards, relative, strict=True)):
            trajectory = self._trajectory(policy, model, rollout, index, own, group)
            reference = self._shelf.reference_us(self._shape.task)
            row = row_of(trajectory, config, reference, False, secrets, self._shelf.device, self._quota)
            if isinstance(row, Row):
                yield row

    def _trajectory(
        self, policy: str, model: str, rollout: Rollout, index: int, own: Reward | None, group: float | None
    ) -> Trajectory:
        session = f"collected-{model}-seed{self._what.seed}"
        return Trajectory(
            trajectory_id=f"{session}/{self._shape.task.task_id}/{self._number}/{index}",
            session_id=session,
            task=self._shape.task,
            policy=policy,
            device=self._shelf.device.label,
            round=self._number,
            index_in_group=index,
            steps=rollout.steps,
            submitted_key=rollout.submitted,
            reward=own.value if own is not None else None,
            reward_parts={**own.parts, "group": group} if own is not None and group is not None else {},
            quota=self._quota,
            ended_by="submit" if rollout.submitted is not None else "policy",
        )

    def _reward(self, rollout: Rollout, settings: RewardSettings) -> Reward | None:
        """Of what was submitted; without a submit of the best, else of the last, as the loop has it."""
        known = [
            trial for trial in rollout.own if trial.status in (Status.OK, Status.FAILED) and trial.plan is not None
        ]
        chosen = next((trial for trial in known if trial.key == rollout.submitted), None)
        if chosen is None and known:
            chosen = max(known, key=lambda trial: trial.ratio if trial.ratio is not None else float("-inf"))
            chosen = chosen if chosen.ratio is not None else known[-1]
        if chosen is None or chosen.plan is None:
            return None
        length = len(render(self._families[chosen.plan.family], chosen.plan).source)
        return reward(rollout.evaluation(chosen.plan), length, settings)


def _trial(one: Tried) -> Trial:
    status = Status.OK if one.score is not None else Status.FAILED
    plan, label = one.variant.plan, one.variant.label
    return Trial(key=one.key, label=label, plan=plan, status=status, ratio=one.score)
