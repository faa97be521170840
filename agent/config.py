"""Settings of a session: one model per concern, one precedence.

    packaged YAML (configs/) < --config FILE < environment < flags (--set included)

The environment's names are HGEMM_AGENT_<SECTION>__<FIELD>, for example HGEMM_AGENT_BUDGET__EVALUATIONS=32. This module
is the only one that turns files and the environment into settings; models read neither.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agent.errors import UsageError
from agent.files import read_text
from memory.exemplars import MemorySettings
from policy.pricing import price_of
from policy.reward import RewardSettings
from policy.settings import LOCAL_QUOTA, SEARCHES, PolicyName, PolicySettings
from tools.hgemm import hgemm, parse_shape
from tools.paths import configs_dir
from tools.records import MODES, Mode, Task
from tools.validation import first_error
from training.settings import TrainSettings

ENV_PREFIX = "HGEMM_AGENT_"
MAX_FILE_BYTES = 1 << 18
#: New variants of a session where the budget does not say.
SEARCH_EVALUATIONS, LOCAL_EVALUATIONS = 400, 24
MAX_VALUES, MAX_DEPTH = 10_000, 16
#: PyYAML lets a date like 2024-13-45 and a number of 5,000 digits through as ValueError.
_NO_YAML = (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError)


class SessionSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    shape: str | None = Field(default=None, description="M,N,K")
    device: str = Field(default="auto", description="auto, cuda:N, replay:h200 or replay:PATH")
    seed: int = Field(default=0, ge=0, lt=2**63)
    accumulate: Literal["float32"] = "float32"
    rounds: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="null: 1 for a search, 3 for a model, for local as many as the budget takes.",
    )
    group_size: int | None = Field(default=None, ge=1, le=64, description="null: 1 for a search, 2 for a model.")
    top_k: int = Field(default=3, ge=1, le=1000, description="Variants per layout of B through the whole gate.")
    modes: tuple[Mode, ...] = Field(default=MODES, min_length=1, description="Of the final timing; offline decides.")
    parallel_compiles: int | None = Field(default=None, ge=1, le=64)
    floor_pct: float | None = Field(
        default=None, ge=0, le=1000, description="Stop within so many % of the floor. null: 2 for a hosted model."
    )

    @field_validator("shape", mode="before")
    @classmethod
    def _shape(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            value = ",".join(map(str, value))
        if value is not None:
            value = str(value)
            parse_shape(value)  # ShapeError is a ValueError with the sentence
        return value

    @field_validator("accumulate", mode="before")
    @classmethod
    def _only_float32(cls, value: Any) -> Any:
        if value == "float16":
            raise ValueError("accumulate can only be float32: compile, verify and the references know no other yet")
        return value

    @field_validator("modes")
    @classmethod
    def _offline_first(cls, modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
        if "offline" not in modes:
            raise ValueError("modes must contain offline, which decides the winner")
        return tuple(mode for mode in MODES if mode in modes)

    @property
    def task(self) -> Task:
        """Raises UsageError if there is no shape."""
        if self.shape is None:
            raise UsageError("a shape is needed: --shape M,N,K, for example --shape 4096,4096,4096")
        return hgemm(*parse_shape(self.shape), accumulate=self.accumulate)


class BudgetSettings(BaseModel):
    """What a session may spend before it goes on to the final timings; null is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    evaluations: int | None = Field(
        default=None, ge=1, le=10**6, description="New variants, whether they pass or not; null: by the policy."
    )
    wall_s: float | None = Field(default=None, gt=0, le=1e8, description="Seconds at work, pauses not counted.")
    tokens: int | None = Field(default=None, gt=0, le=10**12, description="Input and output of a language model.")
    usd: float | None = Field(default=None, gt=0, le=1e6, description="By the price table in configs/policy.yaml.")


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    session: SessionSettings = SessionSettings()
    budget: BudgetSettings = BudgetSettings()
    policy: PolicySettings = PolicySettings()
    reward: RewardSettings = RewardSettings()
    memory: MemorySettings = MemorySettings()

    @property
    def is_search(self) -> bool:
        return self.policy.name in SEARCHES

    @property
    def evaluations(self) -> int:
        """The budget. A model that proposes well needs few; a search tries every plan."""
        return self.budget.evaluations or (LOCAL_EVALUATIONS if self.policy.name == "local" else SEARCH_EVALUATIONS)

    @property
    def floor_pct(self) -> float | None:
        """None: never stop early. A search and a local model do so only when told: their budgets are to compare, and an
        evaluation costs them nothing. The floor is an estimate, which one timing on a cool GPU can come near."""
        given = self.session.floor_pct
        return given if given is not None or self.is_search or self.policy.name == "local" else 2.0

    @property
    def rounds(self) -> int:
        if self.spends_budget:
            return math.ceil(self.evaluations / (self.group_size * LOCAL_QUOTA))
        return self.session.rounds or (1 if self.is_search else 3)

    @property
    def spends_budget(self) -> bool:
        """Rounds go on after those planned: rollouts of a policy that is sure propose the same, which costs nothing."""
        return self.session.rounds is None and self.policy.name == "local"

    @property
    def group_size(self) -> int:
        return self.session.group_size or (1 if self.is_search else 2)


M = TypeVar("M", bound=BaseModel)
_SECTIONS = frozenset({*Settings.model_fields, *TrainSettings.model_fields})


def load_settings(
    config_file: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, Any] | None = None,
    auto: PolicyName = "search",
) -> Settings:
    """``overrides`` are dotted: ``{"budget.evaluations": 32}``. ``auto``: what the policy of that name stands for.
    Raises UsageError with one sentence."""
    settings = load_sections(Settings, config_file, environ, overrides)
    if settings.policy.name == "auto":
        settings = settings.model_copy(update={"policy": settings.policy.model_copy(update={"name": auto})})
    _check_priced(settings)
    return settings


def load_sections(
    model: type[M], config_file: Path | None, environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None
) -> M:
    """Any model whose fields are sections. What a file or the environment says of other models' sections is theirs."""
    merged: dict[str, Any] = {}
    foreign = _SECTIONS - set(model.model_fields)
    for section in model.model_fields:
        path = configs_dir() / f"{section}.yaml"
        merged[section] = _read_yaml(path)
    where = {}
    if config_file is not None:
        for section, values in _read_yaml(config_file).items():
            if not isinstance(values, dict):
                raise UsageError(f"{config_file}: '{section}' must be a mapping of settings")
            if section in foreign:
                continue
            for field, value in values.items():
                _set(model, merged, f"{section}.{field}", value, str(config_file))
                where[f"{section}.{field}"] = str(config_file)
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            dotted = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            if dotted.partition(".")[0] in foreign:
                continue
            _set(model, merged, dotted, parse_value(text), name)
            where[dotted] = name
    for dotted, value in (overrides or {}).items():
        _set(model, merged, dotted, value, "the command line")
        where[dotted] = "the command line"
    try:
        return model.model_validate(merged)
    except ValidationError as error:
        dotted = ".".join(str(part) for part in error.errors()[0]["loc"][:2])
        raise UsageError(f"{where.get(dotted, 'settings')}: {first_error(error)}") from error


def _check_priced(settings: Settings) -> None:
    """A ceiling in dollars is none for a model whose price nobody knows."""
    policy = settings.policy
    model = policy.model or policy.default_models.get(policy.name)
    is_free = settings.is_search or policy.name == "local"
    if settings.budget.usd is not None and not is_free and model and not price_of(model, policy.prices):
        raise UsageError(
            f"budget.usd cannot be kept, there is no price of '{model}': give --set 'policy.prices={{\"{model}\": "
            "{input: 1, output: 5, cache_read: 0.1}}' in dollars per million tokens, or budget.tokens instead"
        )


def parse_assignment(text: str) -> tuple[str, Any]:
    """``"budget.evaluations=32"`` → ("budget.evaluations", 32). The value is YAML."""
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise UsageError(f"'{text}' is not a setting: write --set section.field=value, for example budget.wall_s=600")
    return name.strip(), parse_value(value)


def parse_value(text: str) -> Any:
    try:
        return _plain(yaml.safe_load(text))
    except _NO_YAML as error:
        raise UsageError(f"'{text[:80]}' is not a value (YAML: {_why(error)})") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    text = read_text(path, "the settings file", MAX_FILE_BYTES)
    try:
        data = _plain(yaml.safe_load(text))
    except _NO_YAML as error:
        raise UsageError(f"the settings file {path} is not YAML: {_why(error)}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(f"the settings file {path} must be a mapping of sections (session, budget, policy, reward)")
    return data


def _plain(data: Any) -> Any:
    """The same, if it is of a size that settings have: a few lines of YAML with aliases can stand for a billion values.
    Raises ValueError."""
    rest, seen = [(data, 1)], 0
    while rest:
        value, depth = rest.pop()
        seen += 1
        if seen > MAX_VALUES or depth > MAX_DEPTH:
            raise ValueError(f"settings have at most {MAX_VALUES} values, nested at most {MAX_DEPTH} deep")
        if isinstance(value, dict):
            rest += [(one, depth + 1) for pair in value.items() for one in pair]
        elif isinstance(value, (list, tuple, set)):
            rest += [(one, depth + 1) for one in value]
    return data


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"settings are nested at most {MAX_DEPTH} deep"
    return " ".join(str(error).split())[:300]


def _set(model: type[BaseModel], merged: dict[str, Any], dotted: str, value: Any, origin: str) -> None:
    """Puts a value into its section, or deeper (policy.prices.my-model.input)."""
    section, *path = dotted.split(".")
    if section not in model.model_fields:
        raise UsageError(f"{origin}: there is no section '{section}' of settings{_near(section, model.model_fields)}")
    fields = type(model.model_fields[section].default).model_fields
    if not path or path[0] not in fields:
        name = path[0] if path else ""
        raise UsageError(f"{origin}: there is no setting '{section}.{name}'{_near(name, fields)}")
    target = merged.setdefault(section, {})
    for part in path[:-1]:
        if not isinstance(target.get(part), dict):
            target[part] = {}
        target = target[part]
    target[path[-1]] = value


def _near(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; there are {', '.join(known)}"
