"""Settings → policy. The environment is passed in, so that it is read in one place (agent/config.py)."""

from __future__ import annotations

from collections.abc import Mapping

from memory.recorded_times import RecordedTimes
from policy.anthropic_policy import KEY_NAME as ANTHROPIC_KEY
from policy.anthropic_policy import AnthropicPolicy
from policy.base import Policy, PolicyError
from policy.local_policy import LocalPolicy
from policy.openai_policy import KEY_NAME as OPENAI_KEY
from policy.openai_policy import OpenAIPolicy
from policy.redacting import Secrets
from policy.search import SearchPolicy
from policy.settings import PolicySettings
from tools.records import Family
from tools.replay import default_path


def make_policy(settings: PolicySettings, families: Mapping[str, Family], environ: Mapping[str, str]) -> Policy:
    """Raises PolicyError with one sentence when a key or a model name is missing, or cannot be used."""
    secrets = Secrets.of(environ)
    if secrets.found_in(settings.model_dump_json()):
        raise PolicyError("a setting of the policy contains a key: keys come from the environment only")
    match settings.name:
        case "search":
            recorded = RecordedTimes(default_path(), families) if settings.prior == "records" else None
            return SearchPolicy(settings, families, recorded=recorded)
        case "random":
            return SearchPolicy(settings, families, method="random")
        case "anthropic":
            url = settings.base_url or environ.get("ANTHROPIC_BASE_URL") or None
            return AnthropicPolicy(settings, model_of(settings), environ.get(ANTHROPIC_KEY), url, secrets)
        case "openai":
            url = settings.base_url or environ.get("OPENAI_BASE_URL") or None
            return OpenAIPolicy(settings, model_of(settings), environ.get(OPENAI_KEY), url, secrets)
        case "local":
            return LocalPolicy(settings, families)
        case "auto":
            raise PolicyError("the policy 'auto' stands for another one: name it")


def model_of(settings: PolicySettings) -> str:
    model = settings.model or settings.default_models.get(settings.name)
    if not model:
        raise PolicyError(f"the policy '{settings.name}' needs a model: give one with --model")
    return model
