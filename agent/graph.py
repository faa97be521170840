"""The LangGraph state machine: wiring only. What happens is in nodes.py and finish_nodes.py, where to in routing.py.

    open → start_group → think* → admit → act* → tell → think* … → end_group → start_group …
                                                                  ↘ shortlist → measure* → judge → measure* … → conclude

``*``: fanned out with Send, one task for every rollout, call or measurement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent import routing
from agent.deps import Deps
from agent.finish_nodes import FinishNodes
from agent.nodes import SearchNodes
from agent.state import SessionState

if TYPE_CHECKING:
    from langgraph.checkpoint.base import BaseCheckpointSaver
    from langgraph.graph.state import CompiledStateGraph


def build_graph(deps: Deps, checkpointer: BaseCheckpointSaver[Any] | None) -> CompiledStateGraph[Any, Any, Any, Any]:
    from langgraph.graph import END, START, StateGraph

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
    graph.add_conditional_edges("start_group", routing.thinks, ["think"])
    graph.add_edge("think", "admit")
    graph.add_conditional_edges("admit", routing.acts, ["act", "tell"])
    graph.add_edge("act", "tell")
    graph.add_conditional_edges("tell", routing.after_tell, ["think", "end_group"])
    graph.add_conditional_edges("end_group", routing.after_group, ["start_group", "shortlist"])
    graph.add_conditional_edges("shortlist", routing.measures, ["measure", "conclude"])
    graph.add_edge("measure", "judge")
    graph.add_conditional_edges("judge", routing.measures, ["measure", "conclude"])
    graph.add_edge("conclude", END)
    return graph.compile(checkpointer=checkpointer)
