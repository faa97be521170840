"""The session whose policy writes CUDA source: on a GPU, kept as a record, and played from it, killed or not.

tests/data/source-session.sqlite is the record of a real GPU; `python -m scripts.source_session` makes it. Until it is
there, that part is skipped, and a record of the simulated GPU goes the same way.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import source_session_kit as kit
from nvcc import real_toolchain
from records_kit import AGENT, ROOT, agent, environment

from agent import session as sessions
from agent.devices import open_device
from agent.errors import UsageError
from agent.reporting.source import load
from agent.session_record import export_record
from scripts.scripted_model import Conversation, serving
from scripts.source_session import OUT, SETTINGS, STORY, departures, differences, play, record, trace
from tools.device import DeviceBroken
from tools.record_file import RecordReader
from tools.records import Status

TURNS = len(kit.conversation().turns)


def simulated(home: Path, session: str, url: str) -> int:
    return 0 if kit.run_session(home, session, url).best is not None else 2


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the live session on the simulated GPU."""
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def simulated_record(home: Path) -> Path:
    out = home / "record.sqlite"
    assert record(out, home, "live", simulated) == 0
    return out


@pytest.fixture(params=["simulated", "gpu"])
def record_path(request: pytest.FixtureRequest) -> Path:
    if request.param == "gpu" and not OUT.is_file():
        pytest.skip(f"there is no {OUT.relative_to(ROOT)} yet: python -m scripts.source_session, on a host with a GPU")
    return OUT if request.param == "gpu" else request.getfixturevalue("simulated_record")


# --- the sources ------------------------------------------------------------------------------------------------------


def test_the_sources_compile_as_the_story_says() -> None:
    """The real nvcc and the gate's own judgement: FP32 accumulators, no spills."""
    real_toolchain()
    found = kit.compile_all()
    assert found == json.loads(kit.COMPILES.read_text()), "python tests/source_session_kit.py compiles"
    assert found["draft.cu"]["reason"] == "compile_error" and 'identifier "PITCH"' in found["draft.cu"]["log"]
    for name in ("repaired.cu", "tiled.cu", "direct.cu"):
        assert found[name]["status"] == "ok" and found[name]["spill_bytes"] == 0 and not found[name]["warnings"]
        assert set(found[name]["mma"]) == {"HMMA.16816.F32"}


def test_each_repair_is_the_smallest_change() -> None:
    draft, repaired, tiled = ((kit.FOLDER / name).read_text() for name in ("draft.cu", "repaired.cu", "tiled.cu"))
    assert sum(a != b for a, b in zip(draft.splitlines(), repaired.splitlines(), strict=True)) == 1
    drain = "  put();\n  __syncthreads();\n  multiply();\n\n"
    assert tiled.count(drain) == 1 and tiled.replace(drain, "") == repaired


# --- live, recorded, played -------------------------------------------------------------------------------------------


def test_the_whole_story_is_in_the_trace_and_plays_from_the_record(record_path: Path, tmp_path: Path) -> None:
    told = play(record_path, tmp_path, kit.conversation())
    assert list(departures(told)) == []
    calls = [step for step in told["steps"] if step["kind"] == "call"]
    assert [(c["tool"], c["status"], c["reason"]) for c in calls] == list(STORY)
    assert 'identifier "PITCH" is undefined' in json.loads(calls[0]["text"])["errors"]
    assert "65536 outputs are wrong" in calls[1]["detail"]
    assert [c["key"] for c in calls if c["tool"] == "evaluate_source"] == [v.key for v in kit.variants().values()]
    said = " ".join(step["text"] for step in told["steps"] if step["kind"] == "assistant")
    assert "$" not in said and "(unknown)" not in said, "every number that the policy names is a tool's"


def test_the_live_session_and_the_played_one_say_the_same(home: Path, simulated_record: Path, tmp_path: Path) -> None:
    told = trace(home, "live")
    played = play(simulated_record, tmp_path, kit.conversation())
    assert list(differences(told, played)) == []
    assert len(told["leaderboard"]) == 2 and all(admitted for _, admitted, _ in told["leaderboard"])
    other = json.loads(json.dumps(told))
    other["steps"][5]["text"] += "!"
    other["leaderboard"][0][2] *= 1.01
    assert len(list(differences(told, other))) == 2, "the comparison sees what differs"


def test_a_record_says_where_it_is_from(record_path: Path) -> None:
    reader = RecordReader(record_path)
    try:
        assert reader.sources() == {variant.key: variant for variant in kit.variants().values()}
        assert reader.device.kind != "replay" and reader.meta("recorded_on")
        assert str(reader.meta("compiler")).startswith("nvcc ") and reader.meta("library") and reader.meta("commit")
        compiled = json.loads(kit.COMPILES.read_text())
        for name, variant in kit.variants().items():
            measured = reader.compiled(variant.key)
            assert measured is not None and measured.cubin_sha256 == compiled[name]["cubin_sha256"], "the code as it is"
        if record_path == OUT:
            assert "H200" in reader.device.name and reader.meta("clocks")
        assert reader.counts()["plans"] == 4
        assert record_path.stat().st_size < 1 << 17
        assert load(record_path).variants.keys() == {kit.variants()[name].key for name in ("tiled.cu", "direct.cu")}
    finally:
        reader.close()


def test_another_source_is_not_recorded(record_path: Path) -> None:
    device = open_device(f"replay:{record_path}")
    try:
        variant = kit.variants()["direct.cu"]
        edited = variant.model_copy(update={"source": variant.source + "// faster\n"})
        assert device.compile(variant).ok
        assert device.compile(edited).status is Status.NOT_RECORDED
    finally:
        device.close()


# --- killed -----------------------------------------------------------------------------------------------------------


def killed_at(turn: int, start: Callable[[str], subprocess.Popen[bytes]], port: int = 0) -> int:
    """kill -9 when the policy is asked for this turn; the port that the session will look for again."""
    process: list[subprocess.Popen[bytes]] = []

    def before(asked: int) -> None:
        if asked == turn:
            os.kill(process[0].pid, signal.SIGKILL)

    with serving(kit.conversation(), port, before) as url:
        process.append(start(url))
        assert process[0].wait(60) == -signal.SIGKILL
    return int(url.rpartition(":")[2].removesuffix("/v1"))


def test_a_live_session_that_was_killed_is_recorded_as_if_it_had_not(
    home: Path, simulated_record: Path, tmp_path: Path
) -> None:
    def start(url: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "tests/source_session_kit.py", str(tmp_path), "live", url]
        return subprocess.Popen(command, cwd=ROOT, env=environment(tmp_path))

    killed_at(4, start)
    half = export_record(tmp_path, "live", tmp_path / "half.sqlite")
    assert 0 < half.results < 24 and half.variants == 3, "what is there can be kept at any time"
    assert record(tmp_path / "half.sqlite", tmp_path, "live", simulated) == 0, "and the rest added later"
    straight, broken_off = trace(home, "live"), trace(tmp_path, "live")
    assert list(differences(straight["leaderboard"], broken_off["leaderboard"])) == []
    assert len(straight["steps"]) == len(broken_off["steps"])


def test_a_played_session_that_was_killed_goes_on(simulated_record: Path, tmp_path: Path) -> None:
    """The command line's own way."""
    flags = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    optimize = ["optimize", "--shape", "256,256,256", "--device", f"replay:{simulated_record}", "--session", "s"]

    def start(url: str) -> subprocess.Popen[bytes]:
        model = ("--policy", "openai", "--model", "scripted", "--base-url", url)
        command = [*AGENT, *optimize, *flags, *model, "-q"]
        return subprocess.Popen(command, cwd=ROOT, env=environment(tmp_path))

    port = killed_at(5, start)
    with serving(kit.conversation(), port):
        ended = agent(tmp_path, "resume", "s", "--json", "-q")
    assert ended.returncode == 0, ended.stderr
    straight = play(simulated_record, tmp_path / "straight", kit.conversation())
    assert list(differences(straight, trace(tmp_path, "s"))) == []
    with pytest.raises(UsageError, match="session s measured nothing: it was replayed from Simulated GPU"):
        export_record(tmp_path, "s", tmp_path / "x.sqlite")
    assert not (tmp_path / "x.sqlite").exists()


# --- `agent export-record` --------------------------------------------------------------------------------------------


def test_once_more_changes_nothing_and_a_file_takes_several_sessions(home: Path, simulated_record: Path) -> None:
    before = simulated_record.read_bytes()
    told = agent(home, "export-record", "live", "--out", str(simulated_record))
    assert told.returncode == 0 and "24 results of 4 variants, 4 of them raw sources" in told.stdout, told.stderr
    assert "; 0 of the results are new" in told.stdout
    assert simulated_record.read_bytes() == before
    both = home / "both.sqlite"
    shutil.copy(simulated_record, both)
    with serving(kit.conversation()) as url:
        kit.run_session(home, "again", url)
    merged = export_record(home, "again", both)
    assert merged.added == 0, "the store answers the second session, and the file has it all"


def test_when_it_was_measured_is_kept_and_not_when_it_was_exported(home: Path, simulated_record: Path) -> None:
    reader = RecordReader(simulated_record)
    try:
        config = sessions.load(home, "live")
        assert reader.meta("recorded_on") == config.created_at, "ScriptedDevice's timings are of earlier"
        assert reader.device == config.device_info and reader.meta("commit") == config.commit
    finally:
        reader.close()


def test_a_file_of_another_device_or_of_no_records_is_left_alone(home: Path, simulated_record: Path) -> None:
    other = home / "other.sqlite"
    shutil.copy(simulated_record, other)
    with sqlite3.connect(other) as db:
        (info,) = db.execute("SELECT value FROM meta WHERE key = 'device'").fetchone()
        db.execute("UPDATE meta SET value = ? WHERE key = 'device'", (info.replace("Simulated GPU", "Other GPU"),))
    before = other.read_bytes()
    with pytest.raises(DeviceBroken, match="holds records of Other GPU"):
        export_record(home, "live", other)
    assert other.read_bytes() == before
    with pytest.raises(DeviceBroken, match="not a record file"):
        export_record(home, "live", sessions.store_path(home))
    with pytest.raises(UsageError, match="is a folder"):
        export_record(home, "live", home)


def test_sessions_that_are_not_there_or_have_measured_nothing(home: Path, tmp_path: Path) -> None:
    refused = agent(home, "export-record", "liv", "--out", str(tmp_path / "x.sqlite"))
    assert refused.returncode == 1 and "did you mean live?" in refused.stderr and refused.stderr.count("\n") == 1
    with pytest.raises(UsageError, match="not a session name"):
        export_record(home, "../live", tmp_path / "x.sqlite")
    begun = sessions.load(home, "live")
    sessions.create(tmp_path, begun.settings, "begun", "cuda:0", begun.device_info)
    with pytest.raises(UsageError, match="has not measured anything yet: `agent resume begun` goes on"):
        export_record(tmp_path, "begun", tmp_path / "x.sqlite")
    assert not (tmp_path / "x.sqlite").exists()


# --- the scripted model -----------------------------------------------------------------------------------------------


def test_a_conversation_that_names_what_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("shape: 64,64,64\nturns: [{calls: [{profile: {key: a.cu}}]}]\n")
    with pytest.raises(ValueError, match=r"profile is of a\.cu, which no call sends"):
        Conversation.load(path)
    path.write_text("shape: 64,64,64\nturns: [{calls: [{evaluate_source: {source: a.cu}}]}]\n")
    with pytest.raises(FileNotFoundError):
        Conversation.load(path)


def test_after_its_last_turn_it_has_nothing_to_say() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}, *({"role": "assistant"} for _ in range(TURNS))]
    assert "tool_calls" not in kit.conversation().answer(messages)
