"""The finish of a session, decided by the harness and not by the policy: which variants go through the whole gate.

The best ``top_k`` of each layout of B by screen ratio: verify full → sanitize → time at final budget in every mode →
profile. One that is rejected, or of which a replay device has no record, makes room for the next. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from agent.state import FinalCall, Finalist, TrialRow, Verdict
from tools.records import Mode, Outcome, ProfileResult, SanitizeResult, Status, TimingResult, VerifyResult

#: Rejections per layout, in units of top_k, after which the finish looks no further: sanitize takes seconds each.
REJECTIONS_PER_PLACE = 4


def candidates(trials: Sequence[TrialRow], layout_of: Mapping[str, str]) -> list[Finalist]:
    """Every variant that passed the screen, once, best first; equals in proposal order."""
    best: dict[str, float] = {}
    for row in trials:
        if row["ratio"] is not None:
            best.setdefault(row["key"], row["ratio"])
    ordered = sorted(best, key=lambda key: -best[key])
    return [
        Finalist(key=key, b_layout=layout_of[key], screen_ratio=best[key], stage="verify", missed="", why="")
        for key in ordered
    ]


def pull(finalists: Sequence[Finalist], waiting: Sequence[Finalist], top_k: int) -> list[Finalist]:
    """The finalists, and as many new ones as there are free places. A tool that this machine lacks frees none: the next
    variant would lack it too."""
    found = list(finalists)
    known = {finalist["key"] for finalist in found}
    for layout in dict.fromkeys(f["b_layout"] for f in waiting):
        mine = [f for f in found if f["b_layout"] == layout]
        standing = sum(f["missed"] in ("", Status.UNAVAILABLE) for f in mine)
        rejected = sum(f["missed"] == Status.FAILED for f in mine)
        free = top_k - standing if rejected < REJECTIONS_PER_PLACE * top_k else 0
        queue = [f for f in waiting if f["b_layout"] == layout and f["key"] not in known]
        found += queue[: max(0, free)]
    return found


def next_measures(finalists: Sequence[Finalist], modes: Sequence[Mode]) -> list[FinalCall]:
    """What each finalist needs now, best first. The modes of one variant go out together."""
    calls: list[FinalCall] = []
    for finalist in finalists:
        stage = finalist["stage"]
        if stage == "done":
            continue
        wanted: Sequence[Mode | None] = modes if stage == "time" else (None,)
        calls += [FinalCall(key=finalist["key"], tool=stage, mode=mode) for mode in wanted]
    return calls


def judge(
    finalists: Sequence[Finalist], verdicts: Sequence[Verdict], barred: Callable[[str], str] = lambda key: ""
) -> list[Finalist]:
    """Each finalist after the verdicts on its stage. ``barred``: why the gate keeps a key off the leaderboard that has
    passed here, empty if it does not; the gate also knows what was measured before the finish."""
    by_key: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_key.setdefault(verdict["key"], []).append(verdict)
    advanced = [_advance(f, by_key[f["key"]]) if f["key"] in by_key else f for f in finalists]
    return [_barred(f, barred(f["key"])) if f["stage"] == "profile" and not f["missed"] else f for f in advanced]


#: What a finalist goes through, in this order, and what each tool answers with.
STAGES: dict[str, type[Outcome]] = {
    "verify": VerifyResult,
    "sanitize": SanitizeResult,
    "time": TimingResult,
    "profile": ProfileResult,
}
_NEXT = {"verify": "sanitize", "sanitize": "time", "time": "profile", "profile": "done"}


def _advance(finalist: Finalist, verdicts: Sequence[Verdict]) -> Finalist:
    stage = finalist["stage"]
    # Only offline is needed for the leaderboard, but a failure in any mode is a failure.
    needed = [v for v in verdicts if v["mode"] in (None, "offline") or v["status"] == Status.FAILED]
    bad = next((v for v in needed if v["status"] != Status.OK), None)
    after = Finalist(**{**finalist, "stage": _NEXT[stage]})  # type: ignore[typeddict-item]
    if bad is None or stage == "profile":
        return after
    mode = f" ({bad['mode']})" if bad["mode"] else ""
    reason = f"{bad['reason']}: " if bad["reason"] else ""
    missed = Status.FAILED if bad["status"] == Status.FAILED else Status(bad["status"])
    if not finalist["missed"] or missed is Status.FAILED:
        after["missed"], after["why"] = missed.value, f"{bad['tool']}{mode}: {reason}{bad['detail']}"
    # Without verify there is no final timing. Without a record of sanitize there is: it is shown, and not admitted.
    if missed is Status.FAILED or stage == "verify":
        after["stage"] = "done"
    return after


def _barred(finalist: Finalist, why: str) -> Finalist:
    if not why:
        return finalist
    return Finalist(**{**finalist, "stage": "done", "missed": Status.FAILED.value, "why": why})


def admitted(finalists: Sequence[Finalist]) -> list[Finalist]:
    """Those that passed the whole gate; its rule is in tools/admission.py."""
    return [f for f in finalists if f["stage"] == "done" and not f["missed"]]
