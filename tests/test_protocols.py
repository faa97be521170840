"""A recording of an older protocol is still answered from, and everything made of it says so."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent import certify_against
from agent.cli import app
from agent.reporting.evidence import provenance
from agent.reporting.source import load
from tests.fakes import ScriptedDevice, toy_families
from tests.records_kit import make_record
from tools.device import DeviceBroken
from tools.families import accepted_plans
from tools.gate import device_scope
from tools.hgemm import hgemm
from tools.record_writer import RecordWriter
from tools.recording import record
from tools.records import PROTOCOL_VERSION, READABLE_PROTOCOLS, DeviceInfo
from tools.replay import ReplayDevice

SHAPE = (64, 64, 64)
TASK = hgemm(*SHAPE)
OLD = READABLE_PROTOCOLS[0]
REMARK = f"recorded under protocol {OLD}; see records/README.md"


def rewritten(path: Path, protocol: int | str) -> Path:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'protocol_version'", (str(protocol),))
    db.close()
    return path


@pytest.fixture
def toy_file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.sqlite"
    record(ScriptedDevice(), toy_families(), [SHAPE], path, deadline_s=60, echo=lambda _: None)
    return path


@pytest.fixture
def old_file(toy_file: Path) -> Path:
    return rewritten(toy_file, OLD)


def test_there_is_an_older_protocol_to_test_with() -> None:
    assert OLD < PROTOCOL_VERSION
    assert PROTOCOL_VERSION in READABLE_PROTOCOLS


def test_rows_carry_the_protocol_of_their_file(old_file: Path) -> None:
    replay = ReplayDevice(old_file)
    timing = replay.time(accepted_plans(toy_families(), TASK)[0], TASK, "offline", "screen")
    assert {row.protocol_version for row in timing.rows} == {OLD}
    assert replay.info.protocol_version == OLD


def test_the_scope_holds_the_protocol_of_the_file(toy_file: Path) -> None:
    new = ReplayDevice(toy_file).info
    old = ReplayDevice(rewritten(toy_file, OLD)).info
    assert new.recorded_on == old.recorded_on
    assert device_scope(new) != device_scope(old)


def test_a_device_with_other_libraries_is_another_scope() -> None:
    info = ScriptedDevice().info
    scopes = {device_scope(info.model_copy(update={"library": library})) for library in (None, "cuBLAS 1", "cuBLAS 2")}
    assert len(scopes) == 3


@pytest.mark.parametrize("protocol", [0, PROTOCOL_VERSION + 1, "one"])
def test_other_protocols_are_not_read(toy_file: Path, protocol: int | str) -> None:
    with pytest.raises(DeviceBroken, match=f"under protocol version {protocol}, this program reads 1 and 2"):
        ReplayDevice(rewritten(toy_file, protocol))


def test_nothing_is_added_to_a_file_of_another_protocol(old_file: Path) -> None:
    before = old_file.read_bytes()
    with pytest.raises(DeviceBroken, match="and a file holds one: begin a new file"):
        RecordWriter(old_file, ScriptedDevice().info)
    assert old_file.read_bytes() == before


def test_nothing_is_added_to_a_file_against_other_libraries(toy_file: Path) -> None:
    device = ScriptedDevice()
    info: DeviceInfo = device.info.model_copy(update={"library": "cuBLAS 99"})
    with pytest.raises(DeviceBroken, match="records against unknown libraries, here are cuBLAS 99"):
        RecordWriter(toy_file, info)


def test_the_report_says_so(old_file: Path) -> None:
    (fact,) = (f for f in provenance(load(old_file), ()) if f.name == "protocol version")
    assert fact.value == f"{OLD} ({REMARK})"


def test_an_old_recording_is_compared_as_what_it_is(old_file: Path) -> None:
    assert certify_against.of_recording(old_file, []).protocol_version == OLD


def test_optimize_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HGEMM_AGENT_HOME", str(tmp_path / "home"))
    device = f"replay:{rewritten(make_record(tmp_path / 'h.sqlite', SHAPE), OLD)}"
    arguments = ["optimize", "--shape", "64,64,64", "--device", device, "--evaluations", "4", "-q"]
    done = CliRunner().invoke(app, arguments)
    assert REMARK in done.stdout, done.output
    document = CliRunner().invoke(app, [*arguments, "--json"]).stdout
    assert f'"protocol_version":{OLD}' in document and f'"protocol_version":{PROTOCOL_VERSION}' not in document
