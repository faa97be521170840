"""A session's collaborators for tests: a scripted device, toy families, a policy that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fakes import ScriptedDevice, toy_families

from agent.config import Settings, load_settings
from agent.deps import Deps
from agent.graph import build_graph, checkpoints, run_graph
from agent.progress import Event
from agent.state import SessionState
from agent.summary import Summary
from memory.store import Store
from policy.base import Policy, PolicyRequest
from policy.prompts import load_templates
from policy.search import SearchPolicy
from tools.device import Device
from tools.gate import Toolbox
from tools.records import Family, Step, ToolCall, Usage

Turn = Step | Exception | Callable[[PolicyRequest], Step]


class ScriptedPolicy:
    """Answers with the script's turns, one after the other, for every rollout anew. Keeps the requests it was sent."""

    is_search = False

    def __init__(self, *turns: Turn) -> None:
        self.turns = turns
        self.requests: list[PolicyRequest] = []
        self._next: dict[int, int] = {}

    @property
    def name(self) -> str:
        return "scripted"

    def close(self) -> None:
        return

    def step(self, request: PolicyRequest) -> Step:
        self.requests.append(request)
        position = self._next.get(request.rollout, 0)
        self._next[request.rollout] = position + 1
        turn = self.turns[position]
        if isinstance(turn, Exception):
            raise turn
        return turn(request) if callable(turn) else turn


def turn(*calls: ToolCall, text: str = "", tokens: int = 0, usd: float = 0.0, stop: Any = None) -> Step:
    usage = Usage(input_tokens=tokens, cost_usd=usd)
    return Step(role="assistant", text=text, tool_calls=calls, usage=usage, stop=stop)


def call(name: str, call_id: str = "", **arguments: Any) -> ToolCall:
    return ToolCall(call_id=call_id or name, name=name, arguments=arguments)


def plan_call(bm: int, bn: int, layout: str = "nk", call_id: str = "") -> ToolCall:
    return call("evaluate_plan", call_id, family="toy", b_layout=layout, knobs={"BM": bm, "BN": bn})


def settings(**overrides: Any) -> Settings:
    """Dotted names with ``__`` for the dot: ``budget__evaluations=5``."""
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_settings(None, {}, {"session.shape": "64,64,64", **dotted})


def make_deps(
    folder: Path,
    policy: Policy | None = None,
    device: Device | None = None,
    families: Mapping[str, Family] | None = None,
    session_id: str = "s",
    events: list[Event] | None = None,
    **overrides: Any,
) -> Deps:
    chosen = settings(**overrides)
    known = families or toy_families()
    device = device or ScriptedDevice()
    store = Store(folder / "store.sqlite")
    if store.session(session_id) is None:
        store.create_session(session_id, {})
    return Deps(
        session_id=session_id,
        folder=folder / session_id,
        settings=chosen,
        task=chosen.session.task,
        families=known,
        policy=policy or SearchPolicy(chosen.policy, known),
        toolbox=Toolbox(device, store, known),
        store=store,
        templates=load_templates(),
        observer=(events.append if events is not None else lambda event: None),
    )


def run(deps: Deps, concurrency: int = 1) -> tuple[SessionState, Summary]:
    """To the end, with a checkpoint file, as a session does."""
    from agent.finish_nodes import FinishNodes

    deps.folder.mkdir(parents=True, exist_ok=True)
    with checkpoints(deps.folder / "checkpoints.sqlite") as saver:
        state = run_graph(build_graph(deps, saver), deps.session_id, concurrency)
    return state, FinishNodes(deps).summary(state)


def tool_texts(steps: Sequence[Step]) -> list[str]:
    return [step.text for step in steps if step.role == "tool"]
