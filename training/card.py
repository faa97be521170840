"""The model card of a recipe's adapter, made of the files that its stages left. Pure text: nothing is computed here
that is not in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: Of a training, in this order, where it has them.
_HYPERPARAMETERS = (
    "method",
    "epochs",
    "max_steps",
    "learning_rate",
    "schedule",
    "warmup",
    "batch_size",
    "accumulate",
    "best_of_group",
    "group_size",
    "groups_per_step",
    "clip",
    "clip_high",
    "kl",
    "loss",
    "ratio",
    "credit",
    "scale",
    "behaviour",
    "max_length",
    "seed",
)


class Stage(NamedTuple):
    name: str
    seconds: float
    command: Sequence[str]


class Run(NamedTuple):
    """A training's folder: training.json, and the lines of metrics.jsonl."""

    name: str
    card: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, name: str, folder: Path) -> Run:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return cls(
            name, json.loads((folder / "training.json").read_text(encoding="utf-8")), list(map(json.loads, lines))
        )


def card(name: str, runs: Sequence[Run], stages: Sequence[Stage], tables: Mapping[str, str], size_bytes: int) -> str:
    """``runs`` in their order, the last one being the adapter's; ``tables`` by what they are of."""
    last = runs[-1].card
    base, lora = last["base"], last["settings"]["lora"]
    parts = [
        f"# {name}",
        f"A LoRA adapter (rank {lora['rank']}, alpha {lora['alpha']}, {lora['targets']}; {size_bytes / 1e6:.1f} MB, "
        f"bfloat16) of {base['name']} (fingerprint {base['fingerprint']}) that proposes plans of HGEMM kernels by tool "
        "calls. It is of use with the prompts and the grammar of this repository only: "
        "`agent optimize --policy local --set policy.local.adapter=FOLDER`.",
        "## Results",
        "Regret: how far the best of so many evaluations is from the best recorded plan, in % [95 % interval over "
        "shapes and seeds]. `shortlist` is what the prompts list, evaluated in its order without any model: what is "
        "beyond it is what the model adds. `sft` is the ablation without GRPO. A row `no PART` is the same adapter "
        "with that part left out of its prompts.",
        *(f"### {of}\n\n{table.strip()}" for of, table in tables.items()),
        "## Data",
        *_data(runs),
        "## Training",
        "\n".join(_table(["", *(run.name for run in runs)], _settings(runs))),
        "\n".join(_table(["", *(run.name for run in runs)], _figures(runs))),
        "## Time",
        "\n".join(_table(["stage", "seconds"], [[stage.name, f"{stage.seconds:.0f}"] for stage in stages])),
        "The commands, in their order:",
        "\n".join(f"    {' '.join(stage.command)}" for stage in stages if stage.command),
        "## Limits",
        "Plans only, of the families and shapes of the records; it writes no source. It has seen one GPU's times. "
        "Held-out shapes are of the same grid as the training shapes, off-grid shapes are not. Prompts of another "
        f"version than {last['formats']['prompt']} are not what it was trained on. Ratios are replayed from recorded "
        "measurements at screen budget, whose noise is some tenths of a percent.",
        "## Versions",
        ", ".join(f"{package} {version}" for package, version in sorted(last["versions"].items()) if version)
        + f"; commit {last['commit'] or 'unknown'}; trained on {last.get('device') or 'unknown'}.",
    ]
    return "\n\n".join(parts) + "\n"


def _data(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        rows, result = run.card["rows"], run.card["result"]
        left = ", ".join(f"{count} {why}" for why, count in result["left_out"].items()) or "none"
        yield f"- {run.name}: {rows['file']} (sha256 {rows['sha256'][:16]}…), {result['rows']} rows; left out: {left}"


def _settings(runs: Sequence[Run]) -> list[list[str]]:
    found = [run.card["settings"][run.card["kind"]] for run in runs]
    known = [name for name in _HYPERPARAMETERS if any(one.get(name) is not None for one in found)]
    return [[name, *(_said(one.get(name)) for one in found)] for name in known]


def _figures(runs: Sequence[Run]) -> list[list[str]]:
    rows: list[list[str]] = [
        ["steps", *(str(run.card["result"]["steps"]) for run in runs)],
        ["seconds", *(f"{run.card['result']['elapsed_s']:.0f}" for run in runs)],
        ["steps a second", *(_rate(run) for run in runs)],
        ["time in the model", *(_fraction(run) for run in runs)],
    ]
    for name in ("loss", "eval_loss", "kl", "clip_ratio/region_mean", "advantage_abs"):
        ends = [_ends(run, name) for run in runs]
        if any(ends):
            rows.append([f"{name}, first → last", *(end or "-" for end in ends)])
    return rows


def _rate(run: Run) -> str:
    result = run.card["result"]
    return f"{result['steps'] / result['elapsed_s']:.2f}" if result["elapsed_s"] else "-"


def _fraction(run: Run) -> str:
    """Of the time of all logged steps."""
    parts = [(row["model_fraction"], row["elapsed_s"]) for row in run.metrics if row.get("model_fraction") is not None]
    total = sum(seconds for _, seconds in parts)
    return f"{100 * sum(fraction * seconds for fraction, seconds in parts) / total:.0f} %" if total else "-"


def _ends(run: Run, name: str) -> str:
    values = [row[name] for row in run.metrics if isinstance(row.get(name), int | float)]
    return f"{values[0]:.3g} → {values[-1]:.3g}" if values else ""


def _said(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]
