"""What `agent certify` is given: sources edited under their revision, places that cannot be written, odd numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedDevice, toy_families
from test_certify import SHAPES, CertifyingDevice, candidates, run, variant_of
from typer.testing import CliRunner

from agent.certify_inputs import of_certificate, of_database, of_plans, of_recording
from agent.certify_record import check_writable, read, write
from agent.cli import app
from agent.errors import UsageError
from memory.store import Store, StoreError
from tools.gate import Toolbox
from tools.hgemm import hgemm
from tools.recording import record
from tools.records import Family


def families(**changes: Any) -> dict[str, Family]:
    known = toy_families()
    return {**known, "toy": known["toy"].model_copy(update=changes)}


COMMENTED = families(source='// a remark\nextern "C" __global__ void gemm() {}\n')
EDITED = families(source='extern "C" __global__ void gemm() { __syncthreads(); }\n')
WORDS = "the source of family toy changed since .* measured toy/.*: bump `revision` in kernels/toy/family.yaml"


def test_a_certificates_kernels(tmp_path: Path) -> None:
    found = run(CertifyingDevice(), tmp_path / "c.json")
    assert len(of_certificate(found, COMMENTED)) == 3
    with pytest.raises(UsageError, match=WORDS):
        of_certificate(found, EDITED)
    # One without content_id, as they were: it counts only as it stands.
    old = found.model_copy(update={"entries": tuple(e.model_copy(update={"content_id": None}) for e in found.entries)})
    assert len(of_certificate(old, toy_families())) == 3
    with pytest.raises(UsageError, match=WORDS):
        of_certificate(old, EDITED)


def test_a_run_that_broke_off_and_was_edited(tmp_path: Path) -> None:
    found = run(CertifyingDevice(), tmp_path / "c.json")
    write(tmp_path / "c.json", found.model_copy(update={"entries": found.entries[:1]}))
    toy = EDITED["toy"]
    edited = [c.__class__(c.task, c.variant.model_copy(update={"source": toy.source})) for c in candidates()]
    with pytest.raises(UsageError, match="other kernels or sources"):
        run(CertifyingDevice(), tmp_path / "c.json", edited)
    assert len(read(tmp_path / "c.json").entries) == 1


def test_a_stores_winners(tmp_path: Path) -> None:
    task, variant = hgemm(128, 128, 128), variant_of()
    with Store(tmp_path / "s.sqlite") as store:
        toolbox = Toolbox(ScriptedDevice(), store, toy_families())
        store.put_variant(variant)
        toolbox.compile(variant)
        toolbox.verify(variant, task, "full")
        toolbox.sanitize(variant, task)
        toolbox.time(variant, task, "offline", "final")
    assert len(of_database(tmp_path / "s.sqlite", COMMENTED)) == 1
    with pytest.raises(UsageError, match=WORDS):
        of_database(tmp_path / "s.sqlite", EDITED)
    with Store(tmp_path / "s.sqlite") as store:
        store._db.execute("UPDATE results SET payload = '[' WHERE kind = 'time'")
    with pytest.raises(StoreError, match="is damaged"):
        of_database(tmp_path / "s.sqlite", COMMENTED)


def test_a_recordings_winners(tmp_path: Path) -> None:
    path = tmp_path / "gpu.sqlite"
    record(ScriptedDevice(), toy_families(), SHAPES[:1], path, deadline_s=100, echo=lambda line: None)
    winners = of_recording(path, families(source="/* */" + toy_families()["toy"].source))
    assert len(winners) == 1
    other = {name: f.model_copy(update={"source": EDITED["toy"].source}) for name, f in toy_families().items()}
    with pytest.raises(UsageError, match="changed since"):
        of_recording(path, other)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "[3]", '[{"shape": "1,1,1"}]', "1" * 5000])
def test_plans_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "plans.json").write_text(text)
    with pytest.raises(UsageError) as caught:
        of_plans(tmp_path / "plans.json", toy_families())
    assert "plans.json" in str(caught.value) and "nput should" not in str(caught.value)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("HGEMM_AGENT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tools.families.load_families", toy_families)
    monkeypatch.setattr("agent.devices.open_device", refuse)
    plan = {"shape": "64,64,64", "family": "toy", "b_layout": "nk", "knobs": {"BM": 64, "BN": 64}}
    (tmp_path / "plans.json").write_text(json.dumps([plan]))
    return CliRunner()


def refuse(spec: str) -> None:
    raise AssertionError("a device was opened")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "/proc/nowhere/c.json"], "/proc/nowhere/c.json cannot be written"),
        (["--out", "/dev/null/c.json"], "/dev/null/c.json cannot be written"),
        (["--out", "FOLDER"], "is a folder: give the name of a file"),
        (["--timed", "inf"], "timed_s: must be"),
        (["--warm", "1e9"], "warm_s: must be at most 86400"),
    ],
)
def test_found_before_a_device_is_opened(cli: CliRunner, tmp_path: Path, arguments: list[str], words: str) -> None:
    given = [str(tmp_path) if a == "FOLDER" else a for a in arguments]
    done = cli.invoke(app, ["certify", "--plans", str(tmp_path / "plans.json"), *given])
    assert done.exit_code == 1 and words in done.stderr, done.output
    assert "Traceback" not in done.output


def test_places_that_can_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "c.json")
    (tmp_path / "there.json").write_text("{}")
    check_writable(tmp_path / "there.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "there.json")
    check_writable(tmp_path / "link.json")
    assert (tmp_path / "there.json").read_text() == "{}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "new", "there.json"]
