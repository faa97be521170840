"""Logged trajectories → rows: filters, de-duplication, splits, provenance; keys and absolute paths stay behind.

Reads the store's file and nothing else. A trajectory of a search policy has no prompt: it gets the short one of the
local policy, as if that had been asked. The local policy's own keep theirs, which the tokens go with.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from pydantic import ValidationError

from memory.exemplars_read import Selection
from memory.store import Store
from policy.base import ToolSchema
from policy.compact import PROMPT_VERSION, compact_prompt, compact_steps, compact_tools
from policy.redacting import Secrets
from policy.settings import SEARCHES
from policy.tool_schemas import SEARCH_DOCS, tool_schemas
from tools.records import BaselineResult, DeviceInfo, Status, Step, ToolCall, Trajectory, content_hash
from training.rows import PromptMessage, Provenance, RewardParts, Row, RowCall, RowStatus, RowTokens, Turn
from training.scrub import scrub, scrub_text
from training.splits import split_of

#: How the label of a replay device begins (tools/replay.py).
REPLAYED = "replayed from "
LOCAL = "local"


@dataclass(frozen=True)
class Filters:
    """Empty sets keep everything. ``policies``: names, or kinds (``anthropic`` for ``anthropic:MODEL``). ``compact``:
    the short prompt also for trajectories that have one of their own."""

    min_reward: float | None = None
    policies: Collection[str] = ()
    shapes: Collection[str] = ()  # labels, 64x64x64
    statuses: Collection[str] = ()
    compact: bool = False


@dataclass
class Counts:
    """What an export came to."""

    read: int = 0
    written: Counter[str] = field(default_factory=Counter)  # by split
    left_out: Counter[str] = field(default_factory=Counter)  # by reason
    groups: set[str] = field(default_factory=set)
    rewarded: int = 0
    with_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "rows": sum(self.written.values()),
            "splits": dict(sorted(self.written.items())),
            "groups": len(self.groups),
            "with_reward": self.rewarded,
            "with_tokens": self.with_tokens,
            "left_out": dict(sorted(self.left_out.items())),
        }


def export(
    found: Iterable[Row | str], filters: Filters, counts: Counts, progress: Callable[[int], None] = lambda n: None
) -> Iterator[Row]:
    """Of rows, and of the reasons why there is none, those that the filters keep; each content once, but for the
    rollouts of one group, where a repetition is part of the sample."""
    seen: dict[str, tuple[str, int]] = {}
    at_same_place: set[tuple[str, int]] = set()
    for row in found:
        counts.read += 1
        progress(counts.read)
        if isinstance(row, str):
            counts.left_out[row] += 1
            continue
        place = (row.group_id, row.provenance.index)
        first = seen.setdefault(row.content_id, place)
        if place in at_same_place or first[0] != row.group_id:
            counts.left_out["duplicate"] += 1
        elif why := _filtered(row, filters):
            counts.left_out[why] += 1
        else:
            at_same_place.add(place)
            counts.written[row.split] += 1
            counts.groups.add(row.group_id)
            counts.rewarded += row.reward is not None
            counts.with_tokens += row.tokens is not None
            yield row


def _filtered(row: Row, filters: Filters) -> str:
    label = "x".join(map(str, row.dims.values()))
    policy = row.provenance.policy
    if filters.policies and policy not in filters.policies and _kind(policy) not in filters.policies:
        return "another policy"
    if filters.shapes and label not in filters.shapes:
        return "another shape"
    if filters.statuses and row.status not in filters.statuses:
        return "another status"
    if filters.min_reward is not None and (row.reward is None or row.reward < filters.min_reward):
        return "reward too low"
    return ""


# --- a store's trajectories -------------------------------------------------------------------------------------------


def rows_of(
    store: Store, session_id: str | None, filters: Filters, secrets: Secrets, fallback: DeviceInfo
) -> Iterator[Row | str]:
    """``fallback`` stands for the device of trajectories whose session is not in the store, as a sweep's are not."""
    sessions = {session.session_id: session.config for session in store.sessions()}
    references: dict[str, float | None] = {}
    granted: dict[tuple[str, int], int] = {}
    for trajectory in store.trajectories(session_id):
        task_id = trajectory.task.task_id
        if task_id not in references:
            references[task_id] = _reference_us(store, task_id)
        config = sessions.get(trajectory.session_id, {})
        group = (trajectory.session_id, trajectory.round)  # one prompt, so one budget
        evaluations = granted.setdefault(group, trajectory.quota or _used(trajectory.steps))
        yield row_of(trajectory, config, references[task_id], filters.compact, secrets, fallback, evaluations)


def row_of(
    trajectory: Trajectory,
    config: Mapping[str, Any],
    reference_us: float | None,
    compact: bool,
    secrets: Secrets,
    fallback: DeviceInfo,
    evaluations: int = 1,
) -> Row | str:
    """The row, or in a few words why there is none. ``config`` is the session's, empty where it is not known;
    ``evaluations`` are what the short prompt grants."""
    head, turns = _parted(trajectory.steps)
    if not any(step.role == "assistant" for step in turns):
        return "no turn of the policy"
    device = _device(config, fallback, trajectory.device)
    is_local = _kind(trajectory.policy) == LOCAL
    is_compact = compact or is_local or not head
    tools = compact_tools() if is_compact else _told_tools(turns)
    tokens = None
    if is_compact:
        turns = compact_steps(_unsaid(turns) if trajectory.policy in SEARCHES else turns)
    if head and (is_local or not is_compact):
        tokens = _tokens(turns)
    else:  # another prompt than the one that the turns were sampled after
        head = compact_prompt(trajectory.task, device, reference_us, Selection(), evaluations)
    clean = [prompt_message(step, secrets) for step in head]
    said = _turns(turns, secrets)
    if _is_spoilt(head, turns, clean, said):
        tokens = None  # what was taken out of the text is still in them
    prompt_hash = content_hash([m.content for m in clean])
    policy = config.get("settings", {}).get("policy", {})
    return Row(
        row_id=content_hash([trajectory.trajectory_id, prompt_hash, [t.model_dump() for t in said]]),
        group_id=content_hash([trajectory.session_id, trajectory.task.task_id, trajectory.round]),
        split=split_of(trajectory.task),
        task_id=trajectory.task.task_id,
        dims=trajectory.task.dims,
        prompt=tuple(clean),
        tools=tools_json(tools),
        turns=said,
        tokens=tokens,
        reward=_finite(trajectory.reward),
        reward_parts=_parts(trajectory.reward_parts),
        status=_status(trajectory, turns),
        provenance=Provenance(
            source="session",
            session=scrub_text(trajectory.session_id, secrets),
            policy=trajectory.policy,
            model=scrub_text(_model_name(policy.get("model") or ""), secrets),
            device=trajectory.device,
            protocol=device.protocol_version,
            commit=str(config.get("commit", "")),
            recorded_on=device.recorded_on or "",
            prompt_version=PROMPT_VERSION if is_compact else 0,
            round=trajectory.round,
            index=trajectory.index_in_group,
            ended_by=trajectory.ended_by,
        ),
    )


def tools_json(tools: Iterable[ToolSchema]) -> str:
    """In the order of a live request: another order would be another prompt."""
    return json.dumps([tool.model_dump(mode="json") for tool in tools])


def _parted(steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The prompt and the turns."""
    first = next((i for i, step in enumerate(steps) if step.role == "assistant"), len(steps))
    return steps[:first], steps[first:]


def prompt_message(step: Step, secrets: Secrets) -> PromptMessage:
    return PromptMessage(role="system" if step.role == "system" else "user", content=scrub_text(step.text, secrets))


def _used(steps: Iterable[Step]) -> int:
    """Of a trajectory that does not say what it was granted: what it evaluated, a submit aside."""
    return max(1, sum(len(step.tool_calls) for step in steps) - 1)


def _kind(policy: str) -> str:
    """Of a name like ``anthropic:MODEL`` or ``local:ADAPTER``."""
    return policy.partition(":")[0]


def _unsaid(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Without what a search calls its turns: no model should learn to say it."""
    return tuple(s.model_copy(update={"text": ""}) if s.role == "assistant" else s for s in steps)


def _is_spoilt(
    head: Sequence[Step], turns: Sequence[Step], clean: Sequence[PromptMessage], said: Sequence[Turn]
) -> bool:
    """Whether anything was taken out of a row."""
    before = [step.text for step in (*head, *turns)]
    before += [json.dumps(call.arguments) for step in turns for call in step.tool_calls]
    after = [*(message.content for message in clean), *(turn.content for turn in said)]
    after += [call.arguments for turn in said for call in turn.tool_calls]
    return before != after


def _told_tools(turns: Iterable[Step]) -> tuple[ToolSchema, ...]:
    searched = any(call.name == SEARCH_DOCS for step in turns for call in step.tool_calls)
    return tool_schemas(docs=searched)


def _turns(steps: tuple[Step, ...], secrets: Secrets) -> tuple[Turn, ...]:
    trained = _trained(steps)
    found = []
    for step, is_trained in zip(steps, trained, strict=True):
        if step.role == "system":
            continue
        calls = tuple(_call(call, secrets) for call in step.tool_calls)
        found.append(
            Turn(
                role=step.role,
                content=scrub_text(step.text, secrets),
                tool_calls=calls,
                tool_call_id=step.call_id or "",
                name=step.tool or "",
                trained=is_trained,
            )
        )
    return tuple(found)


def _trained(steps: Sequence[Step]) -> list[bool]:
    """Of each step, whether a loss may cover it (training/rows.py)."""
    found = []
    for place, step in enumerate(steps):
        answers = _answers(steps[place + 1 :])
        unknown = [_answer_status(answers.get(call.call_id, "")) == Status.NOT_RECORDED for call in step.tool_calls]
        found.append(step.role == "assistant" and not (unknown and all(unknown)))
    return found


def _answers(steps: Iterable[Step]) -> dict[str | None, str]:
    """Until the policy speaks again: its next calls may have the same names."""
    until = takewhile(lambda step: step.role != "assistant", steps)
    return {step.call_id: step.text for step in until if step.role == "tool"}


def _call(call: ToolCall, secrets: Secrets) -> RowCall:
    return RowCall(id=call.call_id, name=call.name, arguments=json.dumps(scrub(call.arguments, secrets)))


def _answer_status(text: str) -> str:
    try:
        body = json.loads(text)
    except ValueError:
        return ""
    return str(body.get("status", "")) if isinstance(body, dict) else ""


def _tokens(steps: tuple[Step, ...]) -> RowTokens | None:
    """The turns as one sequence; None unless every turn has tokens and each context continues what came before. Turns
    that a loss may not cover are masked like what the policy was told."""
    own = [(step.sampled, use) for step, use in zip(steps, _trained(steps), strict=True) if step.role == "assistant"]
    sampled = [(turn, use) for turn, use in own if turn is not None]
    if not sampled or len(sampled) != len(own):
        return None
    first = sampled[0][0]
    prompt = list(first.context_ids)
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    starts: list[int] = []
    for turn, use in sampled:
        done = [*prompt, *ids]
        if list(turn.context_ids[: len(done)]) != done:
            return None
        if (turn.model, turn.tokenizer, turn.temperature) != (first.model, first.tokenizer, first.temperature):
            return None
        between = turn.context_ids[len(done) :]
        chosen = list(turn.mask or (1,) * len(turn.token_ids)) if use else [0] * len(turn.token_ids)
        starts.append(len(ids) + len(between))
        ids += [*between, *turn.token_ids]
        mask += [*(0 for _ in between), *chosen]
        logprobs += [*(0.0 for _ in between), *(p if m else 0.0 for p, m in zip(turn.logprobs, chosen, strict=True))]
    try:
        return RowTokens(
            model=first.model,
            tokenizer=first.tokenizer,
            temperature=first.temperature,
            prompt_ids=tuple(prompt),
            completion_ids=tuple(ids),
            mask=tuple(mask),
            logprobs=tuple(logprobs),
            starts=tuple(starts),
        )
    except ValidationError:  # a log-probability that is no number
        return None


def _status(trajectory: Trajectory, turns: tuple[Step, ...]) -> RowStatus:
    if trajectory.reward is None:
        statuses = {_answer_status(step.text) for step in turns if step.role == "tool"}
        return "not_recorded" if Status.NOT_RECORDED.value in statuses else "none"
    failed = "compile_failure" in trajectory.reward_parts or not trajectory.reward_parts.get("speed", 0.0)
    return "failed" if failed else "ok"


def _parts(parts: Mapping[str, float]) -> RewardParts:
    return RewardParts(**{name: _finite(value) for name, value in parts.items() if name in RewardParts.model_fields})


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def _model_name(model: str) -> str:
    """A model that is a folder of this machine is called by the folder's name."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith(("/", "~", ".")) else model


def _device(config: Mapping[str, Any], fallback: DeviceInfo, label: str) -> DeviceInfo:
    try:
        return DeviceInfo.model_validate(config["device_info"])
    except (KeyError, ValidationError):
        name = label.partition(",")[0].removeprefix(REPLAYED)
        given: dict[str, Any] = {"label": label, "name": name}
        return fallback.model_copy(update=given if label.startswith(REPLAYED) else {**given, "recorded_on": None})


def _reference_us(store: Store, task_id: str) -> float | None:
    for payload in store.payloads("baselines", task_id=task_id, status=Status.OK):
        result = BaselineResult.from_json(payload)
        if result.mode == "offline" and result.best_us() is not None:
            return result.best_us()
    return None
