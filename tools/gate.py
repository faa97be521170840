"""The gate around any device: compile → sanitize → verify → time → profile, each result kept and none taken twice.

The order is enforced here and nowhere else. A call out of order answers REFUSED with a sentence that says what to call
first. Every answer that another run would repeat (``Outcome.lasting``, and NOT_RECORDED) is stored under a key that
contains the device, its libraries and the protocol version, so a store filled by one device does not answer for
another. UNAVAILABLE and REFUSED pass, with the tool installed or the order kept, and are not stored; neither are
deadlines of tools nor DeviceBroken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Literal, Protocol, TypeVar

from pydantic import ValidationError

from tools.admission import Hindrance, hindrance
from tools.device import Device, DeviceBroken
from tools.launching import accepts
from tools.records import (
    BUDGETS,
    MODES,
    BaselineResult,
    Budget,
    CompileResult,
    Depth,
    DeviceInfo,
    Evaluation,
    Family,
    Mode,
    Outcome,
    ProfileResult,
    Reason,
    SanitizeResult,
    Status,
    Task,
    TimingResult,
    Variant,
    VerifyResult,
    content_hash,
)
from tools.sanitize_shapes import family_tasks, sanitize_tasks
from tools.validation import first_error

Kind = Literal["compile", "verify", "sanitize", "time", "profile", "baselines"]
R = TypeVar("R", bound=Outcome)


class ResultStore(Protocol):
    """Where results stay. ``put`` is idempotent: the first write of a key wins, whoever made it."""

    def get(self, key: str) -> str | None: ...

    def put(self, key: str, kind: str, payload_json: str) -> None: ...


class MemoryResults:
    """Results for the life of the process."""

    def __init__(self) -> None:
        self._payloads: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        return self._payloads.get(key)

    def put(self, key: str, kind: str, payload_json: str) -> None:
        self._payloads.setdefault(key, payload_json)

    def __len__(self) -> int:
        return len(self._payloads)


@dataclass(frozen=True)
class Admission:
    """Whether a variant may enter the leaderboard; ``why`` says what is missing, and is empty when it may."""

    admitted: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.admitted


def is_kept(result: Outcome) -> bool:
    """A replay device that has no record of something has none a minute later."""
    return result.lasting or result.status is Status.NOT_RECORDED


def device_scope(info: DeviceInfo) -> str:
    """What ties a result to where it came from; the first part of every key. Another recording is another scope."""
    return content_hash([info.kind, info.name, info.driver, info.recorded_on, info.library, info.protocol_version])


class Toolbox:
    """The tools as a policy may call them. Safe to call from several threads: one key is never measured twice.

    ``families`` names the shapes that plans are sanitized at; without it they are derived from the task's shape.
    """

    def __init__(self, device: Device, results: ResultStore, families: Mapping[str, Family] | None = None) -> None:
        self.device = device
        self.info = device.info
        self.scope = device_scope(self.info)
        self._results = results
        self._families = families
        self._guard = Lock()
        self._claims: dict[str, tuple[Lock, int]] = {}

    # --- tools ---------------------------------------------------------------------------------------------------

    def compile(self, variant: Variant) -> CompileResult:
        return self._once(CompileResult, self.key("compile", variant), "compile", lambda: self.device.compile(variant))

    def verify(self, variant: Variant, task: Task, depth: Depth = "quick") -> VerifyResult:
        """A full verify answers for the quick one, and a failure at either depth for both: a wrong kernel that slips
        through another draw of the inputs is still wrong."""

        def answer(status: Status, detail: str, reason: Reason | None = None) -> VerifyResult:
            return VerifyResult(
                status=status,
                reason=reason,
                detail=detail,
                variant_key=variant.key,
                task_id=task.task_id,
                depth=depth,
            )

        if why := self._not_accepted(variant, task):
            return answer(Status.FAILED, why, Reason.NOT_ACCEPTED)
        known = self._known_verify(variant, task)
        if known is not None and known.status is Status.FAILED:
            return known
        key = self.key("verify", variant, task, depth)
        if known is not None and known.ok and known.depth == "full":
            exact = self._stored(VerifyResult, key)
            return exact if exact is not None and exact.ok else known
        if why := self._no_compile("verify", variant):
            return answer(Status.REFUSED, why)
        return self._once(VerifyResult, key, "verify", lambda: self.device.verify(variant, task, depth))

    def sanitize(self, variant: Variant, task: Task) -> SanitizeResult:
        """Runs at the shapes of ``tools.sanitize_shapes``: once for all shapes where ``variant`` is a family's plan."""
        if why := self._not_accepted(variant, task):
            return SanitizeResult(status=Status.FAILED, reason=Reason.NOT_ACCEPTED, detail=why, variant_key=variant.key)
        if why := self._no_compile("sanitize", variant):
            return SanitizeResult(status=Status.REFUSED, detail=why, variant_key=variant.key)
        tasks = sanitize_tasks(variant, task, self._families)
        only_at = None if family_tasks(variant, task, self._families) else task.task_id

        def measure() -> SanitizeResult:
            return self.device.sanitize(variant, tasks).model_copy(update={"task_id": only_at})

        return self._once(SanitizeResult, self._sanitize_key(variant, tasks), "sanitize", measure)

    def time(self, variant: Variant, task: Task, mode: Mode = "offline", budget: Budget = "screen") -> TimingResult:
        """``screen`` needs compile and verify quick, ``final`` verify full, ``certify`` sanitize as well."""

        def answer(status: Status, detail: str, reason: Reason | None = None) -> TimingResult:
            return TimingResult(
                status=status,
                reason=reason,
                detail=detail,
                variant_key=variant.key,
                task_id=task.task_id,
                mode=mode,
                budget=budget,
            )

        if why := self._not_accepted(variant, task):
            return answer(Status.FAILED, why, Reason.NOT_ACCEPTED)
        what = f"time at budget {budget}"
        why = self._no_compile(what, variant)
        why = why or self._no_verify(what, variant, task, "quick" if budget == "screen" else "full")
        if not why and budget == "certify":
            why = self._no_sanitize(what, variant, task)
        if why:
            return answer(Status.REFUSED, why)
        key = self.key("time", variant, task, mode, budget)
        return self._once(TimingResult, key, "time", lambda: self.device.time(variant, task, mode, budget))

    def profile(self, variant: Variant, task: Task) -> ProfileResult:
        def answer(status: Status, detail: str, reason: Reason | None = None) -> ProfileResult:
            return ProfileResult(
                status=status, reason=reason, detail=detail, variant_key=variant.key, task_id=task.task_id
            )

        if why := self._not_accepted(variant, task):
            return answer(Status.FAILED, why, Reason.NOT_ACCEPTED)
        why = self._no_compile("profile", variant) or self._no_verify("profile", variant, task, "quick")
        if why:
            return answer(Status.REFUSED, why)
        key = self.key("profile", variant, task)
        return self._once(ProfileResult, key, "profile", lambda: self.device.profile(variant, task))

    def baselines(self, task: Task, mode: Mode = "offline", budget: Budget = "screen") -> BaselineResult:
        key = self.key("baselines", None, task, mode, budget)
        return self._once(BaselineResult, key, "baselines", lambda: self.device.baselines(task, mode, budget))

    def evaluate(self, variant: Variant, task: Task) -> Evaluation:
        """compile → verify quick → time at screen budget, offline; stops at the first that is not ok."""
        if why := self._not_accepted(variant, task):
            return Evaluation(
                status=Status.FAILED,
                reason=Reason.NOT_ACCEPTED,
                detail=why,
                variant_key=variant.key,
                task_id=task.task_id,
            )
        verified: VerifyResult | None = None
        timed: TimingResult | None = None
        last: Outcome
        last = compiled = self.compile(variant)
        if last.ok:
            last = verified = self.verify(variant, task, "quick")
        if last.ok:
            last = timed = self.time(variant, task, "offline", "screen")
        stages = (compiled, verified, timed)
        return Evaluation(
            status=last.status,
            reason=last.reason,
            detail=last.detail,
            elapsed_s=sum(stage.elapsed_s for stage in stages if stage is not None),
            variant_key=variant.key,
            task_id=task.task_id,
            compile=compiled,
            verify=verified,
            timing=timed,
        )

    def on_leaderboard(self, variant: Variant, task: Task, mode: Mode = "offline") -> Admission:
        """What ``tools.admission`` says of the stored results. Only looks; measures nothing."""
        if why := self._not_accepted(variant, task):
            return Admission(False, why)
        depths: tuple[Depth, ...] = ("quick", "full")
        verified = [(d, v) for d in depths if (v := self.stored(VerifyResult, "verify", variant, task, d))]
        timed = [
            (f"{m}/{b}", t)
            for m in MODES
            for b in BUDGETS
            if (t := self.stored(TimingResult, "time", variant, task, m, b))
        ]
        sanitized = self.stored_sanitize(variant, task)
        found = hindrance(
            [(depth, v.status) for depth, v in verified],
            [sanitized.status] if sanitized else [],
            [(setting, t.status) for setting, t in timed],
            mode,
        )
        match found:
            case None:
                return Admission(True)
            case Hindrance.VERIFY_FAILED | Hindrance.NOT_VERIFIED:
                why = self._no_compile("the leaderboard", variant)
                why = why or self._no_verify("the leaderboard", variant, task, "full")
            case Hindrance.SANITIZE_FAILED | Hindrance.NOT_SANITIZED:
                why = self._no_sanitize("the leaderboard", variant, task)
            case Hindrance.TIMING_FAILED:
                setting, bad = next((s, t) for s, t in timed if t.status is Status.FAILED)
                why = f"a timing ({setting}) failed, which bars the leaderboard: {bad.reason}: {bad.detail}"
            case Hindrance.NOT_TIMED:
                why = f"the leaderboard needs a {mode} timing: call time with budget final first"
        return Admission(False, why)

    # --- keys and results ----------------------------------------------------------------------------------------

    def key(self, kind: Kind, variant: Variant | None, task: Task | None = None, *settings: str) -> str:
        """The store's key of a result: ``<device scope>-<hash of the question>``."""
        question = [kind, variant.key if variant else None, task.task_id if task else None, *settings]
        return f"{self.scope}-{content_hash(question)}"

    def stored(
        self, record: type[R], kind: Kind, variant: Variant, task: Task | None = None, *settings: str
    ) -> R | None:
        """A result that is already known. Only looks; measures nothing."""
        return self._stored(record, self.key(kind, variant, task, *settings))

    def evaluated(self, variant: Variant, task: Task) -> bool:
        """Whether ``evaluate`` would measure nothing more: a verdict against the variant, or a screen timing."""
        verified = self._known_verify(variant, task)
        timed = self.stored(TimingResult, "time", variant, task, "offline", "screen")
        return timed is not None or (verified is not None and verified.status is Status.FAILED)

    def stored_sanitize(self, variant: Variant, task: Task) -> SanitizeResult | None:
        return self._stored(SanitizeResult, self._sanitize_key(variant, sanitize_tasks(variant, task, self._families)))

    def _sanitize_key(self, variant: Variant, tasks: tuple[Task, ...]) -> str:
        return self.key("sanitize", variant, None, *(t.task_id for t in tasks))

    def _stored(self, record: type[R], key: str) -> R | None:
        payload = self._results.get(key)
        return None if payload is None else _read(record, payload, key)

    def _once(self, record: type[R], key: str, kind: Kind, measure: Callable[[], R]) -> R:
        found = self._stored(record, key)
        if found is not None:
            return found
        with self._claim(key):
            found = self._stored(record, key)  # another thread may have had the claim
            if found is not None:
                return found
            result = measure()
            if not is_kept(result):
                return result
            payload = result.to_json()
            self._results.put(key, kind, payload)
            winner = self._results.get(key)  # another process may have been first
            return result if winner is None or winner == payload else _read(record, winner, key)

    @contextmanager
    def _claim(self, key: str) -> Iterator[None]:
        with self._guard:
            lock, users = self._claims.get(key, (Lock(), 0))
            self._claims[key] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._claims.pop(key)
                if users > 1:
                    self._claims[key] = (lock, users - 1)

    # --- conditions: an empty sentence means that they hold ------------------------------------------------------

    def _not_accepted(self, variant: Variant, task: Task) -> str:
        return accepts(variant, task, self.info.sm_count) or ""

    def _no_compile(self, what: str, variant: Variant) -> str:
        compiled = self._stored(CompileResult, self.key("compile", variant))
        return _missing(what, "compile", compiled, "call compile first")

    def _known_verify(self, variant: Variant, task: Task) -> VerifyResult | None:
        """The verdict that counts: a failure at either depth, else full, else quick."""
        depths: tuple[Depth, ...] = ("full", "quick")
        found = [self._stored(VerifyResult, self.key("verify", variant, task, depth)) for depth in depths]
        known = [v for v in found if v is not None]
        by_weight = (Status.FAILED, Status.OK, Status.NOT_RECORDED)
        return min(known, key=lambda v: by_weight.index(v.status), default=None)

    def _no_verify(self, what: str, variant: Variant, task: Task, depth: Depth) -> str:
        known = self._known_verify(variant, task)
        if known is not None and known.ok and known.depth == "quick" and depth == "full":
            full = self._stored(VerifyResult, self.key("verify", variant, task, "full"))
            known = full  # not recorded, or not asked for yet
        return _missing(what, f"verify {depth} at {task.label}", known, f"call verify with depth {depth} first")

    def _no_sanitize(self, what: str, variant: Variant, task: Task) -> str:
        key = self._sanitize_key(variant, sanitize_tasks(variant, task, self._families))
        return _missing(what, "sanitize", self._stored(SanitizeResult, key), "call sanitize first")


def _read(record: type[R], payload: str, key: str) -> R:
    try:
        return record.from_json(payload)
    except ValidationError as error:
        raise DeviceBroken(
            f"the stored result {key} is damaged ({first_error(error)}): restore the store that holds it from a copy, "
            "or move it away"
        ) from error


def _missing(what: str, needed: str, found: Outcome | None, advice: str) -> str:
    if found is None:
        return f"{what} needs a {needed} that is ok: {advice}"
    if found.ok:
        return ""
    because = found.reason.value if found.reason else found.status.value
    return f"{what} needs a {needed} that is ok, but it was {because}: {found.detail}"
