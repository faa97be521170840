"""Processes: deadlines, groups, full pipes, memory limits, and the frame protocol of long-lived workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.frames import MAX_FRAME_BYTES, FrameError, encode_frame, read_frame, write_frame
from tools.proc import Child, run

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("agent", "policy", "memory", "retrieval", "tools")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_subprocess_is_imported_in_one_module_only() -> None:
    pattern = re.compile(r"^\s*(import|from)\s+(subprocess)\b|os\.(system|popen|fork|exec|spawn)", re.MULTILINE)
    found = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if pattern.search(path.read_text())
    ]
    assert found == ["tools/proc.py"]


def test_streams_and_return_code() -> None:
    done = run(
        python("import sys; print('out'); print('err', file=sys.stderr); print(sys.stdin.read()); sys.exit(3)"),
        deadline_s=20,
        stdin=b"given",
    )
    assert (done.returncode, done.stdout, done.stderr, done.timed_out) == (3, b"out\ngiven\n", b"err\n", False)


def test_a_missing_program_is_a_value() -> None:
    done = run(["/no/such/program"], deadline_s=5)
    assert done.returncode == 127
    assert "/no/such/program" in done.text


def test_deadline_kills_the_whole_group_and_keeps_partial_output() -> None:
    code = (
        "import subprocess, sys, time;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    done = run(python(code), deadline_s=1.5)
    assert done.timed_out
    assert 1.4 < done.elapsed_s < 5
    grandchild = int(done.stdout)
    time.sleep(0.1)
    assert not is_running(grandchild)


def test_a_background_process_that_holds_the_pipe_does_not_hold_us() -> None:
    done = run(["/bin/sh", "-c", "sleep 60 & echo started $!"], deadline_s=30)
    assert done.returncode == 0
    assert done.elapsed_s < 5
    assert not done.timed_out
    time.sleep(0.1)
    assert not is_running(int(done.stdout.split()[1]))


def test_much_output_on_both_streams_does_not_block_and_is_bounded() -> None:
    code = (
        "import sys\n"
        "sys.stdout.write('first line\\n'); sys.stderr.write('E' * 3_000_000)\n"
        "for i in range(30000): sys.stdout.write(f'{i:099d}\\n')\n"
        "sys.stdout.write('last line\\n')"
    )
    done = run(python(code), deadline_s=30, output_limit_bytes=100_000)
    assert done.returncode == 0
    assert done.stdout.startswith(b"first line\n")
    assert done.stdout.endswith(b"last line\n")
    assert b"bytes left out" in done.stdout
    assert len(done.stdout) < 250_000
    assert len(done.stderr) < 250_000


def test_output_under_the_limit_is_complete() -> None:
    done = run(python("print('x' * 900_000)"), deadline_s=30)
    assert done.stdout == b"x" * 900_000 + b"\n"


def test_memory_limit() -> None:
    code = "b = bytearray(1 << 30); print(len(b))"
    assert run(python(code), deadline_s=20).returncode == 0
    done = run(python(code), deadline_s=20, memory_bytes=512 << 20)
    assert done.returncode != 0
    assert b"MemoryError" in done.stderr


def test_a_child_that_ignores_its_stdin() -> None:
    done = run(["/bin/true"], deadline_s=10, stdin=b"x" * (4 << 20))
    assert done.returncode == 0


def test_cancel() -> None:
    cancel = threading.Event()
    threading.Timer(0.3, cancel.set).start()
    done = run(["/bin/sleep", "60"], deadline_s=60, cancel=cancel)
    assert done.cancelled
    assert done.elapsed_s < 5


def test_signal_is_a_negative_return_code() -> None:
    assert run(["/bin/sh", "-c", "kill -SEGV $$"], deadline_s=10).returncode == -11


# --- frames and Child ---------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_frames_round_trip(payloads: list[bytes]) -> None:
    reader, writer = os.pipe()
    for payload in payloads:
        write_frame(writer, payload)
    os.close(writer)
    assert [read_frame(reader) for _ in payloads] == payloads
    assert read_frame(reader) is None
    os.close(reader)


@pytest.mark.parametrize("stream", [b"\x05", encode_frame(b"hello")[:-1], (MAX_FRAME_BYTES + 1).to_bytes(4, "little")])
def test_a_broken_stream_is_named(stream: bytes) -> None:
    reader, writer = os.pipe()
    os.write(writer, stream)
    os.close(writer)
    with pytest.raises(FrameError):
        read_frame(reader)
    os.close(reader)


WORKER = """
import argparse, os, sys, time
sys.path.insert(0, sys.argv[1])
from tools.frames import exit_on_hangup, read_frame, write_frame
parser = argparse.ArgumentParser()
parser.add_argument("root"); parser.add_argument("--in-fd", type=int); parser.add_argument("--out-fd", type=int)
args = parser.parse_args()
exit_on_hangup(args.in_fd)
while (message := read_frame(args.in_fd)) is not None:
    word, _, rest = message.partition(b" ")
    if word == b"echo": write_frame(args.out_fd, rest)
    if word == b"big": write_frame(args.out_fd, b"y" * int(rest))
    if word == b"noise": print("noise " * 50000); sys.stdout.flush(); write_frame(args.out_fd, b"done")
    if word == b"sleep": time.sleep(60)
    if word == b"die": print("last words", flush=True); os.kill(os.getpid(), 9)
    if word == b"garbage": os.write(args.out_fd, b"\\xff" * 64)
    if word == b"close": os.close(args.out_fd)
    if word == b"reply-and-die": write_frame(args.out_fd, b"reply"); os._exit(0)
"""


@pytest.fixture
def child() -> Child:  # type: ignore[misc]
    with Child([*python(WORKER), str(ROOT)]) as worker:
        yield worker


def test_child_echo_and_binary_payloads(child: Child) -> None:
    for payload in (b"", b"\n\x00\xff", b"z" * 300_000):
        assert child.send(b"echo " + payload)
        assert child.recv(20) == payload
    assert child.alive


def test_child_big_reply_while_we_send(child: Child) -> None:
    """Replies larger than a pipe are drained while the next requests are still being written."""
    assert child.send(b"big 8000000")
    for _ in range(5):
        assert child.send(b"big 3000000")
    sizes = [len(child.recv(20) or b"") for _ in range(6)]
    assert sizes == [8000000] + [3000000] * 5


def test_child_noise_on_stdout_is_no_reply_and_does_not_block(child: Child) -> None:
    assert child.send(b"noise ")
    assert child.recv(20) == b"done"
    assert "noise" in child.stderr_tail()
    assert len(child.stderr_tail()) <= 1 << 16


def test_recv_keeps_its_timeout(child: Child) -> None:
    assert child.send(b"sleep ")
    started = time.monotonic()
    assert child.recv(0.4) is None
    assert 0.35 < time.monotonic() - started < 20
    assert child.alive


def test_death_is_noticed_at_once(child: Child) -> None:
    assert child.send(b"die ")
    started = time.monotonic()
    assert child.recv(30) is None
    assert time.monotonic() - started < 20
    assert not child.alive
    while child.returncode is None and time.monotonic() - started < 20:  # its pipes close before it can be reaped
        time.sleep(0.01)
    assert child.returncode == -9
    assert "last words" in child.stderr_tail()
    assert child.recv(30) is None
    assert not child.send(b"echo x")


def test_a_reply_written_before_death_arrives(child: Child) -> None:
    assert child.send(b"reply-and-die ")
    assert child.recv(20) == b"reply"
    assert child.recv(20) is None


@pytest.mark.parametrize("word", [b"garbage ", b"close "])
def test_a_broken_channel_ends_the_conversation(child: Child, word: bytes) -> None:
    assert child.send(word)
    assert child.recv(20) is None
    assert not child.alive


def test_send_to_a_child_that_does_not_read_times_out(child: Child) -> None:
    assert child.send(b"sleep ")
    started = time.monotonic()
    assert not child.send(b"x" * 4_000_000, timeout_s=0.5)
    assert time.monotonic() - started < 20


def test_kill_ends_the_group_and_is_idempotent(child: Child) -> None:
    assert child.send(b"sleep ")
    child.kill()
    child.kill()
    assert not child.alive
    assert not is_running(child.pid)


def test_no_descriptors_leak() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    for _ in range(3):
        with Child([*python(WORKER), str(ROOT)]) as worker:
            worker.send(b"echo x")
            assert worker.recv(20) == b"x"
    with pytest.raises(OSError):
        Child(["/no/such/program"])
    run(["/bin/true"], deadline_s=5)
    assert count() == before


def test_last_words_are_heard_of_a_child_whose_channel_closes_first() -> None:
    code = "import os, sys, time; os.close(int(sys.argv[-1])); time.sleep(0.1); print('last words', flush=True)"
    with Child(python(code)) as child:
        assert child.recv(30) is None
        assert "last words" in child.stderr_tail()


def test_worker_ends_when_its_parent_is_killed() -> None:
    """Even in the middle of work that never reads its pipe."""
    parent = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tools.proc import Child\n"
        f"c = Child([sys.executable, '-c', {WORKER!r}, {str(ROOT)!r}])\n"
        "c.send(b'echo x'); c.recv(20); c.send(b'sleep '); print(c.pid, flush=True); time.sleep(60)\n"
    )
    with Child(python(parent)) as outer:
        end = time.monotonic() + 20
        while not (text := outer.stderr_tail().strip()) and time.monotonic() < end:
            time.sleep(0.05)
        worker_pid = int(text)
        assert is_running(worker_pid)
        outer.kill()
        end = time.monotonic() + 10
        while is_running(worker_pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_running(worker_pid)


def killed_parent(tmp_path: Path, argv: list[str], threaded: bool) -> list[int]:
    """The processes that ``argv``'s own process noted in the file ``pids`` before whoever ran it was killed -9."""
    call = f"run({argv!r}, deadline_s=60, memory_bytes=1 << 40)"
    work = f"t = threading.Thread(target=lambda: {call}); t.start(); t.join()" if threaded else call
    code = f"import sys, threading; sys.path.insert(0, {str(ROOT)!r})\nfrom tools.proc import run\n{work}\n"
    parent = subprocess.Popen(python(code), cwd=tmp_path)
    pids = tmp_path / "pids"
    end = time.monotonic() + 20
    while not (pids.exists() and pids.read_text().endswith("\n")) and time.monotonic() < end:
        time.sleep(0.01)
    found = [int(word) for word in pids.read_text().split()]
    assert all(map(is_running, found))
    parent.kill()
    parent.wait()
    return found


def all_gone(pids: list[int], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_running, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
@pytest.mark.parametrize("threaded", [False, True], ids=["main thread", "other thread"])
def test_a_tool_ends_when_its_parent_is_killed(tmp_path: Path, threaded: bool) -> None:
    """compute-sanitizer, ncu or nvcc of an agent that got kill -9: none has a pipe whose end it would notice."""
    code = f"import os, time; open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    assert all_gone(killed_parent(tmp_path, python(code), threaded), within_s=5)


def test_a_tool_lives_as_long_as_the_call_that_started_it() -> None:
    """The signal comes when the thread that forked ends, so a call in a pool's thread must not lose its child early."""
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(run, ["/bin/sh", "-c", "sleep 0.2; echo whole"], deadline_s=20) for _ in range(4)]
        assert [call.result().stdout for call in calls] == [b"whole\n"] * 4
