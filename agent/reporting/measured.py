"""What a report is computed from: the final timings of one device and all that was found out about their kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.records import (
    Budget,
    CompileResult,
    DeviceInfo,
    Mode,
    Plan,
    ProfileResult,
    SanitizeResult,
    Tally,
    TimingResult,
    Variant,
    VerifyResult,
)

#: The task of which reports are made; the word before the slash of a task_id.
OPERATION = "hgemm-f32acc"
#: task_id, key of the variant
At = tuple[str, str]


@dataclass(frozen=True)
class Measured:
    """``timings`` holds the final budget, or certify where there is no final one; all of status ok. A key that is
    missing anywhere was not measured."""

    device: DeviceInfo
    tasks: Mapping[str, Mapping[str, int]]  # task_id → dims, in the order of recording
    timings: Mapping[At, Mapping[Mode, TimingResult]]
    certified: Mapping[At, Mapping[Mode, TimingResult]]
    verified: Mapping[At, VerifyResult]  # depth full
    quick_failed: frozenset[At]
    sanitized: Mapping[At, SanitizeResult]  # what counts at that task: of a plan, the same everywhere
    compiled: Mapping[str, CompileResult]
    profiles: Mapping[At, ProfileResult]
    plans: Mapping[str, Plan]
    variants: Mapping[str, Variant]  # with their sources; a record file has those of no plans
    tallies: tuple[Tally, ...]
    facts: tuple[tuple[str, str], ...]  # where the numbers are from, for people
    timing_failed: frozenset[At] = frozenset()  # in any mode at any budget
    left_out: tuple[str, ...] = ()  # tasks of other operations
    remarks: Mapping[str, str] = field(default_factory=dict)  # task_id → why a sweep found no kernel


def is_reported(task_id: str) -> bool:
    return task_id.startswith(f"{OPERATION}/")


def by_budget(
    found: Mapping[tuple[str, str, Mode, Budget], TimingResult],
) -> tuple[dict[At, dict[Mode, TimingResult]], dict[At, dict[Mode, TimingResult]]]:
    """(``timings``, ``certified``) of a Measured."""
    timings: dict[At, dict[Mode, TimingResult]] = {}
    certified: dict[At, dict[Mode, TimingResult]] = {}
    for (task_id, key, mode, budget), timing in found.items():
        if budget == "final":
            timings.setdefault((task_id, key), {})[mode] = timing
        elif budget == "certify":
            certified.setdefault((task_id, key), {})[mode] = timing
    for at, modes in certified.items():
        timings[at] = {**modes, **timings.get(at, {})}
    return timings, certified
