"""The lock of a GPU across processes: exclusive waits for shared, a kill frees it, a removed file is made again."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.gpu.lock import GpuLock

HOLD = """
import sys, time
from tools.gpu.lock import GpuLock
with GpuLock(sys.argv[1]).held(sys.argv[2] == "x"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{uuid.uuid4()}"
    yield name
    path(name).unlink(missing_ok=True)


def path(name: str) -> Path:
    return Path(f"/tmp/hgemm-agent-{name}.lock")


def holder(name: str, kind: str) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLD, name, kind], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def acquired(lock: GpuLock, exclusive: bool) -> threading.Event:
    done = threading.Event()

    def take() -> None:
        with lock.held(exclusive):
            done.set()

    threading.Thread(target=take, daemon=True).start()
    return done


def test_exclusive_waits_for_shared_and_a_kill_frees_it(name: str) -> None:
    child = holder(name, "s")
    lock = GpuLock(name)
    with lock.held(exclusive=False):
        pass
    waiting = acquired(lock, exclusive=True)
    assert not waiting.wait(0.2)
    child.kill()
    assert waiting.wait(10)
    child.wait()


def test_shared_waits_for_exclusive(name: str) -> None:
    child = holder(name, "x")
    waiting = acquired(GpuLock(name), exclusive=False)
    assert not waiting.wait(0.2)
    child.kill()
    assert waiting.wait(10)
    child.wait()


def test_a_removed_file_still_excludes_a_newcomer(name: str) -> None:
    lock = GpuLock(name)
    with lock.held(exclusive=True):
        pass
    path(name).unlink()
    with lock.held(exclusive=True):
        assert path(name).exists()
        assert not acquired(GpuLock(name), exclusive=True).wait(0.2)


def test_it_is_left_free_and_other_users_may_open_it(name: str) -> None:
    lock = GpuLock(name)
    with lock.held(exclusive=True):
        pass
    assert path(name).stat().st_mode & 0o666 == 0o666
    assert acquired(GpuLock(name), exclusive=True).wait(10)
