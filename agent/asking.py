"""Questions about a session to a language model, which answers with the tools of inspection/tools.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from agent.accounting import with_call_ids
from agent.config import load_settings
from agent.errors import AgentError, UsageError
from agent.files import read_text
from inspection.answers import NotFound, View
from inspection.rendering import for_model
from inspection.tools import run_call, schemas
from inspection.words import heading
from memory.contrast_budget import barred
from policy.base import Policy, PolicyError, PolicyRequest
from policy.factory import make_policy
from policy.settings import PolicySettings
from tools.paths import configs_dir
from tools.records import Record, Step, ToolCall, Usage

MAX_TURNS = 12
MAX_QUESTION = 4000
_CITED = re.compile(r"\[(\d+\.\d+(?:\.\d+)?|finish\.[0-9a-f]+\.\w+(?:\.\w+)?)\]")


class Answer(Record):
    """What the model said. ``cited`` are the steps that it names and that exist, ``unknown`` those that do not."""

    question: str
    text: str
    cited: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()


class Asker:
    """One conversation. ``look`` opens the session as it is now; every question and every tool call sees it anew."""

    def __init__(self, policy: Policy, look: Callable[[], AbstractContextManager[View]]) -> None:
        self._policy = policy
        self._look = look
        self._steps: tuple[Step, ...] = ()
        self._system = read_text(configs_dir() / "prompts" / "inspection.md", "the prompt")

    @property
    def name(self) -> str:
        return self._policy.name

    def ask(self, question: str) -> Answer:
        """Raises PolicyError or AgentError; the conversation then stands as before the question."""
        if len(question) > MAX_QUESTION:
            raise UsageError(f"a question has at most {MAX_QUESTION} characters, this one {len(question)}")
        steps, usage = (*self._steps, *self._opening(question)), Usage()
        calls: list[ToolCall] = []
        for left in range(MAX_TURNS, 0, -1):
            said = with_call_ids(self._policy.step(self._request(steps, left)), len(steps))
            steps, usage = (*steps, said), usage + (said.usage or Usage())
            if not said.tool_calls:
                self._steps = steps
                return self._answer(question, said, tuple(calls), usage)
            calls += said.tool_calls
            steps = (*steps, *(self._told(call) for call in said.tool_calls))
        raise AgentError(f"{self.name} called tools {MAX_TURNS} times without an answer: ask something narrower")

    def close(self) -> None:
        self._policy.close()

    def _opening(self, question: str) -> tuple[Step, ...]:
        with self._look() as view:
            now = "\n".join(line for text in heading(view.trace) for line in barred(text))
        system = () if self._steps else (Step(role="system", text=self._system),)
        return (*system, Step(role="user", text=f"The session now:\n{now}\n\nQuestion: {question}"))

    def _request(self, steps: tuple[Step, ...], left: int) -> PolicyRequest:
        with self._look() as view:
            task, device = view.trace.task, view.trace.device
        return PolicyRequest(
            task=task, device=device, tools=schemas(), steps=steps, evaluations_left=0, turns_left=left
        )

    def _told(self, call: ToolCall) -> Step:
        try:
            with self._look() as view:
                text = for_model(run_call(view, call))
        except NotFound as error:
            text = f"error: {error}"
        return Step(role="tool", text=text, call_id=call.call_id, tool=call.name)

    def _answer(self, question: str, said: Step, calls: tuple[ToolCall, ...], usage: Usage) -> Answer:
        if said.stop == "refusal":
            raise AgentError(f"{self.name} refused to answer: ask in other words, or with a command (/help)")
        if not said.text.strip():
            raise AgentError(f"{self.name} answered nothing: ask again, or with a command (/help)")
        found = tuple(dict.fromkeys(_CITED.findall(said.text)))
        with self._look() as view:
            known = {step.step_id for step in view.trace.steps}
        return Answer(
            question=question,
            text=said.text,
            cited=tuple(one for one in found if one in known),
            unknown=tuple(one for one in found if one not in known),
            calls=calls,
            usage=usage,
        )


def find_policy(
    own: PolicySettings, environ: Mapping[str, str], name: str | None, model: str | None, base_url: str | None
) -> tuple[Policy | None, str]:
    """Who answers: what the flags say, else the settings, else the session's own model. Without one, None and why.
    Raises UsageError or PolicyError where the user named one that cannot be used."""
    flags: dict[str, Any] = {"policy.name": name, "policy.model": model, "policy.base_url": base_url}
    given = {field: value for field, value in flags.items() if value is not None}
    chosen = load_settings(None, environ, given).policy
    if _is_model(chosen):
        return make_policy(chosen, {}, environ), ""
    if name is None and _is_model(own):
        changed = {field.removeprefix("policy."): value for field, value in given.items()}
        mine = PolicySettings.model_validate({**own.model_dump(), **changed})
        try:
            return make_policy(mine, {}, environ), ""
        except PolicyError as error:
            if given:
                raise
            return None, str(error)
    if given and name is None:
        raise UsageError("--model and --base-url need to know the protocol: add --policy openai or --policy anthropic")
    return None, "no language model is configured: give --policy openai or anthropic, with --model and --base-url"


def _is_model(settings: PolicySettings) -> bool:
    return settings.name in ("anthropic", "openai")
