"""Settings that make no sense: one sentence, which states the bound, and never a hang."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from agent.config import Settings, load_settings, parse_assignment
from agent.errors import UsageError


def refused(overrides: dict[str, Any], environ: dict[str, str] | None = None, file: Path | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load_settings(file, environ or {}, overrides)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("policy.temperature", -1, "must be at least 0"),
        ("policy.temperature", float("nan"), "must be a finite number"),
        ("policy.max_output_tokens", 0, "must be at least 256"),
        ("policy.max_output_tokens", 2**70, "must be at most 1000000"),
        ("policy.max_turns", 10**9, "must be at most 10000"),
        ("policy.max_attempts", 10**9, "must be at most 100"),
        ("policy.timeout_s", 1e18, "must be at most 86400"),
        ("policy.max_wait_s", float("inf"), "must be a finite number"),
        ("policy.exemplars", 10**6, "must be at most 64"),
        ("policy.model", "", "neither empty nor"),
        ("policy.model", " \t", "neither empty nor"),
        ("policy.model", "m\x00", "neither empty nor"),
        ("policy.model", "m" * 999, "longer than 200"),
        ("policy.effort", "", "must match"),
        ("policy.base_url", "http://u:p@h", "no user name or password"),
        (
            "policy.prices",
            {"m": {"input": -1, "output": 1, "cache_read": 1}},
            "policy.prices.m.input: must be at least 0",
        ),
        ("session.group_size", 10**6, "must be at most 64"),
        ("session.rounds", 10**9, "must be at most 1000"),
        ("session.seed", 2**64, "must be less than"),
        ("session.top_k", 10**9, "must be at most 1000"),
        ("memory.buckets", 10**9, "must be at most 1000"),
        ("memory.temperature", float("nan"), "must be at least 0"),
        ("reward.alpha", float("nan"), "must be a finite number"),
        ("budget.evaluations", 10**12, "must be at most 1000000"),
        ("budget.wall_s", float("inf"), "must be a finite number"),
        ("budget.usd", float("nan"), "must be a finite number"),
        ("budget.tokens", 10**15, "must be at most"),
    ],
)
def test_nonsense_states_its_bound(setting: str, value: Any, words: str) -> None:
    sentence = refused({setting: value})
    assert words in sentence and sentence.startswith("the command line: ") and "u:p" not in sentence


def test_an_infinite_temperature_outlives_a_sessions_file() -> None:
    hot = load_settings(None, {}, {"memory.temperature": float("inf")})
    assert Settings.model_validate(json.loads(hot.model_dump_json())) == hot


BILLION_LAUGHS = "a: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 5000, "nested at most 16 deep"),
        ("policy: {thinking: " + "{a: " * 20 + "1" + "}" * 21, "nested at most 16 deep"),
        (BILLION_LAUGHS, "at most 10000 values"),
        ("policy: {thinking: &x {a: *x}}", "nested at most 16 deep"),
        ("session: {seed: 2024-13-45}", "month must be in"),
        ("x" * 300_000, "larger than 256 KiB"),
        ("[1]", "must be a mapping of sections"),
        ("just words", "must be a mapping of sections"),
        ("policy: 3", "'policy' must be a mapping"),
        ("1: {a: 2}", "no section '1'"),
        ("policy: {1: 2}", "no setting 'policy.1'"),
        ("policy: {? [a] : b}", "is not YAML"),
        ("a: !!python/object/apply:os.system [ls]", "is not YAML"),
        ("\x00", "is not YAML"),
    ],
)
def test_files_that_are_no_settings(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    began = time.process_time()
    assert words in refused({}, file=path)
    assert time.process_time() - began < 3


@pytest.mark.parametrize("text", ["[" * 3000, "2024-13-45", "{a: *b}", "9" * 5000])
def test_values_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="is not a value") as caught:
        parse_assignment(f"policy.model={text}")
    assert len(str(caught.value)) < 500
    assert "is not a value" in refused({}, {"HGEMM_AGENT_POLICY__MODEL": text})


def test_a_ceiling_in_dollars_needs_a_price() -> None:
    model = {"policy.name": "openai", "policy.model": "house-model-1.5"}
    sentence = refused({**model, "budget.usd": 5})
    assert "there is no price of 'house-model-1.5'" in sentence and "budget.tokens" in sentence
    advice = sentence.partition("--set '")[2].partition("'")[0]
    loaded = load_settings(None, {}, {**model, "budget.usd": 5, **dict([parse_assignment(advice)])})
    assert loaded.policy.prices["house-model-1.5"].output == 5
    load_settings(None, {}, {**model, "budget.tokens": 5})
    load_settings(None, {}, {"policy.name": "anthropic", "budget.usd": 5})


def test_both_names_of_the_ceiling_in_dollars() -> None:
    from typer.testing import CliRunner

    from agent.cli import app

    for flag in ("--usd", "--max-usd"):
        done = CliRunner().invoke(app, ["optimize", "--shape", "64,64,64", flag, "-1"])
        assert done.exit_code == 1 and "budget.usd: must be more than 0" in done.output
