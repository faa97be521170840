"""The LangGraph state machine: wiring only. What happens is in nodes.py and finish_nodes.py, where to in routing.py.

    open → start_group → think* → admit → act* → tell → think* … → end_group → start_group …
                                                                  ↘ shortlist → measure* → judge → measure* … → conclude

``*``: fanned out, one task for every rollout, call or measurement. The only module that imports langgraph.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, cast, get_origin, get_type_hints

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Send

from agent import routing
from agent.deps import Deps
from agent.finish_nodes import FinishNodes
from agent.nodes import SearchNodes
from agent.state import Finalist, Rollout, SessionState, Spent, TrialRow, initial_state
from tools.sqlite_reading import read_only_uri

Graph = CompiledStateGraph[Any, Any, Any, Any]
#: LangGraph's own limit is no budget of ours; a session ends by its budgets.
_STEPS = 10**9


class DamagedCheckpoint(Exception):
    """The file is a database, and what it holds is no state of ours."""


def build_graph(deps: Deps, checkpointer: BaseCheckpointSaver[Any] | None = None) -> Graph:
    search, finish = SearchNodes(deps), FinishNodes(deps)
    graph = StateGraph(SessionState)
    graph.add_node("open", search.open)
    graph.add_node("start_group", search.start_group)
    graph.add_node("think", search.think)
    graph.add_node("admit", search.admit)
    graph.add_node("act", search.act)
    graph.add_node("tell", search.tell)
    graph.add_node("end_group", search.end_group)
    graph.add_node("shortlist", finish.shortlist)
    graph.add_node("measure", finish.measure)
    graph.add_node("judge", finish.judge)
    graph.add_node("conclude", finish.conclude)

    graph.add_edge(START, "open")
    graph.add_edge("open", "start_group")
    graph.add_conditional_edges("start_group", _fan("think", routing.thinks), ["think"])
    graph.add_edge("think", "admit")
    graph.add_conditional_edges("admit", _fan("act", routing.acts), ["act", "tell"])
    graph.add_edge("act", "tell")
    graph.add_conditional_edges("tell", _fan("think", routing.after_tell), ["think", "end_group"])
    graph.add_conditional_edges("end_group", routing.after_group, ["start_group", "shortlist"])
    graph.add_conditional_edges("shortlist", _fan("measure", routing.measures), ["measure", "conclude"])
    graph.add_edge("measure", "judge")
    graph.add_conditional_edges("judge", _fan("measure", routing.measures), ["measure", "conclude"])
    graph.add_edge("conclude", END)
    return graph.compile(checkpointer=checkpointer)


def run_graph(graph: Graph, thread_id: str, concurrency: int) -> SessionState:
    """From the last checkpoint, or from the beginning, to the end. Of a finished thread, its final state."""
    where: Any = {
        "configurable": {"thread_id": thread_id},
        "recursion_limit": _STEPS,
        "max_concurrency": concurrency,
    }
    with readable():
        before = graph.get_state(where)
        if before.values:
            _check(before.values)
    # Not `before.next`: it leaves out tasks whose writes are saved, so it is empty between the last task of a step and
    # the step's checkpoint, and a session killed there would look finished.
    unfinished = bool(before.tasks)
    if before.values and not unfinished:
        return cast("SessionState", before.values)
    # New input on an unfinished thread would begin it anew; None goes on.
    state = graph.invoke(None if unfinished else initial_state(), where, durability="sync")
    return cast("SessionState", state)


@contextmanager
def checkpoints(path: Path) -> Iterator[BaseCheckpointSaver[Any]]:
    """The checkpoints' file. Raises sqlite3.Error if it cannot be used."""
    if not path.exists():
        for suffix in ("-wal", "-shm"):  # of a damaged file that was moved away, as our own advice is
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    db = sqlite3.connect(path, check_same_thread=False, timeout=30.0)
    try:
        # The state is plain JSON types, so nothing else need be let in.
        saver = SqliteSaver(db, serde=JsonPlusSerializer(allowed_msgpack_modules=()))
        with readable():
            saver.setup()
        # Safe against kill -9; a power cut may cost the last steps, whose measurements are in the store.
        db.execute("PRAGMA synchronous = NORMAL")
        yield saver
    finally:
        db.close()


@contextmanager
def checkpoints_to_read(path: Path) -> Iterator[BaseCheckpointSaver[Any]]:
    """The same, of a session that may be running: nothing in the file is changed."""
    db = sqlite3.connect(read_only_uri(path), check_same_thread=False, timeout=30.0, uri=True)
    try:
        saver = SqliteSaver(db, serde=JsonPlusSerializer(allowed_msgpack_modules=()))
        saver.is_setup = True  # else it would make its tables
        yield saver
    finally:
        db.close()


def last_state(saver: BaseCheckpointSaver[Any], thread_id: str) -> SessionState | None:
    """What the last checkpoint holds, without running anything."""
    with readable():
        found = saver.get_tuple({"configurable": {"thread_id": thread_id}})
        if found is None:
            return None
        state = {**initial_state(), **found.checkpoint["channel_values"]}
        _check(state)
        return cast("SessionState", state)


def _check(state: Mapping[str, Any]) -> None:
    """Whether it is a state of ours, as far as its forms go. Raises ValueError."""
    for name, example in initial_state().items():
        if name in state and type(state[name]) is not type(example):
            raise ValueError(f"'{name}' is of another kind")
    rows = {"group": Rollout, "trials": TrialRow, "finalists": Finalist}
    parts = [(name, kind, row) for name, kind in rows.items() for row in state.get(name, ())]
    for name, kind, row in [*parts, ("spent", Spent, state.get("spent", initial_state()["spent"]))]:
        if not isinstance(row, dict) or not _required(kind) <= set(row):
            raise ValueError(f"'{name}' lacks a part")


@cache
def _required(kind: type) -> frozenset[str]:
    """``__required_keys__`` is wrong for annotations that are strings."""
    hints = get_type_hints(kind, include_extras=True)
    return frozenset(name for name, hint in hints.items() if get_origin(hint) is not NotRequired)


@contextmanager
def readable() -> Iterator[None]:
    """What LangGraph raises for damaged bytes is no type of its own."""
    try:
        yield
    except sqlite3.Error:
        raise
    except Exception as error:
        raise DamagedCheckpoint(" ".join(str(error).split())[:200] or type(error).__name__) from error


def _fan(node: str, router: Callable[[SessionState], list[Any] | str]) -> Callable[[SessionState], Any]:
    """LangGraph's form of a router: inputs become tasks of ``node``, a name stays a name."""

    def route(state: SessionState) -> Any:
        found = router(state)
        return found if isinstance(found, str) else [Send(node, one) for one in found]

    return route
