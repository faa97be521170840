"""Answers with any part exchanged for any JSON: a step that can be stored and sent back, or BadAnswer; nothing else."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from policy_kit import PROVIDERS, at, message, request

from policy.redacting import Secrets
from policy.tidying import BadAnswer
from policy.tool_schemas import CallError, parse_arguments
from tools.records import Step

DEEP: Any = None
for _ in range(300):
    DEEP = [DEEP]
JUNK: list[Any] = [
    *(None, True, 0, -1, 2**80, 1.5, float("nan"), "", "text", "\x00", "\ud800", "x" * 5000, '{"a": 1}', "[" * 2000),
    *([], {}, [None], [[]], {"": None}, {"type": "text"}, {"type": []}, {"type": "tool_use"}, DEEP, {"a": DEEP}),
    *([{"type": "tool_use", "id": 5}], [{"function": []}], [{"type": "thinking", "thinking": 5}]),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in items:
        yield from places(one, (*at, name))


def exchanged(value: Any, place: tuple[Any, ...], junk: Any) -> Any:
    found = copy.deepcopy(value)
    target = found
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = junk
    return found


def answers(provider: str) -> Iterator[dict[str, Any]]:
    whole = message(provider, "Text.", [("verify", {"key": "k"}), ("search_docs", {"query": "q", "limit": 2})])
    if provider == "anthropic":
        whole["content"].insert(0, {"type": "thinking", "thinking": "hm", "signature": "c2ln"})
        whole["usage"] |= {"cache_read_input_tokens": 1, "cache_creation_input_tokens": 1}
    else:
        whole["choices"][0]["message"] |= {"reasoning_content": "hm", "refusal": None}
        whole["usage"]["prompt_tokens_details"] = {"cached_tokens": 1}
    for place in places(whole):
        for junk in JUNK:
            if place:
                yield exchanged(whole, place, junk)
            elif isinstance(junk, dict):
                yield junk
    rng = random.Random(0)
    for _ in range(500):
        found: Any = whole
        for _ in range(3):
            place = rng.choice([p for p in places(found) if p and len(p) < 20])
            found = exchanged(found, place, rng.choice(JUNK))
        yield found


@pytest.mark.parametrize("provider", PROVIDERS)
def test_any_answer(provider: str) -> None:
    policy = at(provider, "http://localhost:9/v1")
    secrets = Secrets(["a-key-of-some-length"])
    asked = request()
    bad = good = 0
    for answer in answers(provider):
        try:
            step = secrets.step(policy._parse(secrets.value(answer)))
        except BadAnswer as error:
            assert "answered with" in str(error) and "\n" not in str(error)
            bad += 1
            continue
        good += 1
        assert Step.from_json(step.to_json()) == step
        for call in step.tool_calls:
            try:
                parse_arguments(call)
            except CallError as error:
                assert len(str(error)) < 1000
        body = policy._body(asked.model_copy(update={"steps": (Step(role="user", text="Go."), step)}))
        json.dumps(body, allow_nan=False).encode("utf-8")
    assert bad > 100 and good > 500
