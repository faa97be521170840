"""The local policy: a base and its adapter in a process of its own, held to calls that would be run.

The rollouts of a group take their turns at the same time; they are sampled in one batch. What each was sampled as goes
into its turn, for reinforcement learning later.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from policy.base import PolicyError, PolicyRequest
from policy.base_model import DEFAULT_BASE, BaseSettings, base_source, is_path, public_name
from policy.chat import messages_of, parse_turn, tool_messages
from policy.compact import compact_steps, compact_tools
from policy.grammar import Allowed, Option, allowed_calls, options
from policy.packaged import missing_packages, packaged_adapter
from policy.settings import PACKAGED, PolicySettings
from tools.extras import install_command
from tools.families import plans_taking
from tools.paths import home_dir
from tools.proc import Child
from tools.records import Family, SampledTokens, Step, Usage, content_hash

LOAD_TIMEOUT_S = 1800.0  # a large model from a slow disk, or from a hub
#: How torch, the loader of its libraries, the libraries of C and C++, and Python say that memory ran out.
MEMORY_WORDS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to map segment",
    "std::bad_alloc",
    "memoryerror",
)
#: Others of a group that a turn waits for: all come within milliseconds, or never (they were answered before a kill).
GATHER_S = 1.0
_DEFAULT_TEMPERATURE = 1.0


class LocalPolicy:
    """Cheap to make: the model is loaded at the first turn. Raises PolicyError for what can be seen before that."""

    is_search = False

    def __init__(self, settings: PolicySettings, families: Mapping[str, Family], home: Path | None = None) -> None:
        self._settings = settings = located(settings)
        local = settings.local
        self._families = dict(families)
        self._home = home or home_dir()
        self._base = local.base
        self._adapter = Path(local.adapter) if local.adapter else None
        _check(self._base, self._adapter)
        self._options: dict[str, list[Option]] = {}
        self._child: Child | None = None
        self._about: dict[str, Any] = {}
        self._is_loaded = False
        self._group = _Group(self._sample)

    @property
    def name(self) -> str:
        return f"local:{self._adapter.name if self._adapter is not None else public_name(self._base.name)}"

    @property
    def peak_rss_bytes(self) -> int:
        """Of the model's process so far; 0 before it was asked anything."""
        return int(self._about.get("peak_rss_bytes", 0))

    def identity(self) -> str:
        """Of what the model is, whatever it is called: weights, tokenizer, template, device. Loads it."""
        return str(self._loaded()["identity"])

    def start(self) -> None:
        """Begins to load the model, which takes a while that may be used; what is asked next waits for it."""
        if self._child is not None and self._child.alive:
            return
        self.close()
        # Threads that spin while they wait cost a shared machine several times what they win.
        env = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", **os.environ}
        root = Path(__file__).resolve().parent.parent
        try:
            self._child = Child([sys.executable, "-m", "policy.local_worker"], cwd=root, env=env)
        except OSError as error:
            raise PolicyError(f"the local model's process cannot be started: {error.strerror}") from error
        adapter = str(self._adapter) if self._adapter is not None else None
        order = {"op": "load", "base": self._base.model_dump(), "adapter": adapter, "home": str(self._home)}
        self._child.send(json.dumps(order).encode())  # one that died says so when it is asked

    def close(self) -> None:
        self._is_loaded = False
        if self._child is not None:
            self._child.kill()
            self._child = None

    def step(self, request: PolicyRequest) -> Step:
        allowed = self._allowed(request)
        return self._group.step(request, allowed) if allowed.calls else _nothing(request)

    def steps(self, requests: Sequence[PolicyRequest]) -> list[Step | None]:
        """The turns of several rollouts, in one batch where the memory holds it. None for one that is not over yet: it
        goes on when it is asked for again, beside others. All of a call are never None."""
        allowed = [self._allowed(request) for request in requests]
        asked = [(request, own) for request, own in zip(requests, allowed, strict=True) if own.calls]
        answers = iter(self._sampled(asked, may_wait=True) if asked else ())
        return [
            next(answers) if own.calls else _nothing(request) for request, own in zip(requests, allowed, strict=True)
        ]

    def _allowed(self, request: PolicyRequest) -> Allowed:
        task_id = request.task.task_id
        if task_id not in self._options:
            self._options[task_id] = options(plans_taking(self._families, request.task, request.device.sm_count))
        return allowed_calls(request, self._options[task_id])

    # --- the process ---------------------------------------------------------------------------------------------

    def _sample(self, batch: Sequence[tuple[PolicyRequest, Allowed]]) -> list[Step]:
        """The turns of all requests, in one order whoever came first."""
        return [step for step in self._sampled(batch, may_wait=False) if step is not None]

    def _sampled(self, batch: Sequence[tuple[PolicyRequest, Allowed]], may_wait: bool) -> list[Step | None]:
        about = self._loaded()
        temperature = self._settings.temperature
        temperature = _DEFAULT_TEMPERATURE if temperature is None else temperature
        reply = self._ask(
            {
                "op": "sample",
                "rows": [_row(request, allowed, about["tokenizer"]) for request, allowed in batch],
                "temperature": temperature,
                "top_p": self._settings.local.top_p,
                "words": self._settings.local.words,
                "may_wait": may_wait,
            },
            self._settings.timeout_s,
        )
        self._about["peak_rss_bytes"] = reply["peak_rss_bytes"]
        return [_step(turn, about, temperature) if turn is not None else None for turn in reply["turns"]]

    def _loaded(self) -> dict[str, Any]:
        self.start()
        if not self._is_loaded:
            self._about = self._answer(LOAD_TIMEOUT_S)
            self._is_loaded = True
        return self._about

    def _ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._child is not None
        return self._answer(timeout_s, self._child.send(json.dumps(message).encode()))

    def _answer(self, timeout_s: float, is_asked: bool = True) -> dict[str, Any]:
        child = self._child
        assert child is not None
        frame = child.recv(timeout_s) if is_asked else None
        if frame is None:
            sentence = _lost(child, timeout_s)
            self.close()
            raise PolicyError(sentence)
        reply: dict[str, Any] = json.loads(frame)
        if "error" in reply:
            if reply["error"] == "memory":
                self.close()  # what is left of its memory is in pieces
            raise PolicyError(_NO_MEMORY if reply["error"] == "memory" else reply["error"])
        return reply


_SMALLER = "take --set policy.local.base.dtype=bfloat16, a smaller base, or a smaller session.group_size"
_NO_MEMORY = f"there is not enough memory for the local model: {_SMALLER}"


def located(settings: PolicySettings) -> PolicySettings:
    """The model in one place, base.name, and whole paths: the model's process works in a folder of its own, and a
    session may go on from another one. Raises PolicyError."""
    if settings.name != "local":
        return settings
    local, base = settings.local, settings.local.base
    name = settings.model or base.name
    if name != DEFAULT_BASE and is_path(name):
        name = _absolute("base.name", name)
    adapter = local.adapter
    if adapter == PACKAGED:  # on another base it would be none
        packaged = packaged_adapter() if name == DEFAULT_BASE else None
        adapter = str(packaged) if packaged is not None else None
    changed = {
        "name": name,
        "chat_template": _absolute("base.chat_template", base.chat_template) if base.chat_template else None,
    }
    whole = {
        "base": base.model_copy(update=changed),
        "adapter": _absolute("adapter", adapter) if adapter else None,
    }
    return settings.model_copy(update={"model": None, "local": local.model_copy(update=whole)})


def _absolute(field: str, path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except (OSError, RuntimeError) as error:  # the current folder is gone; ~nobody
        raise PolicyError(f"policy.local.{field}: {path} leads nowhere: give a full path") from error


def _check(base: BaseSettings, adapter: Path | None) -> None:
    if missing := missing_packages():
        raise PolicyError(
            f"a local model (--policy local or base, an adapter) needs {', '.join(missing)}: {install_command('local')}"
        )
    base_source(base.name, None)
    if base.chat_template is not None and not Path(base.chat_template).is_file():
        raise PolicyError(f"policy.local.base.chat_template: there is no file {base.chat_template}")
    if adapter is None:
        return
    if not (adapter / "adapter_config.json").is_file():
        what = "holds no adapter (adapter_config.json is missing)" if adapter.is_dir() else "does not exist"
        raise PolicyError(f"policy.local.adapter: the folder {adapter} {what}: give one that `agent train` made")


def _lost(child: Child, timeout_s: float) -> str:
    """Why there was no answer."""
    if child.alive:
        return (
            f"the local model gave no answer within {timeout_s:.0f} s: raise policy.timeout_s, or take a smaller base"
        )
    until = time.monotonic() + 1.0
    while child.returncode is None and time.monotonic() < until:  # its pipe is closed a moment before
        time.sleep(0.01)
    if child.returncode == -9:
        return f"the local model's process was killed, as a system does that runs out of memory: {_SMALLER}"
    lines = [line.strip() for line in child.stderr_tail().splitlines() if line.strip()]
    if lines and any(words in lines[-1].lower() for words in MEMORY_WORDS):  # a thread that could not be made, say
        return _NO_MEMORY
    return f"the local model's process died ({lines[-1][:300] if lines else f'code {child.returncode}'})"


def _nothing(request: PolicyRequest) -> Step:
    why = "no plan passed" if request.trials else f"no family accepts {request.task.label}"
    return Step(role="assistant", text=f"nothing to call: {why}", stop="end")


def _row(request: PolicyRequest, allowed: Allowed, tokenizer: str) -> dict[str, Any]:
    steps = compact_steps(request.steps)
    sampled = [step.sampled for step in steps if step.role == "assistant"]
    return {
        "messages": messages_of(steps),
        "tools": _tools(),
        "own": [list(s.token_ids) if s is not None and s.tokenizer == tokenizer else None for s in sampled],
        "lead": allowed.lead,
        "calls": allowed.calls,
        "numbered": list(allowed.numbered.items()),
        "seed": sampling_seed(request),
        "conversation": content_hash([request.task.task_id, request.seed, request.rollout]),
    }


def sampling_seed(request: PolicyRequest) -> str:
    """Of one turn. Each shape has its own: with the same numbers drawn at all, a policy would take plans of the same
    places in their lists everywhere, and many shapes would tell no more than one."""
    return content_hash(["local", request.task.task_id, request.seed, request.rollout, len(request.steps)])


@cache
def _tools() -> list[dict[str, Any]]:
    return tool_messages(compact_tools())


def _step(turn: Mapping[str, Any], about: Mapping[str, Any], temperature: float) -> Step:
    sampled = None
    if temperature > 0:  # the likeliest token is no sample
        sampled = SampledTokens(
            model=about["model"],
            tokenizer=about["tokenizer"],
            context_ids=tuple(turn["context_ids"]),
            token_ids=tuple(turn["token_ids"]),
            logprobs=tuple(turn["logprobs"]),
            mask=tuple(turn["mask"]),
            temperature=temperature,
        )
    usage = Usage(input_tokens=len(turn["context_ids"]), output_tokens=len(turn["token_ids"]))
    return parse_turn(turn["text"]).model_copy(update={"sampled": sampled, "usage": usage})


# --- turns that are taken at the same time ----------------------------------------------------------------------------


class _Seat:
    def __init__(self, request: PolicyRequest, allowed: Allowed) -> None:
        self.order = (request.task.task_id, request.seed, request.rollout)
        self.asked = (request, allowed)
        self.step: Step | None = None
        self.error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.step is not None or self.error is not None


class _Group:
    """Calls from several threads become one call: each says how many there will be (``PolicyRequest.beside``), and the
    first to come asks for all. Which rows are in one batch changes the last bits of a logit, so it must not depend on
    who is quicker. A resume may ask for a part of a group; in bfloat16 its turns can then differ from those of a
    session that ran through."""

    def __init__(self, sample: Any) -> None:
        self._sample = sample
        self._changed = threading.Condition()
        self._waiting: list[_Seat] = []
        self._is_led = False
        self._busy = threading.Lock()

    def step(self, request: PolicyRequest, allowed: Allowed) -> Step:
        seat = _Seat(request, allowed)
        with self._changed:
            self._waiting.append(seat)
            self._changed.notify_all()
            leads, self._is_led = not self._is_led, True
            if not leads:
                self._changed.wait_for(lambda: seat.is_done)
        if leads:
            self._lead(self._gathered(request.beside))
        if seat.error is not None:
            raise seat.error
        assert seat.step is not None
        return seat.step

    def _gathered(self, count: int) -> list[_Seat]:
        with self._changed:
            quiet_until = time.monotonic() + GATHER_S
            come = len(self._waiting)
            while come < count and (left := quiet_until - time.monotonic()) > 0:
                self._changed.wait(left)
                if len(self._waiting) > come:
                    come, quiet_until = len(self._waiting), time.monotonic() + GATHER_S
            seats = sorted(self._waiting, key=lambda seat: seat.order)
            self._waiting, self._is_led = [], False
            return seats

    def _lead(self, seats: list[_Seat]) -> None:
        steps: list[Step | None] = [None] * len(seats)
        error: BaseException | None = None
        try:
            with self._busy:
                steps = list(self._sample([seat.asked for seat in seats]))
        except BaseException as caught:
            error = caught
        with self._changed:
            for seat, step in zip(seats, steps, strict=True):
                seat.step, seat.error = step, error
            self._changed.notify_all()
