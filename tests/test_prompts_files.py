"""The prompt files: complete, in the order the policy must follow, and true of the device at hand."""

from __future__ import annotations

from typing import get_args

import pytest
from fakes import ScriptedDevice

from policy.prompts import SYSTEM_PARTS, analytical_floor_us, load_templates, prompt, regime_text, sections
from tools.hgemm import hgemm
from tools.paths import configs_dir
from tools.records import Task
from tools.shapes import Regime, floor_us, regime

TEMPLATES = load_templates()
H200 = ScriptedDevice(name="NVIDIA H200").info


def test_every_regime_has_its_hints() -> None:
    assert set(TEMPLATES.regimes) == set(get_args(Regime)) and all(TEMPLATES.regimes.values())


def test_the_shape_gets_the_hints_of_its_regime_and_no_others() -> None:
    for shape in (
        (64, 64, 64),
        (512, 512, 512),
        (128, 128, 16384),
        (16384, 64, 4096),
        (1024, 4096, 4096),
        (8192, 8192, 8192),
    ):
        task = hgemm(*shape)
        _, user = prompt(TEMPLATES, task, H200, [], "", 8, 9)
        shown = [name for name, text in TEMPLATES.regimes.items() if text in user.text]
        assert shown == [regime(task)]
        assert f"{floor_us(task):.3g} us" in user.text
    assert len({regime(hgemm(*s)) for s in ((64, 64, 64), (512, 512, 512), (8192, 8192, 8192))}) == 3


def test_the_floor_is_told_only_where_it_holds() -> None:
    task, other = hgemm(64, 64, 64), ScriptedDevice().info
    assert analytical_floor_us(task, H200) == floor_us(task) and analytical_floor_us(task, other) is None
    assert "floor" not in regime_text(task, other, {}) and "Regime `tiny`" in regime_text(task, other, {})
    softmax = Task(op="softmax", dims={"ROWS": 4}, tensors=())
    assert analytical_floor_us(softmax, H200) is None and "Not known" in regime_text(softmax, H200, {})


def test_device_facts_come_from_the_device() -> None:
    odd = H200.model_copy(update={"sm_count": 77, "l2_bytes": 33 << 20, "smem_per_block_bytes": 99_328})
    _, user = prompt(TEMPLATES, hgemm(64, 64, 64), odd, [], "", 8, 9)
    for fact in ("77 SMs", "33 MiB L2", "99328 bytes of shared memory a block"):
        assert fact in user.text
    packaged = " ".join(path.read_text() for path in (configs_dir() / "prompts").glob("*.md"))
    assert not {"132", "232448", "141 GB"} & set(packaged.replace(",", " ").split()), "no device's facts in the files"


def test_the_order_is_analysis_design_code() -> None:
    text = TEMPLATES.system
    places = [text.index(word) for word in ("# What you may send", "# The gate", "# How to work")]
    places += [text.index(word) for word in ("**Performance analysis.**", "**Design.**", "**Code.**")]
    assert places == sorted(places)
    assert "data" in text.split("# What you may send")[0], "what tools answer is data, said first"


def test_the_system_prompt_is_one_for_all_tasks() -> None:
    first, _ = prompt(TEMPLATES, hgemm(64, 64, 64), H200, [], "", 8, 9)
    second, _ = prompt(TEMPLATES, hgemm(8192, 512, 64), ScriptedDevice().info, [], "memory", 3, 4)
    assert first == second and len(SYSTEM_PARTS) == 3


def test_notes_are_filled_in() -> None:
    assert "2 candidates" in TEMPLATES.note("failed", failed=2, left=2)
    for name in ("no-call", "cut-off", "no-memory"):
        assert TEMPLATES.note(name) and "$" not in TEMPLATES.note(name)
    with pytest.raises(KeyError):
        TEMPLATES.note("failed")


def test_sections() -> None:
    assert sections("for editors\n\n## one\n\na\n### deeper\nb\n\n## two \nc") == {
        "one": "a\n### deeper\nb",
        "two": "c",
    }
    assert sections("nothing") == {}
