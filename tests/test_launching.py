"""Launch specs → concrete integers: what is computed, every limit, every sentence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.families import accepted_plans, load_families, plans, render
from tools.hgemm import hgemm
from tools.launching import (
    MAX_SMEM_BYTES,
    ConcreteSpec,
    ConcreteTensorMap,
    LaunchError,
    accepts,
    environment,
    resolve,
    tensor_dims,
)
from tools.records import LaunchSpec, Reason, Task, TensorSpec, Variant

TASK = hgemm(4096, 72, 200)


def variant(launch: dict[str, Any] | None = None, accepts: tuple[str, ...] = (), **spec: Any) -> Variant:
    base = {"entry": "k", "grid": [1, 1, 1], "block": [128, 1, 1], "args": ["A", "B", "C"]}
    b_layout = spec.pop("b_layout", "nk")
    found = LaunchSpec.model_validate({"launches": [{**base, **(launch or {})}], **spec})
    return Variant(source="", launch=found, b_layout=b_layout, accepts=accepts)


def resolved(
    found: Variant, task: Task = TASK, occupancy: tuple[int, int] = (2, 16), sm_count: int = 132
) -> ConcreteSpec:
    return resolve(found, task, sm_count, lambda *_: occupancy)


def refusal(found: Variant, task: Task = TASK, occupancy: tuple[int, int] = (2, 16)) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        resolved(found, task, occupancy)
    assert "\n" not in str(caught.value)
    return caught.value


# --- what is computed ------------------------------------------------------------------------------------------------


def test_expressions_become_integers() -> None:
    found = variant(
        {
            "grid": ["ceil_div(N, TN)", "ceil_div(M, 128)", 1],
            "block": ["TN * 2", 1, 1],
            "smem_bytes": "STAGES * TN * 64",
            "args": ["A", "B", "C", "workspace", {"i32": "M"}, {"i64": "M * N * K"}, {"i32": -1}],
        },
        constants={"TN": 64, "STAGES": "4 if K > 100 else 2"},
        workspace_bytes="M * 4",
        workspace_state={"bytes": "M", "fill": 255},
        deterministic=False,
    )
    spec = resolved(found)
    (launch,) = spec.launches
    assert (launch.grid, launch.block, launch.cluster) == ((2, 32, 1), (128, 1, 1), (1, 1, 1))
    assert launch.smem_bytes == 4 * 64 * 64
    assert [(a.kind, a.value) for a in launch.args] == [
        ("tensor", "A"),
        ("tensor", "B"),
        ("tensor", "C"),
        ("workspace", None),
        ("i32", 4096),
        ("i64", 4096 * 72 * 200),
        ("i32", -1),
    ]
    assert (spec.workspace_bytes, spec.state_bytes, spec.state_fill) == (16384, 4096, 255)
    assert not spec.deterministic


def test_the_grid_may_depend_on_occupancy_and_the_device() -> None:
    found = variant({"grid": ["min(sm_count * ctas_per_sm, 1000)", "max_active_clusters", 1]})
    assert resolved(found, occupancy=(3, 7)).launches[0].grid == (396, 7, 1)
    assert resolved(found, occupancy=(1, 5), sm_count=78).launches[0].grid == (78, 5, 1)


def test_occupancy_is_asked_with_the_final_launch() -> None:
    asked: list[Any] = []

    def occupancy(*launch: Any) -> tuple[int, int]:
        asked.append(launch)
        return 1, 4

    found = variant({"block": ["K", 1, 1], "cluster": [2, 1, 1], "grid": [4, 1, 1], "smem_bytes": "M"})
    resolve(found, TASK, 132, occupancy)
    assert asked == [("k", (200, 1, 1), (2, 1, 1), 4096)]


def test_the_environment_in_order() -> None:
    spec = LaunchSpec.model_validate(
        {"launches": variant().launch.launches, "constants": {"A1": "M", "B1": "A1 + B_NK"}}
    )
    assert environment(spec, {"M": 5}, "nk", 132) == {"M": 5, "sm_count": 132, "B_NK": 1, "A1": 5, "B1": 6}
    assert environment(spec, {"M": 5}, "kn", 132)["B1"] == 5


@pytest.mark.parametrize(
    ("role", "layout", "dims"),
    [
        ("A", "nk", (4096, 200)),
        ("A", "kn", (4096, 200)),
        ("B", "nk", (72, 200)),
        ("B", "kn", (200, 72)),
        ("C", "nk", (4096, 72)),
    ],
)
def test_stored_dims(role: str, layout: str, dims: tuple[int, int]) -> None:
    assert tensor_dims(TASK, role, layout) == dims


def test_a_tensor_map() -> None:
    task = hgemm(128, 64, 256)
    map_ = {"tensor": "B", "dims": ["K", "N"], "box": [64, "N"], "swizzle": "64 * 2", "l2_promotion": 256}
    (arg,) = resolved(variant({"args": [{"tensor_map": map_}]}), task).launches[0].args
    assert arg.value == ConcreteTensorMap("B", (256, 64), (512,), (64, 64), 128, 256, "zero")


def test_a_tensor_map_with_strides_of_its_own() -> None:
    task = hgemm(128, 64, 256)
    map_ = {"tensor": "A", "dims": [64, "M", "K // 64"], "box": [64, 128, 1], "strides": ["K", 64]}
    (arg,) = resolved(variant({"args": [{"tensor_map": map_}]}), task).launches[0].args
    assert isinstance(arg.value, ConcreteTensorMap)
    assert arg.value.stride_bytes == (512, 128)


@pytest.mark.parametrize("family", sorted(load_families()))
@pytest.mark.parametrize("shape", [(64, 64, 64), (4096, 4096, 4096), (16384, 64, 8192), (1000, 104, 72), (16, 8, 8)])
def test_every_plan_that_takes_a_shape_resolves_there(family: str, shape: tuple[int, int, int]) -> None:
    """Nothing that a family offers fails for a limit that its manifest could have stated."""
    task = hgemm(*shape)
    found = load_families()[family]
    resolved_any = False
    for plan in plans(found):
        rendered = render(found, plan)
        if accepts(rendered, task) is None:
            resolved(rendered, task, occupancy=(2, 64))
            resolved_any = True
    assert resolved_any or found.accepts


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "spec", "words"),
    [
        ({"grid": [0, 1, 1]}, {}, "every size must be at least 1"),
        ({"grid": ["N - 100", 1, 1]}, {}, "-28 x 1 x 1"),
        ({"grid": [2**31, 1, 1]}, {}, "2^31-1"),
        ({"grid": [1, 65536, 1]}, {}, "65535"),
        ({"block": [1025, 1, 1]}, {}, "1025 threads"),
        ({"block": [32, 33, 1]}, {}, "1056 threads"),
        ({"block": [1, 1, 65]}, {}, "65 threads"),
        ({"block": [0, 1, 1]}, {}, "block of k"),
        ({"cluster": [16, 1, 1], "grid": [16, 1, 1]}, {}, "portable limit is 8"),
        ({"cluster": [2, 1, 1], "grid": [3, 1, 1]}, {}, "not a multiple of its cluster"),
        ({"smem_bytes": -1}, {}, "-1 bytes of shared memory"),
        ({"args": ["D"]}, {}, "names tensor 'D'; this task has A, B, C"),
        ({"args": [{"i32": "M * M * M"}]}, {}, "over 32 bits"),
        ({"args": [{"i32": "-(M * M * M)"}]}, {}, "over 32 bits"),
        ({"args": [{"i32": "Q"}]}, {}, "'Q', which is not defined"),
        ({"grid": ["M // (N - 72)", 1, 1]}, {}, "divides by zero"),
        ({"grid": ["import os", 1, 1]}, {}, "not an arithmetic expression"),
        ({}, {"workspace_bytes": -1}, "workspace of -1 bytes"),
        ({}, {"workspace_bytes": 2**40}, "8 GiB"),
        ({}, {"workspace_bytes": 8, "workspace_state": {"bytes": 16}}, "16 bytes of state"),
        ({}, {"constants": {"M": 3}}, "would hide"),
        ({}, {"constants": {"sm_count": 1}}, "would hide"),
        ({}, {"constants": {"B_NK": 1}}, "would hide"),
        ({}, {"constants": {"ctas_per_sm": 1}}, "would hide"),
        ({}, {"constants": {"A1": "B1", "B1": 3}}, "'B1', which is not defined"),
    ],
)
def test_limits(launch: dict[str, Any], spec: dict[str, Any], words: str) -> None:
    error = refusal(variant(launch, **spec))
    assert error.reason is Reason.BAD_LAUNCH_SPEC
    assert words in str(error)


def test_shared_memory_has_its_own_reason() -> None:
    assert resolved(variant({"smem_bytes": MAX_SMEM_BYTES})).launches[0].smem_bytes == MAX_SMEM_BYTES
    error = refusal(variant({"smem_bytes": 300 * 1024}))
    assert error.reason is Reason.TOO_MUCH_SHARED_MEMORY
    assert "307200" in str(error) and "232448" in str(error)


def test_cooperative_launches_must_fit() -> None:
    found = variant({"grid": [32, 1, 1], "cluster": [2, 1, 1]}, cooperative=True)
    assert resolved(found, occupancy=(1, 16)).launches[0].cooperative
    error = refusal(found, occupancy=(1, 15))
    assert error.reason is Reason.NOT_CO_RESIDENT
    assert "32 CTAs but only 30" in str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor": "W"}, "names tensor 'W'"),
        ({"dims": ["N", "M"]}, "144 bytes; TMA needs multiples of 16|multiples of 16"),
        ({"box": [257, 1]}, "box sizes 1"),
        ({"box": [0, 1]}, "box sizes 1"),
        ({"box": [4, 1]}, "multiple of 16"),
        ({"box": [128, 1]}, "at most the swizzle"),
        ({"box": [64, 1], "swizzle": 64}, "at most the swizzle"),
        ({"swizzle": "M"}, "must be 0, 32, 64 or 128"),
        ({"dims": ["K", "M + 1"]}, "spans"),
        ({"dims": ["K", 0]}, "dims are 1"),
        ({"strides": ["2 * K"]}, "spans"),
        ({"strides": [0]}, "multiples of 16"),
        ({"dims": [8, 100000, 2], "box": [8, 1, 1], "strides": [64000, 8]}, "spans"),
    ],
)
def test_tensor_map_limits(change: dict[str, Any], words: str) -> None:
    base = {"tensor": "A", "dims": ["K", "M"], "box": [64, 128]}
    task = hgemm(4096, 73, 200) if change.get("dims") == ["N", "M"] else TASK
    error = refusal(variant({"args": [{"tensor_map": {**base, **change}}]}), task)
    assert any(w in str(error) for w in words.split("|")), str(error)


def test_an_inner_box_wider_than_the_swizzle_is_fine_without_swizzle() -> None:
    map_ = {"tensor": "A", "dims": ["K", "M"], "box": [128, 64], "swizzle": 0}
    assert resolved(variant({"args": [{"tensor_map": map_}]}))


# --- accepts ---------------------------------------------------------------------------------------------------------


def test_accepts_names_the_demand_that_fails() -> None:
    found = variant(accepts=("K % 8 == 0", "N % 16 == 0"))
    assert accepts(found, hgemm(64, 64, 64)) is None
    sentence = accepts(found, TASK)
    assert sentence is not None
    assert "4096x72x200" in sentence and sentence.endswith("it demands N % 16 == 0")


def test_accepts_may_use_constants_and_the_layout() -> None:
    found = variant(accepts=("N % TN == 0 or B_NK",), constants={"TN": 64})
    assert accepts(found, TASK) is None
    assert accepts(variant(accepts=("N % TN == 0 or B_NK",), constants={"TN": 64}, b_layout="kn"), TASK)


@pytest.mark.parametrize("demand", ["Q == 1", "M / 2", "M % (N - 72) == 0"])
def test_a_demand_that_cannot_be_evaluated_is_a_refusal(demand: str) -> None:
    assert accepts(variant(accepts=(demand,)), TASK)


def test_tasks_other_than_hgemm() -> None:
    """Nothing here knows what M, N and K are."""
    task = Task(
        op="scale",
        dims={"rows": 6, "cols": 32},
        tensors=(
            TensorSpec(role="X", dtype="float32", dims=("rows", "cols")),
            TensorSpec(role="Y", dtype="float32", dims=("rows", "cols"), output=True),
        ),
    )
    map_ = {"tensor": "X", "dims": ["cols", "rows"], "box": [32, "rows"], "swizzle": 128}
    spec = resolved(variant({"grid": ["rows", 1, 1], "args": ["X", "Y", {"tensor_map": map_}]}), task)
    assert spec.launches[0].grid == (6, 1, 1)
    assert spec.launches[0].args[2].value == ConcreteTensorMap("X", (32, 6), (128,), (32, 6), 128, 128, "zero")


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20), st.integers(1, 300), st.integers(1, 300))
def test_a_resolved_map_never_reaches_past_its_tensor(m: int, k: int, box_m: int, box_k: int) -> None:
    task = hgemm(m, 8, k)
    map_ = {"tensor": "A", "dims": ["K", "M"], "box": [box_k, box_m], "swizzle": 0}
    try:
        (arg,) = resolved(variant({"args": [{"tensor_map": map_}]}), task).launches[0].args
    except LaunchError:
        return
    assert isinstance(arg.value, ConcreteTensorMap)
    last = sum((d - 1) * s for d, s in zip(arg.value.dims, (2, *arg.value.stride_bytes), strict=True))
    assert last + 2 <= 2 * m * k
    assert all(s % 16 == 0 for s in arg.value.stride_bytes)


def test_with_ragged_no_box_is_taller_than_the_operand() -> None:
    """Few rows that fill no tile: of A nothing past the last one is fetched. Without it boxes are whole tiles."""
    seen = set[str]()
    for family in load_families().values():
        if "RAGGED" not in family.knobs:
            continue
        for plan in plans(family):
            variant = render(family, plan)
            for m in (1, 33, 100, 264, 500):
                task = hgemm(m, 1024, 1024)
                if accepts(variant, task) is not None:
                    continue
                seen.add(f"{family.name} {plan.knob('RAGGED')}")
                (launch,) = resolve(variant, task, 132, lambda *_: (1, 66)).launches
                box = next(a.value.box for a in launch.args if a.kind == "tensor_map" and a.value.tensor == "A")
                rows = plan.knobs["BM"] // plan.knobs.get("CLUSTER_N", 1)
                assert box[1] == (min(rows, m) if plan.knob("RAGGED") else rows), plan.label
    assert seen == {f"{name} {value}" for name in ("wgmma_tile", "wgmma_persistent") for value in (0, 1)}


def test_ragged_is_for_few_rows_that_fill_no_tile() -> None:
    families = load_families()
    for m, is_ragged in ((33, True), (500, True), (64, False), (192, False), (1000, False)):
        found = [v for v in accepted_plans(families, hgemm(m, 1024, 1024)) if v.plan and v.plan.knob("RAGGED")]
        assert bool(found) == is_ragged, m
