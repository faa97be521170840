"""agent collect: groups of a local model's rollouts on what was recorded, with the tokens, log-probabilities and
rewards that offline GRPO needs; and the whole way from there to an adapter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records_kit import agent, make_record

for needed in ("torch", "transformers", "llguidance", "peft"):
    pytest.importorskip(needed, reason="needs the extra train")
pytestmark = pytest.mark.slow

from tiny_model import make_tiny_model  # noqa: E402

from agent.config import load_settings  # noqa: E402
from memory.exemplars import MemorySettings  # noqa: E402
from policy.base import PolicyRequest  # noqa: E402
from policy.base_model import Base, BaseSettings, load_base  # noqa: E402
from policy.compact import plan_arguments  # noqa: E402
from policy.redacting import Secrets  # noqa: E402
from policy.reward import RewardSettings  # noqa: E402
from policy.settings import LocalSettings  # noqa: E402
from tools.families import load_families  # noqa: E402
from tools.record_file import RecordReader  # noqa: E402
from tools.records import Step, ToolCall  # noqa: E402
from training.collect import KINDS, Collection, collect  # noqa: E402
from training.collect_parts import Order, part_files  # noqa: E402
from training.replaying import Shape, Turns, shapes_of, side_by_side  # noqa: E402
from training.rows import Row, read_rows  # noqa: E402
from training.samples import sample_of  # noqa: E402
from training.shelf import Shelf  # noqa: E402

FAMILIES = load_families()
SHAPES = ((64, 64, 64), (64, 128, 256))


class Scripted:
    """Plans by their place in the list of the prompt, which the rollout's number gives; then a submit of the best, or
    none."""

    name = "local:scripted"
    is_search = False

    def __init__(self, shelf: Shelf, submits: bool = True, model: str = "m") -> None:
        self.shelf, self.submits, self.model = shelf, submits, model
        self.asked: list[int] = []

    def close(self) -> None:
        return

    def identity(self) -> str:
        return self.model

    def steps(self, requests: list[PolicyRequest]) -> list[Step]:
        self.asked.append(len(requests))
        return [self.step(request) for request in requests]

    def step(self, request: PolicyRequest) -> Step:
        if request.evaluations_left < 1:
            best = max(request.trials, key=lambda trial: trial.ratio or 0.0)
            call = ToolCall(call_id="c", name="submit", arguments={"key": best.key})
            return Step(role="assistant", tool_calls=(call,) if self.submits else (), stop="tool_calls")
        tried = {trial.key for trial in request.trials}
        left = [one.plan for one in self.shelf.expected(request.task) if one.plan.plan_id not in tried]
        plan = left[request.rollout % 4]
        call = ToolCall(call_id="c", name="evaluate_plan", arguments=plan_arguments(plan))
        return Step(role="assistant", text="x", tool_calls=(call,), stop="tool_calls")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("records") / "toy.sqlite", *SHAPES)


@pytest.fixture(scope="module")
def shelf(path: Path) -> Iterator[Shelf]:
    reader = RecordReader(path)
    yield Shelf(reader, FAMILIES)
    reader.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def collected(policy: Scripted, shelf: Shelf, shapes: list[Shape], batch: int = 5) -> list[Row]:
    what = Collection(groups_per_shape=len(KINDS), group_size=4)
    settings = (RewardSettings(), MemorySettings(), batch, Secrets())
    return list(collect(policy, shelf, FAMILIES, shapes, what, *settings))


def test_a_group_has_one_prompt_and_each_rollout_its_own_trials_and_reward(shelf: Shelf) -> None:
    shapes = shapes_of(shelf)
    policy = Scripted(shelf)
    rows = collected(policy, shelf, shapes)
    assert len(rows) == len(SHAPES) * len(KINDS) * 4 and max(policy.asked) == 5
    groups = {row.group_id: [one for one in rows if one.group_id == row.group_id] for row in rows}
    assert len(groups) == len(SHAPES) * len(KINDS)
    ratios = {(shape.task.task_id, key): ratio for shape in shapes for key, ratio in shape.ratios.items()}
    for members in groups.values():
        assert len(members) == 4 and len({one.prompt for one in members}) == 1
        quota = KINDS[members[0].provenance.round % len(KINDS)].evaluations
        assert f"evaluations {quota}\n" in members[0].prompt[1].content
        for one in members:
            answers = [json.loads(turn.content) for turn in one.turns if turn.role == "tool"]
            best = max(ratios[one.task_id, answer["key"]] or 0.0 for answer in answers)
            assert len(answers) == quota and one.reward_parts.speed == pytest.approx(best)
            assert one.turns[-1].tool_calls[0].name == "submit" and one.provenance.ended_by == "submit"
    later = [row for row in rows if KINDS[row.provenance.round % len(KINDS)].is_later]
    assert later and all(
        f"measured at {'x'.join(map(str, row.dims.values()))}" in row.prompt[1].content for row in later
    )
    assert collected(policy, shelf, shapes, batch=64) == rows  # how many are side by side decides nothing
    other = collected(Scripted(shelf, model="another"), shelf, shapes)
    assert groups.keys().isdisjoint(row.group_id for row in other)
    unsubmitted = collected(Scripted(shelf, submits=False), shelf, shapes)
    assert [row.reward for row in unsubmitted] == [row.reward for row in rows]


def test_one_that_ends_makes_room_for_the_next() -> None:
    def turns(count: int) -> Turns:
        for _ in range(count):
            yield "asked"  # type: ignore[misc]

    class Policy:
        is_search = False

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def steps(self, requests: list[object]) -> list[object]:
            self.sizes.append(len(requests))
            return list(requests)

    policy = Policy()
    over = list(
        side_by_side(policy, [(name, turns(count)) for name, count in zip("abcd", (3, 1, 2, 0), strict=True)], 2)
    )  # type: ignore[arg-type]
    assert sorted(over) == list("abcd")
    assert policy.sizes == [2, 2, 2]


def test_one_that_is_not_over_is_asked_for_again_beside_others() -> None:
    def turns(count: int) -> Turns:
        for number in range(count):
            assert (yield f"{count}.{number}") == f"{count}.{number}"  # type: ignore[misc]

    class Policy:
        is_search = False

        def __init__(self) -> None:
            self.asked: list[list[str]] = []

        def steps(self, requests: list[str]) -> list[str | None]:
            self.asked.append(requests)
            return [None if len(self.asked) == 1 and request == "3.0" else request for request in requests]

    policy = Policy()
    over = list(side_by_side(policy, [(n, turns(n)) for n in (3, 1, 2)], 2))  # type: ignore[arg-type]
    assert sorted(over) == [1, 2, 3]
    assert policy.asked[:2] == [["3.0", "1.0"], ["3.0", "2.0"]]


def test_from_collected_rollouts_to_an_adapter(path: Path, tiny: Path, tmp_path: Path) -> None:
    base = ("--set", f"policy.local.base.name={tiny}", "--set", "policy.local.base.device=cpu")
    given = ("collect", "--from", str(path), "--out", str(tmp_path / "rows.jsonl"), "--split", "all", "--groups", "2")
    words = ("--group-size", "3", "--batch", "16", "--set", "policy.local.words=8", "--json", *base)
    done = agent(tmp_path, *given, *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["rows"], said["groups"], said["with_tokens"]) == (12, 4, 12) and "12 of 12 rollouts" in done.stderr
    rows = read_rows(tmp_path / "rows.jsonl")
    loaded = load_base(BaseSettings(name=str(tiny), device="cpu"), tmp_path)
    for row in rows:
        log_probabilities_are_right(loaded, row)
    assert len({row.provenance.session for row in rows}) == 1
    pytest.importorskip("trl")
    train = ("train", "grpo", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "grpo"), "--base", str(tiny))
    small = (
        "base.device=cpu",
        "grpo.max_length=8000",
        "grpo.batch_size=3",
        "grpo.group_size=3",
        "grpo.max_steps=2",
        "lora.rank=2",
    )
    trained = agent(tmp_path, *train, *(word for one in small for word in ("--set", one)), OMP_NUM_THREADS="1")
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "grpo" / "adapter_model.safetensors").is_file()


def test_several_processes_leave_what_one_leaves_and_nothing_is_collected_again(
    path: Path, tiny: Path, tmp_path: Path
) -> None:
    base = ("--set", f"policy.local.base.name={tiny}", "--set", "policy.local.base.device=cpu")
    words = ("--split", "all", "--groups", "2", "--group-size", "3", "--set", "policy.local.words=8", *base)

    def collect_into(name: str, *more: str) -> Any:
        given = ("collect", "--from", str(path), "--out", str(tmp_path / name), *words, "--json", *more)
        return agent(tmp_path, *given, OMP_NUM_THREADS="1")

    one = collect_into("one.jsonl", "--batch", "3")
    several = collect_into("several.jsonl", "--batch", "9", "--jobs", "3")
    assert one.returncode == several.returncode == 0, one.stderr + several.stderr
    assert "12 of 12 rollouts" in several.stderr
    assert sorted(file.name for file in tmp_path.glob("*.jsonl")) == ["one.jsonl", "several.jsonl"]
    assert not list(tmp_path.glob(".part-*"))

    def turns(name: str) -> list[Any]:
        return [(row.row_id, row.turns, row.reward) for row in read_rows(tmp_path / name)]

    assert turns("one.jsonl") == turns("several.jsonl")
    # A part that an earlier run left is taken as it is.
    lines = (tmp_path / "one.jsonl").read_text().splitlines(keepends=True)
    loaded = load_settings(None, {}, {})
    base_here = {"name": str(tiny), "device": "cpu"}
    local = LocalSettings.model_validate({"base": base_here, "words": 8, "adapter": None})
    order = Order(
        policy=loaded.policy.model_copy(update={"name": "local", "local": local}), reward=loaded.reward,
        memory=loaded.memory, source=path.absolute(), split="all", groups=2, group_size=3, batch=9, parts=3,
    )  # fmt: skip
    part_files(order, tmp_path / "again.jsonl")[1].write_text("".join(lines[:3]))
    again = collect_into("again.jsonl", "--batch", "9", "--jobs", "3")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["rows"] < 12 and not list(tmp_path.glob(".part-*"))


def log_probabilities_are_right(base: Base, row: Row) -> None:
    import torch

    sample = sample_of(row, base)
    assert sample.logprobs is not None
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    with torch.inference_mode():
        expected = torch.log_softmax(base.model(ids).logits[0].double(), -1)
    begin = len(sample.prompt_ids) - 1
    for place, (token, use, logprob) in enumerate(
        zip(sample.completion_ids, sample.mask, sample.logprobs, strict=True), begin
    ):
        if use:
            assert np.isclose(float(expected[place, token]), logprob, atol=1e-3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--out", "rows.txt"], "must end in .jsonl or .parquet"),
        (["--out", "rows.jsonl", "--adapter", "/nowhere"], "the folder /nowhere does not exist"),
        (["--out", "rows.jsonl", "--split", "test"], "--split is heldout"),
        (["--out", "rows.jsonl", "--split", "off_grid"], "the records have no off_grid shape"),
        (["--out", "rows.jsonl", "--from", "/nowhere.sqlite"], "/nowhere.sqlite"),
    ],
)
def test_what_cannot_be_is_one_sentence(given: list[str], told: str, path: Path, tiny: Path, tmp_path: Path) -> None:
    base = ("--set", f"policy.local.base.name={tiny}", "--set", "policy.local.base.device=cpu")
    given = [str(tmp_path / word) if word.startswith("rows.") else word for word in given]
    done = agent(tmp_path, "collect", "--from", str(path), *given, *base)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert told in done.stderr.replace("\n", " ") and done.stderr.startswith("error: ")
    assert not (tmp_path / "rows.jsonl").exists()
