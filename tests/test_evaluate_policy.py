"""agent evaluate-policy: the table recomputed from what was recorded, cells that are not played twice, a language model
side by side with others, and what can be wrong with what was asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from fakes import ScriptedDevice
from records_kit import ROOT, agent, make_record

from agent import evaluate_cli
from agent.config import Settings
from memory.exemplars import MemorySettings
from memory.shortlist import LISTED
from policy.base import PolicyRequest
from policy.compact import plan_arguments
from policy.search import SearchPolicy
from policy.settings import LOCAL_QUOTA, PolicySettings
from tools.families import accepted_plans, load_families
from tools.hgemm import hgemm
from tools.model import held_out, rank
from tools.record_file import RecordReader
from tools.records import Plan, Reason, Step, Task, ToolCall, Variant
from tools.replay import default_path
from training.evaluate import Cell, ModelPolicy, Player, Plays, ShortlistPolicy, play
from training.evaluate_cache import appending, read_cells
from training.evaluate_table import estimate, lines, table
from training.replaying import Shape, shapes_of
from training.shelf import Shelf

FAMILIES = load_families()
SHAPES = ((64, 64, 64), (64, 128, 256), (128, 128, 128))
needs_train = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torch", "transformers", "llguidance", "peft")),
    reason="needs the extra train",
)


class Scripted:
    """A language model that says what it is told to: plans by their place in the list of accepted ones, a submit, a
    call that is no call, or nothing."""

    name = "scripted"
    is_search = False

    def __init__(self, *script: int | str) -> None:
        self.script = list(script)
        self.requests: list[PolicyRequest] = []

    def close(self) -> None:
        return

    def step(self, request: PolicyRequest) -> Step:
        self.requests.append(request)
        said = self.script.pop(0) if self.script else "nothing"
        if isinstance(said, int):
            plan = plans_of(request)[said]
            call = ToolCall(call_id="c", name="evaluate_plan", arguments=plan_arguments(plan))
        elif said == "nothing":
            return Step(role="assistant", text="I give up", stop="end")
        else:
            call = ToolCall(call_id="c", name=said, arguments={"key": "k"} if said == "submit" else {})
        return Step(role="assistant", tool_calls=(call,), stop="tool_calls")


def plans_of(request: PolicyRequest) -> list[Plan]:
    return [v.plan for v in accepted_plans(FAMILIES, request.task) if v.plan is not None]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("records") / "toy.sqlite", *SHAPES)


@pytest.fixture(scope="module")
def records(path: Path) -> Iterator[RecordReader]:
    reader = RecordReader(path)
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def shelf(records: RecordReader) -> Shelf:
    return Shelf(records, FAMILIES)


@pytest.fixture(scope="module")
def shapes(shelf: Shelf) -> list[Shape]:
    return shapes_of(shelf)


def plays(shelf: Shelf, shapes: Sequence[Shape], budgets: Sequence[int] = (1, 4, 8), seeds: int = 2) -> Plays:
    return Plays(shelf, FAMILIES, shapes, budgets, range(seeds), MemorySettings(), 2)


def played(players: Sequence[Player], of: Plays, known: dict[str, Cell] | None = None) -> tuple[list[Cell], int]:
    new = []
    cells = [
        cell for player in players for cell in play(player, of, known or {}, 4, lambda cell, is_new: new.append(is_new))
    ]
    return cells, sum(new)


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_the_table_is_what_the_records_say(shelf: Shelf, shapes: list[Shape]) -> None:
    """The model's row, computed another way: from its ranking and the recorded timings."""
    players = [
        Player("model", ModelPolicy(shelf), "m"),
        Player("random", SearchPolicy(PolicySettings(), FAMILIES, "random"), "r"),
    ]
    cells, _ = played(players, plays(shelf, shapes))
    rows = {r.policy: r for r in table(cells, shapes, (1, 4, 8), {p.name: p.quota for p in players}, "random")}
    complete = [shape for shape in shapes if shape.is_complete]
    assert complete and rows["model"].shapes == len(shapes) and rows["model"].cells == 2 * len(shapes)
    for budget in (1, 4, 8):
        expected, apart = [], []
        for shape in complete:
            plans = [v.plan for v in accepted_plans(FAMILIES, shape.task) if v.plan is not None]
            order = [r.plan.plan_id for r in rank(plans, shape.task, shelf.device, held_out(shape.task))]
            found = {}
            for plan in plans:
                timing = shelf.records.timed(plan.plan_id, shape.task.task_id, "offline", "screen")
                row = timing.row() if timing is not None else None
                found[plan.plan_id] = row.ratio if row is not None else 0.0
            expected.append(1 - max(found[key] for key in order[:budget]) / max(found.values()))
            for cell in cells:
                if cell.policy == "random" and cell.task_id == shape.task.task_id:
                    best = max((ratio or 0.0) for ratio in cell.ratios[:budget])
                    apart.append(expected[-1] - (1 - best / max(found.values())))
        own, difference = rows["model"].regret[budget], rows["model"].difference[budget]
        assert own is not None and own.mean == pytest.approx(np.mean(expected)) and own.lo <= own.mean <= own.hi
        assert difference is not None and difference.mean == pytest.approx(np.mean(apart))
    assert rows["random"].difference == {} and rows["random"].evaluations == 8 * 2 * len(shapes)


def test_the_interval_is_of_shapes_and_the_seeds_within_them() -> None:
    assert estimate({}) is None
    same = estimate({(f"shape {i}", seed): 0.1 for i in range(5) for seed in range(3)})
    assert same is not None and (same.mean, same.lo, same.hi) == pytest.approx((0.1, 0.1, 0.1))
    # Two shapes that differ: half of the resamples of two are mixed, a quarter are one of them.
    two = estimate({(f"shape {i}", seed): float(i) for i in range(2) for seed in range(50)})
    assert two is not None and (two.mean, two.lo, two.hi) == pytest.approx((0.5, 0.0, 1.0))
    rng = np.random.default_rng(3)
    values = rng.normal(size=400)
    many = estimate({(f"shape {i}", 0): float(value) for i, value in enumerate(values)})
    assert many is not None
    assert (many.hi - many.lo) / 2 == pytest.approx(1.96 * values.std() / np.sqrt(400), rel=0.1)


def test_what_is_not_recorded_costs_an_evaluation_and_an_unknown_optimum_gives_no_regret(
    shelf: Shelf, shapes: list[Shape]
) -> None:
    shape = shapes[0]
    plans = [v.plan for v in accepted_plans(FAMILIES, shape.task) if v.plan is not None]
    fewer = {key: ratio for key, ratio in shape.ratios.items() if key != plans[2].plan_id}
    policy = Scripted(2, 0, "list_families", 1, 0)
    player = Player("scripted", policy, "s")
    partial = [Shape(shape.task, fewer, False)]
    (cell,), _ = played([player], Plays(shelf, FAMILIES, partial, (4,), (0,), MemorySettings(), 2))
    assert cell.ratios[:3] == (None, shape.ratios[plans[0].plan_id], shape.ratios[plans[1].plan_id])
    assert (cell.not_recorded, cell.invalid, cell.calls) == (1, 1, 5)  # the last repeats one, and costs nothing
    (row,) = table([cell], partial, (4,), {"scripted": player.quota}, None)
    assert row.regret == {4: None} and "1 of 3" in "\n".join(lines([row], (4,), None, markdown=True))


def test_a_language_model_plays_rollouts_of_its_quota_and_is_shown_what_it_tried(
    shelf: Shelf, shapes: list[Shape]
) -> None:
    policy = Scripted(*range(4), 4, "submit", *range(5, 8))
    one_seed = Plays(shelf, FAMILIES, shapes[:1], (8,), (0,), MemorySettings(), 2)
    (cell,), _ = played([Player("scripted", policy, "s")], one_seed)
    assert len(cell.ratios) == 8 and cell.quota == LOCAL_QUOTA and len(policy.requests) == 9
    assert [r.evaluations_left for r in policy.requests] == [4, 3, 2, 1, 4, 3, 3, 2, 1]
    assert [r.rollout for r in policy.requests] == [0] * 4 + [1] * 2 + [2] * 3
    first, later = policy.requests[0].steps, policy.requests[4].steps
    label = shapes[0].task.label
    assert f"measured at {label}" not in first[1].text and f"measured at {label}" in later[1].text
    answer = json.loads(policy.requests[1].steps[-1].text)
    assert answer["key"] == policy.requests[1].trials[0].key and answer["status"] == "ok"


def test_a_recorded_compile_failure_is_a_rejection(tmp_path: Path) -> None:
    """As a verdict like any other: it leaves the optimum known, costs an evaluation, and is what the model is told."""
    task = hgemm(*SHAPES[0])
    plans = [v.plan for v in accepted_plans(FAMILIES, task) if v.plan is not None]

    def script(tool: str, variant: Variant, task: Task | None) -> Reason | None:
        return Reason.COMPILE_ERROR if (tool, variant.key) == ("compile", plans[0].plan_id) else None

    reader = RecordReader(make_record(tmp_path / "toy.sqlite", SHAPES[0], device=ScriptedDevice(script)))
    try:
        shelf = Shelf(reader, FAMILIES)
        (shape,) = shapes_of(shelf)
        assert shape.is_complete and shape.ratios[plans[0].plan_id] is None
        policy = Scripted(0, 1)
        (cell,) = played([Player("scripted", policy, "s")], plays(shelf, [shape], (2,), seeds=1))[0]
        assert cell.not_recorded == 0 and cell.ratios[0] is None and cell.ratios[1] is not None
        told = json.loads(policy.requests[1].steps[-1].text)
        assert (told["status"], told["reason"]) == ("failed", "compile_error")
        nothing = Shape(task, {plans[0].plan_id: None}, True)  # no optimum, so no regret
        (row,) = table([cell], [nothing], (2,), {"scripted": lambda budget: cell.quota}, None)
        assert row.regret == {2: None}
    finally:
        reader.close()


def test_prompts_can_leave_exemplars_out(shelf: Shelf, shapes: list[Shape]) -> None:
    policy = Scripted(*range(8))
    of = plays(shelf, shapes[:1], (8,), seeds=1)
    bare = Player("bare", policy, "s", frozenset({"exemplars", "shortlist"}))
    cells, _ = played([bare], of)
    assert all("nothing is measured yet" in request.steps[1].text for request in policy.requests)
    other, _ = played([Player("scripted", Scripted(*range(8)), "s")], of)
    assert cells[0].key not in {cell.key for cell in other}
    unlisted = Scripted(*range(8))
    played([Player("unlisted", unlisted, "s", frozenset({"shortlist"}))], of)
    assert all("expected here" not in request.steps[1].text for request in unlisted.requests)
    assert "measured at" in unlisted.requests[0].steps[1].text


def test_the_list_of_the_prompts_is_a_policy_of_its_own(shelf: Shelf, shapes: list[Shape]) -> None:
    policy = Scripted(*range(8))
    of = plays(shelf, shapes[:1], (8,), seeds=1)
    (cell,), _ = played([Player("shortlist", ShortlistPolicy(shelf), "l")], of)
    played([Player("scripted", policy, "s")], of)
    listed = re.findall(r"^#\d \d+\.\d\d (\S.*)$", policy.requests[0].steps[1].text, re.MULTILINE)
    label_of = {plan.plan_id: plan.label for plan in shelf.plans(shapes[0].task)}
    assert len(listed) == LISTED
    ratios = [shapes[0].ratios[key] for label in listed for key in label_of if label_of[key] == label]
    assert list(cell.ratios) == ratios
    later = policy.requests[4].steps[1].text  # what was tried makes room for the next ones
    tried = {trial.label for trial in policy.requests[4].trials}
    assert not any(f" {label}" in later.partition("expected here:")[2] for label in tried)


def test_the_search_by_records_is_a_policy_of_its_own(tmp_path: Path) -> None:
    """It asks training shapes only, as the prompts do; of the packaged records, where there are some."""
    given = ("evaluate-policy", "--policy", "search", "--policy", "search-records", "--budgets", "1,8", "--seeds", "1")
    done = agent(tmp_path, *given, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    by_model, by_records = ({row["policy"]: row for row in document["policies"]}[name] for name in given[2:5:2])
    for budget in ("1", "8"):
        assert by_records["regret"][budget]["mean"] < by_model["regret"][budget]["mean"]
    again = agent(tmp_path, *given, "--json")
    assert json.loads(again.stdout)["policies"] == document["policies"]


def test_a_policy_that_gives_up_ends_its_cell_and_is_no_regret(shelf: Shelf, shapes: list[Shape]) -> None:
    policy = Scripted()
    (cell, _), _ = played([Player("scripted", policy, "s")], plays(shelf, shapes[:1], (4,)))
    assert cell.empty and len(policy.requests) == 4
    (row,) = table([cell], shapes, (4,), {"scripted": lambda budget: LOCAL_QUOTA}, None)
    assert row.regret == {4: None} and row.empty == 1


def test_what_was_played_is_known_by_all_code_that_decides(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a cell that was played before a change of it would count as played after."""
    asked: list[set[str]] = []
    monkeypatch.setattr(evaluate_cli, "_code", lambda *modules: str(asked.append(set(modules))))
    with ExitStack() as stack:
        names = dict.fromkeys(evaluate_cli.SEARCHES)
        evaluate_cli._players(names, Settings(), FAMILIES, shelf, default_path(), frozenset(), stack)
    assert all({"tools.model", "tools.model_terms"} <= code for code in asked) and len(asked) == len(names)
    code_of = {**dict(zip(names, asked, strict=True)), "local": set(evaluate_cli.LOCAL_CODE)}
    for name in ("search-records", "shortlist", "local"):
        assert {"memory.exemplars_read", "memory.shortlist", "tools.model_terms", "training.splits"} <= code_of[name]


# --- the cache --------------------------------------------------------------------------------------------------------


def test_what_was_played_is_not_played_again_also_after_a_cut_line(
    shelf: Shelf, shapes: list[Shape], tmp_path: Path
) -> None:
    players = [Player("random", SearchPolicy(PolicySettings(), FAMILIES, "random"), "r")]
    cells, new = played(players, plays(shelf, shapes))
    assert new == len(cells) == 2 * len(shapes)
    path = tmp_path / "deep" / "cells.jsonl"
    with appending(path) as file:
        for cell in cells:
            file.add(cell)
    path.write_bytes(path.read_bytes()[:-30])
    known = read_cells(path)
    assert len(known) == len(cells) - 1
    again, new = played(players, plays(shelf, shapes), known)
    assert (again, new) == (cells, 1)
    with appending(path) as file:
        file.add(cells[-1])
    assert read_cells(path) == {cell.key: cell for cell in cells}
    more, new = played(players, plays(shelf, shapes, (1, 4, 8, 16)), read_cells(path))
    assert new == len(cells) and len(more[0].ratios) == 16  # another budget is another play


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_tells_the_table_as_text_markdown_and_json(path: Path, tmp_path: Path) -> None:
    given = ["evaluate-policy", "--from", str(path), "--split", "all", "--budgets", "1,4", "--seeds", "2"]
    done = agent(tmp_path, *given)
    assert done.returncode == 0, done.stderr
    assert "model " in done.stdout and "random " in done.stdout and "Regret less that of search" in done.stdout
    again = agent(tmp_path, *given, "--json")
    document = json.loads(again.stdout)
    assert [row["policy"] for row in document["policies"]] == ["random", "search", "model"]
    assert document["budgets"] == [1, 4] and document["shapes"] == len(SHAPES)
    marked = agent(tmp_path, *given, "--markdown", "--quiet").stdout
    assert "| policy | 1 evaluation | 4 evaluations | not recorded | invalid calls |\n|---|---|---|---|---|" in marked
    mean = document["policies"][1]["regret"]["4"]["mean"]
    assert (
        f"| search | {100 * document['policies'][1]['regret']['1']['mean']:.2f} " in marked
        and f"{100 * mean:.2f}" in marked
    )
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 3 * 2 * len(SHAPES)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--policy", "clever"], "--policy is one of random, search, search-records, model, shortlist, base"),
        (["--adapter", "sft"], "write --adapter NAME=FOLDER"),
        (["--adapter", "search=x"], "two policies called 'search'"),
        (["--adapter", "sft=/nowhere"], "the folder /nowhere does not exist"),
        (["--budgets", "0,4"], "--budgets are numbers"),
        (["--split", "test"], "--split is heldout"),
        (["--split", "off_grid"], "the records have no off_grid shape"),
        (["--without", "retrieval"], "holds no retrieved documents"),
        (["--without", "words"], "--without is exemplars, profiles or shortlist"),
        (["--ablate", "grpo"], "--ablate takes an adapter or base, and none is played, not 'grpo'"),
        (["--from", "/nowhere.sqlite"], "/nowhere.sqlite"),
        (["--split", "all", "--cache", "/dev/null/cells"], "--cache"),
    ],
)
def test_what_cannot_be_is_one_sentence(given: list[str], told: str, path: Path, tmp_path: Path) -> None:
    if "/nowhere" in given[-1] and find_spec("llguidance") is None:
        pytest.skip("needs the extra train")
    done = agent(tmp_path, "evaluate-policy", "--from", str(path), *given)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert told in done.stderr.replace("\n", " ") and done.stderr.startswith("error: ")


@needs_train
@pytest.mark.slow
def test_a_local_model_is_played_side_by_side_and_only_says_valid_calls(
    shelf: Shelf, shapes: list[Shape], tmp_path: Path
) -> None:
    from tiny_model import make_tiny_model

    from policy.local_policy import LocalPolicy

    base = {"name": str(make_tiny_model(tmp_path / "tiny")), "device": "cpu"}
    settings = PolicySettings.model_validate({"name": "local", "local": {"base": base, "words": 8}})
    policy = LocalPolicy(settings, FAMILIES, home=tmp_path)
    try:
        of = plays(shelf, shapes[:2], (1, 4))
        first, new = played([Player("tiny", policy, "t")], of)
        assert new == 2 * 2 * 2 and sum(cell.invalid for cell in first) == 0
        assert {(cell.quota, len(cell.ratios)) for cell in first} == {(1, 1), (LOCAL_QUOTA, 4)}
        assert played([Player("tiny", policy, "t")], of)[0] == first
    finally:
        policy.close()


@needs_train
@pytest.mark.slow
def test_a_model_that_was_trained_anew_in_its_folder_is_played_again(tmp_path: Path) -> None:
    from tiny_model import make_tiny_model

    record = make_record(tmp_path / "one.sqlite", SHAPES[0])
    folder = make_tiny_model(tmp_path / "tiny")
    given = ["evaluate-policy", "--from", str(record), "--split", "all", "--budgets", "1", "--seeds", "1", "--quiet"]
    given += ["--policy", "base", "--set", f"policy.local.base.name={folder}", "--set", "policy.local.base.device=cpu"]

    def keys() -> list[str]:
        done = agent(tmp_path, *given, "--against", "base")
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["key"] for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]

    assert len(keys()) == 1
    make_tiny_model(folder, seed=1)
    assert len(set(keys())) == 2


@needs_train
@pytest.mark.slow
def test_a_models_identity_is_of_every_weight_its_type_template_and_adapter(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from tiny_model import make_tiny_model
    from transformers import AutoModelForCausalLM

    from policy.base_model import BaseSettings
    from policy.local_worker import Worker

    folder, adapter = make_tiny_model(tmp_path / "tiny"), tmp_path / "adapter"

    def identity(adapter: Path | None = None, **given: str) -> str:
        settings = BaseSettings.model_validate({"name": str(folder), "device": "cpu", **given})
        return Worker(settings, adapter, tmp_path, None).identity

    plain = identity()
    assert identity() == plain and identity(dtype="bfloat16") != plain
    template = tmp_path / "own.jinja"
    template.write_text((ROOT / "configs" / "chat" / "tools.jinja").read_text().replace("system", "System"))
    assert identity(chat_template=str(template)) != plain
    model = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    tuned = identity(adapter)
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 16'))
    assert len({plain, tuned, identity(adapter)}) == 3
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] += 0.01  # none of those that a fingerprint looks at
    model.save_pretrained(folder)
    assert identity() != plain
