"""Several ways of GRPO from one adapter and one collection, trained and played against each other.

    python scripts/compare_grpo.py --out runs/grpo --sft runs/full/sft --jobs 6                # one GPU, all variants
    python scripts/compare_grpo.py --out runs/grpo --sft runs/full/sft --jobs 6 --variants turn,gain
    python scripts/compare_grpo.py --out runs/grpo --sft runs/full/sft --jobs 6 --variants turn --full turn

Stages: collect rollouts of --sft at the training shapes, pruned ones too -> (sft-wide: imitation at the same shapes,
where --wide gives rows, to tell what the data bring without reinforcement) -> a training for each variant -> everything
is played at held-out and off-grid shapes -> evaluation.md. --full NAME adds the base and NAME without parts of its
prompts. Each command is a stage: the same command goes on where it was stopped, and with more variants, budgets or
seeds it does what is missing.

Choose a variant by the table of pruned held-out shapes (--pruned-seeds), and tell what it is worth by the others: the
best of several at few shapes is also the luckiest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.replay import default_path  # noqa: E402
from training.card import Stage  # noqa: E402
from training.proof import (  # noqa: E402
    ALL_SEARCHES,
    SEARCHES,
    cells_of,
    kept_optima,
    optima_of,
    package,
    row_words,
    tables_of,
    write_evaluation,
)
from training.shelf import PARTS  # noqa: E402
from training.splits import asked_splits  # noqa: E402
from training.stages import Failed, Stages, file_name, ran  # noqa: E402

#: Of all variants. Offline, a step away from the logged policy is all that a narrow clip allows.
COMMON: dict[str, Any] = {
    "grpo.epochs": 1,
    "grpo.batch_size": 32,
    "grpo.groups_per_step": 8,
    "grpo.log_steps": 2,
    "grpo.learning_rate": 1e-4,
    "grpo.warmup": 0.1,
    "grpo.clip": 0.8,
    "grpo.clip_high": 3.0,
    "grpo.kl": 0.01,
    "reward.min_std": 0.003,  # less is the measurements' noise
}
#: What each changes, most promising first. ``plain`` has nothing but the wider data, and so tells what these bring.
VARIANTS: dict[str, dict[str, Any]] = {
    "turn": {"grpo.credit": "turn"},
    "gain": {"grpo.credit": "gain"},
    "best": {"grpo.credit": "best"},
    "plain": {},
    "all": {"grpo.credit": "best", "grpo.scale": "all"},
    "turn-free": {"grpo.credit": "turn", "grpo.kl": 0.001, "grpo.epochs": 2},
}
TINY: dict[str, Any] = {
    "grpo.max_steps": 2,
    "grpo.batch_size": 2,
    "grpo.group_size": 4,
    "grpo.groups_per_step": 1,
    "grpo.log_steps": 1,
    "grpo.max_length": 8000,
}
COLLECT = {"full": ("--groups", "1", "--group-size", "8", "--batch", "512"),
           "tiny": ("--groups", "1", "--group-size", "4", "--batch", "16")}  # fmt: skip
SFT = {
    "full": {"sft.epochs": 1, "sft.batch_size": 8, "sft.log_steps": 5},
    "tiny": {"sft.max_steps": 2, "sft.batch_size": 2, "sft.eval_rows": 2, "sft.max_length": 8000},
}
POLICY = {"full": {}, "tiny": {"policy.local.words": 8}}
BATCH = {"full": "256", "tiny": "16"}
WIDE = "sft-wide"


def main() -> int:
    return ran(Comparison(parsed()).run_all)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; the same command goes on in it")
    parser.add_argument("--sft", type=Path, required=True, help="the adapter that all begin with")
    parser.add_argument("--wide", type=Path, help="rows of the same shapes to imitate (export-trajectories --pruned)")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=FOLDER", help="another adapter to play")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--full", metavar="NAME", help="also the base, and this one without each part of its prompts")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="tiny: for a test")
    parser.add_argument("--from", dest="source", type=Path, help="a record file (default: the packaged H200's)")
    parser.add_argument("--base", help="a model's folder or a hub's id (default: smollm2)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budgets", default="1,4")
    parser.add_argument("--seeds", type=int, default=6, help="of the evaluation")
    parser.add_argument("--pruned-seeds", type=int, default=0, metavar="N", help="at pruned held-out shapes too, at 4")
    parser.add_argument("--no-searches", action="store_true", help="not played now: they need no GPU")
    parser.add_argument("--split", default="heldout,off_grid", help="what is evaluated on")
    parser.add_argument("--jobs", type=int, default=1, help="processes that collect, policies that are played")
    parser.add_argument("--trainings", type=int, default=1, help="side by side, shared out over the GPUs")
    parser.add_argument("--processes", type=int, default=1, help="of one training, one a GPU")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.FIELD=VALUE",
                        help="of the trainings or of the policy")  # fmt: skip
    parser.add_argument("--until", metavar="STAGE", choices=("collect", "train"), help="stop after this")
    parser.add_argument("--tell", action="store_true", help="nothing more is trained or played: the tables of what was")
    parser.add_argument(
        "--package", metavar="NAME", help="of the variants: its folder with a card, to ship, in adapter/"
    )
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever is in the folder")
    return parser.parse_args()


class Comparison(Stages):
    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given.out, given.jobs, given.processes)
        self.given = given
        self.sft = given.sft.absolute()
        self.variants = [name for name in given.variants.split(",") if name]

    def run_all(self) -> None:
        given = self.given
        if unknown := [name for name in self.variants if name not in VARIANTS]:
            raise Failed(f"--variants are of {', '.join(VARIANTS)}, not '{unknown[0]}'")
        if given.package is not None and given.package not in self.variants:
            raise Failed(f"--package is of {', '.join(self.variants)}, not '{given.package}'")
        if given.jobs < 1 or given.trainings < 1 or given.processes < 1:
            raise Failed("--jobs, --trainings and --processes are 1 or more")
        if given.processes > 1 and given.trainings > 1:
            raise Failed("--trainings side by side have a GPU each: give --processes or --trainings, not both")
        if given.tell and (given.fresh or given.until):
            raise Failed("--tell is of what was played: without --fresh and --until")
        if given.package is not None and given.until:
            raise Failed("--package ships what was played: without --until")
        if not (self.sft / "adapter_config.json").is_file():
            raise Failed(f"{self.sft} holds no adapter: give --sft the folder of `agent train sft`")
        if given.tell and not (self.out / "evaluate").is_dir():
            raise Failed(f"{self.out} holds nothing that was played: give the --out of a comparison")
        self.budgets = numbers("--budgets", given.budgets)
        asked_splits(given.split)
        players = self.players()
        inside = [path for path in (*players.values(), given.wide) if path is not None and self.is_given(path)]
        if given.fresh and inside:
            raise Failed(f"--fresh would delete {inside[0]}, which lies in {self.out}: move it out of there first")
        if given.full is not None and given.full not in players:
            raise Failed(f"--full is of {', '.join(players)}, not '{given.full}'")
        if not given.tell or given.package is not None:
            self.open(given.fresh)
        if not given.tell and not self.played(players):
            return
        tables = self.tell(players)
        if given.package is not None:
            self.ship(given.package, tables)

    def is_given(self, path: Path) -> bool:
        """In the folder of the run, and made by none of its stages."""
        path = path.absolute()
        return self.out in path.parents and path.relative_to(self.out).parts[0] not in (*self.variants, WIDE)

    def played(self, players: Mapping[str, Path]) -> bool:
        """Whether --until left something of it."""
        given = self.given
        # Beside what collects, whose processes wait for Python more than for the GPU, there is room for a training.
        self.each({"collect": self.collection(), **self.imitation()}, min(2, given.trainings))
        if given.until == "collect":
            return False
        self.each(self.trainings(), given.trainings)
        if given.until == "train":
            return False
        self.each(self.evaluations(players), given.jobs)
        return True

    def players(self) -> dict[str, Path]:
        """Adapters by their name in the table."""
        found = {"sft": self.sft}
        taken = {*found, WIDE, "base", ALL_SEARCHES, *SEARCHES, *self.variants}
        for text in self.given.also:
            name, _, folder = (part.strip() for part in text.partition("="))
            if not name or not folder:
                raise Failed(f"--also is NAME=FOLDER, not '{text}'")
            if name in taken:
                raise Failed(f"--also {name}: there is a policy of that name already, take another")
            taken.add(name)
            found[name] = Path(folder).absolute()
        if self.given.wide is not None:
            found[WIDE] = self.out / WIDE
        return found | {name: self.out / name for name in self.variants}

    # --- commands ------------------------------------------------------------------------------------------------

    def collection(self) -> list[str]:
        given = self.given
        return ["collect", "--adapter", str(self.sft), "--out", self.path("collected.jsonl"), "--pruned",
                "--seed", str(given.seed), *COLLECT[given.scale], *self.source(), *self.policy()]  # fmt: skip

    def trainings(self) -> dict[str, list[str]]:
        given = self.given
        common = TINY if given.scale == "tiny" else COMMON
        collected = self.path("collected.jsonl")
        found = {}
        for name in self.variants:
            told = {**common, **VARIANTS[name]}
            found[name] = [*self.train("grpo", collected, name, told), "--adapter", str(self.sft)]
        return found

    def imitation(self) -> dict[str, list[str]]:
        given = self.given
        if given.wide is None:
            return {}
        return {WIDE: self.train("sft", str(given.wide.absolute()), WIDE, SFT[given.scale])}

    def train(self, kind: str, rows: str, out: str, told: Mapping[str, Any]) -> list[str]:
        given = self.given
        words = ["train", kind, rows, "--out", self.path(out), *(["--base", given.base] if given.base else [])]
        return [*words, *self.set_words({**told, "base.device": given.device}, kind, "lora", "reward")]

    def policy(self) -> list[str]:
        given = self.given
        told = {**POLICY[given.scale], "policy.local.base.device": given.device}
        if given.base:
            told["policy.local.base.name"] = given.base
        return self.set_words(told, "policy", "memory", "reward")

    def set_words(self, told: Mapping[str, Any], *sections: str) -> list[str]:
        return self.sets((f"{k}={v}" for k, v in told.items()), self.given.settings, *sections)

    def source(self) -> list[str]:
        return ["--from", str(self.given.source.absolute())] if self.given.source else []

    def evaluations(self, players: Mapping[str, Path]) -> dict[str, list[str]]:
        """By stage; a row's cells are in one file, whatever budgets, seeds and shapes they are of. Stages of before
        cells told their budget had other names: they are played again."""
        given = self.given
        found = {}
        for row in self.rows(players):
            name, _, part = row.partition(", no ")
            words = row_words(row, lambda adapter: players[adapter])
            words += ["--batch", BATCH[given.scale], "--cache", self.path("evaluate", f"{file_name(row)}.jsonl")]
            words = ["evaluate-policy", *words, *self.source(), *self.policy()]
            asked = f"{given.budgets} x{given.seeds} {given.split}"
            shapes = ["--split", given.split, "--budgets", given.budgets, "--seeds", str(given.seeds)]
            found[f"evaluate {row} at {asked}"] = [*words, *shapes]
            if given.pruned_seeds and not part and name != "base":
                shapes = ["--split", "heldout", "--pruned", "--budgets", "4", "--seeds", str(given.pruned_seeds)]
                found[f"evaluate {row} at pruned x{given.pruned_seeds}"] = [*words, *shapes]
        (self.out / "evaluate").mkdir(exist_ok=True)
        # What decides is played first.
        return dict(sorted(found.items(), key=lambda item: ", no " in item[0] or item[0].startswith("evaluate base")))

    def rows(self, players: Mapping[str, Path]) -> list[str]:
        name = self.given.full
        more = ["base", *(f"{name}, no {part}" for part in PARTS)] if name is not None else []
        return [*([] if self.given.no_searches else [ALL_SEARCHES]), *players, *more]

    def tell(self, players: Mapping[str, Path]) -> dict[str, str]:
        rows = dict.fromkeys([ALL_SEARCHES, *self.rows(players)])
        files = {row: self.out / "evaluate" / f"{file_name(row)}.jsonl" for row in rows}
        record = self.given.source or default_path()
        cells = cells_of(files)
        if without := [row for row in self.rows(players) if row != ALL_SEARCHES and row not in cells]:
            print(f"nothing was played by {', '.join(without)}", file=sys.stderr)
        if not cells:
            raise Failed(f"{self.out} holds nothing that was played at shapes of {record}")
        if self.given.tell and self.given.source is not None:
            optima = optima_of(cells, record)
        else:
            optima = kept_optima(files.values(), cells, record)
        tables, document = tables_of(cells, optima, ["all", *asked_splits(self.given.split)], self.budgets)
        if not tables:
            raise Failed(f"{self.out} holds nothing that was played at shapes of {record}")
        write_evaluation(self.out, tables, document)
        print("\n\n".join(f"{of}\n\n{table}" for of, table in tables.items()))
        return tables

    def ship(self, name: str, tables: Mapping[str, str]) -> None:
        given = self.given
        stages = [
            Stage(stage, one["seconds"], self.shown(one["words"], given.base, given.source, sft=self.sft))
            for stage, one in self.state.items()
            if stage in ("collect", name)
        ]
        place = package(self.out, {"sft": self.sft, name: self.out / name}, stages, tables)
        print(f"\n{place}: the adapter and its card")


def numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(number) for number in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise Failed(f"{option} are numbers from 1 on with commas between, not '{text}'")
    return found


if __name__ == "__main__":
    sys.exit(main())
