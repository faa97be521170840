"""``agent show``: what the home folder holds, without a device."""

from __future__ import annotations

import json
from typing import Any

from agent import session as sessions
from agent.edge import complain, sentence
from agent.errors import UsageError
from tools.paths import home_dir


def show_sessions(json_output: bool) -> None:
    """All of them; of a damaged one, on stderr, what is wrong with it."""
    rows = []
    for session_id in sessions.session_ids(home_dir()):
        try:
            rows.append(_row(session_id))
        except Exception as error:
            found = sentence(error) or f"{type(error).__name__}: {error}"
            complain(f"session {session_id} is left out: {found}", error)
    if json_output:
        print(json.dumps(rows))
        return
    if not rows:
        print(
            f"no sessions in {sessions.sessions_folder(home_dir())}; begin one: agent optimize --shape 4096,4096,4096"
        )
    for row in rows:
        ratio = f"{row['ratio']:.3f}x" if row["ratio"] else "-"
        state = "finished" if row["finished"] else "unfinished"
        print(f"{row['session']:<44} {state:<10} {row['evaluations']:>4} evaluations  best {ratio:<8} {row['device']}")


def _row(session_id: str) -> dict[str, Any]:
    config = sessions.load(home_dir(), session_id)
    summary = sessions.partial_summary(home_dir(), config)
    best = summary.best
    return {
        "session": session_id,
        "task": summary.task.label,
        "policy": config.settings.policy.name,
        "device": config.device_info.label,
        "finished": summary.finished,
        "evaluations": summary.evaluations,
        "ratio": best.final_ratio if best else None,
        "best": best.label if best else None,
        "created_at": config.created_at,
    }


def show_session(session_id: str, json_output: bool) -> None:
    summary = sessions.partial_summary(home_dir(), sessions.load(home_dir(), session_id))
    if json_output:
        print(summary.to_json())
        return
    from agent.report import print_curve, print_leaderboard, print_summary
    from agent.tables import console_for_result

    console = console_for_result()
    print_summary(summary, console)
    print_leaderboard(summary, console)
    print_curve(summary, console)


def show_source(key: str, json_output: bool) -> None:
    """The source of any variant in the store; as JSON with its launch spec and plan."""
    from memory.store import Store

    path = sessions.store_path(home_dir())
    if not path.is_file():
        raise UsageError(f"there are no variants yet: {path} does not exist")
    with Store(path) as store:
        variant = store.variant(key)
    if variant is None:
        raise UsageError(f"there is no variant with key {key} in {path}; `agent show SESSION` lists keys")
    print(variant.to_json() if json_output else variant.source)
