"""The client of the GPU worker, against workers that are scripts: whose fault it is when no answer comes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.fakes import ScriptedDevice, raw_variant
from tools import cuda_device
from tools.cuda_device import CudaDevice
from tools.device import DeviceBroken
from tools.hgemm import hgemm
from tools.records import CompileResult, Reason, Status, Variant

TASK = hgemm(64, 64, 64)
VARIANT = raw_variant()
VERIFIED = ScriptedDevice().verify(VARIANT, TASK, "quick").model_dump(mode="json")

#: ``act`` does what a test wants after each request.
WORKER = """
import argparse, json, os, sys, time
from tools.frames import read_frame, write_frame
parser = argparse.ArgumentParser()
parser.add_argument("--in-fd", type=int)
parser.add_argument("--out-fd", type=int)
args = parser.parse_args()
def say(value):
    write_frame(args.out_fd, json.dumps(value).encode())
say({{"ready": True}})
while (frame := read_frame(args.in_fd)) is not None:
    request = json.loads(frame)
{body}
"""


class Scripted(CudaDevice):
    """A CudaDevice whose worker is ``body``, run for every request."""

    def __init__(self, body: str, folder: Path) -> None:
        super().__init__(cache_dir=folder)
        self.script = WORKER.format(body="\n".join(f"    {line}" for line in body.splitlines()))
        self.started = 0

    def _worker(self) -> list[str]:
        self.started += 1
        return [sys.executable, "-c", self.script]

    def compile(self, variant: Variant) -> CompileResult:
        return ScriptedDevice().compile(variant)

    def _cubin_path(self, compiled: CompileResult) -> Path:
        return Path("x.cubin")


STARTED = 'say({"started": True})\n'
ANSWER = f"say({{'record': json.loads({json.dumps(VERIFIED)!r}), 'restart': False}})"


def answering(text: str = ANSWER) -> str:
    return STARTED + text


def verify(body: str, folder: Path) -> tuple[Status, Reason | None, str]:
    with Scripted(body, folder) as device:
        result = device.verify(VARIANT, TASK, "quick")
        return result.status, result.reason, result.detail


def test_an_answer(tmp_path: Path) -> None:
    assert verify(answering(), tmp_path)[0] is Status.OK


def test_a_worker_that_dies_once_it_has_begun_was_killed_by_the_candidate(tmp_path: Path) -> None:
    status, reason, detail = verify(answering("os._exit(9)"), tmp_path)
    assert (status, reason) == (Status.FAILED, Reason.CRASH)
    assert detail == f"under {VARIANT.label} the worker died"


def test_silence_once_it_has_begun_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "VERIFY_TIMEOUT_S", 0.3)
    status, reason, detail = verify(answering("time.sleep(60)"), tmp_path)
    assert (status, reason) == (Status.FAILED, Reason.HANG)
    assert "gave no answer within 0 s" in detail


def test_a_worker_that_dies_while_it_waits_is_nobodys_fault(tmp_path: Path) -> None:
    with pytest.raises(DeviceBroken, match=r"its worker died before it began \(no lock for you\)"):
        verify('print("no lock for you", flush=True); os._exit(1)', tmp_path)


def test_waiting_for_the_gpu_is_not_counted_against_the_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_device, "VERIFY_TIMEOUT_S", 0.5)
    assert verify("time.sleep(1.0)\n" + answering(), tmp_path)[0] is Status.OK


def test_waiting_for_the_gpu_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "LOCK_TIMEOUT_S", 0.3)
    started = time.monotonic()
    with pytest.raises(DeviceBroken, match="has waited 0 min for the GPU"):
        verify("time.sleep(60)", tmp_path)
    assert time.monotonic() - started < 20


def test_what_the_worker_calls_broken_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(DeviceBroken, match="cuda:0 cannot answer: out of GPU memory"):
        verify(answering('say({"broken": "out of GPU memory", "restart": True})'), tmp_path)


def test_a_lost_worker_is_replaced(tmp_path: Path) -> None:
    body = STARTED + f"if request['depth'] == 'full': os._exit(9)\n{ANSWER}"
    with Scripted(body, tmp_path) as device:
        assert device.verify(VARIANT, TASK, "full").reason is Reason.CRASH
        assert device.verify(VARIANT, TASK, "quick").ok
        assert device.verify(VARIANT, TASK, "quick").ok
        assert device.started == 2


def test_without_a_candidate_a_lost_worker_is_broken_machinery(tmp_path: Path) -> None:
    with Scripted(answering("os._exit(9)"), tmp_path) as device:
        with pytest.raises(DeviceBroken, match="cuda:0 cannot answer: the worker died"):
            device.baselines(TASK, "offline", "screen")
        with pytest.raises(DeviceBroken, match="the worker died"):
            _ = device.info


def test_the_worker_gets_no_secrets_and_finds_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-for-kernels")
    body = answering('say({"broken": str(os.environ.get("OPENAI_API_KEY")), "restart": False})')
    with pytest.raises(DeviceBroken, match="cannot answer: None"):
        verify(body, tmp_path)


# --- several at once ------------------------------------------------------------------------------------------------

SEVERAL = """
assert request["op"] == "verify_many" and [c["cubin"] for c in request["candidates"]] == ["x.cubin"] * 2
record = {"results": [json.loads(%r)] * 2, "baselines": None}
say({"record": record, "restart": False})
"""


def several(body: str, folder: Path) -> tuple[list[Status] | None, int]:
    """Twice the same candidate, and then once more alone; how often a worker was started."""
    with Scripted(body, folder) as device:
        found = device.verify_many([VARIANT, VARIANT], TASK, "quick")
        statuses = None if found is None else [result.status for result in found]
        return statuses, device.started


def test_several_at_once_have_an_answer_each(tmp_path: Path) -> None:
    body = answering(SEVERAL % json.dumps(VERIFIED))
    assert several(body, tmp_path) == ([Status.OK, Status.OK], 1)


@pytest.mark.parametrize(
    "body", ['say({"declined": "one of them is wrong", "restart": True})', "os._exit(9)", "time.sleep(60)"]
)
def test_several_at_once_are_never_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Whatever happens: nobody knows which of them it was."""
    monkeypatch.setattr(cuda_device, "VERIFY_TIMEOUT_S", 0.3)
    assert several(answering(body), tmp_path) == (None, 1)


def test_after_several_at_once_came_to_nothing_one_alone_is_asked_for(tmp_path: Path) -> None:
    body = answering(f'if request["op"] == "verify_many":\n    os._exit(9)\n{ANSWER}')
    with Scripted(body, tmp_path) as device:
        assert device.verify_many([VARIANT, VARIANT], TASK, "quick") is None
        assert device.verify(VARIANT, TASK, "quick").ok
        assert device.started == 2
