"""The command ``agent evaluate-policy``. agent/cli.py registers it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent.edge import guarded
from agent.errors import UsageError

if TYPE_CHECKING:
    from agent.config import Settings
    from training.evaluate import Cell, Player
    from training.shelf import Part, Shelf

#: ``search`` is the policy with policy.prior=model, ``search-records`` that with records, here of training shapes.
SEARCHES = ("random", "search", "search-records", "model", "shortlist")
#: Played where none is named; the list of the prompts is played beside language models, which are told it.
DEFAULT = ("random", "search", "model")
#: What decides on the analytical model's estimates, and on those that near shapes correct.
MODEL_CODE = ("tools.model", "tools.model_terms")
LIST_CODE = ("memory.exemplars_read", "memory.shortlist", *MODEL_CODE, "training.splits")
#: What decides on a local model's turns, besides the model.
LOCAL_CODE = (
    *LIST_CODE,
    *(f"policy.{name}" for name in ("chat", "compact", "grammar", "key_values", "local_policy", "local_worker")),
    *(f"policy.{name}" for name in ("picking", "rendering", "sampling", "tool_schemas")),
    "training.shelf",
)
#: Seconds between two lines of progress, where stderr is no terminal.
EVERY_S = 10.0


def evaluate_policy(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="random, search, model (default: these three), search-records, shortlist, or base, the base without "
            "adapter; repeatable."
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="An adapter of `agent train`; may be repeated.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="heldout (default), off_grid, train, all; or several, with commas.")
    ] = "heldout",
    budgets: Annotated[str, typer.Option(metavar="N,…", help="Evaluations.")] = "1,4,8,16",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Of each policy at each shape.")] = 3,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="A record file (default: the H200's).")
    ] = None,
    against: Annotated[str, typer.Option(metavar="NAME", help="Differences from this policy are shown.")] = "search",
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help="Leave exemplars, profiles or the shortlist out of prompts; repeatable."),
    ] = None,
    ablate: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also this policy without each of these parts, a row each; repeatable."),
    ] = None,
    pruned: Annotated[
        bool, typer.Option("--pruned", help="Also shapes where only likely plans are recorded: no regret of these.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Conversations side by side; hundreds on a GPU.")] = 8,
    cache: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What was played (default: evaluations.jsonl in the home).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="E.g. --set policy.local.base.name=FOLDER."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table for a document.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Regret against the recorded optimum after a few evaluations: searches, the base, and adapters.

    The same command goes on where it was stopped. Example: agent evaluate-policy --adapter sft=adapters/sft
    """
    with guarded():
        from agent.config import load_settings, parse_assignment
        from tools.families import load_families
        from tools.paths import home_dir
        from tools.replay import ReplayDevice, default_path
        from training.evaluate import Plays
        from training.evaluate_cache import appending, read_cells
        from training.evaluate_table import lines, table
        from training.replaying import in_split
        from training.shelf import Shelf

        loaded = load_settings(None, os.environ, dict(parse_assignment(text) for text in settings or []))
        told_budgets, left_out = _budgets(budgets), _parts(without or [])
        names = _names(policy, adapter)
        families = load_families()
        with ExitStack() as stack:
            device = ReplayDevice(source or default_path())
            stack.callback(device.close)
            shelf = Shelf(device.records, families)
            players = _players(names, loaded, families, shelf, source or default_path(), left_out, stack)
            players = _ablated(players, ablate or [])
            _start_first(players)
            shapes = in_split(shelf, split, pruned)
            plays = Plays(shelf, families, shapes, told_budgets, range(seeds), loaded.memory, loaded.policy.exemplars)
            path = cache or home_dir() / "evaluations.jsonl"
            known = read_cells(path)
            file = stack.enter_context(appending(path))
            progress = _Progress(quiet)

            def tell(cell: Cell, is_new: bool) -> None:
                if is_new:
                    file.add(cell)
                progress(cell, is_new)

            # A cell may have been played under another name.
            cells = [
                cell.model_copy(update={"policy": p.name}) for p, cell in _each(players, plays, known, batch, tell)
            ]
        rows = table(cells, shapes, told_budgets, {p.name: p.quota for p in players}, against)
        complete = sum(shape.is_complete for shape in shapes)
        if json_output:
            print(
                json.dumps(
                    {
                        "device": device.info.label,
                        "split": split,
                        "shapes": len(shapes),
                        "shapes_with_known_optimum": complete,
                        "seeds": seeds,
                        "budgets": told_budgets,
                        "without": sorted(left_out),
                        "against": against,
                        "policies": [row.model_dump(mode="json") for row in rows],
                    }
                )
            )
            return
        print(
            f"{device.info.label}: {len(shapes)} {split} shapes, {seeds} seeds; regret of {complete} with known optimum"
        )
        if left_out:
            print(f"prompts without {' and '.join(sorted(left_out))}")
        print("mean regret in % of the best recorded ratio [95 % interval]\n")
        print("\n".join(lines(rows, told_budgets, against, markdown)))


def _start_first(players: list[Player]) -> None:
    """Its model loads while the records are read and searches play."""
    from policy.local_policy import LocalPolicy

    first = next((player.policy for player in players if isinstance(player.policy, LocalPolicy)), None)
    if first is not None:
        first.start()


def _each(players: list[Player], plays: Any, known: Any, batch: int, tell: Any) -> Iterator[tuple[Player, Cell]]:
    """One policy after the other, each closed before the next: two models need not fit into the memory. What a local
    model is, is known once it is loaded."""
    from policy.local_policy import LocalPolicy
    from tools.records import content_hash
    from training.evaluate import play

    for place, player in enumerate(players):
        policy = player.policy
        if isinstance(policy, LocalPolicy):
            player = replace(player, identity=content_hash([player.identity, policy.identity()]))
        for cell in play(player, plays, known, batch, tell):
            yield player, cell
        if not any(later.policy is policy for later in players[place + 1 :]):
            policy.close()


class _Progress:
    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._begun = self._last = time.monotonic()
        self._new = self._known = 0

    def __call__(self, cell: Cell, is_new: bool) -> None:
        self._new += is_new
        self._known += not is_new
        now = time.monotonic()
        if self._quiet or now - self._last < EVERY_S:
            return
        self._last = now
        rate = self._new / (now - self._begun)
        kept = f", {self._known} from earlier" if self._known else ""
        print(f"{cell.policy}: {self._new} played, {rate:.1f}/s{kept}", file=sys.stderr, flush=True)


# --- what was asked ---------------------------------------------------------------------------------------------------


def _names(policies: list[str] | None, adapters: list[str] | None) -> dict[str, str | None]:
    """Name → folder of an adapter, or None."""
    chosen = policies if policies is not None else list(DEFAULT)
    known = (*SEARCHES, "base")
    if unknown := [name for name in chosen if name not in known]:
        raise UsageError(
            f"--policy is one of {', '.join(known)}, not '{unknown[0]}'; adapters are given with --adapter"
        )
    found: dict[str, str | None] = dict.fromkeys(chosen)
    for text in adapters or []:
        name, sign, folder = text.partition("=")
        if not sign or not name.strip() or not folder.strip():
            raise UsageError(
                f"'{text}' is not an adapter: write --adapter NAME=FOLDER, e.g. --adapter sft=adapters/sft"
            )
        if name in found or name in known:
            raise UsageError(f"there are two policies called '{name}': give each a name of its own")
        found[name] = folder
    return found


def _players(
    names: dict[str, str | None],
    loaded: Settings,
    families: Any,
    shelf: Shelf,
    source: Path,
    left_out: frozenset[Part],
    stack: ExitStack,
) -> list[Player]:
    from memory.recorded_times import RecordedTimes
    from policy.search import SearchPolicy
    from policy.settings import PolicySettings
    from tools.model import held_out, load_fitted
    from tools.records import content_hash
    from training.evaluate import ModelPolicy, Player, ShortlistPolicy
    from training.splits import split_of

    space = sorted((name, family.revision) for name, family in families.items())
    fitted = content_hash([list(map(dict, load_fitted().folds)), space])
    found = []
    for name, folder in names.items():
        match name:
            case "random" | "search":
                method = "random" if name == "random" else "tpe"
                made: Any = SearchPolicy(PolicySettings(), families, method, constants_of=held_out)
                told = PolicySettings().model_dump(mode="json")
                identity = content_hash([name, space, told, fitted, _code("policy.search", *MODEL_CODE)])
            case "search-records":
                times = RecordedTimes(source, families, lambda task: split_of(task) == "train")
                made = SearchPolicy(PolicySettings(), families, constants_of=held_out, recorded=times)
                code = _code("memory.recorded_times", "policy.search", "policy.surrogate", *LIST_CODE)
                told = PolicySettings().model_dump(mode="json")
                identity = content_hash([name, space, told, fitted, shelf.device.recorded_on, code])
            case "model":
                made, identity = ModelPolicy(shelf), content_hash([name, space, fitted, _code(*MODEL_CODE)])
            case "shortlist":
                made = ShortlistPolicy(shelf)
                code = _code("training.shelf", *LIST_CODE)
                identity = content_hash([name, space, fitted, shelf.device.recorded_on, code])
            case _:
                made, identity = _local(folder, loaded, families, [space, fitted])
        stack.callback(made.close)
        found.append(Player(name, made, identity, frozenset() if made.is_search else left_out))
    return found


def _ablated(players: list[Player], names: list[str]) -> list[Player]:
    """Each named policy is followed by itself without one part of its prompt after the other."""
    from training.shelf import PARTS

    models = [player.name for player in players if not player.policy.is_search]
    if unknown := [name for name in names if name not in models]:
        known = f"one of {', '.join(models)}" if models else "an adapter or base, and none is played"
        raise UsageError(f"--ablate takes {known}, not '{unknown[0]}'")
    found = []
    for player in players:
        found.append(player)
        for part in PARTS if player.name in names else ():
            if part not in player.without:
                without = player.without | {part}
                found.append(replace(player, name=f"{player.name}, no {part}", without=without))
    return found


def _local(folder: str | None, loaded: Settings, families: Any, space: Any) -> tuple[Any, str]:
    """The identity is of all but the model."""
    from policy.local_policy import LocalPolicy
    from tools.paths import configs_dir
    from tools.records import content_hash

    local = loaded.policy.local.model_copy(update={"adapter": folder})
    settings = loaded.policy.model_copy(update={"name": "local", "local": local})
    made = LocalPolicy(settings, families)
    asked = local.model_dump(mode="json", exclude={"adapter", "base"})
    words = (configs_dir() / "prompts" / "compact.md").read_text(encoding="utf-8")
    return made, content_hash(["local", asked, settings.temperature, space, words, _code(*LOCAL_CODE)])


def _code(*modules: str) -> str:
    """Of the sources that decide how something is played: a version that nobody has to remember to count up."""
    from importlib.util import find_spec

    from tools.records import content_hash

    texts = []
    for name in (*modules, "training.evaluate", "training.replaying"):
        spec = find_spec(name)
        texts.append(Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else "")
    return content_hash(texts)


def _budgets(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1 or found[-1] > 1000:
        raise UsageError(f"--budgets are numbers of evaluations from 1 to 1000, e.g. 1,4,8,16, not '{text}'")
    return found


def _parts(names: list[str]) -> frozenset[Part]:
    from training.shelf import PARTS

    for name in names:
        if name == "retrieval":
            raise UsageError("the local policy's prompt holds no retrieved documents, so there is nothing to leave out")
        if name not in PARTS:
            raise UsageError(f"--without is {', '.join(PARTS[:-1])} or {PARTS[-1]}, not '{name}'")
    return frozenset(part for part in PARTS if part in names)
