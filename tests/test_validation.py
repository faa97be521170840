"""What pydantic complains of, in words for people: no class names, no types of Python, one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from agent.config import Settings
from agent.errors import UsageError
from agent.sweep_shapes import load_models
from tools.records import Knob, LaunchSpec, Outcome
from tools.validation import first_error

LAUNCH: dict[str, Any] = {"entry": "k", "grid": [1, 1, 1], "block": [1, 1, 1], "args": []}


@pytest.mark.parametrize(
    ("model", "value", "sentence"),
    [
        (LaunchSpec, [], "must be a mapping of fields"),
        (LaunchSpec, {}, "launches: is missing"),
        (LaunchSpec, {"launches": []}, "launches: needs at least 1, has 0"),
        (LaunchSpec, {"launches": {}}, "launches: must be a list"),
        (LaunchSpec, {"launches": [{**LAUNCH, "x": 1}]}, "launches.0.x: there is no such field"),
        (LaunchSpec, {"launches": [{**LAUNCH, "grid": [1, 1]}]}, "launches.0.grid.2: is missing"),
        (
            LaunchSpec,
            {"launches": [{**LAUNCH, "entry": "\ud800"}]},
            r"launches.0.entry: '\ud800' is not the name of a kernel: letters, digits and _",
        ),
        (
            LaunchSpec,
            {"launches": [{**LAUNCH, "grid": [1.5, 1, 1]}]},
            "launches.0.grid.0: must be an integer or a text, not 1.5",
        ),
        (
            LaunchSpec,
            {"launches": [{**LAUNCH, "grid": [1.5, None, 1]}]},
            "launches.0.grid.0: must be an integer or a text, not 1.5 (and 1 more)",
        ),
        (
            LaunchSpec,
            {"launches": [LAUNCH], "cooperative": "maybe"},
            "cooperative: must be true or false, not 'maybe'",
        ),
        (Knob, {"values": ["a"], "doc": ""}, "values.0: must be an integer, not 'a'"),
        (Knob, {"values": [1], "doc": 10**5000}, "doc: must be a text, not a number of so many digits"),
        (
            Outcome,
            {"status": "bad"},
            "status: must be 'ok', 'failed', 'refused', 'not_recorded' or 'unavailable', not 'bad'",
        ),
        (Outcome, {"status": "failed"}, "status failed and reason None do not go together"),
        (
            Settings,
            {"budget": {"evaluations": "many"}},
            "budget.evaluations: must be an integer, not 'many'",
        ),
    ],
)
def test_sentences(model: type[BaseModel], value: Any, sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(value)
    assert first_error(caught.value) == sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("m: {layer: {N: many, K: 1}}", "m.layer.N: must be an integer, not 'many'"),
        ("m: [", "while parsing"),
        ("[" * 5000, "is not a file of models"),
    ],
    ids=lambda value: value[:20],
)
def test_a_file_of_models(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "models.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_models(tmp_path / "models.yaml")
    assert words in str(caught.value) and "\n" not in str(caught.value)
