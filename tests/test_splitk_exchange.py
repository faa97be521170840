"""wgmma_splitk on the CPU: its own source, compiled for the host, with stand-ins for what is PTX.

The ring runs as threads, one for the producer and one for lane 0 of each warp: every wgmma finds the step that is due
where its descriptors point, and nothing is loaded over what is still being read. Then the exchange, thread after
thread: each part is sent and read at one place inside the workspace, each output stored, and the state left as it was
found. It shows nothing about swizzles, fragments or memory order.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.families import load_families, plans, render
from tools.hgemm import hgemm
from tools.launching import ConcreteTensorMap, accepts, resolve
from tools.records import Plan

FAMILY = load_families()["wgmma_splitk"]
#: Tails; two splits of a step or two; more than 16 splits; splits that do not divide the chunks or the steps.
SHAPES = ((72, 136, 136), (40, 264, 520), (72, 200, 8216), (200, 328, 1304), (65, 1032, 1800))
#: As many tiles along M as RASTER_BLOCK takes.
TALL = ((904, 136, 136), (904, 264, 520), (936, 200, 392), (1000, 136, 1304), (1032, 392, 264), (1000, 264, 1304))

HOST, MAIN = ((Path(__file__).parent / "data" / f"splitk_{name}.h").read_text() for name in ("host", "main"))


STAND_INS = (
    *("mbar_init", "mbar_expect", "mbar_arrive", "mbar_wait", "tma_load", "wgmma_commit", "wgmma_wait"),
    *("pack_half2", "load_part", "store_part", "count_up", "load_counter"),
)


def without_ptx(source: str) -> str:
    """Without asm statements; of the functions that have a stand-in on the host, under another name."""
    out, at = [], 0
    for match in re.finditer(r"\basm\b( volatile)?\s*\(", source):
        if match.start() < at:
            continue
        out.append(source[at : match.start()])
        start = match.start()
        depth, at, quoted = 1, match.end(), False
        while depth:
            char = source[at]
            if char == '"' and source[at - 1] != "\\":
                quoted = not quoted
            depth += 0 if quoted else (char == "(") - (char == ")")
            at += 1
        if "wgmma.mma_async" in source[start:at]:
            out.append("on_mma(d, a, b)")
    text = "".join(out) + source[at:]
    for name in STAND_INS:
        text, found = re.subn(rf"^DEVICE (\w+) {name}\(", rf"DEVICE \1 {name}_of_the_gpu(", text, flags=re.MULTILINE)
        assert found, name
    changes = (
        ("extern __shared__ __align__(1024) unsigned char shared[];", "unsigned char* shared = shared_of_cta.data();"),
        ("  multiply(acc, ", "  if (phase == 0) multiply(acc, "),
        ("  send(acc, ", "  after_multiply(acc);\n  if (phase == 1) send(acc, "),
        ("  receive(reinterpret_cast", "  if (phase == 2) receive(reinterpret_cast"),
    )
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def some_plans() -> list[Plan]:
    """Both layouts, one and two warpgroups, 8 to 32 chunks of columns."""
    tiles = (("nk", 64, 64), ("nk", 64, 96), ("kn", 64, 192), ("kn", 128, 128), ("nk", 128, 256))
    found = [p for p in plans(FAMILY) if (p.b_layout, p.knobs["BM"], p.knobs["BN"]) in tiles]
    return [p for p in found if not p.knobs["RASTER_BLOCK"] or p.knobs["BN"] in (64, 128)]


@pytest.mark.parametrize("plan", some_plans(), ids=lambda plan: plan.label.replace(" ", ","))
def test_every_part_is_sent_read_and_stored(plan: Plan, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    variant = render(FAMILY, plan)
    macros, _, source = variant.source.partition("#pragma nv_diag")
    (tmp_path / "host.cpp").write_text(macros + HOST + "#pragma nv_diag" + without_ptx(source) + MAIN)
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [compiler, "-std=c++17", "-O1", "-w", "-pthread", *checks, "host.cpp"]
    subprocess.run([*command, "-o", "host"], cwd=tmp_path, check=True)
    shapes = TALL if plan.knobs["RASTER_BLOCK"] else SHAPES
    taken = [shape for shape in shapes if accepts(variant, hgemm(*shape)) is None]
    assert len(taken) >= 3
    for shape in taken:
        spec = resolve(variant, hgemm(*shape), 132, lambda *_: (1, 132))
        launch = spec.launches[0]
        numbers = [arg.value for arg in launch.args if not isinstance(arg.value, ConcreteTensorMap | str | None)]
        assert numbers[:2] == list(shape[:2])
        values = [*shape, *launch.grid, launch.smem_bytes, spec.workspace_bytes, spec.state_bytes, *numbers[2:]]
        done = subprocess.run(["./host", *map(str, values)], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stdout == "ok\n", (shape, done.stdout, done.stderr[-2000:])
