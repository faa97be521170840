"""How much is timed: launches in a replay, rounds, seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tools.records import Budget, Mode

#: Aim of one replay of the fastest reference. What precedes the first kernel inside the events (2–4 us) is shared by
#: its launches, and every subject of a run has the same number of them, so that it weighs the same on all.
REPLAY_US = 200.0
#: A slow candidate shortens the replays of its run, for all subjects alike.
SLOW_REPLAY_US = 4000.0
#: Few values, so that the graphs of the references are made once and serve most candidates of a task.
LAUNCH_CHOICES = (1, 2, 4, 8, 16, 24, 32, 40)
MAX_SETS = 64
#: Rotating alternates between two graphs over different halves of the operand sets.
MAX_ROTATING_LAUNCHES = MAX_SETS // 2
#: Outputs of one offline replay stay in L2, as a single reused C would, while four or more launches fit.
HOT_RING_BYTES = 24 << 20
#: No Hopper multiplies FP16 faster (dense peak 989 TFLOP/s at 1.83 GHz, 1.98 GHz at most); one that does, does not.
IMPOSSIBLE_FLOP_PER_US = 1.15e9
SERVER_GAP_S = 1e-3  # mean of the exponential gap between server-mode calls
SLOW_ROUND_S = 20e-3


@dataclass(frozen=True)
class Effort:
    """Rounds a run takes: between ``least`` and ``most``, aiming at ``aim_s`` seconds of device time a subject.

    For certify ``aim_s`` is what the candidate and each reference are timed for together, after ``warm_s``; in server
    mode their gaps count.
    """

    least: int
    most: int
    aim_s: float
    warm_s: float = 0.0


EFFORTS: dict[Budget, Effort] = {
    "screen": Effort(least=5, most=11, aim_s=1.5e-3),
    "final": Effort(least=15, most=60, aim_s=20e-3, warm_s=10e-3),
    "certify": Effort(least=30, most=1_000_000, aim_s=30.0, warm_s=10.0),
}
SERVER_ROUNDS: dict[Budget, int] = {"screen": 12, "final": 30, "certify": 1_000_000}


def launches_per_replay(reference_us: float, candidate_us: float, mode: Mode, output_bytes: int, slots: int) -> int:
    """Launches between the events of every subject of a run: the largest choice that no limit forbids.

    ``reference_us`` is the fastest reference's time, the same for all candidates of a task; ``candidate_us`` only
    matters where it would make a replay take milliseconds. ``slots`` are the outputs that the ring holds.
    """
    if mode == "server":
        return 1
    of_mode = MAX_ROTATING_LAUNCHES if mode == "rotating" else max(4, HOT_RING_BYTES // output_bytes)
    most = min(REPLAY_US / reference_us, SLOW_REPLAY_US / candidate_us, of_mode, slots - 1)
    return max((n for n in LAUNCH_CHOICES if n <= most), default=1)


def sets_in_use(mode: Mode, launches: int, sets: int) -> int:
    """Operand sets that a subject's graphs touch, of ``sets``: two halves that replays alternate between."""
    if mode == "server":
        return min(4, sets)
    return 2 * max(1, min(launches, sets // 2)) if mode == "rotating" else 2


def rounds(budget: Budget, mode: Mode, subjects: int, round_s: float, aim_s: float | None = None) -> int:
    """Rounds of a run of ``subjects``, one of which takes ``round_s`` of device time."""
    if mode == "server":
        return SERVER_ROUNDS[budget]
    effort = EFFORTS[budget]
    if budget == "certify":
        return effort.most
    # Two dozen shapes cost more than all others together; three rounds still screen them.
    least = min(effort.least, 3) if budget == "screen" and round_s > SLOW_ROUND_S else effort.least
    wanted = (effort.aim_s if aim_s is None else aim_s) * subjects / max(round_s, 1e-9)
    return int(min(max(wanted, least), effort.most))
