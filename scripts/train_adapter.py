"""From recorded measurements to a trained adapter and the proof that it helps, as one command that can be stopped.

    python scripts/train_adapter.py --out runs/full --scale full --jobs 6          # one GPU, the default base
    python scripts/train_adapter.py --out runs/7b --scale full --base /models/some-7b --processes 8
    python scripts/train_adapter.py --out runs/tiny --scale tiny --base FOLDER --device cpu      # minutes, for a test

Stages: export rows of the records -> sft -> (collect rollouts of the adapter -> grpo) as often as --rounds says ->
evaluate on held-out and off-grid shapes -> a folder `adapter` with its weights, figures and MODEL_CARD.md. A stage is
one or several `agent` commands, which are printed; what they say is in logs/. The same command goes on where it was
stopped: what is finished is not done again, a training goes on from its checkpoint, an evaluation from what was played.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.replay import default_path  # noqa: E402
from training.card import Stage  # noqa: E402
from training.proof import (  # noqa: E402
    ADAPTER_BYTES,
    ALL_SEARCHES,
    cells_of,
    optima_of,
    package,
    row_words,
    tables_of,
    write_evaluation,
)
from training.shelf import PARTS  # noqa: E402
from training.stages import Failed, Stages, file_name, ran  # noqa: E402


class Scale(NamedTuple):
    """Words that are added to the commands."""

    export: Sequence[str]
    sft: Mapping[str, Any]
    collect: Sequence[str]
    grpo: Mapping[str, Any]
    evaluate: Sequence[str]
    policy: Mapping[str, Any]
    rounds: int
    budgets: Sequence[int]
    lora: Mapping[str, Any] = {}
    reward: Mapping[str, Any] = {}  # of GRPO: imitation reads none of it


SCALES = {
    "full": Scale(
        # All shapes of the grid, those with likely plans alone too; what won in scripts/compare_grpo.py.
        export=("--groups", "3", "--group-size", "2", "--pruned", "--split", "train,heldout"),
        sft={"epochs": 1, "batch_size": 8, "log_steps": 5},
        collect=("--pruned", "--groups", "1", "--group-size", "8", "--batch", "512"),
        # Offline, a step away from the logged policy is all that a narrow clip allows: here it may become another one.
        grpo={"epochs": 1, "batch_size": 32, "groups_per_step": 8, "log_steps": 2, "learning_rate": 1e-4, "warmup": 0.1,
              "clip": 0.8, "clip_high": 3.0, "kl": 0.01, "credit": "best"},
        evaluate=("--seeds", "3", "--batch", "256"),  # of each of --jobs processes, which share the GPU's memory
        policy={},
        rounds=1,
        budgets=(1, 4, 8, 16),
        reward={"min_std": 0.003},  # groups that differ by less differ by the measurements' noise
    ),
    "tiny": Scale(
        export=("--groups", "2", "--group-size", "2"),
        sft={"max_steps": 2, "batch_size": 2, "log_steps": 1, "eval_rows": 2, "max_length": 8000},
        collect=("--groups", "1", "--group-size", "4", "--batch", "16"),
        grpo={"max_steps": 2, "batch_size": 2, "group_size": 4, "groups_per_step": 1, "log_steps": 1,
              "max_length": 8000},
        evaluate=("--seeds", "1", "--batch", "16"),
        policy={"local.words": 8},
        rounds=1,
        budgets=(1, 4),
        lora={"rank": 2},
    ),
}  # fmt: skip


def main() -> int:
    recipe = Recipe(parsed())
    return ran(recipe.run_all)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; the same command goes on in it")
    parser.add_argument("--scale", choices=sorted(SCALES), default="full")
    parser.add_argument("--from", dest="source", type=Path, help="a record file (default: the packaged H200's)")
    parser.add_argument("--base", help="a model's folder or a hub's id (default: smollm2)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--rounds", type=int, help="of collecting and GRPO (default: as the scale says)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, help="of the evaluation (default: as the scale says)")
    parser.add_argument("--processes", type=int, default=1, help="of the trainings, one a GPU")
    parser.add_argument("--jobs", type=int, default=1,
                        help="processes side by side: of a collection, and policies that are evaluated")  # fmt: skip
    parser.add_argument("--split", default="heldout,off_grid", help="what is evaluated on")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="of prompts, each of which the adapter is played without"
    )
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.FIELD=VALUE",
                        help="of the trainings (sft, grpo, lora) or of the policy")  # fmt: skip
    parser.add_argument("--until", metavar="STAGE", help="stop after this stage")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever is in the folder")
    return parser.parse_args()


class Recipe(Stages):
    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given.out, given.jobs, given.processes)
        self.given, self.scale = given, SCALES[given.scale]
        self.rounds: int = given.rounds if given.rounds is not None else self.scale.rounds
        self.trained = ["sft", *(f"grpo{number}" for number in range(1, self.rounds + 1))]

    # --- the stages ----------------------------------------------------------------------------------------------

    def run_all(self) -> None:
        given = self.given
        if self.rounds < 0 or given.processes < 1 or given.jobs < 1:
            raise Failed("--rounds is 0 or more, --processes and --jobs are 1 or more")
        if unknown := [part for part in given.parts.split(",") if part and part not in PARTS]:
            raise Failed(f"--parts are of {', '.join(PARTS)}, not '{unknown[0]}'")
        self.open(given.fresh)
        for name, words in self.stages().items():
            self.run(name, words)
            if given.until == name:
                return
        evaluations = {row: self.evaluation(row) for row in self.rows()}
        self.stage("evaluate", evaluations, lambda: self.side_by_side(evaluations))
        if given.until != "evaluate":
            self.finish()

    def stages(self) -> dict[str, list[str]]:
        """Commands, in their order, up to the evaluation."""
        given, scale = self.given, self.scale
        source = str(given.source.absolute()) if given.source else "h200"
        found = {"export": ["export-trajectories", "--from-records", source, "--out", self.path("rows.jsonl"),
                            "--seed", str(given.seed), *scale.export, "--quiet"],
                 "sft": self.train("sft", "rows.jsonl", None, "sft")}  # fmt: skip
        for number, before in enumerate(self.trained[:-1], 1):
            rows = f"collected{number}.jsonl"
            found[f"collect{number}"] = [
                "collect", "--adapter", self.path(before), "--out", self.path(rows), "--seed", str(given.seed + number),
                *scale.collect, *self.source(), *self.policy()]  # fmt: skip
            found[f"grpo{number}"] = self.train("grpo", rows, before, f"grpo{number}")
        return found

    def finish(self) -> None:
        given = self.given
        files = {row: self.out / "evaluate" / f"{file_name(row)}.jsonl" for row in self.rows()}
        record = given.source or default_path()
        cells = cells_of(files)
        tables, document = tables_of(cells, optima_of(cells, record), given.split.split(","), self.scale.budgets)
        write_evaluation(self.out, tables, document)
        told = [
            Stage(name, one["seconds"], self.shown(one["words"], given.base, given.source))
            for name, one in self.state.items()
        ]
        place = package(self.out, {name: self.out / name for name in self.trained}, told, tables)
        print("\n\n".join(f"{of}\n\n{table}" for of, table in tables.items()))
        size = (place / "adapter_model.safetensors").stat().st_size
        print(f"\n{place}: the adapter ({size / 1e6:.1f} MB) and its card")
        if size > ADAPTER_BYTES:
            raise Failed(f"the adapter has {size / 1e6:.1f} MB, more than {ADAPTER_BYTES / 1e6:.0f}: lower lora.rank")

    # --- their commands ------------------------------------------------------------------------------------------

    def train(self, kind: str, rows: str, adapter: str | None, out: str) -> list[str]:
        given, scale = self.given, self.scale
        own = {"seed": given.seed, **(scale.sft if kind == "sft" else scale.grpo)}
        told = [f"{kind}.{name}={value}" for name, value in own.items()]
        told += [f"lora.{name}={value}" for name, value in scale.lora.items()]
        told += [f"reward.{name}={value}" for name, value in scale.reward.items() if kind == "grpo"]
        told += [f"base.device={given.device}", f"base.dtype={given.dtype}"]
        words = [
            "train",
            kind,
            self.path(rows),
            "--out",
            self.path(out),
            *(["--base", given.base] if given.base else []),
        ]
        words += ["--adapter", self.path(adapter)] if adapter is not None else []
        return [*words, *self.sets(told, given.settings, kind, "lora", "reward")]

    def policy(self) -> list[str]:
        given = self.given
        told = [f"policy.{name}={value}" for name, value in self.scale.policy.items()]
        told += [f"policy.local.base.device={given.device}", f"policy.local.base.dtype={given.dtype}"]
        told += [f"policy.local.base.name={given.base}"] if given.base else []
        return self.sets(told, given.settings, "policy", "memory", "reward")

    def evaluation(self, row: str) -> list[str]:
        words = row_words(row, lambda name: self.path("sft" if name == "sft" else self.trained[-1]))
        words += [
            "--split",
            self.given.split,
            "--budgets",
            ",".join(map(str, self.scale.budgets)),
            *self.scale.evaluate,
        ]
        words += ["--seeds", str(self.given.seeds)] if self.given.seeds else []
        return ["evaluate-policy", *words, "--cache", self.path("evaluate", f"{file_name(row)}.jsonl"), *self.source(),
                *self.policy()]  # fmt: skip

    def rows(self) -> list[str]:
        """Of the table; those of the searches are played by one process."""
        models = ["sft", "sft + grpo"] if self.rounds else ["sft"]
        parts = [part for part in self.given.parts.split(",") if part]
        return [ALL_SEARCHES, "base", *models, *(f"{models[-1]}, no {part}" for part in parts)]

    def source(self) -> list[str]:
        return ["--from", str(self.given.source.absolute())] if self.given.source else []


if __name__ == "__main__":
    sys.exit(main())
