"""What a session came to: one record, written to summary.json, printed by --json and rendered by agent/report.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import Field

from agent.finish import admitted
from agent.state import Finalist, SessionState, Spent, TrialRow
from tools.records import (
    HEADLINE_REFERENCE,
    BaselineTime,
    BLayout,
    DeviceInfo,
    Mode,
    Outcome,
    Plan,
    Record,
    Status,
    Task,
    TimingResult,
    TimingRow,
    Variant,
)


class ModeResult(Record):
    """One mode's final timing. ``rows`` holds every reference of the run; empty unless ``status`` is ok."""

    mode: Mode
    status: Status
    detail: str = ""
    rows: tuple[TimingRow, ...] = ()
    empty_kernel_us: float | None = None
    spread: float | None = None
    noisy: bool = False
    throttled: bool = False

    def row(self, reference: str = HEADLINE_REFERENCE) -> TimingRow | None:
        return next((r for r in self.rows if r.reference == reference), None)


class StageResult(Record):
    """verify full, sanitize or profile of a variant: the verdict and its sentences."""

    status: Status
    detail: str = ""
    sentences: tuple[str, ...] = ()


class Entry(Record):
    """One variant of the leaderboard. ``admitted`` means the whole gate; otherwise ``why`` says what is missing."""

    key: str
    label: str
    b_layout: BLayout
    plan: Plan | None = None
    admitted: bool
    why: str = ""
    screen_ratio: float
    modes: tuple[ModeResult, ...] = ()
    verify: StageResult | None = None
    sanitize: StageResult | None = None
    profile: StageResult | None = None

    def mode(self, mode: Mode) -> ModeResult | None:
        return next((m for m in self.modes if m.mode == mode), None)

    @property
    def final_ratio(self) -> float | None:
        """Offline, final budget, against the headline reference."""
        offline = self.mode("offline")
        row = offline.row() if offline else None
        return row.ratio if row else None


class References(Record):
    mode: Mode
    status: Status
    detail: str = ""
    times: tuple[BaselineTime, ...] = ()


class Summary(Record):
    """``best`` is the winner: the best admitted entry by final offline ratio. Without one, ``provisional`` names the
    best that was screened, which is no result."""

    session_id: str
    task: Task
    device: DeviceInfo
    policy: str
    seed: int
    finished: bool
    best: Entry | None = None
    provisional: Entry | None = None
    best_per_layout: dict[str, str] = Field(default_factory=dict)
    source_path: str | None = None
    leaderboard: tuple[Entry, ...] = ()
    #: Variants that passed the screen and of whose full gate a replay device has no record; not in the leaderboard.
    unrecorded_finalists: int = 0
    references: tuple[References, ...] = ()
    evaluations: int = 0
    passed: int = 0
    rejected: dict[str, int] = Field(default_factory=dict)
    not_recorded: int = 0
    best_curve: tuple[tuple[int, float], ...] = ()
    stopped_by: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    cost_known: bool = True
    wall_s: float = 0.0


def best_curve(trials: Sequence[TrialRow]) -> tuple[tuple[int, float], ...]:
    """(number of variants evaluated, best ratio so far), wherever it rose."""
    curve: list[tuple[int, float]] = []
    best = 0.0
    for count, row in enumerate(unique(trials), start=1):
        if row["ratio"] is not None and row["ratio"] > best:
            best = row["ratio"]
            curve.append((count, best))
    return tuple(curve)


def unique(trials: Sequence[TrialRow]) -> list[TrialRow]:
    """Each variant once, at its first trial."""
    found: dict[str, TrialRow] = {}
    for row in trials:
        found.setdefault(row["key"], row)
    return list(found.values())


def counts(trials: Sequence[TrialRow]) -> tuple[int, dict[str, int], int]:
    """(passed, rejected by reason with the most frequent first, not recorded)."""
    rows = unique(trials)
    rejected = Counter(row["reason"] or "?" for row in rows if row["status"] == Status.FAILED)
    passed = sum(row["status"] == Status.OK for row in rows)
    return passed, dict(rejected.most_common()), sum(row["status"] == Status.NOT_RECORDED for row in rows)


def entry(
    finalist: Finalist, variant: Variant, stages: Mapping[str, Outcome], timings: Sequence[TimingResult]
) -> Entry:
    """``stages``: verify, sanitize and profile, as far as they ran."""
    return Entry(
        key=finalist["key"],
        label=variant.label,
        b_layout=variant.b_layout,
        plan=variant.plan,
        admitted=bool(admitted([finalist])),
        why=finalist["why"],
        screen_ratio=finalist["screen_ratio"],
        modes=tuple(mode_result(timing) for timing in timings),
        **{name: stage_result(outcome) for name, outcome in stages.items()},
    )


def mode_result(timing: TimingResult) -> ModeResult:
    return ModeResult(
        mode=timing.mode,
        status=timing.status,
        detail=timing.detail,
        rows=timing.rows,
        empty_kernel_us=timing.empty_kernel_us,
        spread=timing.spread,
        noisy=timing.noisy,
        throttled=timing.throttled,
    )


def stage_result(outcome: Outcome) -> StageResult:
    sentences = getattr(outcome, "sentences", ())
    return StageResult(status=outcome.status, detail=outcome.detail, sentences=sentences)


def ranked(entries: Sequence[Entry]) -> list[Entry]:
    """Admitted ones first, by final offline ratio; the others by what they have."""
    return sorted(entries, key=lambda e: (not e.admitted, -(e.final_ratio or 0.0), -e.screen_ratio, e.key))


def summarise(
    *,
    session_id: str,
    task: Task,
    device: DeviceInfo,
    policy: str,
    seed: int,
    state: SessionState,
    entries: Sequence[Entry],
    references: Sequence[References],
    source_path: str | None,
    cost_known: bool,
    finished: bool = True,
) -> Summary:
    board = ranked(entries)
    winners = [e for e in board if e.admitted]
    unrecorded = {f["key"] for f in state["finalists"] if f["missed"] == Status.NOT_RECORDED}
    passed, rejected, not_recorded = counts(state["trials"])
    per_layout: dict[str, str] = {}
    for winner in winners:
        per_layout.setdefault(winner.b_layout, winner.key)
    spent: Spent = state["spent"]
    return Summary(
        session_id=session_id,
        task=task,
        device=device,
        policy=policy,
        seed=seed,
        finished=finished,
        best=winners[0] if winners else None,
        provisional=None if winners or not board else max(board, key=lambda e: (e.final_ratio or 0.0, e.screen_ratio)),
        best_per_layout=per_layout,
        source_path=source_path,
        leaderboard=tuple(e for e in board if e.key not in unrecorded),
        unrecorded_finalists=len(unrecorded),
        references=tuple(references),
        evaluations=spent["evaluations"],
        passed=passed,
        rejected=rejected,
        not_recorded=not_recorded,
        best_curve=best_curve(state["trials"]),
        stopped_by=state["stopped_by"],
        input_tokens=spent["input_tokens"],
        output_tokens=spent["output_tokens"],
        cost_usd=spent["usd"],
        cost_known=cost_known,
        wall_s=spent["wall_s"],
    )
