"""The command ``agent model``: how well the analytical model ranks, and what it says of one shape. agent/cli.py
registers it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent.edge import guarded

if TYPE_CHECKING:
    from tools.model import Fitted
    from tools.model_quality import Quality

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The analytical model of plans: rank them for a shape, and measure how well it ranks.",
)

From = Annotated[Path | None, typer.Option("--from", metavar="PATH", help="A record file (default: H200).")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@app.command()
def evaluate(source: From = None, json_output: Json = False) -> None:
    """Rank correlation and regret at k = 1, 4, 8, 16, 24 against the measured optimum, by regime.

    Regret at k: by how much the best of the first k plans is slower than the best of all, offline, screen budget. The
    model's constants for a shape were fitted without it. Example: agent model evaluate
    """
    with guarded():
        from agent.errors import UsageError
        from tools import model_quality
        from tools.families import load_families
        from tools.replay import ReplayDevice, default_path

        device = ReplayDevice(source or default_path())
        try:
            shapes, partial = model_quality.measured(device.records, load_families())
        finally:
            device.close()
        if not shapes:
            raise UsageError(f"{source or default_path()} has no shape with an offline timing of every plan")
        fitted = _fitted()
        rows = model_quality.evaluate(shapes, device.info, fitted)
        if json_output:
            document = {
                "device": device.info.label,
                "shapes": len(shapes),
                "shapes_left_out": partial,
                "provenance": dict(fitted.provenance),
                "quality": [row.model_dump(mode="json") for row in rows],
            }
            print(json.dumps(document))
            return
        print(f"{device.info.label}: {len(shapes)} shapes with every plan timed, {partial} with only some left out")
        print("regret in %: mean / p90 / worst; the model's constants are fitted without the shape\n")
        print(_table(rows))


@app.command()
def rank(
    shape: Annotated[str, typer.Option(metavar="M,N,K", help="For example 4096,4096,4096.")],
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 10,
    json_output: Json = False,
) -> None:
    """The plans that the model expects to be quickest at a shape, any shape. Estimates, never measurements.

    Example: agent model rank --shape 1000,4096,7168
    """
    with guarded():
        from tools import model
        from tools.families import load_families, plans_taking
        from tools.hgemm import hgemm, parse_shape

        task = hgemm(*parse_shape(shape))
        fitted = _fitted()
        plans = plans_taking(load_families(), task, fitted.gpu.sm_count)
        ranked = model.rank(plans, task, fitted.gpu, fitted.constants)
        floor = model.floor_us(task, fitted.gpu, fitted.constants)
        if json_output:
            listed = [
                {"estimate_us": r.time_us, "label": r.plan.label, "plan": r.plan.model_dump()} for r in ranked[:top]
            ]
            print(json.dumps({"shape": task.dims, "plans": len(plans), "floor_us": floor, "ranked": listed}))
            return
        print(f"{task.label} on {fitted.provenance['device']}: {len(plans)} plans, estimated floor {floor:.2f} us")
        for found in ranked[:top]:
            estimate = f"{found.time_us:10.2f} us" if found.time_us is not None else "   unknown   "
            print(f"{estimate}  {found.plan.label}")


def _fitted() -> Fitted:
    from agent.errors import UsageError
    from tools.model import ModelError, load_fitted

    try:
        return load_fitted()
    except ModelError as error:
        raise UsageError(str(error)) from error


def _table(rows: list[Quality]) -> str:
    ks = list(rows[0].regret)
    lines = ["| regime | shapes | order | Spearman | " + " | ".join(f"k = {k}" for k in ks) + " |"]
    lines.append("|---" * (4 + len(ks)) + "|")
    for row in rows:
        spreads = [f"{100 * s.mean:.2f} / {100 * s.p90:.1f} / {100 * s.worst:.1f}" for s in (row.regret[k] for k in ks)]
        correlation = f"{row.spearman:.3f}" if row.spearman is not None else "-"
        lines.append(f"| {row.regime} | {row.shapes} | {row.order} | {correlation} | " + " | ".join(spreads) + " |")
    return "\n".join(lines)
