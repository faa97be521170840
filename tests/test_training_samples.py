"""Which rows teach, and how: imitation of the best, groups of one size, advantages of turns as tokens. No model."""

from collections import Counter

import pytest
from training_kit import row

from training.errors import TrainingError
from training.samples import Sample, credited, grouped, imitated, one_temperature
from training.settings import GrpoSettings, SftSettings, TrainSettings

HELDOUT = (64, 64, 128)


def sample(name: str, group: str = "g", logprobs: tuple[float, ...] | None = (-0.5, -0.5), **given: object) -> Sample:
    fields = {"prompt_ids": (1,), "completion_ids": (2, 3), "mask": (1, 1), "logprobs": logprobs}
    return Sample(row_id=name, group_id=group, **{**fields, **given})  # type: ignore[arg-type]


def test_groups_are_of_one_size() -> None:
    settings = GrpoSettings(group_size=4)
    large = [sample(f"g-{i}", advantages=(float(i),) * 2) for i in range(6)]
    small = [sample("h-0", "h"), sample("h-1", "h")]
    found = grouped([*large, *small], settings, Counter())
    assert [s.row_id for s in found] == [*(f"g-{i}" for i in range(6)), "g-4", "g-4", "h-0", "h-1", "h-0", "h-0"]
    fillers = [found[i] for i in (6, 7, 10, 11)]
    assert all(not any(f.mask) for f in fillers)
    assert [s.advantages[0] for s in found[:6]] == [0, 1, 2, 3, 4, 5]


def test_an_advantage_of_each_turn_is_that_of_its_tokens() -> None:
    long = sample("a", completion_ids=(2, 3, 4, 5, 6), mask=(1, 1, 0, 1, 1), starts=(0, 3))
    found = credited(long, (0.5, -1.0))
    assert found is not None and found.advantages == (0.5, 0.5, 0.5, -1.0, -1.0)
    whole = credited(sample("a"), (0.5,))
    assert whole is not None and whole.advantages == (0.5, 0.5)  # of the rollout: no turns need to be told apart
    assert credited(sample("a"), (0.5, -1.0)) is None


def test_rows_without_log_probabilities_only_where_that_is_said() -> None:
    both = [sample("a"), sample("b", logprobs=None)]
    left_out: Counter[str] = Counter()
    assert len({s.row_id for s in grouped(both, GrpoSettings(group_size=2), left_out)}) == 1
    assert left_out == {"no log-probabilities": 1}
    assert len(grouped(both, GrpoSettings(group_size=2, behaviour="reference"), Counter())) == 2


def test_one_temperature() -> None:
    assert one_temperature([sample("a", temperature=0.7), sample("b", logprobs=None)]) == 0.7
    with pytest.raises(TrainingError, match=r"temperatures 0\.7, 1\.0"):
        one_temperature([sample("a", temperature=0.7), sample("b")])


def test_the_best_of_each_group_are_imitated_and_held_out_shapes_never() -> None:
    rows = [row(i, reward=float(i)) for i in range(4)]
    rows += [
        row(0, "h", shape=HELDOUT),
        row(1, "bad").model_copy(update={"status": "failed"}),
        row(2, "x", reward=None),
    ]
    left_out: Counter[str] = Counter()
    assert [r.row_id for r in imitated(rows, SftSettings(best_of_group=2), left_out)] == ["g-3", "g-2"]
    assert left_out == {"held out": 1, "failed": 1, "no reward": 1, "not among the best": 2}
    assert len(imitated(rows, SftSettings(best_of_group=None, min_reward=2.0), Counter())) == 2
    assert len(imitated(rows, SftSettings(split="all"), Counter())) == 3


def test_two_rollouts_of_one_content_are_imitated_once() -> None:
    twin = row(0).model_copy(update={"row_id": "twin"})
    assert [r.row_id for r in imitated([row(0), twin], SftSettings(best_of_group=2), Counter())] == ["g-0"]


def test_labels_cover_what_is_masked_in() -> None:
    assert sample("a", mask=(0, 1)).labels == [-100, -100, 3]


def test_settings_that_make_no_sense() -> None:
    for wrong in (
        {"grpo": {"behaviour": "reference", "kl": 0}},
        {"sft": {"learning_rate": float("nan")}},
        {"lora": {"rank": 0}},
    ):
        with pytest.raises(ValueError):
            TrainSettings.model_validate(wrong)
