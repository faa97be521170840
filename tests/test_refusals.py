"""What a command says of a place that the system refuses: the option or variable that chose it is named, once."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from records_kit import AGENT, ROOT, environment, make_record

from agent.certify_record import check_writable
from agent.errors import UsageError, refusal
from agent.files import write_atomic

MOUNT = 'mount -t tmpfs -o ro none "$RO"'
NEW_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def refused(number: int, chosen_with: str = "") -> str:
    return refusal(OSError(number, os.strerror(number)), chosen_with)


def test_another_place_is_named_by_what_chose_it() -> None:
    assert refused(errno.EROFS) == "Read-only file system; choose another place"
    assert refused(errno.EROFS, "--out") == "Read-only file system; choose another place with --out"
    both = "Permission denied; check its permissions, or choose another place with --out"
    assert refused(errno.EACCES, "--out") == both
    assert refused(errno.EMFILE, "--out") == refused(errno.EMFILE)  # it is the same everywhere
    assert refused(errno.EPIPE) == "Broken pipe"


def test_a_file_in_the_way_of_an_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"choose another place with --out$"):
        write_atomic(tmp_path / "file" / "r" / "report.json", "{}", "--out")
    with pytest.raises(UsageError, match=r"choose another place with --out$"):
        check_writable(tmp_path / "file" / "c.json")


@pytest.fixture(scope="module")
def record_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("record") / "h.sqlite", (64, 64, 64))


@pytest.fixture
def read_only(tmp_path: Path) -> Path:
    """Where ``on_read_only`` mounts a read-only disk."""
    folder = tmp_path / "ro"
    folder.mkdir()
    try:
        done = subprocess.run(
            [*NEW_NAMESPACE, "sh", "-c", MOUNT], env=environment(tmp_path, RO=str(folder)), capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if done.returncode != 0:
        pytest.skip("this user may make no namespace with a disk of its own")
    return folder


def on_read_only(folder: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*NEW_NAMESPACE, "sh", "-c", f'{MOUNT} && exec "$@"', "sh", *AGENT, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(home, RO=str(folder)),
        timeout=120,
        check=False,
    )


def test_a_report_onto_a_read_only_disk(read_only: Path, record_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("scipy")
    done = on_read_only(read_only, tmp_path, "report", "--from", str(record_path), "--out", str(read_only / "r"))
    assert done.returncode == 1
    assert done.stderr == (
        f"error: {read_only}/r/report.json cannot be written: Read-only file system; choose another place with --out\n"
    )


def test_a_session_in_a_home_on_a_read_only_disk(read_only: Path, record_path: Path) -> None:
    flags = ["--shape", "64,64,64", "--device", f"replay:{record_path}", "--evaluations", "2", "--session", "s", "-q"]
    done = on_read_only(read_only, read_only / "home", "optimize", *flags)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.count("HGEMM_AGENT_HOME") == 1
    assert done.stderr.endswith("Read-only file system; choose another place with HGEMM_AGENT_HOME\n")
