"""Recorded conversations, played to the real policies: what they send and what they understand stays what it was."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from cassette_kit import AGAIN, FOLDER, load, play, record, text_of
from policy_kit import KEY
from pytest_httpserver import HTTPServer
from record_cassettes import CONVERSATIONS

from tools.records import Step

CASSETTES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", CASSETTES, ids=[path.stem for path in CASSETTES])
def test_a_recorded_conversation_plays(httpserver: HTTPServer, path: Path) -> None:
    cassette = load(path)
    for turn, (step, sent) in zip(cassette["turns"], play(httpserver, cassette), strict=True):
        assert sent == [one["request"] for one in turn["exchanges"]], AGAIN
        assert step == Step.model_validate(turn["step"]), AGAIN


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_cassette_is_what_the_recorder_makes(name: str) -> None:
    path = FOLDER / f"{name}.json"
    assert path.read_text(encoding="utf-8") == text_of(record(CONVERSATIONS[name]())), AGAIN


def test_every_cassette_has_its_conversation_and_no_key_in_it() -> None:
    assert [path.stem for path in CASSETTES] == sorted(CONVERSATIONS)
    for path in CASSETTES:
        text = path.read_text(encoding="utf-8")
        assert KEY not in text and "Wv9k" not in text and "127.0.0.1" not in text and "localhost" not in text


def test_the_cassettes_hold_what_hosted_models_do() -> None:
    """So that nobody thins them out without noticing."""
    turns = {path.stem: load(path)["turns"] for path in CASSETTES}
    steps = {name: [Step.model_validate(turn["step"]) for turn in found] for name, found in turns.items()}
    every = [step for found in steps.values() for step in found]
    replies = [one["response"] for found in turns.values() for turn in found for one in turn["exchanges"]]
    assert {reply.get("status", 200) for reply in replies} == {200, 429, 503, 529}
    assert any("events" in reply for reply in replies) and any("body" in reply for reply in replies)
    assert {step.stop for step in every} == {"tool_calls", "end", "length", "refusal"}
    assert sum(len(step.tool_calls) > 1 for step in every) >= 5
    assert any(call.malformed for step in every for call in step.tool_calls)
    assert [s.usage.cached_tokens for s in steps["anthropic-thinking"] if s.usage] == [0, 5200, 5900]
    assert steps["openai-parallel"][1].usage is not None and steps["openai-parallel"][1].usage.cached_tokens == 5200
    blocks = turns["anthropic-thinking"][1]["exchanges"][0]["request"]["messages"][1]["content"]
    assert [block["type"] for block in blocks] == ["thinking", "redacted_thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["signature"], "signed thinking goes back as it came"
    assert all(step.reasoning for step in steps["vllm-streams"])


def test_a_change_of_what_is_sent_is_seen(httpserver: HTTPServer) -> None:
    cassette = load(FOLDER / "anthropic-refusal.json")
    changed = copy.deepcopy(cassette)
    changed["settings"]["temperature"] = 0.6
    played = play(httpserver, changed)
    assert played[0][1] != [one["request"] for one in cassette["turns"][0]["exchanges"]]
    assert [step.stop for step, _ in played] == ["tool_calls", "refusal"]
