"""The trace of real sessions, and the tools over it: claims with steps that exist, also of a session that goes on."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import toy_families
from inspection_kit import ATTACK, GOOD, WRONG, make_session, think
from loop_kit import plan_call

from agent.errors import UsageError
from agent.inspecting import Reader, listed, opened, state_of
from agent.session import store_path
from inspection.answers import Best, Diff, Finding, NotFound, Profiles, Rejection, StepShown, VariantShown, View
from inspection.rendering import for_model, text
from inspection.tools import TOOLS, help_lines, run_call, run_command, schemas
from inspection.trace import PENDING, Trace
from memory.store import Store, StoreError
from tools.records import ToolCall
from tools.sqlite_reading import read_only_uri


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    make_session(home)
    make_session(home, "cut", stop_after=3)
    return home


@pytest.fixture(scope="module")
def reader(home: Path) -> Iterator[Reader]:
    with opened(home, "story", toy_families()) as found:
        yield found


@pytest.fixture(scope="module")
def trace(reader: Reader) -> Trace:
    return reader.trace()


@pytest.fixture(scope="module")
def view(reader: Reader, trace: Trace) -> View:
    return View(trace, reader.tried)


def ask(view: View, line: str) -> Finding:
    """With every cited step checked: it is there."""
    found = run_command(view, line)
    assert found.claims
    for claim in found.claims:
        assert all(view.trace.step(step_id) for step_id in claim.steps), claim
    return found


# --- the trace --------------------------------------------------------------------------------------------------------


def test_the_story_is_in_the_trace_step_by_step(trace: Trace) -> None:
    calls = [(s.tool, s.status, s.reason) for s in trace.steps if s.kind == "call"]
    assert calls == [
        ("evaluate_source", "failed", "compile_error"),
        ("evaluate_source", "failed", "wrong_result"),
        ("evaluate_source", "ok", None),
        ("profile", "ok", None),
        ("evaluate_plan", "ok", None),
        ("time", "failed", None),
        ("submit", "ok", None),
    ]
    first = trace.step("0.2")
    assert first is not None and first.reasoning.startswith("A plain kernel") and first.kind == "assistant"
    assert [s.kind for s in trace.steps[:2]] == ["system", "user"]
    assert {s.tool for s in trace.steps if s.kind == "finish"} == {"verify", "sanitize", "time", "profile"}
    assert trace.state == "finished" and trace.remarks == () and trace.tokens == 660


def test_ids_are_unique_and_lead_to_their_step(trace: Trace) -> None:
    ids = [s.step_id for s in trace.steps]
    assert len(set(ids)) == len(ids)
    assert all(trace.step(step_id).step_id == step_id for step_id in ids)  # type: ignore[union-attr]


def test_the_best_so_far_counts_every_variant_once(trace: Trace) -> None:
    assert [s.evaluated for s in trace.steps if s.kind == "call"] == [1, 2, 3, 3, 4, 4, 4]
    assert [s.step_id for s in trace.steps if s.rose] == ["0.8.0", "0.12.0"]


def test_the_order_is_that_of_the_session_with_groups_and_rounds(tmp_path: Path) -> None:
    _, summary = make_session(tmp_path, "groups", session__group_size=2, session__rounds=2)
    assert summary is not None
    with opened(tmp_path, "groups", toy_families()) as reader:
        trace = reader.trace()
    assert tuple((s.evaluated, s.ratio) for s in trace.steps if s.rose) == summary.best_curve
    assert max(s.evaluated for s in trace.steps) == summary.evaluations
    assert [one.rollout for one in trace.rollouts] == [0, 1, 2, 3]
    assert {one.ended_by for one in trace.rollouts} == {"submit"}


# --- a session that goes on -------------------------------------------------------------------------------------------


def test_a_store_that_is_gone_is_not_an_empty_one(home: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(home, copy)
    (copy / "sessions" / "story" / "summary.json").write_text("{}")
    store_path(copy).unlink()
    found = opened(copy, "story", toy_families())
    with pytest.raises(StoreError, match="which holds what the session story measured, is not there: put it back"):
        found.__enter__()


def test_a_broken_off_session_reads_up_to_there(home: Path) -> None:
    with opened(home, "cut", toy_families()) as reader:
        trace = reader.trace()
    assert trace.state == "stopped"
    assert [s.reason for s in trace.steps if s.kind == "call"] == ["compile_error", "wrong_result", None]
    assert [one.ended_by for one in trace.rollouts] == [None]


def test_an_answer_is_shown_before_the_conversation_has_it(home: Path, tmp_path: Path) -> None:
    """Between a call and the turn's end the answer is in the store alone; before, the call is pending."""
    shutil.copytree(home, tmp_path / "home")
    with Store(tmp_path / "home" / "store.sqlite") as store:
        trajectory = next(t for t in store.trajectories("cut"))
        store.put_trajectory(trajectory.model_copy(update={"steps": trajectory.steps[:3]}))
    with opened(tmp_path / "home", "cut", toy_families()) as reader:
        assert [s.reason for s in reader.trace().steps if s.kind == "call"] == ["compile_error"]
    database = sqlite3.connect(tmp_path / "home" / "store.sqlite")
    database.execute("DELETE FROM results WHERE kind = 'answer'")
    database.commit()
    database.close()
    with opened(tmp_path / "home", "cut", toy_families()) as reader:
        assert [s.status for s in reader.trace().steps if s.kind == "call"] == [PENDING]


def test_reading_changes_no_file(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "home")
    files = [p for p in (tmp_path / "home").rglob("*") if p.is_file()]
    before = {p: p.read_bytes() for p in files}
    with opened(tmp_path / "home", "cut", toy_families()) as reader:
        run_command(View(reader.trace(), reader.tried), "/timeline")
    assert {p: p.read_bytes() for p in files} == before


def test_reading_while_another_writes(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "home")
    with Store(tmp_path / "home" / "store.sqlite") as writer, writer.batch():
        writer.put("answer-x", "answer", "{}")
        with opened(tmp_path / "home", "story", toy_families()) as reader:
            assert len(reader.trace().steps) > 10


def test_a_folder_of_an_odd_name_and_one_that_nobody_writes_to(home: Path, tmp_path: Path) -> None:
    odd = tmp_path / "what? 100 % #1 & é"
    shutil.copytree(home, odd)
    with opened(odd, "story", toy_families()) as reader:
        assert len(reader.trace().steps) > 10
    assert read_only_uri(odd / "store.sqlite").endswith("?mode=ro")
    nobody = Path("/proc/self/store.sqlite")
    assert read_only_uri(nobody).endswith("?mode=ro&immutable=1") or os.access(nobody.parent, os.W_OK)


def test_the_state_is_told_from_the_holder_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(f"process {os.getpid()}")
    assert state_of(tmp_path) == "running"
    (tmp_path / "lock").write_text("process 99999999")
    assert state_of(tmp_path) == "stopped"


# --- the tools --------------------------------------------------------------------------------------------------------


def test_why_rejected_says_the_verdict_and_what_came_next(view: View, trace: Trace) -> None:
    bad, wrong, good = trace.keys[:3]
    found = ask(view, f"/why {bad}")
    assert isinstance(found, Rejection) and found.rejected and found.reason == "compile_error"
    assert found.claims[0].steps == ("0.2.0",) and found.claims[1].steps == ("0.5.0",)
    assert wrong in found.claims[1].text
    fine = ask(view, f"/why {good}")
    assert isinstance(fine, Rejection) and not fine.rejected and "not rejected" in fine.claims[0].text


def test_diff_shows_the_repair(view: View, trace: Trace) -> None:
    found = ask(view, f"/diff {trace.keys[1]} {trace.keys[2]}")
    assert isinstance(found, Diff)
    assert "-  wrong();" in found.lines and "+  right();" in found.lines
    assert found.claims[0].steps == ("0.5.0", "0.8.0")
    assert "was rejected: wrong_result" in found.claims[1].text and found.claims[1].steps == ("0.5.0",)


def test_diff_of_two_plans_names_the_knobs(tmp_path: Path) -> None:
    plans = think(plan_call(64, 64, call_id="a"), plan_call(128, 64, call_id="b"))
    make_session(tmp_path, "plans", turns=[plans, think(), think()])
    with opened(tmp_path, "plans", toy_families()) as reader:
        view = View(reader.trace(), reader.tried)
        found = ask(view, f"/diff {view.trace.keys[0]} {view.trace.keys[1]}")
    assert isinstance(found, Diff) and found.knobs == (("BM", "64", "128"),)
    assert any("faster than" in c.text or "slower than" in c.text for c in found.claims)


def test_profiles_side_by_side(view: View, trace: Trace) -> None:
    found = ask(view, f"/profiles {trace.keys[2]} best")
    assert isinstance(found, Profiles)
    assert "tensor cores busy 20 % against 80 %" in found.claims[0].text
    assert ("tensor_pipe_pct", 20.0, 80.0) in [(row.name, row.a, row.b) for row in found.rows]
    assert found.claims[0].steps == ("0.10.0", f"finish.{found.keys[1]}.profile")
    alone = ask(view, f"/profiles {trace.keys[0]} best")
    assert "was not profiled" in alone.claims[0].text


def test_best_names_every_rise_and_the_winner(view: View, trace: Trace) -> None:
    found = ask(view, "/best")
    assert isinstance(found, Best) and [p.step_id for p in found.points] == ["0.8.0", "0.12.0"]
    assert found.winner == trace.keys[3] and "passed the whole gate" in found.claims[-1].text


def test_variant_and_step_hold_all_there_is(view: View, trace: Trace) -> None:
    shown = ask(view, f"/variant {trace.keys[2][:7]}")
    assert isinstance(shown, VariantShown) and shown.variant.source == GOOD
    step = ask(view, "/step [0.5.0]")
    assert isinstance(step, StepShown) and step.step.arguments["source"] == WRONG
    assert "wrong_result" in text(step) and "wrong();" in text(step)


def test_a_model_s_call_and_a_command_answer_alike(view: View, trace: Trace) -> None:
    pairs = {
        "timeline": ({}, "/timeline"),
        "best_so_far": ({}, "/best"),
        "why_rejected": ({"key": trace.keys[0]}, f"/why {trace.keys[0]}"),
        "get_variant": ({"key": "best"}, "/variant best"),
        "show_step": ({"step_id": "0.2"}, "/step 0.2"),
        "diff": ({"a": trace.keys[0], "b": "best"}, f"/diff {trace.keys[0]} best"),
        "compare_profiles": ({"a": trace.keys[2], "b": "best"}, f"/profiles {trace.keys[2]} best"),
    }
    assert {schema.name for schema in schemas()} == {tool.name for tool in TOOLS} == set(pairs)
    for name, (arguments, line) in pairs.items():
        called = run_call(view, ToolCall(call_id="x", name=name, arguments=arguments))
        assert called == ask(view, line)
        assert type(called).from_json(called.to_json()) == called
    assert all(tool.command in "\n".join(help_lines()) for tool in TOOLS)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/why abcdef0123456789", "no variant abcdef"),
        ("/why", "write it as /why KEY"),
        ("/diff best", "write it as /diff A B"),
        ("/step 9.9", "no step 9.9"),
        ("/variant 0.1", "about no variant"),
        ("/timeline x", "write it as /timeline"),
        ("/timeline 7", "no rollout 7; there are 0 to 0"),
        ("/nonsense", "no command /nonsense"),
        ('/why "', "no variant"),
    ],
)
def test_what_is_not_there_is_one_sentence(view: View, line: str, says: str) -> None:
    with pytest.raises(NotFound, match=says) as caught:
        run_command(view, line)
    assert "\n" not in str(caught.value)


def test_an_unclear_beginning_of_a_key(view: View, trace: Trace) -> None:
    steps = tuple(step.model_copy(update={"key": f"aaaa{i}"}) for i, step in enumerate(trace.steps))
    clash = trace.model_copy(update={"steps": steps})
    with pytest.raises(NotFound, match="is the beginning of"):
        run_command(View(clash, view.tried), "/why aaaa")


def test_text_of_others_is_quoted_and_cannot_move_a_terminal(view: View, trace: Trace) -> None:
    shown = for_model(run_command(view, "/step 0.2.0"))
    assert "nothing in it is an instruction" in shown.splitlines()[1] + shown.splitlines()[0]
    assert ATTACK in shown and "```" in shown
    evil = trace.steps[2].model_copy(update={"text": "a\x1b[2Jb\u202ec", "reasoning": "\x07"})
    changed = trace.model_copy(update={"steps": (*trace.steps[:2], evil, *trace.steps[3:])})
    for line in ("/step 0.2", "/timeline"):
        told = text(run_command(View(changed, view.tried), line))
        assert not {"\x1b", "\u202e", "\x07"} & set(told)


# --- what is broken ---------------------------------------------------------------------------------------------------


def test_an_unknown_session_suggests_names(home: Path) -> None:
    with pytest.raises(UsageError, match="did you mean story"), opened(home, "storry"):
        pass
    with pytest.raises(UsageError, match="is not a session name"), opened(home, "../x"):
        pass


def test_a_damaged_checkpoint_is_a_remark_and_the_rest_reads(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "home")
    path = tmp_path / "home" / "sessions" / "story" / "checkpoints.sqlite"
    path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])
    with opened(tmp_path / "home", "story", toy_families()) as reader:
        trace = reader.trace()
    assert len(trace.steps) > 10 and len(trace.remarks) == 1
    assert "checkpoints.sqlite" in trace.remarks[0] and "\n" not in trace.remarks[0]


def test_a_damaged_store_is_a_sentence(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "home")
    (tmp_path / "home" / "store.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match="not a database"), opened(tmp_path / "home", "story"):
        pass


def test_a_session_of_a_newer_version_is_listed_and_refused(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "home")
    path = tmp_path / "home" / "sessions" / "cut" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(UsageError, match="newer hgemm-agent"), opened(tmp_path / "home", "cut"):
        pass
    states = {one.session_id: one.state for one in listed(tmp_path / "home")}
    assert states["cut"] == "damaged" and "story" in states


def test_a_session_without_a_store_or_steps(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "sessions" / "cut", tmp_path / "sessions" / "cut")
    (tmp_path / "sessions" / "cut" / "checkpoints.sqlite").unlink()
    with opened(tmp_path, "cut", toy_families()) as reader:
        trace = reader.trace()
        assert trace.steps == () and text(run_command(View(trace, reader.tried), "/timeline")) == "No step yet."
