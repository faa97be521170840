"""The toolchain's search order, and what ``agent doctor`` says of a machine."""

from __future__ import annotations

import stat
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from agent.doctor import Check, Gpus, diagnose, look_for_gpus
from tools.toolchain import HOW_TO_INSTALL, TOOL_NAMES, Tool, Toolchain, find_toolchain, how_to_install

H200 = Gpus(driver="580.159.04", cuda=(13, 0), names=("NVIDIA H200",), capabilities=((9, 0),))


def program(path: Path, output: str = "Version 1.2.3") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'X'\n{output}\nX\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# --- toolchain -------------------------------------------------------------------------------------------------------


def test_search_order(tmp_path: Path) -> None:
    on_path = program(tmp_path / "bin" / "nvcc")
    cuda_home = program(tmp_path / "cuda" / "bin" / "nvcc")
    setting = program(tmp_path / "mine" / "nvcc")
    environ = {"PATH": str(on_path.parent), "CUDA_HOME": str(tmp_path / "cuda")}

    def found(settings: dict[str, str], environ: dict[str, str]) -> Path | None:
        tool = find_toolchain(settings, environ).nvcc
        return tool.path if tool else None

    assert found({"nvcc": str(setting)}, environ) == setting
    assert found({}, environ) == on_path
    assert found({}, {**environ, "PATH": str(tmp_path)}) == cuda_home
    assert found({"nvcc": str(tmp_path / "gone")}, environ) is None  # not another copy unasked


def test_a_file_that_cannot_be_run_is_passed_over(tmp_path: Path) -> None:
    plain = tmp_path / "cuda" / "bin" / "ncu"
    plain.parent.mkdir(parents=True)
    plain.write_text("not a program")
    ncu = find_toolchain({}, {"PATH": "", "CUDA_HOME": str(tmp_path / "cuda")}).ncu
    assert ncu is None or ncu.path != plain


def test_the_sanitizer_lives_in_a_folder_of_its_own(tmp_path: Path) -> None:
    path = program(tmp_path / "compute-sanitizer" / "compute-sanitizer")
    found = find_toolchain({}, {"PATH": "", "CUDA_HOME": str(tmp_path)}).sanitizer
    assert found == Tool("compute-sanitizer", path)


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ("nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\nBuild x", "13.0.88"),
        ("NVIDIA (R) Compute Sanitizer\nVersion 2025.3.1.0 (build 36565053) (public-release)", "2025.3.1.0"),
        ("NVIDIA (R) Nsight Compute Command Line Profiler\nVersion 2025.3.1.0 (build 36398880)", "2025.3.1.0"),
        ("hello", "unknown"),
    ],
)
def test_versions(output: str, version: str, tmp_path: Path) -> None:
    assert Tool("x", program(tmp_path / "x", output)).version == version


def test_a_replaced_program_is_asked_again(tmp_path: Path) -> None:
    tool = Tool("x", program(tmp_path / "x", "Version 1.0.0"))
    assert tool.version == "1.0.0"
    program(tmp_path / "x", "Version 2.0.0 of it")
    assert tool.version == "2.0.0"
    tool.path.unlink()
    assert tool.version == "unknown"


def test_cutlass_from_a_checkout(tmp_path: Path) -> None:
    include = tmp_path / "include"
    for name, text in (
        ("cute/tensor.hpp", ""),
        ("cutlass/version.h", "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 1\n"),
    ):
        (include / name).parent.mkdir(parents=True, exist_ok=True)
        (include / name).write_text(text)
    for setting in (tmp_path, include):
        found = find_toolchain({"cutlass": str(setting)}).cutlass
        assert found is not None
        assert (found.path, found.version) == (include, "4.2.1")
    assert find_toolchain({"cutlass": str(tmp_path / "gone")}).cutlass is None


def test_every_tool_has_a_command() -> None:
    for name in (*TOOL_NAMES, "cutlass", "g++"):
        assert "install" in HOW_TO_INSTALL[name]
        assert how_to_install(name).startswith(f"{name} is missing; install it with: ")


# --- doctor ----------------------------------------------------------------------------------------------------------


def checks(tmp_path: Path, **options: object) -> dict[str, Check]:
    base = {"toolchain": Toolchain(), "gpus": Gpus(why="no driver"), "environ": {}, "home": tmp_path}
    found = diagnose(**{**base, "records": tmp_path / "none.sqlite", **options})  # type: ignore[arg-type]
    assert len({c.name for c in found}) == len(found)
    return {c.name: c for c in found}


def test_what_is_missing_has_a_fix(tmp_path: Path) -> None:
    found = checks(tmp_path)
    for check in found.values():
        assert check.detail
        assert "\n" not in check.detail
        assert check.ok or check.fix, check.name
    assert not found["nvcc"].ok and "pip install" in found["nvcc"].fix
    assert not found["ncu"].ok and "apt-get" in found["ncu"].fix
    assert found["python"].ok == (sys.version_info[:2] in ((3, 11), (3, 12)))


def test_tools_that_are_there(tmp_path: Path) -> None:
    nvcc = Tool("nvcc", program(tmp_path / "nvcc", "release 13.0, V13.0.88"))
    found = checks(tmp_path, toolchain=Toolchain(nvcc=nvcc))
    assert found["nvcc"].ok and found["nvcc"].detail.startswith("13.0.88 at ")
    assert not found["compute-sanitizer"].ok


def test_home(tmp_path: Path) -> None:
    assert checks(tmp_path, home=tmp_path / "not" / "yet")["home"].ok
    assert not (tmp_path / "not").exists()  # looking changes nothing
    (tmp_path / "file").write_text("")
    blocked = checks(tmp_path, home=tmp_path / "file" / "home")["home"]
    assert not blocked.ok and "HGEMM_AGENT_HOME" in blocked.fix and blocked.needed


def test_records(tmp_path: Path) -> None:
    (tmp_path / "torn.sqlite").write_bytes(b"SQLite format 3\0 and then nothing")
    for name in ("none.sqlite", "torn.sqlite"):
        check = checks(tmp_path, records=tmp_path / name)["records"]
        assert not check.ok and check.needed and check.fix
        assert name in check.detail


@pytest.mark.parametrize(
    ("gpus", "driver", "gpu", "words"),
    [
        (Gpus(why="no NVIDIA driver answers"), False, False, "replay:h200 works without"),
        (Gpus(driver="580", cuda=(13, 0)), True, False, "shows no GPU"),
        (Gpus("580", (13, 0), ("NVIDIA A100",), ((8, 0),)), True, False, "compute capability 9.0"),
        (H200, True, True, "NVIDIA H200 (sm_90)"),
    ],
)
def test_driver_and_gpu_are_told_apart(gpus: Gpus, driver: bool, gpu: bool, words: str, tmp_path: Path) -> None:
    found = checks(tmp_path, gpus=gpus)
    assert (found["NVIDIA driver"].ok, found["GPU"].ok) == (driver, gpu)
    assert words in found["GPU"].detail
    assert not found["GPU"].needed


@pytest.mark.parametrize(("cuda", "extra"), [((12, 4), "cuda12"), ((13, 0), "cuda13"), (None, "cuda13")])
def test_the_extra_follows_the_driver(cuda: tuple[int, int] | None, extra: str, tmp_path: Path) -> None:
    missing = [c for c in checks(tmp_path, gpus=Gpus(driver="5", cuda=cuda)).values() if "not installed" in c.detail]
    for check in missing:
        if check.name in ("cupy", "cuda-bindings", "torch"):
            assert f"[{extra}]" in check.fix


def test_keys_are_named_and_never_shown(tmp_path: Path) -> None:
    secret = "sk-ant-do-not-print"
    if find_spec("anthropic") is None or find_spec("openai") is None:
        pytest.skip("the clients are not installed")
    found = checks(tmp_path, environ={"ANTHROPIC_API_KEY": secret})
    assert "ANTHROPIC_API_KEY" in found["policy anthropic"].detail and found["policy anthropic"].ok
    assert not found["policy openai"].ok and "OPENAI_API_KEY" in found["policy openai"].fix
    assert secret not in repr(found)


def test_looking_for_gpus_never_raises() -> None:
    found = look_for_gpus()
    assert (found.driver is None) == bool(found.why)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/nvcc", "x" * 5000, "a\0b"])
def test_settings_that_lead_nowhere_count_as_missing(name: str) -> None:
    found = find_toolchain({"nvcc": name, "cutlass": name}, {"PATH": "", "CUDA_HOME": "/" + "x" * 5000})
    assert found.nvcc is None and found.cutlass is None


def test_a_home_that_cannot_be(tmp_path: Path) -> None:
    for home in (Path("/dev/null/home"), tmp_path / ("x" * 5000)):
        check = next(c for c in diagnose(home=home) if c.name == "home")
        assert not check.ok and check.needed and "cannot be written" in check.detail


def test_a_compiler_that_does_not_answer(tmp_path: Path) -> None:
    broken = Toolchain(nvcc=Tool("nvcc", program(tmp_path / "nvcc", "no licence")))
    check = next(c for c in diagnose(toolchain=broken) if c.name == "nvcc")
    assert not check.ok and "does not answer `--version`" in check.detail and check.fix
