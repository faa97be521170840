"""What the hosted policies share: a request with retries, and the edge at which keys, broken answers and surprises end.

Whatever goes wrong in a turn leaves ``step`` as a PolicyError of one sentence, without a key in it and without the
error that it came from, whose text nobody has looked through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from policy.base import PolicyError, PolicyRequest
from policy.endpoints import check_key, check_url, is_local
from policy.redacting import Secrets, watch_logs
from policy.retrying import Who, describe, with_retries
from policy.settings import PolicySettings
from policy.tidying import BadAnswer, Garbled
from policy.transport import Overrun, bounded
from tools.records import Step

T = TypeVar("T")
MAX_SENTENCE = 800


class HostedPolicy(ABC):
    """One provider's protocol is what a subclass adds. Raises PolicyError at construction for a key or an address that
    cannot be used."""

    is_search = False
    kind: ClassVar[str]
    key_name: ClassVar[str]
    default_url: ClassVar[str]
    provider: ClassVar[str]
    #: The end of the sentence for a missing key.
    without_key: ClassVar[str]
    _client: Any

    def __init__(
        self,
        settings: PolicySettings,
        model: str,
        api_key: str | None,
        base_url: str | None,
        secrets: Secrets | None = None,
    ) -> None:
        self._settings = settings
        self._model = model
        try:
            url = check_url(base_url) if base_url else self.default_url
            self._local = is_local(url)
            key = check_key(api_key, self.key_name, self._local)
        except ValueError as error:
            raise PolicyError(str(error)) from None
        if key is None and not self._keyless:
            raise PolicyError(f"the policy '{self.kind}' needs a key: export {self.key_name}=... {self.without_key}")
        self._secrets = secrets or Secrets([key])
        self._who = Who(self.provider, self.key_name, model, url)
        self._errors: tuple[type[Exception], ...] = ()
        self._connection_errors: tuple[type[Exception], ...] = ()
        self._guarded(lambda: self._connect(key, url))
        self._forget_logs = watch_logs(self._secrets)

    @property
    def _keyless(self) -> bool:
        """Whether the server may run without a key."""
        return False

    @property
    def name(self) -> str:
        return f"{self.kind}:{self._model}"

    def close(self) -> None:
        self._forget_logs()
        self._client.close()

    @abstractmethod
    def _connect(self, key: str | None, url: str) -> None:
        """Makes the SDK's client and names the SDK's errors."""

    @abstractmethod
    def _body(self, request: PolicyRequest) -> dict[str, Any]: ...

    @abstractmethod
    def _ask(self, body: dict[str, Any]) -> Mapping[str, Any]:
        """One request. The answer is plain JSON, not yet looked at."""

    @abstractmethod
    def _parse(self, answer: Mapping[str, Any]) -> Step: ...

    def step(self, request: PolicyRequest) -> Step:
        def work() -> Step:
            body = self._body(request)
            answer = with_retries(lambda: self._ask(body), self._settings, self._connection_errors)
            # Before, because parsing shortens some texts, and half a key would not be known as one; after, because it
            # undoes escapes.
            return self._secrets.step(self._parse(self._secrets.value(answer)))

        return self._guarded(work)

    def _http_client_options(self) -> dict[str, Any]:
        """Redirects are not followed: they would take the key and the conversation to a host that nobody named."""
        hooks = {"response": [bounded(self._settings.timeout_s)]}
        return {"event_hooks": hooks, "follow_redirects": False, "timeout": self._settings.timeout_s}

    def _guarded(self, work: Callable[[], T]) -> T:
        attempts = self._settings.max_attempts
        known: tuple[type[Exception], ...] = (*self._errors, *self._connection_errors, Overrun)
        try:
            return work()
        except PolicyError as error:
            sentence = str(error)
        except Garbled as error:
            sentence = f"{self._who.label} {error} ({attempts} attempts)"
        except BadAnswer as error:
            sentence = f"{self._who.label} {error}"
        except known as error:
            sentence = describe(self._who, error, attempts, self._secrets.message)
        except Exception as error:
            said = " ".join(str(error).split())
            what = f"{type(error).__name__}: {said}" if said else type(error).__name__
            sentence = f"{self._who.label} failed unexpectedly ({self._secrets.message(what)[:300]})"
        raise PolicyError(self._secrets.message(" ".join(sentence.split()))[:MAX_SENTENCE])
