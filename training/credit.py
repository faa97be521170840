"""What each turn of a logged rollout is worth beside the same turn of its group's other rollouts: advantages for GRPO.
Pure.

A rollout's reward is that of what it submitted. As one advantage for all of its turns (``credit: rollout``) it praises
and blames evaluations for the submit. With any other credit a submit is worth how far what it chose is behind the best
of its rollout, and an evaluation the ratio of that best (``best``), its own ratio (``turn``), or by how much the best
would be worse without it (``gain``). Ratios are those that the policy was told, to three decimals.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from policy.reward import RewardSettings, clipped, spread
from training.rows import Row, RowCall, Turn
from training.settings import GrpoSettings

#: Of one rollout, a value for each of the policy's turns, or one for all; None where nothing is known.
Values = Sequence[float | None]


def advantages(
    rows: Sequence[Row], settings: GrpoSettings, reward: RewardSettings, dropped: Counter[str]
) -> dict[str, tuple[float, ...]]:
    """By row_id, of the rows that a group can teach something; one for each of the policy's turns, or one for all."""
    groups: dict[str, list[Row]] = defaultdict(list)
    values: dict[str, Values] = {}
    for row in rows:
        values[row.row_id] = values_of(row, settings)
        if any(value is not None for value in values[row.row_id]):
            groups[row.group_id].append(row)
        else:
            dropped[_unknown(row)] += 1
    apart = {
        row_id: own
        for members in groups.values()
        if len(members) > 1
        for row_id, own in _apart(members, values, settings, reward).items()
    }
    unit = _unit(apart.values()) if settings.scale == "all" else 1.0
    found: dict[str, tuple[float, ...]] = {}
    for members in groups.values():
        if len(members) < 2:
            dropped["alone in its group"] += 1
        elif not any(any(apart[row.row_id]) for row in members):
            dropped["equal rewards in the group"] += len(members)
        else:
            found |= {row.row_id: tuple(clipped(v / unit, reward) for v in apart[row.row_id]) for row in members}
    return found


def _unknown(row: Row) -> str:
    """Why none of its values is known. Credits of turns ask for verdicts, not for the reward."""
    if row.reward is None:
        return "no reward"
    return "reward is no number" if row.known_reward is None else "nothing is known of its turns"


def values_of(row: Row, settings: GrpoSettings) -> Values:
    if settings.credit == "rollout":
        return [row.known_reward]
    turns = _answered(row.turns)
    ratios = [_ratio(turn.tool_calls, answers) for turn, answers in turns]
    best = max((ratio for ratio in ratios if ratio is not None), default=0.0)
    told = _by_key(answer.content for _, answers in turns for answer in answers)
    found: list[float | None] = []
    for place, ((turn, _), ratio) in enumerate(zip(turns, ratios, strict=True)):
        submitted = _submitted(turn)
        if submitted is not None:
            found.append(told[submitted] - max(told.values()) if submitted in told else None)
        elif ratio is None or settings.credit == "turn":
            found.append(ratio)
        elif settings.credit == "best":
            found.append(best)
        else:
            others = [other for at, other in enumerate(ratios) if at != place and other is not None]
            found.append(max(0.0, ratio - max(others, default=0.0)))
    return found


def _submitted(turn: Turn) -> str | None:
    """The key; None for a turn that submits nothing."""
    return next((_argument(call, "key") for call in turn.tool_calls if call.name == "submit"), None)


def _answered(turns: Sequence[Turn]) -> list[tuple[Turn, list[Turn]]]:
    """The policy's turns, each with the answers up to the next one: ids of calls are of one turn only."""
    found: list[tuple[Turn, list[Turn]]] = []
    for turn in turns:
        if turn.role == "assistant":
            found.append((turn, []))
        elif found:
            found[-1][1].append(turn)
    return found


def _ratio(calls: Sequence[RowCall], answers: Sequence[Turn]) -> float | None:
    """The best of what a turn evaluated; 0 for what was rejected, None if nothing is known of it."""
    asked = {call.id for call in calls if call.name == "evaluate_plan"}
    known = [_told(answer.content) for answer in answers if answer.tool_call_id in asked]
    return max((ratio for _, ratio in known if ratio is not None), default=None)


def _by_key(answers: Iterable[str]) -> dict[str, float]:
    told = (_told(answer) for answer in answers)
    return {key: ratio for key, ratio in told if key and ratio is not None}


def _told(answer: str) -> tuple[str, float | None]:
    """Key and ratio."""
    body = _object(answer)
    key, status, ratio = str(body.get("key", "")), body.get("status"), body.get("ratio")
    if status == "failed":
        return key, 0.0
    if status == "ok" and isinstance(ratio, int | float) and math.isfinite(ratio):
        return key, float(ratio)
    return key, None


def _argument(call: RowCall, name: str) -> str:
    return str(_object(call.arguments).get(name, ""))


def _object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


# --- beside the group -------------------------------------------------------------------------------------------------


def _apart(
    members: Sequence[Row], values: Mapping[str, Values], settings: GrpoSettings, reward: RewardSettings
) -> dict[str, list[float]]:
    """How far each turn is from the mean of its group's turns of the same place, evaluations beside evaluations and
    submits beside submits; in units of their spread where ``settings.scale`` is group. 0 where they spread less than
    ``reward.min_std``, and where nothing is known.

    A limit of ``turn``: a plan is tried once, so a rollout that takes the best one first has only worse ones left, and
    its next turn looks bad beside those of rollouts that take it then."""
    found = {row.row_id: [0.0] * len(values[row.row_id]) for row in members}
    beside: dict[tuple[int, bool], dict[str, float]] = defaultdict(dict)
    for row in members:
        own = values[row.row_id]
        for place, (value, is_submit) in enumerate(zip(own, _submits(row, settings), strict=True)):
            if value is not None:
                beside[place, is_submit][row.row_id] = value
    for (place, _), known in beside.items():
        if len(known) < 2:
            continue
        mean, std = spread(list(known.values()))
        if std >= reward.min_std:
            for row_id, value in known.items():
                found[row_id][place] = (value - mean) / (std if settings.scale == "group" else 1.0)
    return found


def _submits(row: Row, settings: GrpoSettings) -> list[bool]:
    """Of each value of a row, whether it is of a submit."""
    if settings.credit == "rollout":
        return [False]
    return [_submitted(turn) is not None for turn in row.turns if turn.role == "assistant"]


def _unit(apart: Iterable[Sequence[float]]) -> float:
    """The spread within groups of all turns that are apart from others at all."""
    squares = [value**2 for own in apart for value in own if value]
    return math.sqrt(sum(squares) / len(squares)) if squares else 1.0
