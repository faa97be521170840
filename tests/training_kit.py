"""Rows and trajectories for tests of exporting and training."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tools.hgemm import hgemm
from tools.records import DeviceInfo, SampledTokens, Step, ToolCall, Trajectory
from training.rows import PromptMessage, Provenance, Row, RowCall, Turn
from training.splits import split_of

TRAINED = (64, 64, 64)
#: Two to learn from, one held out, one off the grid.
OF_EVERY_SPLIT = ((64, 64, 64), (128, 128, 128), (64, 64, 128), (72, 80, 96))
needs_train = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("trl", "llguidance", "peft")), reason="needs the extra train"
)

DEVICE = DeviceInfo(
    name="NVIDIA H200",
    label="NVIDIA H200, driver 1",
    kind="replay",
    sm_count=132,
    compute_capability="9.0",
    memory_bytes=2**37,
    l2_bytes=2**25,
    smem_per_block_bytes=232448,
    driver="1",
    cuda_runtime="13.0",
    recorded_on="2026-01-01",
)


def row(
    number: int = 0, group: str = "g", reward: float | None = 1.0, shape: tuple[int, int, int] = TRAINED, **given: Any
) -> Row:
    """One evaluate and nothing more."""
    task = hgemm(*shape)
    call = RowCall(id="call-0", name="evaluate_plan", arguments=json.dumps({"number": number}))
    fields: dict[str, Any] = {
        "row_id": f"{group}-{number}",
        "group_id": group,
        "split": split_of(task),
        "task_id": task.task_id,
        "dims": task.dims,
        "prompt": (PromptMessage(role="system", content="s"), PromptMessage(role="user", content=task.label)),
        "tools": "[]",
        "turns": (
            Turn(role="assistant", content=f"plan {number}", tool_calls=(call,), trained=True),
            Turn(role="tool", content='{"status":"ok"}', tool_call_id="call-0", name="evaluate_plan"),
        ),
        "reward": reward,
        "status": "ok" if reward is not None else "none",
        "provenance": Provenance(source="session", protocol=2, index=number),
    }
    return Row(**{**fields, **given})


def trajectory(*turns: Step, prompt: tuple[Step, ...] = (), **given: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "trajectory_id": "session-a/0",
        "session_id": "session-a",
        "task": hgemm(*TRAINED),
        "policy": "search",
        "device": DEVICE.label,
        "round": 0,
        "index_in_group": 0,
        "steps": (*prompt, *turns),
        "reward": 1.0,
        "reward_parts": {"speed": 1.1, "deviation": -0.05, "length": -0.05, "group": 0.0},
    }
    return Trajectory(**{**fields, **given})


def says(text: str, number: int = 0, sampled: SampledTokens | None = None, **arguments: Any) -> Step:
    call = ToolCall(call_id=f"call-{number}", name="evaluate_plan", arguments=arguments)
    return Step(role="assistant", text=text, tool_calls=(call,), stop="tool_calls", sampled=sampled)


def answers(number: int = 0, **body: Any) -> Step:
    return Step(role="tool", text=json.dumps(body), call_id=f"call-{number}", tool="evaluate_plan")


def sampled(context: tuple[int, ...], tokens: tuple[int, ...], logprob: float = -0.5, **given: Any) -> SampledTokens:
    fields = {"model": "m", "tokenizer": "t", "context_ids": context, "token_ids": tokens}
    return SampledTokens(**{**fields, "logprobs": (logprob,) * len(tokens), **given})
