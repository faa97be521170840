"""Settings of the policies. Values come from agent/config.py; nothing here reads a file or the environment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from policy.base_model import BaseSettings
from policy.endpoints import check_url

PolicyName = Literal["auto", "search", "random", "anthropic", "openai", "local"]
#: In the place of an adapter's folder: the one that travels with this program, on the base that it was trained on.
PACKAGED = "packaged"
#: Those that are no model.
SEARCHES = frozenset({"search", "random"})
#: Evaluations of one rollout of the local policy: as many as it was trained on.
LOCAL_QUOTA = 4


class Price(BaseModel):
    """US dollars per million tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    input: float = Field(ge=0, le=1e6)
    output: float = Field(ge=0, le=1e6)
    cache_read: float = Field(ge=0, le=1e6)
    cache_write: float = Field(default=0.0, ge=0, le=1e6)


class LocalSettings(BaseModel):
    """Of the policy ``local``; policy.temperature is 1 there where it is null."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    base: BaseSettings = BaseSettings()
    adapter: str | None = Field(
        default=PACKAGED,
        min_length=1,
        max_length=4096,
        description="Folder of `agent train`; packaged: the one that comes along; null: the base as it is.",
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Below 1, unlikely tokens are never taken.")
    words: int = Field(default=200, ge=0, le=2000, description="Characters said before a call, at most.")


class PolicySettings(BaseModel):
    """Bounds are far above what is of use; they are there so that a slip of the pen is a sentence and not a hang."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: PolicyName = Field(
        default="search", description="auto, search, random, anthropic, openai or local; auto: local where it can run."
    )
    model: str | None = Field(default=None, max_length=200, description="Model name; null: the provider's default.")
    base_url: str | None = Field(default=None, description="Another endpoint of the provider's protocol.")
    batch: int = Field(default=16, ge=1, le=256, description="search: plans proposed in one turn.")
    prior: Literal["records", "model"] = Field(
        default="records",
        description="search: what is expected of plans before they are tried; records: the model, corrected by what "
        "was recorded at other shapes.",
    )
    startup_trials: int = Field(default=10, ge=1, le=10_000, description="search: random trials before TPE begins.")
    max_turns: int = Field(default=40, ge=1, le=10_000, description="Turns of a language model in one rollout.")
    max_output_tokens: int = Field(default=16_000, ge=256, le=1_000_000, description="Per turn, thinking included.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="null leaves it to the provider.")
    thinking: dict[str, Any] | None = Field(
        default=None, description="anthropic: the request's thinking field, sent as it stands; null omits it."
    )
    effort: str | None = Field(
        default=None,
        pattern=r"^\w{1,40}$",
        description="anthropic: output_config.effort; openai: reasoning_effort.",
    )
    stream: bool = Field(default=True, description="Ask for answers as streams; false for a server that has none.")
    timeout_s: float = Field(default=600.0, gt=0, le=86_400, description="One request, until its answer is complete.")
    max_attempts: int = Field(default=6, ge=1, le=100, description="Of one request, before the session stops.")
    max_wait_s: float = Field(default=60.0, ge=0, le=3600, description="Longest pause between two attempts.")
    exemplars: int = Field(default=2, ge=0, le=64, description="Variants contrasted in a prompt; see memory.yaml.")
    max_failed_repairs: int | None = Field(
        default=3, ge=1, le=10_000, description="So many repairs in a row that fail end the rollout; null: no limit."
    )
    docs_searches: int = Field(
        default=12, ge=0, le=1000, description="Searches of the documentation in one rollout; 0: no such tool."
    )
    docs_tokens: int = Field(default=4000, ge=200, le=50_000, description="Of what one search answers, estimated.")
    local: LocalSettings = LocalSettings()
    default_models: dict[str, str] = Field(default={}, description="Model of each provider when none is named.")
    prices: dict[str, Price] = Field(default={}, description="By model name, or by the name's beginning.")

    @field_validator("model")
    @classmethod
    def _model(cls, value: str | None) -> str | None:
        if value is not None and not (value.strip() and value.isprintable()):
            raise ValueError("a model's name is neither empty nor holds control characters; null takes the default")
        return value.strip() if value is not None else None

    @field_validator("base_url")
    @classmethod
    def _base_url(cls, value: str | None) -> str | None:
        return check_url(value) if value is not None else None
