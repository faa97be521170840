"""Which GPC each CTA of a launch runs on: reads what scripts/launch_order.cu printed on a GPU.

python scripts/launch_order.py [records/launch-order.json]
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

CLUSTER = 16
LAUNCHES = {"plain_0": "no clusters", "c2_0": "clusters of 2", "c4": "clusters of 4"}


def gpcs(smid: dict[str, list[int]]) -> dict[int, int]:
    """SM to the number of its GPC: SMs that were in one cluster of 16 are in one GPC. Only whole ones: of an SM that
    no such cluster took, the GPC is not known."""
    root: dict[int, int] = {}

    def find(sm: int) -> int:
        while root.setdefault(sm, sm) != sm:
            sm = root[sm]
        return sm

    for name, sms in smid.items():
        if name.startswith("c16"):
            for first in range(0, len(sms), CLUSTER):
                for sm in sms[first + 1 : first + CLUSTER]:
                    root[find(sm)] = find(sms[first])
    groups = defaultdict(list)
    for sm in sorted(root):
        groups[find(sm)].append(sm)
    whole = [group for group in groups.values() if len(group) >= CLUSTER]
    return {sm: number for number, group in enumerate(whole, start=1) for sm in group}


def runs(names: list[str]) -> str:
    """1 1 1 2 → 1x3 2x1."""
    out: list[list[str]] = []
    for name in names:
        if out and out[-1][0] == name:
            out[-1].append(name)
        else:
            out.append([name])
    return " ".join(f"{run[0]}x{len(run)}" for run in out)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "records" / "launch-order.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        smid: dict[str, list[int]] = data.get("smid", data)
        gpc = gpcs(smid)
        lines = [(what, runs([str(gpc.get(sm, "?")) for sm in smid[name]])) for name, what in LAUNCHES.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(f"error: {path} is not what scripts/launch_order.cu prints ({error.__class__.__name__})")
    whole = max(gpc.values(), default=0)
    print(f"GPCs of {CLUSTER} SMs and more: {whole}; CTAs in launch order, GPC x how many in a row:")
    for what, line in lines:
        print(f"{what}: {line}")


if __name__ == "__main__":
    main()
