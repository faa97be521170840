"""`agent check` and device names: files and names that are none, on a machine without GPU and compiler."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_cli import KERNEL, LAUNCH
from typer.testing import CliRunner

from agent import checking, devices
from agent.cli import app
from agent.devices import check_gpu, open_device, resolve
from agent.errors import UsageError
from tools.hgemm import hgemm
from tools.records import Status
from tools.toolchain import Toolchain
from tools.visible_gpus import VisibleGpu, visible_gpus

ONE: dict[str, Any] = LAUNCH["launches"][0]
TASK = hgemm(64, 64, 64)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "k.cu").write_text(KERNEL)
    (tmp_path / "l.json").write_text(json.dumps(LAUNCH))
    return tmp_path / "k.cu", tmp_path / "l.json"


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(5 << 30)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("tamper", [endless, pipe, huge, lambda path: path.write_bytes(b"\xff\xfe")])
def test_files_that_are_none(files: tuple[Path, Path], which: int, tamper: Callable[[Path], object]) -> None:
    tamper(files[which])
    started = time.monotonic()
    with pytest.raises(UsageError) as caught:
        checking.load_variant(*files, "nk")
    assert str(files[which]) in str(caught.value) and time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "is nested too deeply"),
        ("[]", "is not a launch spec: must be a mapping of fields"),
        ("1" * 5000, "number of too many digits"),
        (json.dumps({"launches": [{**ONE, "entry": "\ud800"}]}), "is not the name of a kernel"),
        (json.dumps({"launches": [{**ONE, "entry": "a b"}]}), "'a b' is not the name of a kernel"),
    ],
    ids=lambda value: value[:20],
)
def test_launch_specs_that_are_none(files: tuple[Path, Path], text: str, words: str) -> None:
    files[1].write_text(text)
    with pytest.raises(UsageError) as caught:
        checking.load_variant(*files, "nk")
    assert words in str(caught.value)


def checked(files: tuple[Path, Path], **changes: Any) -> checking.CheckReport:
    files[1].write_text(json.dumps({**LAUNCH, "launches": [{**ONE, **changes}]}))
    device = open_device("replay:h200", compile_really=True)
    try:
        variant = checking.load_variant(*files, "nk")
        return checking.check(device, variant, TASK, full=True, modes=("offline",))
    finally:
        device.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": [0, 1, 1]}, "every size must be at least 1"),
        ({"grid": ["Q", 1, 1]}, "names 'Q', which is not defined"),
        ({"block": [4096, 1, 1]}, "the limits are 1024 threads"),
        ({"smem_bytes": 10**6}, "a block has at most 232448"),
        ({"grid": [10**400, 1, 1]}, "an integer leaves the 62-bit range"),
        ({"args": ["A", "B", "D"]}, "names tensor 'D'"),
        ({"grid": ["ctas_per_sm * sm_count", 1, 1]}, ""),
    ],
)
def test_a_launch_is_resolved_without_a_gpu(
    files: tuple[Path, Path], changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.toolchain.find_toolchain", Toolchain)
    report = checked(files, **changes)
    if words:
        (stage,) = report.stages
        assert (stage.name, stage.status, report.verdict) == ("launch", Status.FAILED, "rejected")
        assert words in stage.sentence and report.exit_code == 2
    else:
        assert report.stages[0].name == "compile"


def test_host_code_alone_is_rejected_without_a_compiler(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.toolchain.find_toolchain", Toolchain)
    files[0].write_text("int f() { return 1; }\n")
    report = checked(files)
    assert (report.verdict, report.stages[-1].reason) == ("rejected", "missing_entry")
    files[0].write_text(KERNEL)
    report = checked(files)
    assert report.verdict == "incomplete" and "nvcc is missing" in report.stages[-1].sentence


# --- names of devices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["replay:~nouser/x", "replay:", "cuda:x", "cuda:\u0661", "gpu", ""])
def test_names_that_lead_nowhere(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(spec)
    assert "replay:h200" in str(caught.value)


@pytest.mark.skipif(bool(visible_gpus()), reason="there is a GPU")
@pytest.mark.parametrize("command", ["optimize", "record"])
def test_a_gpu_where_there_is_none(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_DRIVER_FILES", ())
    monkeypatch.setenv("HGEMM_AGENT_HOME", str(tmp_path / "home"))
    more = ["--shape", "64,64,64"] if command == "optimize" else ["--out", str(tmp_path / "x"), "--deadline", "5"]
    done = CliRunner().invoke(app, [command, "--device", "cuda:0", *more])
    assert done.exit_code == 1
    assert "this machine has none: use " in done.stderr and "pip" not in done.stderr
    assert ("--device replay:h200" in done.stderr) == (command == "optimize"), "records are not made from records"
    assert not (tmp_path / "home").exists()


def test_a_gpu_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: [VisibleGpu(n, "H200", (9, 0)) for n in range(2)])
    monkeypatch.setattr(devices, "missing_gpu_modules", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check_gpu("cuda:1")
    with pytest.raises(UsageError, match="there is no cuda:2: this machine has cuda:0, cuda:1"):
        check_gpu("cuda:2")
