"""Trajectories out of the packaged record file: true of the records, seeded, and nothing of held-out shapes in them."""

import json
import re
from collections.abc import Iterator

import pytest

from memory.exemplars import MemorySettings
from policy.reward import RewardSettings
from policy.tool_schemas import parse_arguments
from tools.families import load_families, validate_plan
from tools.hgemm import hgemm, parse_shape
from tools.record_file import RecordReader
from tools.records import Task, ToolCall
from tools.replay import default_path
from training.errors import TrainingError
from training.rows import Row
from training.splits import asked_splits, split_of
from training.synthesise import Recipe, synthesise

FAMILIES = load_families()
TASKS = 6


class Few(RecordReader):
    """The first tasks only, one held out among them, so that a test takes a second."""

    def tasks(self) -> list[Task]:
        return super().tasks()[:TASKS]


def made(**recipe: object) -> list[Row]:
    records = Few(default_path())
    try:
        return list(synthesise(records, FAMILIES, Recipe(**recipe), RewardSettings(), MemorySettings()))  # type: ignore[arg-type]
    finally:
        records.close()


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    yield made(groups_per_shape=4, group_size=4)


def test_groups_are_whole_and_have_one_prompt(rows: list[Row]) -> None:
    assert len(rows) == TASKS * 4 * 4 and len({r.row_id for r in rows}) == len(rows)
    groups = {r.group_id: [m for m in rows if m.group_id == r.group_id] for r in rows}
    for members in groups.values():
        assert len(members) == 4 and len({m.prompt for m in members}) == 1
        assert [m.provenance.index for m in members] == [0, 1, 2, 3]


def test_only_shapes_of_the_splits_that_are_asked_for(rows: list[Row]) -> None:
    assert {r.split for r in rows} == {"train", "heldout"}
    for split in ("train", "heldout"):
        few = made(groups_per_shape=1, group_size=1, splits=asked_splits(f"off_grid, {split}"))
        assert {r.task_id for r in few} == {r.task_id for r in rows if r.split == split}
    with pytest.raises(TrainingError, match="--split is heldout, off_grid, train or all, not 'test'"):
        asked_splits("train,test")


def test_every_call_is_valid_and_every_submit_names_a_plan_that_was_tried(rows: list[Row]) -> None:
    for one in rows:
        calls = [call for turn in one.turns for call in turn.tool_calls]
        assert [c.name for c in calls[:-1]] == ["evaluate_plan"] * (len(calls) - 1) and calls[-1].name == "submit"
        keys = []
        for call in calls:
            arguments = json.loads(call.arguments)
            parse_arguments(ToolCall(call_id=call.id, name=call.name, arguments=arguments))
            if call.name == "evaluate_plan":
                plan = validate_plan(FAMILIES[arguments["family"]], arguments["b_layout"], arguments["knobs"])
                keys.append(plan.plan_id)
        assert len(set(keys)) == len(keys) and json.loads(calls[-1].arguments)["key"] in keys


def test_what_is_answered_is_what_was_recorded(rows: list[Row]) -> None:
    with_records = RecordReader(default_path())
    for one in rows[::7]:
        answers = [json.loads(turn.content) for turn in one.turns if turn.role == "tool"]
        for answer in answers:
            timing = with_records.timed(answer["key"], one.task_id, "offline", "screen")
            assert timing is not None and timing.row() is not None
            assert answer["ratio"] == pytest.approx(timing.row().ratio, abs=6e-4)  # type: ignore[union-attr]
        best = max(a["ratio"] for a in answers)
        assert one.reward_parts.speed == pytest.approx(best, abs=1e-3)
    with_records.close()


def test_no_exemplar_is_of_a_held_out_shape_but_the_prompts_own(rows: list[Row]) -> None:
    assert {r.split for r in rows} == {"train", "heldout"}
    for one in rows:
        told = one.prompt[1].content
        for shape in re.findall(r"measured at (\d+x\d+x\d+)", told):
            task = hgemm(*parse_shape(shape))
            assert task.task_id == one.task_id or split_of(task) == "train"


def test_the_first_of_a_group_is_worth_imitating(rows: list[Row]) -> None:
    firsts = [r.reward or 0.0 for r in rows if r.provenance.index == 0]
    others = [r.reward or 0.0 for r in rows if r.provenance.index > 0]
    assert sum(firsts) / len(firsts) > sum(others) / len(others)


def test_the_seed_decides(rows: list[Row]) -> None:
    assert made(groups_per_shape=4, group_size=4) == rows
    assert made(groups_per_shape=4, group_size=4, seed=1) != rows
