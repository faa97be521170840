"""What a search policy finds in a small budget, over every fully recorded shape: distance to the recorded optimum.

    python scripts/bench_search.py                             # search, 24 evaluations
    python scripts/bench_search.py --policy search-records     # goes by the records of the other shapes too
    python scripts/bench_search.py --policy random --budget 96

The policy runs turn by turn as in a session, and is told recorded ratios (offline, screen budget); compile, verify and
the final re-timing are left out, so it takes a minute for all shapes. The model uses constants fitted without it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from memory.recorded_times import RecordedTimes  # noqa: E402
from policy.base import PolicyRequest, Trial  # noqa: E402
from policy.search import MODEL_FIRST, SearchPolicy  # noqa: E402
from policy.settings import PolicySettings  # noqa: E402
from tools.device import DeviceBroken  # noqa: E402
from tools.families import load_families, validate_plan  # noqa: E402
from tools.model import held_out  # noqa: E402
from tools.model_quality import Measured, measured  # noqa: E402
from tools.records import DeviceInfo, Family, Status  # noqa: E402
from tools.replay import ReplayDevice, default_path  # noqa: E402
from tools.shapes import regime  # noqa: E402

WITHIN = 0.02


def regret(
    policy: SearchPolicy, shape: Measured, device: DeviceInfo, families: dict[str, Family], budget: int, seed: int
) -> float:
    """1 - (best ratio that the policy was told) / (best recorded)."""
    ratio = {plan.plan_id: float(r) for plan, r in zip(shape.plans, shape.ratios, strict=True)}
    trials: list[Trial] = []
    while len(trials) < budget:
        request = PolicyRequest(
            task=shape.task,
            device=device,
            trials=tuple(trials),
            evaluations_left=budget - len(trials),
            turns_left=10**9,
            seed=seed,
        )
        calls = policy.step(request).tool_calls
        if not calls or calls[0].name == "submit":
            break
        for call in calls:
            a = call.arguments
            plan = validate_plan(families[a["family"]], a["b_layout"], a["knobs"])
            key = plan.plan_id
            trials.append(Trial(key=key, label=plan.label, plan=plan, status=Status.OK, ratio=ratio[key]))
    return 1 - max(t.ratio or 0.0 for t in trials) / float(shape.ratios.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", type=Path, default=default_path())
    parser.add_argument("--policy", choices=["search", "search-records", "random"], default="search")
    parser.add_argument("--budget", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=3, help="one is played where there is no chance")
    options = parser.parse_args()
    families = load_families()
    try:
        device = ReplayDevice(options.records)
    except DeviceBroken as error:
        sys.exit(f"error: {error}")
    shapes, _ = measured(device.records, families)
    method = "random" if options.policy == "random" else "tpe"
    times = RecordedTimes(options.records, families) if options.policy == "search-records" else None
    policy = SearchPolicy(PolicySettings(), families, method, constants_of=held_out, recorded=times)
    has_chance = options.policy == "random" or (options.policy == "search" and options.budget > MODEL_FIRST)
    seeds = options.seeds if has_chance else 1
    rows: dict[str, list[float]] = defaultdict(list)
    begun = time.perf_counter()
    for shape in shapes:
        for seed in range(seeds):
            found = regret(policy, shape, device.info, families, options.budget, seed)
            rows["all"].append(found)
            rows[regime(shape.task)].append(found)
    spent = time.perf_counter() - begun
    rate = len(rows["all"]) * options.budget / spent
    played = f"{options.budget} evaluations, {seeds} {'seed' if seeds == 1 else 'seeds'}, {len(shapes)} shapes"
    print(f"{options.policy}, {played}: {rate:.0f}/s")
    print()
    print("| regime | shapes | mean regret % | p90 | worst | within 2 % of the optimum |")
    print("|---|---|---|---|---|---|")
    for name in ["all", *sorted(set(rows) - {"all"})]:
        r = np.array(rows[name])
        share = f"{100 * np.mean(r <= WITHIN):.0f} %"
        print(
            f"| {name} | {len(r) // seeds} | {100 * r.mean():.2f} | {100 * np.quantile(r, 0.9):.1f} | "
            f"{100 * r.max():.1f} | {share} |"
        )


if __name__ == "__main__":
    main()
