"""Manifests that would leak a file, hang the program or could never run: one sentence each, when they are loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.test_families import MANIFEST, SOURCE, refusal, write
from tools.families import ManifestError, load_families, load_family, plans
from tools.manifest_files import MAX_INCLUDE_DEPTH

LAUNCH = MANIFEST["launch"]["launches"][0]


def launch(**changes: Any) -> dict[str, Any]:
    return {"launch": {**MANIFEST["launch"], "launches": [{**LAUNCH, **changes}]}}


# --- files that are not the family's ---------------------------------------------------------------------------------


def linked(folder: Path) -> None:
    (folder / "part.cuh").unlink()
    (folder / "part.cuh").symlink_to("/etc/passwd")


def linked_folder(folder: Path) -> None:
    (folder / "part.cuh").unlink()
    (folder / "sub").symlink_to("/etc")
    (folder / "kernel.cu").write_text('#include "sub/passwd"\n')


def linked_source(folder: Path) -> None:
    (folder / "kernel.cu").unlink()
    (folder / "kernel.cu").symlink_to("/etc/hostname")


def in_a_circle(folder: Path) -> None:
    (folder / "kernel.cu").unlink()
    (folder / "kernel.cu").symlink_to(folder / "kernel.cu")


@pytest.mark.parametrize("tamper", [linked, linked_folder, linked_source])
def test_links_out_of_the_folder(tmp_path: Path, tamper: Callable[[Path], None]) -> None:
    folder = write(tmp_path, MANIFEST)
    tamper(folder)
    with pytest.raises(ManifestError, match="lies outside kernels/fam and kernels/include") as caught:
        load_family(folder)
    assert "root:" not in str(caught.value)


@pytest.mark.parametrize("source", ["../../etc/passwd", "../other/kernel.cu", "sub/../../x.cu"])
def test_sources_out_of_the_folder(tmp_path: Path, source: str) -> None:
    (tmp_path / "fam" / "sub").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kernel.cu").write_text(SOURCE)
    assert "lies outside kernels/fam" in refusal(tmp_path, {**MANIFEST, "source": source})


def test_an_absolute_source(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="the kernel source /etc/passwd lies outside kernels/fam"):
        load_family(write(tmp_path, {**MANIFEST, "source": "/etc/passwd"}))


@pytest.mark.parametrize("source", ["", ".", 7, ["kernel.cu"], "a\0b", "x" * 5000])
def test_sources_that_are_no_file(tmp_path: Path, source: Any) -> None:
    refusal(tmp_path, {**MANIFEST, "source": source})


def test_links_within(tmp_path: Path) -> None:
    """A family's folder may be a link itself, and its files links to one another or to kernels/include."""
    folder = write(tmp_path / "elsewhere", MANIFEST)
    (tmp_path / "kernels" / "include").mkdir(parents=True)
    (tmp_path / "kernels" / "include" / "shared.cuh").write_text("#define SHARED 1\n")
    (tmp_path / "kernels" / "mine").symlink_to(folder)
    (folder / "part.cuh").unlink()
    (folder / "real.cuh").write_text('#include "shared.cuh"\n')
    (folder / "part.cuh").symlink_to("real.cuh")
    assert "#define SHARED 1" in load_family(tmp_path / "kernels" / "mine").source


def test_a_source_linked_to_itself(tmp_path: Path) -> None:
    folder = write(tmp_path, MANIFEST)
    in_a_circle(folder)
    with pytest.raises(ManifestError):
        load_family(folder)


# --- what would hang, or fill the memory -----------------------------------------------------------------------------


def test_too_many_combinations(tmp_path: Path) -> None:
    knobs = {f"K{n}": {"values": list(range(1, 11)), "doc": ""} for n in range(30)}
    text = refusal(tmp_path, {**MANIFEST, **launch(block=[1, 1, 1]), "knobs": {**MANIFEST["knobs"], **knobs}})
    assert "field 'knobs': about 10^31 combinations" in text
    six = {**MANIFEST["knobs"], **{f"K{n}": {"values": list(range(10)), "doc": ""} for n in range(4)}}
    six["BM"] = {"values": [32, 64, 96, 128], "doc": ""}
    assert "320000 combinations of values" in refusal(tmp_path, {**MANIFEST, "knobs": six})


def test_too_many_plans(tmp_path: Path) -> None:
    knobs = {**MANIFEST["knobs"], "LONG": {"values": list(range(5_000)), "doc": "", "runtime": True}}
    started = time.process_time()
    assert "more than 20000 plans" in refusal(tmp_path, {**MANIFEST, "knobs": knobs})
    assert time.process_time() - started < 5
    few = {**MANIFEST, "knobs": knobs, "constraints": [*MANIFEST["constraints"], "LONG < 100"]}
    assert len(list(plans(load_family(write(tmp_path, few))))) == 1600


def test_too_many_knobs(tmp_path: Path) -> None:
    knobs = {f"ONE{n}": {"values": [1], "doc": ""} for n in range(2000)}
    assert "at most 64" in refusal(tmp_path, {**MANIFEST, "knobs": {**MANIFEST["knobs"], **knobs}})


def chain(folder: Path, length: int) -> None:
    (folder / "part.cuh").write_text('#include "c0.cuh"\n')
    for n in range(length):
        (folder / f"c{n}.cuh").write_text(f'#include "c{n + 1}.cuh"\n' if n + 1 < length else "#define END 1\n")


def test_chains_of_includes(tmp_path: Path) -> None:
    folder = write(tmp_path, MANIFEST)
    chain(folder, MAX_INCLUDE_DEPTH - 1)
    assert "#define END 1" in load_family(folder).source
    chain(folder, 600)
    with pytest.raises(ManifestError, match="levels deep"):
        load_family(folder)


def test_includes_in_a_circle(tmp_path: Path) -> None:
    folder = write(tmp_path, MANIFEST)
    (folder / "part.cuh").write_text('#include "kernel.cu"\n#include "part.cuh"\n#define ONCE\n')
    source = load_family(folder).source
    assert source.count("__global__") == source.count("#define ONCE") == 1


def test_includes_that_add_up(tmp_path: Path) -> None:
    folder = write(tmp_path, MANIFEST)
    (folder / "kernel.cu").write_text("".join(f'#include "p{n}.cuh"\n' for n in range(3)) + SOURCE)
    for n in range(3):
        (folder / f"p{n}.cuh").write_text("x" * 400_000)
    with pytest.raises(ManifestError, match="larger than 1024 KiB"):
        load_family(folder)


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 5000, "nested too deeply"),
        ("a: " + "[" * 100 + "]" * 100, "nested more than 32 deep"),
        ("{a: " * 5000, "nested too deeply"),
        (BOMB, "more than 20000 values"),
        ("&a [*a]", "must be a mapping"),
        ("a: &a [*a]", "nested more than"),
        ("revision: " + "1" * 5000, "no number or date"),
        ("revision: 2026-13-45", "no number or date"),
        ("revision: 1\nrevision: 2\n", "line 2: 'revision' is given twice"),
        ("knobs: {BM: 1, BM: 2}", "'BM' is given twice"),
        ("1: 2\n", "names are words"),
        ("? [a]\n: b\n", "line 1"),
        ("a: [1", "line 1"),
        ("\0", "is not valid YAML"),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
        ("x" * 300_000, "larger than 256 KiB"),
    ],
    ids=lambda value: value[:20],
)
def test_yaml_that_is_no_manifest(tmp_path: Path, text: str, words: str) -> None:
    started = time.process_time()
    assert words in refusal(tmp_path, text)
    assert time.process_time() - started < 5


def test_manifests_that_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "a" / "family.yaml").mkdir(parents=True)
    with pytest.raises(ManifestError, match="is a folder, not a file"):
        load_families(tmp_path)
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / "family.yaml")
    with pytest.raises(ManifestError, match="is a pipe or a device"):
        load_family(tmp_path / "b")


# --- what could never run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"op": "conv"}, "field 'op': there is no operation 'conv'; there is hgemm"),
        ({"revision": 0}, "field 'revision'"),
        ({"revision": 10**30}, "field 'revision'"),
        ({"b_layouts": []}, "field 'b_layouts': name at least one"),
        ({"b_layouts": ["nk", "nk"]}, "field 'b_layouts': nk is given twice"),
        ({"knobs": {**MANIFEST["knobs"], "BM": {"values": [32, 64, 32], "doc": ""}}}, "'knobs.BM.values': 32 is given"),
        ({"knobs": {**MANIFEST["knobs"], "BM": {"values": [2**40], "doc": ""}}}, "is beyond 32 bits"),
        ({"knobs": {**MANIFEST["knobs"], "BM": {"values": [10**4000], "doc": ""}}}, "so many digits is beyond 32 bits"),
        ({"flags": ["-Xcompiler=-fplugin=x.so"]}, "field 'flags': the compiler flag"),
        ({"flags": ["-include", "/etc/passwd"]}, "field 'flags': the compiler flag '-include' is not allowed"),
        ({"accepts": ["K % 8 == 0", "K < 0"]}, "no plan can be launched at M=64, N=64, K=64: fam/nk"),
        ({"accepts": ["M > N"], "sanitize_dims": []}, None),
        ({"accepts": ["M > 2 * M"], "sanitize_dims": []}, "no plan can be launched at any shape that was tried"),
        ({"accepts": ["M // (N - N) > 0"]}, "divides by zero"),
        ({"accepts": ["D > 3"]}, "accepts 'D > 3' names unknown D"),
        ({"sanitize_dims": [{"M": 64, "N": 64, "K": 65}]}, "field 'sanitize_dims.0': no plan can be launched at"),
        ({"sanitize_dims": [{"M": 64, "N": 64}]}, "field 'sanitize_dims.0': K is missing"),
        ({"sanitize_dims": [{"M": 64, "N": 64, "K": 64, "D": 1}]}, "'sanitize_dims.0': hgemm has no dimension D"),
        ({"sanitize_dims": [{"M": 0, "N": 64, "K": 64}]}, "'sanitize_dims.0': M must be a positive integer"),
        (launch(entry="k2"), "no __global__ function 'k2'"),
        (launch(entry="k x"), "field 'launch.launches.0.entry': 'k x' is not the name of a kernel"),
        (launch(entry='"\ud800"'), "is not the name of a kernel"),
        (launch(args=["A", "B", "D"]), "'launch.launches.0.args.2': hgemm has no tensor 'D'; an argument is one of A"),
        (launch(args=[{"tensor_map": {"tensor": "Q", "dims": ["K", "M"], "box": [64, 64]}}]), "no tensor 'Q'"),
        (launch(smem_bytes=300_000), "a block has at most 232448"),
        (launch(smem_bytes=-1), "shared memory"),
        (launch(grid=[0, 1, 1]), "grid of k is 0 x 1 x 1; every size must be at least 1"),
        (launch(grid=["M - M", 1, 1]), "every size must be at least 1"),
        (launch(block=[2048, 1, 1]), "the limits are 1024 threads"),
        (launch(block=["ctas_per_sm", 1, 1]), "names 'ctas_per_sm', which is not defined"),
        (launch(cluster=[3, 1, 1], grid=[4, 1, 1]), "not a multiple of its cluster"),
        (launch(grid=["ctas_per_sm * sm_count", 1, 1]), None),
        ({"launch": {**MANIFEST["launch"], "constants": {"min": 1, "TILES": 1}}}, "constants min hide"),
        ({"launch": {**MANIFEST["launch"], "constants": {"a b": 1, "TILES": 1}}}, "'a b' cannot be a name"),
        ({"launch": {**MANIFEST["launch"], "workspace_bytes": -8}}, "need 0 <= state <= workspace"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_could_never_run(tmp_path: Path, changes: dict[str, Any], words: str | None) -> None:
    manifest = {**MANIFEST, **changes}
    if words is None:
        load_family(write(tmp_path, manifest))
    else:
        assert words in refusal(tmp_path, manifest)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("int k() { return 1; }", "no __global__ function"),
        ("// extern __global__ void k();\n", "no __global__ function"),
        ('extern "C" __global__ void other() { /* k */ }', "no __global__ function 'k'"),
        ('#include <stdio.h>\nextern "C" __global__ void k() {}', "'stdio.h' is not on the allow-list"),
        ('extern "C" __global__ void k() {}\nint main() {}', "a main function"),
        ("", "no __global__ function"),
    ],
)
def test_sources_that_could_never_run(tmp_path: Path, source: str, words: str) -> None:
    assert words in refusal(tmp_path, MANIFEST, source)


@pytest.mark.parametrize("name", ["a b", "ü", "-x", "x" * 65])
def test_names_of_folders(tmp_path: Path, name: str) -> None:
    with pytest.raises(ManifestError, match="cannot be a family's"):
        load_family(write(tmp_path, MANIFEST, name=name))


def test_the_packaged_families_load_quickly() -> None:
    load_families()
    started = time.process_time()
    load_families()
    assert time.process_time() - started < 0.6  # 0.15 s on a quiet machine
