"""Whether a kernel may stand on a leaderboard: the one rule. Pure.

The gate asks it of the results it stored, the store of its table, a report of what it read, and the finish of a session
asks the gate. Each says the answer in its own words.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from tools.records import Mode, Status

#: A setting (verify's depth, time's mode/budget) and what came of it.
Verdict = tuple[str, Status]


class Hindrance(StrEnum):
    """The first thing that keeps a kernel out, as a report says it."""

    VERIFY_FAILED = "failed verification"
    NOT_VERIFIED = "not verified at full depth"
    SANITIZE_FAILED = "failed the sanitizer"
    NOT_SANITIZED = "not sanitized"
    TIMING_FAILED = "failed a timing"
    NOT_TIMED = "not timed at the final budget"


def hindrance(
    verify: Iterable[Verdict], sanitize: Iterable[Status], time: Iterable[Verdict], mode: Mode = "offline"
) -> Hindrance | None:
    """None admits: verify at full depth, sanitize, and a timing in ``mode`` at final budget or longer are ok, and
    nothing failed: no verify at another depth, no timing in any mode at any budget.

    All verdicts are of one variant at one task on one device; of a sanitize that did not count for this task
    (``SanitizeResult.task_id``), none.
    """
    verified, sanitized, timed = set(verify), set(sanitize), set(time)
    if any(status is Status.FAILED for _, status in verified):
        return Hindrance.VERIFY_FAILED
    if ("full", Status.OK) not in verified:
        return Hindrance.NOT_VERIFIED
    if Status.FAILED in sanitized:
        return Hindrance.SANITIZE_FAILED
    if Status.OK not in sanitized:
        return Hindrance.NOT_SANITIZED
    if any(status is Status.FAILED for _, status in timed):
        return Hindrance.TIMING_FAILED
    if timed.isdisjoint({(f"{mode}/final", Status.OK), (f"{mode}/certify", Status.OK)}):
        return Hindrance.NOT_TIMED
    return None
