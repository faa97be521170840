"""Manifests: what a sound one gives, and one sentence for every way of writing a broken one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.expr import evaluate
from tools.families import (
    ManifestError,
    accepted_plans,
    load_families,
    load_family,
    plans,
    render,
    validate_plan,
)
from tools.hgemm import hgemm
from tools.launching import accepts
from tools.manifest_files import inline_includes
from tools.records import Family, Plan

MANIFEST: dict[str, Any] = {
    "revision": 3,
    "summary": "a family for tests",
    "op": "hgemm",
    "b_layouts": ["nk", "kn"],
    "knobs": {
        "BM": {"values": [32, 64, 128], "doc": "rows"},
        "STAGES": {"values": [2, 3], "doc": "depth"},
        "ORDER": {"values": [0, 1], "doc": "raster", "runtime": True},
    },
    "constraints": ["BM * STAGES <= 256", "B_NK or BM >= 64"],
    "accepts": ["K % 8 == 0"],
    "launch": {
        "constants": {"TILES": "ceil_div(M, BM)"},
        "launches": [
            {
                "entry": "k",
                "grid": ["TILES", 1, 1],
                "block": ["BM", 1, 1],
                "smem_bytes": "BM * STAGES * 64",
                "args": ["A", "B", "C", {"i32": "ORDER"}],
            }
        ],
    },
    "flags": ["-DX=1"],
    "sanitize_dims": [{"M": 64, "N": 64, "K": 64}],
}
SOURCE = '#include "part.cuh"\nextern "C" __global__ void k() {}\n'


def write(root: Path, manifest: Any, source: str | bytes = SOURCE, name: str = "fam") -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    text = manifest if isinstance(manifest, str) else yaml.safe_dump(manifest, sort_keys=False)
    (folder / "family.yaml").write_text(text)
    if isinstance(source, bytes):
        (folder / "kernel.cu").write_bytes(source)
    else:
        (folder / "kernel.cu").write_text(source)
    (folder / "part.cuh").write_text("#pragma once\n#define PART 1\n")
    return folder


def loaded(root: Path, **changes: Any) -> Family:
    return load_family(write(root, {**MANIFEST, **changes}))


def refusal(root: Path, manifest: Any, source: str | bytes = SOURCE) -> str:
    with pytest.raises(ManifestError) as caught:
        load_family(write(root, manifest, source))
    text = str(caught.value)
    assert "\n" not in text
    assert str(root) in text  # says which file
    return text


# --- a sound manifest ------------------------------------------------------------------------------------------------


def test_a_family(tmp_path: Path) -> None:
    family = loaded(tmp_path)
    assert (family.name, family.revision, family.op) == ("fam", 3, "hgemm")
    assert family.source == '#define PART 1\n\nextern "C" __global__ void k() {}\n'
    assert Family.from_json(family.to_json()) == family


def test_plans_are_the_combinations_that_keep_the_constraints(tmp_path: Path) -> None:
    family = loaded(tmp_path)
    found = list(plans(family))
    brute = [
        {"BM": bm, "STAGES": stages, "ORDER": order, "B_NK": nk}
        for nk, bm, stages, order in itertools.product((1, 0), (32, 64, 128), (2, 3), (0, 1))
    ]
    kept = [env for env in brute if all(evaluate(c, env) for c in family.constraints)]
    assert [{**p.knobs, "B_NK": int(p.b_layout == "nk")} for p in found] == kept
    assert len({p.plan_id for p in found}) == len(found) == 16
    assert {p.revision for p in found} == {3}


def test_rendering(tmp_path: Path) -> None:
    family = loaded(tmp_path)
    plan = validate_plan(family, "nk", {"ORDER": 1, "BM": 64, "STAGES": 2})
    variant = render(family, plan)
    assert variant.source.startswith("#define BM 64\n#define STAGES 2\n#define B_NK 1\n#define PART 1\n")
    assert "ORDER" not in variant.source  # a run-time knob only reaches the launch arguments
    assert variant.launch.constants == {"BM": 64, "STAGES": 2, "ORDER": 1, "TILES": "ceil_div(M, BM)"}
    assert (variant.flags, variant.accepts, variant.key) == (("-DX=1",), ("K % 8 == 0",), plan.plan_id)
    assert list(plan.knobs) == ["BM", "STAGES", "ORDER"]  # in the manifest's order, whatever was given
    other = render(family, validate_plan(family, "nk", {"ORDER": 0, "BM": 64, "STAGES": 2}))
    assert other.source == variant.source
    assert other.variant_id != variant.variant_id


def test_a_new_revision_is_another_plan(tmp_path: Path) -> None:
    one, two = loaded(tmp_path / "a"), loaded(tmp_path / "b", revision=4)
    assert next(plans(one)).plan_id != next(plans(two)).plan_id


def test_the_packaged_families() -> None:
    families = load_families()
    assert {"plain_tiled", "mma_cpasync", "wgmma_persistent"} <= set(families)
    for family in families.values():
        assert next(plans(family))
        assert '#include "' not in family.source
        assert family.summary
        for plan in itertools.islice(plans(family), 3):
            assert validate_plan(family, plan.b_layout, dict(plan.knobs)) == plan


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (64, 64, 64), (1000, 33, 17), (16384, 16384, 16384)])
def test_every_shape_has_a_plan(shape: tuple[int, int, int]) -> None:
    task = hgemm(*shape)
    found = accepted_plans(load_families(), task)
    assert {v.b_layout for v in found} == {"nk", "kn"}
    assert all(accepts(v, task) is None for v in found)


def test_sanitize_dims_are_shapes_the_family_takes() -> None:
    for family in load_families().values():
        assert family.sanitize_dims, family.name
        for dims in family.sanitize_dims:
            task = hgemm(dims["M"], dims["N"], dims["K"])
            assert any(accepts(render(family, p), task) is None for p in plans(family)), (family.name, dims)


# --- broken manifests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"knobz": {}}, "field 'knobz'"),
        ({"revision": "new"}, "field 'revision'"),
        ({"b_layouts": ["tn"]}, "b_layouts"),
        ({"knobs": {"BM": {"values": [], "doc": ""}}}, "knobs.BM.values"),
        ({"knobs": {"bm": {"values": [1], "doc": ""}}}, "'bm' cannot be a knob name"),
        ({"knobs": {"M": {"values": [1], "doc": ""}}}, "'M' cannot be a knob name"),
        ({"knobs": {"B_NK": {"values": [1], "doc": ""}}}, "'B_NK' cannot be a knob name"),
        ({"knobs": {**MANIFEST["knobs"], "BN": {"values": [1.5], "doc": ""}}}, "knobs.BN.values"),
        ({"constraints": ["BN > 3"]}, "constraint 'BN > 3' names unknown BN"),
        ({"constraints": ["M > 3"]}, "names unknown M"),
        ({"constraints": ["BM >"]}, "not an arithmetic expression"),
        ({"constraints": ["__import__('os')"]}, "not an arithmetic expression"),
        ({"constraints": ["BM > 1000"]}, "constraint 'BM > 1000' never holds"),
        ({"constraints": ["BM == 32", "BM == 64"]}, "rule out every combination"),
        ({"constraints": ["STAGES % (BM - 32) < 99"]}, "divides by zero"),
        ({"accepts": ["Q == 1"]}, "accepts 'Q == 1' names unknown Q"),
        ({"accepts": ["ctas_per_sm > 1"]}, "names unknown ctas_per_sm"),
        ({"accepts": ["K / 8"]}, "not an arithmetic expression"),
        ({"launch": {**MANIFEST["launch"], "constants": {"BM": 1}}}, "constants BM hide"),
        ({"launch": {**MANIFEST["launch"], "constants": {"sm_count": 1}}}, "constants sm_count hide"),
        ({"launch": {**MANIFEST["launch"], "constants": {"K": 64}}}, "constants K hide"),
        ({"launch": {**MANIFEST["launch"], "constants": {"TILES": "M // BQ"}}}, "names unknown BQ"),
        ({"launch": {**MANIFEST["launch"], "workspace_bytes": "Z"}}, "names unknown Z"),
        ({"launch": {"launches": []}}, "launch.launches"),
        ({"launch": {"launches": [{"entry": "k", "grid": [1, 1], "block": [1, 1, 1], "args": []}]}}, "grid"),
        (
            {"launch": {"launches": [{"entry": "k", "grid": [1, 1, 1], "block": [1, 1, 1], "args": [{"i8": 1}]}]}},
            "args",
        ),
        ({"source": "other.cu"}, "other.cu does not exist"),
    ],
)
def test_each_mistake_is_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    if "launch" in changes and "constants" not in changes["launch"]:
        changes = {**changes, "accepts": []}
    assert words in refusal(tmp_path, {**MANIFEST, **changes})


def test_a_missing_field(tmp_path: Path) -> None:
    manifest = {k: v for k, v in MANIFEST.items() if k != "launch"}
    assert "field 'launch'" in refusal(tmp_path, manifest)


@pytest.mark.parametrize("text", ["a: [1", "- a\n- b\n", "just text", ""])
def test_files_that_are_no_manifest(text: str, tmp_path: Path) -> None:
    refusal(tmp_path, text)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no kernel families under"):
        load_families(tmp_path)
    with pytest.raises(ManifestError, match=r"family\.yaml does not exist"):
        load_family(tmp_path / "nothing")


def test_a_constraint_may_divide_where_another_forbids_zero(tmp_path: Path) -> None:
    family = loaded(tmp_path, constraints=["BM != 32", "STAGES % (BM - 32) == 0 or BM > 32"])
    assert {p.knobs["BM"] for p in plans(family)} == {64, 128}
    with pytest.raises(ManifestError, match="BM != 32"):
        validate_plan(family, "nk", {"BM": 32, "STAGES": 2, "ORDER": 0})
    swapped = loaded(tmp_path / "swapped", constraints=["STAGES % (BM - 32) == 0 or BM > 32", "BM != 32"])
    with pytest.raises(ManifestError, match="divides by zero"):
        validate_plan(swapped, "nk", {"BM": 32, "STAGES": 2, "ORDER": 0})


# --- plans from outside ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "knobs", "words"),
    [
        ("tn", {"BM": 64, "STAGES": 2, "ORDER": 0}, "layouts nk, kn of B, not 'tn'"),
        ("nk", {"BM": 64, "STAGES": 2}, "lacks ORDER"),
        ("nk", {"BM": 64, "STAGES": 2, "ORDER": 0, "BN": 1, "BQ": 2}, "no knob BN, BQ; it has BM, STAGES, ORDER"),
        ("nk", {"BM": 65, "STAGES": 2, "ORDER": 0}, "knob BM is one of 32, 64, 128, not 65"),
        ("nk", {"BM": "64", "STAGES": 2, "ORDER": 0}, "not '64'"),
        ("nk", {"BM": 64.0, "STAGES": 2, "ORDER": 0}, "not 64.0"),
        ("nk", {"BM": 64, "STAGES": 2, "ORDER": True}, "not True"),
        ("nk", {"BM": 64, "STAGES": 2, "ORDER": None}, "not None"),
        ("nk", {"BM": [64], "STAGES": 2, "ORDER": 0}, "not [64]"),
        ("nk", {"BM": 128, "STAGES": 3, "ORDER": 0}, "breaks the constraint BM * STAGES <= 256"),
        ("kn", {"BM": 32, "STAGES": 2, "ORDER": 0}, "breaks the constraint B_NK or BM >= 64"),
    ],
)
def test_plans_from_a_language_model(layout: str, knobs: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        validate_plan(loaded(tmp_path), layout, knobs)
    assert words in str(caught.value)


def test_validated_plans_are_the_plans(tmp_path: Path) -> None:
    family = loaded(tmp_path)
    known = list(plans(family))
    for plan in known:
        assert validate_plan(family, plan.b_layout, dict(reversed(plan.knobs.items()))) == plan
    assert isinstance(known[0], Plan)


# --- includes --------------------------------------------------------------------------------------------------------


def test_includes_are_inlined_once_and_recursively(tmp_path: Path) -> None:
    include = tmp_path / "include"
    include.mkdir()
    (include / "a.cuh").write_text('#pragma once\n#include "b.cuh"\nint a;\n')
    (include / "b.cuh").write_text('#pragma once\n#include "a.cuh"\n#include <cstdint>\nint b;\n')
    main = tmp_path / "main.cu"
    main.write_text('  # include "a.cuh" // first\n#include "b.cuh"\nint m;\n')
    text = inline_includes(main, (tmp_path, include))
    assert [line for line in text.splitlines() if line] == ["#include <cstdint>", "int b;", "int a;", "int m;"]


def test_the_familys_own_header_wins(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "part.cuh").write_text("int shared;\n")
    assert "#define PART 1" in load_family(write(tmp_path, MANIFEST)).source


@pytest.mark.parametrize("name", ["missing.cuh", "../fam/part.cuh", "/etc/passwd"])
def test_includes_that_cannot_be(name: str, tmp_path: Path) -> None:
    assert "cannot find the included file" in refusal(tmp_path, MANIFEST, f'#include "{name}"\n')


def test_a_source_that_is_not_text(tmp_path: Path) -> None:
    assert "is not a text file" in refusal(tmp_path, MANIFEST, b"\xff\xfe\x00")


# --- optional knobs -----------------------------------------------------------------------------------------------


def with_optional(**changes: Any) -> dict[str, Any]:
    """MANIFEST with a knob that came later."""
    launch = MANIFEST["launch"]
    first = {**launch["launches"][0], "args": ["A", "B", "C", {"i32": "ORDER + 2 * LATER"}]}
    later = {"values": [0, 1], "doc": "came later", "optional": True, **changes}
    knobs = {**MANIFEST["knobs"], "LATER": later}
    return {**MANIFEST, "knobs": knobs, "launch": {**launch, "launches": [first]}}


def test_plans_from_before_an_optional_knob_are_what_they_were(tmp_path: Path) -> None:
    before = load_family(write(tmp_path / "before", MANIFEST))
    after = load_family(write(tmp_path / "after", with_optional()))
    old, new = list(plans(before)), list(plans(after))
    assert [plan for plan in new if "LATER" not in plan.knobs] == old and len(new) == 2 * len(old)
    assert {plan.plan_id for plan in old} <= {plan.plan_id for plan in new}
    assert all(plan.knobs["LATER"] == plan.knob("LATER") == 1 for plan in new if plan not in old)


def test_a_plan_that_does_not_name_an_optional_knob_is_rendered_with_0(tmp_path: Path) -> None:
    family = load_family(write(tmp_path, with_optional()))
    by_value = {plan.knob("LATER"): render(family, plan) for plan in plans(family)}
    for value, variant in by_value.items():
        assert f"#define LATER {value}\n" in variant.source and variant.launch.constants["LATER"] == value


def test_an_optional_knob_may_be_left_out_of_a_call_or_be_0(tmp_path: Path) -> None:
    family = load_family(write(tmp_path, with_optional()))
    knobs = {"BM": 64, "STAGES": 2, "ORDER": 0}
    named = validate_plan(family, "nk", {**knobs, "LATER": 0})
    assert named == validate_plan(family, "nk", knobs) and "LATER" not in named.knobs
    assert validate_plan(family, "nk", {**knobs, "LATER": 1}).knobs["LATER"] == 1
    with pytest.raises(ManifestError, match="LATER is one of 0, 1, not 2"):
        validate_plan(family, "nk", {**knobs, "LATER": 2})
    with pytest.raises(ManifestError, match="lacks ORDER"):
        validate_plan(family, "nk", {"BM": 64, "STAGES": 2, "LATER": 1})


def test_an_optional_knob_has_0_among_its_values(tmp_path: Path) -> None:
    assert "an optional knob has 0 among its values" in refusal(tmp_path, with_optional(values=[1, 2]))


def test_constraints_and_filters_see_an_optional_knob_of_any_plan(tmp_path: Path) -> None:
    from tools.plan_filters import Filter

    family = load_family(write(tmp_path, {**with_optional(), "constraints": ["LATER == 0 or BM == 64"]}))
    assert {plan.knobs["BM"] for plan in plans(family) if plan.knob("LATER")} == {64}
    families = {family.name: family}
    of_value = {v: len(list(Filter.parse(f"fam LATER={v}", families).variants(families))) for v in ("0", "1", "0,1")}
    assert of_value == {"0": 24, "1": 8, "0,1": 32}
