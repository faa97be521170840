"""Broken surroundings, as a user meets them: streams, signals, disks, encodings, homes. Real processes throughout."""

from __future__ import annotations

import errno
import json
import os
import pty
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import ScriptedDevice
from records_kit import AGENT, ROOT, agent, environment, make_record
from rich.console import Console
from rich.table import Table

from agent import session as sessions
from agent.config import load_settings
from agent.errors import UsageError
from agent.files import write_atomic
from agent.tables import print_table

DEBUG = "HGEMM_AGENT_DEBUG"


@pytest.fixture(scope="module")
def record_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("record") / "h.sqlite", (64, 64, 64))


@pytest.fixture(scope="module")
def done(record_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the finished session ``s``."""
    home = tmp_path_factory.mktemp("home")
    assert agent(home, *optimize(record_path), "-q").returncode == 0
    return home


def optimize(record_path: Path, session: str = "s", evaluations: int = 4) -> list[str]:
    flags = ["--shape", "64,64,64", "--device", f"replay:{record_path}", "--evaluations", str(evaluations)]
    return ["optimize", *flags, "--session", session]


def shell(home: Path, line: str, **more: str) -> subprocess.CompletedProcess[str]:
    """``line`` in bash, with $AGENT. What a pipe's last command says is the exit code unless it asks PIPESTATUS."""
    environ = environment(home, AGENT=" ".join(AGENT), **more)
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, env=environ, timeout=120, check=False
    )


def words(arguments: list[str]) -> str:
    return " ".join(arguments)


def one_sentence(text: str) -> bool:
    return text.startswith("error: ") and text.count("\n") == 1 and "Traceback" not in text


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stderr", ["2> >(head -1 >/dev/null)", "2>/dev/full", "2>&-"], ids=["pipe", "full", "closed"])
def test_a_search_outlives_its_stderr(tmp_path: Path, record_path: Path, stderr: str) -> None:
    found = shell(tmp_path, f"$AGENT {words(optimize(record_path, evaluations=32))} --json {stderr}")
    assert found.returncode == 0 and json.loads(found.stdout)["finished"]


def test_both_streams_into_a_reader_that_leaves(tmp_path: Path, record_path: Path) -> None:
    """The search goes to its end; that its result reached nobody is no success."""
    line = f"$AGENT {words(optimize(record_path, evaluations=32))} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"
    assert shell(tmp_path, line).returncode == 1
    assert json.loads(agent(tmp_path, "show", "--json").stdout)[0]["finished"]


@pytest.mark.parametrize("stdout", [">/dev/full", ">&-"])
def test_a_result_that_cannot_be_printed_is_an_error(tmp_path: Path, record_path: Path, stdout: str) -> None:
    found = shell(tmp_path, f"$AGENT {words(optimize(record_path))} -q {stdout}; exit ${{PIPESTATUS[0]}}")
    assert found.returncode == 1 and one_sentence(found.stderr) and "`agent show s` prints it" in found.stderr


def test_a_reader_that_has_had_enough_is_no_error(done: Path) -> None:
    for command in ("show s", "--help", "show s --json"):
        found = shell(done, f"$AGENT {command} | true; exit ${{PIPESTATUS[0]}}")
        assert (found.returncode, found.stderr) == (0, ""), command
    full = shell(done, "$AGENT show s >/dev/full")
    assert full.returncode == 1 and full.stderr == "error: stdout cannot be written to: No space left on device\n"
    assert shell(done, "$AGENT show s <&-").returncode == 0


def test_a_closed_descriptor_is_not_reused_for_a_file(tmp_path: Path, record_path: Path) -> None:
    """With 2 closed, the first file that is opened would be number 2, and the next message would land in it."""
    assert shell(tmp_path, f"$AGENT {words(optimize(record_path))} 2>&- <&- >/dev/null").returncode == 0
    assert agent(tmp_path, "show", "s").returncode == 0
    log = (tmp_path / "sessions" / "s" / "session.log").read_text().splitlines()
    assert all(json.loads(line) for line in log)


def test_ascii(tmp_path: Path, record_path: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = agent(tmp_path, *optimize(record_path), **plain)
    assert found.returncode == 0 and "Traceback" not in found.stderr, found.stderr
    assert "| offline" in found.stdout and found.stdout.isascii()


def test_files_are_read_and_written_as_utf8() -> None:
    bare = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in ("agent", "policy", "memory", "retrieval", "tools")
        for path in (ROOT / package).rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if ".read_text()" in line or (".write_text(" in line and line.endswith(")") and "encoding=" not in line)
    ]
    assert bare == []


def test_stderr_on_a_terminal_keeps_stdout_to_itself(tmp_path: Path, record_path: Path) -> None:
    """The live panel must not take the result along to the terminal."""
    ours, theirs = pty.openpty()
    command = [*AGENT, *optimize(record_path), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, cwd=ROOT, env=environment(tmp_path, TERM="xterm")
    ) as process:
        os.close(theirs)
        screen = bytearray()
        try:
            while piece := os.read(ours, 4096):
                screen += piece
        except OSError as error:  # how Linux says that the other end is closed
            assert error.errno == errno.EIO
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["finished"]
    os.close(ours)
    assert b"\x1b[" in screen and b"session_id" not in screen


def test_a_terminal_that_goes_away_ends_nothing(tmp_path: Path, record_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*AGENT, *optimize(record_path, evaluations=32), "--json"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=ROOT,
        env=environment(tmp_path, TERM="xterm"),
        start_new_session=True,
    ) as process:
        os.close(theirs)
        os.read(ours, 1)
        os.close(ours)
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["finished"]
    assert process.returncode == 0


def test_narrow_terminals_keep_the_numbers(done: Path) -> None:
    row = json.loads(agent(done, "show", "s", "--json").stdout)["best"]["modes"][0]["rows"]
    ratio = next(r["ratio"] for r in row if r["reference"] == "cublaslt_auto_max")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*AGENT, "show", "s"], stdout=theirs, cwd=ROOT, env={**environment(done, TERM="xterm"), "COLUMNS": "40"}
    ) as process:
        os.close(theirs)
        screen = b""
        try:
            while piece := os.read(ours, 4096):
                screen += piece
        except OSError as error:
            assert error.errno == errno.EIO
    os.close(ours)
    assert process.returncode == 0 and f"ratio: {ratio:.3f}" in screen.decode()


def test_a_table_that_does_not_fit_is_a_list() -> None:
    table = Table(title="Times")
    for name in ("shape", "ratio", ""):
        table.add_column(name)
    table.add_row("4096x4096x4096", "1.234", "remark")
    for width, wanted in ((60, "│"), (20, "- shape: 4096x4096x4096\n  ratio: 1.234\n  remark\n")):
        console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
        print_table(table, console)
        assert wanted in console.export_text()


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["TERM", "HUP"])
def test_signals_stop_a_session_and_keep_it(tmp_path: Path, record_path: Path, number: int, code: int) -> None:
    process = subprocess.Popen(
        [*AGENT, *optimize(record_path, evaluations=150)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(tmp_path),
    )
    assert process.stderr is not None
    process.stderr.readline()  # the search has begun
    process.send_signal(number)
    process.send_signal(number)  # an echo, as `timeout` sends it to the group
    said = process.stderr.read()
    assert process.wait(30) == code, said
    assert "agent resume s" in said and "Traceback" not in said
    if number == signal.SIGTERM:
        assert agent(tmp_path, "resume", "s", "-q").returncode == 0


@pytest.mark.parametrize(
    ("module", "number"),
    [("typer", signal.SIGINT), ("typer", signal.SIGTERM), ("agent.config", signal.SIGINT), ("optuna", signal.SIGINT)],
)
def test_a_signal_among_the_imports(tmp_path: Path, record_path: Path, module: str, number: int) -> None:
    """-X importtime says on stderr when a module has been imported; optuna, by a search that goes by the model."""
    command = [sys.executable, "-X", "importtime", "-m", "agent", *optimize(record_path, evaluations=150)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(tmp_path, HGEMM_AGENT_POLICY__PRIOR="model"),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith(f" {module}"):
            break
    process.send_signal(number)
    said = [line for line in process.stderr if not line.startswith("import time:")]
    assert process.wait(30) == 128 + number, said
    assert not any("Traceback" in line or "Error" in line for line in said), said


def test_a_signal_that_falls_into_a_destructor_is_not_lost() -> None:
    """Python prints and drops what a __del__ raises; a sweep then went on to its end."""
    code = (
        "import os, signal, time\n"
        "from agent.interrupt import raise_on_signals\n"
        "class Dying:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        for _ in range(1000): pass\n"
        "raise_on_signals()\n"
        "Dying()\n"
        "try: time.sleep(20)\n"
        "except KeyboardInterrupt as error: print(error.exit_code)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert (found.stdout, found.stderr) == ("143\n", "")


def test_nohup_is_respected(tmp_path: Path, record_path: Path) -> None:
    command = f"$AGENT {words(optimize(record_path, evaluations=32))} -q"
    assert shell(tmp_path, f"trap '' HUP; {command} & P=$!; sleep 0.7; kill -HUP $P; wait $P").returncode == 0


# --- disks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 1 MiB, where the machine lets us have one."""
    folder = Path(tempfile.mkdtemp(prefix="small-disk-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        folder.rmdir()
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        if leave_bytes:
            file.truncate(file.tell() - leave_bytes)
    return ballast


@pytest.mark.parametrize("free", [0, 16384, 98304])
def test_a_disk_that_is_full_at_some_moment(small_disk: Path, record_path: Path, free: int) -> None:
    """Wherever it ends: one sentence, and after some space is free the same name is made or goes on."""
    ballast = fill(small_disk, free)
    full = agent(small_disk / "home", *optimize(record_path, evaluations=16), "-q")
    assert full.returncode == 1 and "Traceback" not in full.stderr, full.stderr
    assert "bug of hgemm-agent" not in full.stderr and full.stderr.startswith("error: "), full.stderr
    assert "free some space" in full.stderr and full.stderr.count("\n") <= 2, full.stderr
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    made = (small_disk / "home" / "sessions" / "s").exists()
    again = ["resume", "s"] if made else optimize(record_path, evaluations=16)
    found = agent(small_disk / "home", *again, "-q", "--json")
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)
    assert summary["finished"] and summary["evaluations"] == 16
    assert (small_disk / "home" / "sessions" / "s" / "best" / "kernel.cu").is_file()


def test_a_half_made_session_is_cleared_away(tmp_path: Path, record_path: Path) -> None:
    old, new = (tmp_path / "sessions" / name for name in (".new-killed", ".new-running"))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{")
    os.utime(old, (0, 0))
    (tmp_path / "sessions" / "s").mkdir()  # as an earlier version left it on a full disk
    assert agent(tmp_path, *optimize(record_path), "-q").returncode == 0
    assert sorted(p.name for p in (tmp_path / "sessions").iterdir()) == [".new-running", "s"]
    listed = agent(tmp_path, "show", "--json")
    assert [row["session"] for row in json.loads(listed.stdout)] == ["s"] and listed.stderr == ""


def test_sessions_that_begin_in_the_same_second(tmp_path: Path) -> None:
    chosen, info = load_settings(None, {}, {"session.shape": "64,64,64"}), ScriptedDevice().info
    with ThreadPoolExecutor(8) as pool:
        begun = list(pool.map(lambda _: sessions.create(tmp_path, chosen, None, "fake", info), range(40)))
        named = [pool.submit(sessions.create, tmp_path, chosen, "one", "fake", info) for _ in range(8)]
    assert len({config.session_id for config in begun}) == 40
    assert [type(error) for future in named if (error := future.exception())] == [UsageError] * 7
    assert {config.session_id for config in begun} | {"one"} == set(sessions.session_ids(tmp_path))
    assert not list((tmp_path / "sessions").glob(".*"))


def test_devices_stay_devices(tmp_path: Path) -> None:
    null = tmp_path / "null"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device needs root")
    write_atomic(null, "text")
    assert stat.S_ISCHR(null.stat().st_mode)
    with pytest.raises(UsageError, match="/dev/full cannot be written: No space left on device; free some space"):
        write_atomic(Path("/dev/full"), "text")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)
    with pytest.raises(UsageError, match="is a folder"):
        write_atomic(tmp_path, "text")


def test_links_and_modes_are_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "target.csv", tmp_path / "link.csv"
    link.symlink_to("target.csv")
    write_atomic(link, "first")
    assert link.is_symlink() and target.read_text() == "first"
    target.chmod(0o640)
    write_atomic(link, "second ≥ first")
    assert link.is_symlink() and target.read_text(encoding="utf-8") == "second ≥ first"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640 and len(list(tmp_path.iterdir())) == 2
    longest = tmp_path / ("n" * 255)
    write_atomic(longest, "x")
    assert longest.read_text() == "x"


def test_a_descriptor_is_written_to(tmp_path: Path) -> None:
    code = "from agent.files import write_atomic; from pathlib import Path; write_atomic(Path('/dev/stdout'), 'text')"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, cwd=ROOT, check=True)
    assert (tmp_path / "out").read_text() == "text"


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(done: Path, tmp_path: Path) -> Path:
    """A home with a sound session ``s`` and an unfinished one, ``broken``."""
    home = tmp_path / "home"
    shutil.copytree(done, home)
    shutil.copytree(home / "sessions" / "s", home / "sessions" / "broken")
    (home / "sessions" / "broken" / "summary.json").unlink()
    config = home / "sessions" / "broken" / "config.json"
    config.write_text(config.read_text().replace('"session_id": "s"', '"session_id": "broken"'))
    return home


def test_a_damaged_session_hides_no_other(damaged: Path) -> None:
    (damaged / "sessions" / "broken" / "config.json").write_bytes(b"\xff{")
    found = agent(damaged, "show", "--json")
    assert found.returncode == 0 and [row["session"] for row in json.loads(found.stdout)] == ["s"]
    assert found.stderr.startswith("session broken is left out: ") and found.stderr.count("\n") == 1


def test_a_checkpoint_whose_bytes_are_no_state(damaged: Path) -> None:
    import sqlite3

    path = damaged / "sessions" / "broken" / "checkpoints.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("UPDATE checkpoints SET thread_id = 'broken', checkpoint = x'c1c1c1'")
    for command in (("show", "broken"), ("resume", "broken")):
        found = agent(damaged, *command)
        assert found.returncode == 1 and "checkpoints.sqlite is damaged" in found.stderr, found.stderr
        assert "Traceback" not in found.stderr and "bug of" not in found.stderr
    path.unlink()
    assert agent(damaged, "resume", "broken", "-q").returncode == 0


@pytest.mark.parametrize(
    "name", ["", "s\n", "..", ".", "a/b", "/abs", ".new-x", "-x", "n" * 81, "n" * 300, "a b", "a\x1b[31m", "é"]
)
def test_names_of_sessions(tmp_path: Path, record_path: Path, name: str) -> None:
    """In process: the command line's own reading of a name is the same for all of them."""
    from agent.session import folder_of

    with pytest.raises(UsageError, match="is not a session name") as caught:
        folder_of(tmp_path, name)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value) and len(str(caught.value)) < 250
    if name == "":
        found = agent(tmp_path, *optimize(record_path, name))
        assert found.returncode == 1 and one_sentence(found.stderr)


# --- bugs of ours, and homes ------------------------------------------------------------------------------------------

#: An agent whose doctor has a bug.
BUGGY = (
    "import os, agent.doctor\n"
    "def broken(): raise KeyError('lost ' + os.environ['ANTHROPIC_API_KEY'])\n"
    "agent.doctor.diagnose = broken\n"
    "from agent.cli import main\nmain()\n"
)
KEY = "sk-ant-0123456789abcdef"


def buggy(home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environ = environment(home, ANTHROPIC_API_KEY=KEY, **more)
    command = [sys.executable, "-c", BUGGY, "doctor"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=120, check=False)


def test_a_bug_leaves_its_traceback_in_a_file(tmp_path: Path) -> None:
    found = buggy(tmp_path)
    assert found.returncode == 1 and one_sentence(found.stderr)
    (path,) = (tmp_path / "crashes").glob("*.txt")
    assert str(path) in found.stderr and "KeyError" in found.stderr
    text = path.read_text()
    assert "Traceback" in text and "in broken" in text and "hgemm-agent" in text
    assert KEY not in text and KEY not in found.stderr
    for number in range(30):
        (tmp_path / "crashes" / f"2020-{number:02}.txt").write_text("")
    assert "Traceback" in buggy(tmp_path, **{DEBUG: "1"}).stderr
    assert len(list((tmp_path / "crashes").iterdir())) == 20


def test_a_bug_where_the_home_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    found = buggy(tmp_path / "home", TMPDIR=str(tmp_path))
    (path,) = (tmp_path / "hgemm-agent-crashes").iterdir()
    assert found.returncode == 1 and one_sentence(found.stderr) and str(path) in found.stderr


def test_homes_that_are_none(tmp_path: Path, record_path: Path) -> None:
    for home in ("/proc/none", str(record_path), "~nobody-here/x"):
        found = agent(tmp_path, *optimize(record_path), "-q", HGEMM_AGENT_HOME=home)
        assert found.returncode == 1 and one_sentence(found.stderr), found.stderr
    assert agent(tmp_path, "show", HGEMM_AGENT_HOME="/nonexistent/home").returncode == 0
    gone = shell(
        tmp_path, "mkdir $D && cd $D && rmdir $D && PYTHONPATH=$R $AGENT show", D=str(tmp_path / "d"), R=str(ROOT)
    )
    assert gone.returncode == 0, gone.stderr
    relative = shell(
        tmp_path, "mkdir $D && cd $D && rmdir $D && HGEMM_AGENT_HOME=x PYTHONPATH=$R $AGENT show",
        D=str(tmp_path / "d"), R=str(ROOT),
    )  # fmt: skip
    assert relative.returncode == 1 and one_sentence(relative.stderr) and "full path" in relative.stderr


def test_a_limit_of_the_system_is_a_sentence(tmp_path: Path, record_path: Path) -> None:
    found = shell(tmp_path, f"ulimit -n 12; $AGENT {words(optimize(record_path))} -q")
    assert found.returncode == 1 and "Traceback" not in found.stderr and "bug of" not in found.stderr, found.stderr
