"""Settings of the policies. Values come from agent/config.py; nothing here reads a file or the environment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PolicyName = Literal["search", "random", "anthropic", "openai"]


class Price(BaseModel):
    """US dollars per million tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: float = Field(ge=0)
    output: float = Field(ge=0)
    cache_read: float = Field(ge=0)
    cache_write: float = Field(default=0.0, ge=0)


class PolicySettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: PolicyName = Field(default="search", description="search, random, anthropic or openai.")
    model: str | None = Field(default=None, description="Model name; null takes the default of the provider.")
    base_url: str | None = Field(default=None, description="Another endpoint of the provider's protocol.")
    batch: int = Field(default=16, ge=1, le=256, description="search: plans proposed in one turn.")
    startup_trials: int = Field(default=10, ge=1, description="search: TPE samples at random before this many trials.")
    max_turns: int = Field(default=40, ge=1, description="Turns of a language model in one rollout.")
    max_output_tokens: int = Field(default=16_000, ge=256, description="Per turn, thinking included.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="null leaves it to the provider.")
    thinking: dict[str, Any] | None = Field(
        default=None, description="anthropic: the request's thinking field, sent as it stands; null omits it."
    )
    effort: str | None = Field(default=None, description="anthropic: output_config.effort; openai: reasoning_effort.")
    timeout_s: float = Field(default=600.0, gt=0, description="One request.")
    max_attempts: int = Field(default=6, ge=1, description="Of one request, before the session stops (resumable).")
    max_wait_s: float = Field(default=60.0, ge=0, description="Longest pause between two attempts.")
    exemplars: int = Field(default=2, ge=0, description="Earlier variants contrasted in a prompt; see memory.yaml.")
    max_failed_repairs: int | None = Field(
        default=3, ge=1, description="So many repairs in a row that fail end the rollout; null: no limit."
    )
    default_models: dict[str, str] = Field(default={}, description="Model of each provider when none is named.")
    prices: dict[str, Price] = Field(default={}, description="By model name, or by the name's beginning.")
