"""``agent sweep`` as a user meets it: real workers, bad input, a full disk, schedulers of one's own."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import ScriptedDevice
from typer.testing import CliRunner, Result

pytest.importorskip("distributed")

from sweep_kit import Options, calls_of, shapes

from agent import sweep_farm
from agent.cli import app
from agent.sweep_rows import stored_rows
from memory.store import Store
from tools.families import load_families
from tools.recording import record

ROOT = Path(__file__).resolve().parent.parent
KIT = Path(__file__).with_name("sweep_kit.py")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shapes of one family, as a real recording holds them."""
    path = tmp_path_factory.mktemp("recording") / "gpu.sqlite"
    family = load_families()["plain_tiled"]
    wanted = [(64, 64, 64), (512, 512, 512)]
    record(ScriptedDevice(), {"plain_tiled": family}, wanted, path, deadline_s=100, echo=lambda line: None)
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HGEMM_AGENT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def agent(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def sentence(result: Result) -> str:
    """The one line that the user is left with."""
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.stderr.strip().splitlines()[-1]


# --- a sweep of a recording, and what is done with its database -------------------------------------------------------


def test_a_recording_is_swept_compared_and_certified(recording: Path, tmp_path: Path) -> None:
    device = f"replay:{recording}"
    db = str(tmp_path / "s.sqlite")
    table = tmp_path / "t.csv"
    listed = tmp_path / "wanted.csv"
    listed.write_text("64,64,64\n512,512,512\n4096,64,64\n64,64,64\n")
    common = ("sweep", "--shapes", str(listed), "--device", device, "--db", db)
    # Every plan, since one family alone is recorded.
    more = ("--policy", "random", "--evaluations", "400", "--workers", "2", "--csv", str(table))
    first = agent(*common, *more)
    assert first.exit_code == 0, first.output
    assert "line 4 repeats 64x64x64" in first.stderr and "3/3 shapes" in first.stderr
    assert "2 with a kernel that passed the whole gate, 1 not recorded" in first.stdout
    lines = table.read_text().splitlines()
    assert [line.split(",")[:4] for line in lines[1:]] == [
        ["64", "64", "64", "won"], ["512", "512", "512", "won"], ["4096", "64", "64", "not_recorded"],
    ]  # fmt: skip
    before = table.read_text()
    again = agent(*common, *more, "--json", "--quiet")
    summary = json.loads(again.stdout)
    assert again.exit_code == 0 and again.stderr == "" and table.read_text() == before
    assert summary["states"] == {"won": 2, "not_recorded": 1} and len(summary["rows"]) == 3
    assert not Path(db + ".spool").exists()

    same = agent("compare", db, db, "--json")
    found = json.loads(same.stdout)
    assert found["shared"] == 2 and found["modes"][0]["geo_mean_change"]["value"] == 1.0
    refused = agent("certify", "--db", db, "--device", device, "--out", str(tmp_path / "c.json"))
    assert refused.exit_code == 1 and "2 incomplete" in refused.stdout, "a recording has no certify budget"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give exactly one set of shapes"),
        (("--grid", "paper", "--db", "/dev/null"), "--db /dev/null is a device or a pipe"),
        (("--grid", "paper", "--db", "."), "--db . is a folder"),
        (("--grid", "paper", "--csv", "."), "--csv . is a folder"),
        (("--grid", "paper", "--device", "gpu7"), "there is no device 'gpu7'"),
        (("--grid", "paper", "--device", "cuda:all"), "finds no GPU"),
        (("--grid", "paper", "--device", "replay:h200,replay:h200"), "given twice"),
        (("--grid", "paper", "--policy", "openai"), "OPENAI_API_KEY"),
        (("--grid", "paper", "--policy", "magic"), "policy.name"),
        (("--grid", "paper", "--set", "budget.evalutions=3"), "did you mean 'evaluations'"),
        (("--model", "llama3-70b"), "need --batch"),
        (("--shapes", "/nowhere/s.csv"), "does not exist"),
        (("--records", "--device", "cuda:0"), "--records are the shapes of a replay device"),
        (("--records", "--device", "replay:/nowhere/r.sqlite"), "there is no record file"),
        (("--grid", "paper", "--scheduler", "tcp://a:1", "--scheduler-file", "f"), "not both"),
        (("--grid", "paper", "--scheduler", "tcp://a:1", "--workers", "3"), "leave out --workers"),
    ],
)
def test_wrong_options_are_one_sentence(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert words in sentence(agent("sweep", *arguments))


@pytest.mark.parametrize(
    ("text", "words"), [("64,64,64\n64,,64\n", "line 2"), ("# none\n", "holds no shapes"), ("64,64,-1\n", "line 1")]
)
def test_a_bad_file_of_shapes(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "s.csv"
    path.write_text(text)
    found = sentence(agent("sweep", "--shapes", str(path)))
    assert words in found and str(path) in found


def one_shape(tmp_path: Path) -> str:
    path = tmp_path / "one.csv"
    path.write_text("64,64,64\n")
    return str(path)


def test_a_database_of_another_version_is_left_alone(tmp_path: Path, recording: Path) -> None:
    db = tmp_path / "s.sqlite"
    with Store(db) as store, store.batch():
        store._write("UPDATE meta SET value = '99' WHERE key = 'schema_version'", ())
    before = db.read_bytes()
    arguments = ("sweep", "--shapes", one_shape(tmp_path), "--device", f"replay:{recording}", "--db", str(db))
    assert "schema version 99" in sentence(agent(*arguments))
    assert db.read_bytes() == before


@pytest.mark.parametrize("text", [b"not a database at all, but long enough to have a header" * 40, b""])
def test_a_file_that_is_no_database(tmp_path: Path, recording: Path, text: bytes) -> None:
    db = tmp_path / "folder" if not text else tmp_path / "s.sqlite"
    db.write_bytes(text) if text else db.mkdir()
    arguments = ("sweep", "--shapes", one_shape(tmp_path), "--device", f"replay:{recording}", "--db", str(db))
    assert str(db) in sentence(agent(*arguments))


def test_two_sweeps_do_not_write_one_database(tmp_path: Path, recording: Path) -> None:
    import fcntl

    db = tmp_path / "s.sqlite"
    with (tmp_path / "s.sqlite.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        arguments = ("sweep", "--shapes", one_shape(tmp_path), "--device", f"replay:{recording}", "--db", str(db))
        assert "another sweep is writing" in sentence(agent(*arguments))


# --- a disk that fills up ---------------------------------------------------------------------------------------------


def run_kit(options: Options, limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))

    command = [sys.executable, str(KIT), options.to_json()]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=120, check=False)


@pytest.mark.parametrize("limit_bytes", [6_000, 300_000], ids=["journals", "database"])
def test_a_disk_that_fills_up_in_the_middle_loses_nothing(tmp_path: Path, limit_bytes: int) -> None:
    log = tmp_path / "log"
    options = Options(str(tmp_path / "s.sqlite"), str(log), shapes(8))
    full = run_kit(options, limit_bytes)
    assert full.returncode == 1 and "Traceback" not in full.stderr, full.stderr
    assert "full" in full.stderr.splitlines()[-1] and "error: " in full.stderr.splitlines()[-1]
    done = run_kit(options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 9
    repeated = [call for call, count in Counter(call for _, call in calls_of(log)).items() if count > 1]
    # A measurement whose result could not be written has to be taken again: one for each worker, and for a retry.
    assert len(repeated) <= 4


# --- signals, and files that are none ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_a_signal_ends_the_driver_and_its_workers(tmp_path: Path, number: int) -> None:
    """To the whole group, as the end of a terminal does it."""
    options = Options(str(tmp_path / "s.sqlite"), str(tmp_path / "log"), shapes(8), sleep_s=0.01)
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from agent.edge import guarded, leave_with\nfrom agent.interrupt import raise_on_signals\n"
        "from sweep_kit import Options, run_options\n"
        "def command():\n    with guarded(): run_options(Options.from_json(sys.argv[1]))\n"
        "if __name__ == '__main__':\n    raise_on_signals(); sys.exit(leave_with(command))\n"
    )
    script = tmp_path / "driver.py"
    script.write_text(code)
    command = [sys.executable, str(script), options.to_json(), str(ROOT), str(ROOT / "tests")]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment(), cwd=tmp_path
    )
    until = time.monotonic() + 60
    while not (tmp_path / "log").exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(process.pid, number)
    said = process.communicate(timeout=60)[1]  # until its workers, which hold the other end, have ended with it
    assert process.returncode == 128 + number and "Traceback" not in said, said
    assert "interrupted" in said
    done = run_kit(options)
    assert done.returncode == 0 and done.stdout.count("\n") == 9, done.stderr


def test_a_quiet_sweep_says_that_it_was_interrupted(tmp_path: Path) -> None:
    db = tmp_path / "s.sqlite"
    command = [sys.executable, "-m", "agent.cli", "sweep", "--records", "--evaluations", "64", "--quiet"]
    command += ["--device", "replay:h200", "--workers", "1", "--db", str(db)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(),
        start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not db.exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert said == "interrupted; nothing is lost: the same command goes on\n"


def test_ctrl_c_while_the_workers_start_is_one_sentence(tmp_path: Path) -> None:
    """A terminal sends it to the whole group, and starting is seconds of imports."""
    command = [sys.executable, "-m", "agent.cli", "sweep", "--records", "--evaluations", "64", "--quiet"]
    command += ["--device", "replay:h200", "--workers", "2", "--db", str(tmp_path / "s.sqlite")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(), process_group=0)
    until = time.monotonic() + 60
    while not (begun := spawned_by(process.pid)) and time.monotonic() < until:
        time.sleep(0.01)
    assert begun and all(blocks_ctrl_c(worker) for worker in begun)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "interrupted; nothing is lost: the same command goes on\n"
    assert process.returncode == 130


def spawned_by(parent: int) -> list[int]:
    """The processes of multiprocessing that ``parent`` has started and that run Python by now."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            said = status.with_name("cmdline").read_bytes()
            if f"\nPPid:\t{parent}\n" in status.read_text() and b"spawn_main" in said:
                found.append(int(status.parent.name))
    return found


def blocks_ctrl_c(pid: int) -> bool:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk"))
    return bool(int(line.split()[1], 16) & 1 << (signal.SIGINT - 1))


def test_what_our_exit_cut_off_is_tidied_up_in_silence() -> None:
    code = (
        "from agent.sweep_farm import _start_resource_tracker\n_start_resource_tracker()\n"
        "from multiprocessing import resource_tracker\n"
        "resource_tracker.register('/mp-removed-already', 'semaphore')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=60, check=True)
    assert done.stderr == ""


def test_a_csv_that_is_a_device_stays_one(tmp_path: Path, recording: Path) -> None:
    more = (
        "--device",
        f"replay:{recording}",
        "--workers",
        "1",
        "--evaluations",
        "4",
        "--db",
        str(tmp_path / "s.sqlite"),
    )
    found = agent("sweep", "--shapes", one_shape(tmp_path), *more, "--csv", "/dev/full", "-q")
    assert "/dev/full cannot be written: No space left on device" in sentence(found)
    assert "1 shapes: " in found.stdout, "the result is told all the same"
    assert Path("/dev/full").is_char_device()


# --- workers of one's own ---------------------------------------------------------------------------------------------


def test_a_scheduler_that_is_not_there(tmp_path: Path, recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_farm, "CONNECT_TIMEOUT_S", 0.5)
    common = ("sweep", "--shapes", one_shape(tmp_path), "--device", f"replay:{recording}")
    assert "there is no scheduler at tcp://127.0.0.1:9" in sentence(agent(*common, "--scheduler", "tcp://127.0.0.1:9"))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes the connection and says nothing
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        assert f"there is no scheduler at {address} (nothing answered" in sentence(
            agent(*common, "--scheduler", address)
        )
    for nonsense in ("nonsense", "", "http://127.0.0.1:80", "tcp://127.0.0.1:99999", "tcp://[::", "a:1\nb:2"):
        assert "is not the address of a Dask scheduler" in sentence(agent(*common, "--scheduler", nonsense)), nonsense
    missing = str(tmp_path / "scheduler.json")
    assert f"{missing} does not exist" in sentence(agent(*common, "--scheduler-file", missing))
    broken = tmp_path / "broken.json"
    for content, words in (("{", "is not JSON"), ("[1]", "names no address"), ('{"address": "x"}', "not the address")):
        broken.write_text(content)
        found = sentence(agent(*common, "--scheduler-file", str(broken)))
        assert words in found and ("broken.json" in found or "'x'" in found)


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}


class Hosts:
    """A scheduler and workers as processes, as a cluster's users start them."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "scheduler.json"
        self._folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "dask", *command, "--scheduler-file", str(self.file)]
        process = subprocess.Popen(argv, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.processes.append(process)
        return process

    def scheduler(self) -> str:
        self.file.unlink(missing_ok=True)
        self.start("scheduler", "--port", "0", "--no-dashboard", "--host", "127.0.0.1")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError):  # not there yet, or not whole yet
                address: str = json.loads(self.file.read_text())["address"]
                return address
            time.sleep(0.05)
        pytest.fail("the scheduler did not begin")

    def worker(self, *options: str) -> None:
        fixed = ("--nthreads", "1", "--no-dashboard", "--no-nanny", "--death-timeout", "20")
        self.start("worker", *fixed, *options, "--local-directory", str(self._folder))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes.clear()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.stop()


def test_a_scheduler_without_workers_and_workers_without_a_gpu(
    tmp_path: Path, recording: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("sweep", "--shapes", one_shape(tmp_path), "--device", f"replay:{recording}")
    common = (*common, "--scheduler", hosts.scheduler())
    monkeypatch.setattr(sweep_farm, "WORKERS_TIMEOUT_S", 0.5)
    assert "no worker joined the scheduler" in sentence(agent(*common))
    hosts.worker()
    monkeypatch.setattr(sweep_farm, "WORKERS_TIMEOUT_S", 60.0)
    assert "--resources GPU=1" in sentence(agent(*common))


def test_a_scheduler_that_goes_away_takes_nothing_with_it(tmp_path: Path, hosts: Hosts) -> None:
    log = tmp_path / "log"
    options = Options(str(tmp_path / "s.sqlite"), str(log), shapes(8), sleep_s=0.01, scheduler=hosts.scheduler())
    hosts.worker("--resources", "GPU=1")
    driver = subprocess.Popen([sys.executable, str(KIT), options.to_json()], text=True, stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while (not log.exists() or log.read_bytes().count(b"\n") < 60) and time.monotonic() < until:
        time.sleep(0.01)
    hosts.stop()  # all at once, the worker in the middle of a measurement
    _, err = driver.communicate(timeout=60)
    assert driver.returncode == 1 and "went away; nothing is lost" in err.splitlines()[-1], err
    with Store(options.db) as store:
        done = len(stored_rows(store))
    assert 0 < done < 8
    options = Options(options.db, options.log, options.shapes, scheduler=hosts.scheduler())
    hosts.worker("--resources", "GPU=1")
    finished = run_kit(options)
    assert finished.returncode == 0, finished.stderr
    counts = Counter(call for _, call in calls_of(log))
    assert sum(count - 1 for count in counts.values()) <= 1, "the one that was cut off"


def test_the_slurm_script_runs_with_local_processes(tmp_path: Path, recording: Path) -> None:
    """With a stand-in for srun that starts two tasks here."""
    commands = tmp_path / "bin"
    commands.mkdir()
    scripts = {
        "two": 'trap "kill \\$(jobs -p)" TERM\n"$@" & "$@" & wait\n',
        "agent": f'exec {sys.executable} -m agent.cli "$@"\n',
        "dask": f'exec {sys.executable} -m dask "$@"\n',
    }
    for name, text in scripts.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (commands / name).chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    options = ("--records", "--policy", "random", "--evaluations", "400", "--db", "s.sqlite", "--spool", ".", "--json")
    process = subprocess.Popen(
        [str(ROOT / "scripts" / "sweep_slurm.sh"), *options],
        env={**environment(), "PATH": path, "SRUN": "two", "DEVICE": f"replay:{recording}"},
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, err
    assert json.loads(out)["shapes"] == 2
    assert not list(tmp_path.glob(".sweep-*")), "the script cleans up"
    assert not list(tmp_path.glob("*.spool")) and (tmp_path / "s.sqlite").is_file()
