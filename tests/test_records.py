"""The data model: JSON round trips, hashes that depend on what they should, validators that keep status and fields
together, the HGEMM task."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tools import records
from tools.hgemm import ShapeError, flops, grid, hgemm, min_bytes, parse_shape
from tools.records import (
    ArgSpec,
    BaselineResult,
    BaselineTime,
    CompileResult,
    DeviceInfo,
    Evaluation,
    Family,
    KernelLaunch,
    Knob,
    LaunchSpec,
    Outcome,
    Plan,
    ProfileResult,
    Reason,
    Record,
    SanitizeCheck,
    SanitizeResult,
    Status,
    Step,
    Task,
    TensorMapSpec,
    TierResult,
    TimingResult,
    TimingRow,
    ToolCall,
    Trajectory,
    Usage,
    Variant,
    VerifyResult,
    WorkspaceState,
    content_hash,
)

# --- strategies ------------------------------------------------------------------------------------------------------

texts = st.text(max_size=20)
names_ = st.text("ABCDEFGHKMN", min_size=1, max_size=4)
finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-6, max_value=1e9)
counts = st.integers(0, 1 << 40)
exprs: st.SearchStrategy[int | str] = st.one_of(
    st.integers(-(2**40), 2**40), st.sampled_from(["M", "ceil_div(N, 8)", "K * 2"])
)
layouts = st.sampled_from(["kn", "nk"])
dims = st.fixed_dictionaries({"M": st.integers(1, 1 << 20), "N": st.integers(1, 1 << 20), "K": st.integers(1, 1 << 20)})
#: JSON as a provider sends it: null included, which must come back.
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
json_objects = st.dictionaries(texts, json_values, max_size=4)

triples = st.tuples(exprs, exprs, exprs)
maps = st.integers(1, 5).flatmap(
    lambda rank: st.builds(
        TensorMapSpec,
        tensor=names_,
        dims=st.tuples(*[exprs] * rank),
        box=st.tuples(*[exprs] * rank),
        strides=st.none() | st.tuples(*[exprs] * (rank - 1)),
        swizzle=st.sampled_from([0, 32, 64, 128, "BN * 2"]),
        l2_promotion=st.sampled_from([0, 64, 128, 256]),
        oob_fill=st.sampled_from(["zero", "nan"]),
    )
)
arguments = st.one_of(
    st.builds(ArgSpec, tensor=names_),
    st.just(ArgSpec(workspace=True)),
    st.builds(ArgSpec, i32=exprs),
    st.builds(ArgSpec, i64=exprs),
    st.builds(ArgSpec, tensor_map=maps),
)
launches = st.builds(
    KernelLaunch,
    entry=names_,
    grid=triples,
    block=triples,
    cluster=triples,
    smem_bytes=exprs,
    args=st.lists(arguments, max_size=4).map(tuple),
)
specs = st.builds(
    LaunchSpec,
    launches=st.lists(launches, min_size=1, max_size=2).map(tuple),
    constants=st.dictionaries(names_, exprs, max_size=3),
    workspace_bytes=exprs,
    workspace_state=st.builds(WorkspaceState, bytes=exprs, fill=st.sampled_from([0, 255])),
    cooperative=st.booleans(),
    deterministic=st.booleans(),
)
plans = st.builds(
    Plan,
    family=texts,
    revision=st.integers(0, 9),
    b_layout=layouts,
    knobs=st.dictionaries(names_, st.integers(-9, 999), max_size=4),
)
variants = st.builds(
    Variant,
    source=st.text(max_size=60),
    launch=specs,
    b_layout=layouts,
    flags=st.lists(texts, max_size=2).map(tuple),
    plan=st.none() | plans,
    accepts=st.lists(texts, max_size=2).map(tuple),
)
families = st.builds(
    Family,
    name=texts,
    revision=st.integers(0, 9),
    summary=texts,
    op=texts,
    b_layouts=st.lists(layouts, min_size=1, max_size=2).map(tuple),
    knobs=st.dictionaries(
        names_,
        st.builds(Knob, values=st.lists(st.integers(), min_size=1, max_size=3).map(tuple), doc=texts),
        max_size=2,
    ),
    launch=specs,
    source=texts,
    sanitize_dims=st.lists(dims, max_size=2).map(tuple),
)
rows = st.builds(
    TimingRow,
    task_id=texts,
    dims=dims,
    b_layout=layouts,
    mode=st.sampled_from(records.MODES),
    budget=st.sampled_from(["screen", "final", "certify"]),
    reference=st.sampled_from(records.REFERENCES),
    ratio=positive,
    ratio_lo=positive,
    ratio_hi=positive,
    time_us=positive,
    ref_us=positive,
    samples=counts,
    key=texts,
    device=texts,
    driver=texts,
    measured_at=texts,
)
#: status, reason and detail that go together.
outcomes = st.one_of(
    st.just({"status": Status.OK}),
    st.builds(lambda r, d: {"status": Status.FAILED, "reason": r, "detail": d or "x"}, st.sampled_from(Reason), texts),
    st.builds(
        lambda s, d: {"status": s, "detail": d or "x"},
        st.sampled_from([Status.REFUSED, Status.NOT_RECORDED, Status.UNAVAILABLE]),
        texts,
    ),
)


def outcome_of(
    model: type[Outcome], required: dict[str, Any], **fields: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """``required`` is added when the status is OK."""
    return st.builds(
        lambda base, elapsed, extra: model(
            **{**extra, **(required if base["status"] is Status.OK else {}), **base, "elapsed_s": elapsed}
        ),
        outcomes,
        st.floats(0, 1e6),
        st.fixed_dictionaries(fields),
    )


compiles = outcome_of(
    CompileResult,
    {"build_id": "b", "cubin_sha256": "c", "registers": 12},
    variant_id=texts,
    compiler=st.none() | texts,
    spill_bytes=st.none() | counts,
    mma=st.dictionaries(texts, counts, max_size=2),
    warnings=st.lists(texts, max_size=2).map(tuple),
    log=texts,
)
tier = TierResult(tier="integer", ok=True, checked=9, max_abs_error=math.inf)
verifies = outcome_of(
    VerifyResult,
    {"tiers": (tier,)},
    variant_key=texts,
    task_id=texts,
    depth=st.sampled_from(["quick", "full"]),
    max_abs_error=st.none() | finite,
)
sanitizes = outcome_of(
    SanitizeResult, {"checks": (SanitizeCheck(tool="memcheck", dims={"M": 1}, ok=True, errors=0),)}, variant_key=texts
)
timings = st.builds(
    lambda base, found, key: TimingResult(
        **base,
        variant_key=key,
        task_id="t",
        mode="offline",
        budget="screen",
        rows=tuple(found) if base["status"] is Status.OK else (),
    ),
    outcomes,
    st.lists(rows, min_size=1, max_size=3),
    texts,
)
profiles = outcome_of(
    ProfileResult,
    {},
    variant_key=texts,
    task_id=texts,
    metrics=st.dictionaries(texts, finite, max_size=3),
    stalls=st.dictionaries(texts, finite, max_size=3),
    sentences=st.lists(texts, max_size=3).map(tuple),
)
baselines = outcome_of(
    BaselineResult,
    {},
    task_id=texts,
    mode=st.sampled_from(records.MODES),
    budget=st.just("screen"),
    times=st.lists(st.builds(BaselineTime, reference=texts, b_layout=layouts, time_us=finite), max_size=2).map(tuple),
)
usages = st.builds(Usage, input_tokens=counts, output_tokens=counts, cached_tokens=counts, cost_usd=st.floats(0, 1e6))
steps = st.builds(
    Step,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    text=texts,
    tool_calls=st.lists(
        st.builds(ToolCall, call_id=texts, name=texts, arguments=json_objects, malformed=st.none() | texts), max_size=2
    ).map(tuple),
    usage=st.none() | usages,
    raw=st.none() | st.lists(json_objects, max_size=2),
)
tasks = dims.map(lambda d: hgemm(d["M"], d["N"], d["K"]))
trajectories = st.builds(
    Trajectory,
    trajectory_id=texts,
    session_id=texts,
    task=tasks,
    policy=texts,
    device=texts,
    round=counts,
    index_in_group=counts,
    steps=st.lists(steps, max_size=3).map(tuple),
    reward=st.none() | finite,
    reward_parts=st.dictionaries(texts, finite, max_size=2),
    usage=usages,
    quota=st.none() | counts,
)
everything = st.one_of(
    specs,
    plans,
    variants,
    families,
    rows,
    compiles,
    verifies,
    sanitizes,
    timings,
    profiles,
    baselines,
    steps,
    trajectories,
    tasks,
)


# --- JSON ------------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(everything)
def test_json_round_trip(record: Record) -> None:
    text = record.to_json()
    assert "\n" not in text
    back = type(record).from_json(text)
    assert back == record
    assert back.to_json() == text
    assert type(record).from_json(text.encode()) == record


@given(everything)
def test_records_are_values(record: Record) -> None:
    first = next(iter(type(record).model_fields))
    with pytest.raises(ValidationError):
        setattr(record, first, getattr(record, first))
    with pytest.raises(ValidationError):
        type(record).model_validate({**record.model_dump(), "a_field_of_the_future": 1})


def test_infinities_survive() -> None:
    assert TierResult.from_json(tier.to_json()).max_abs_error == math.inf


# --- identity --------------------------------------------------------------------------------------------------------


@given(json_objects)
def test_content_hash_ignores_the_order_of_keys_only(value: dict[str, Any]) -> None:
    assert content_hash(dict(reversed(value.items()))) == content_hash(value)
    assert content_hash([value, 1]) != content_hash([1, value])
    assert len(content_hash(value)) == 16


def test_hashes_are_what_they_were() -> None:
    """Stored records are found by these; a change here orphans them all."""
    assert content_hash({"b": [1, "é"], "a": None}) == "a44633ba036df252"
    plan = Plan(family="f", revision=1, b_layout="nk", knobs={"BM": 64, "BN": 32})
    assert plan.plan_id == "1dc2f1a949802af7"


@given(variants)
def test_variant_id_is_source_launch_layout_and_flags(variant: Variant) -> None:
    same = variant.model_copy(update={"plan": None, "accepts": ("K > 1",)})
    assert same.variant_id == variant.variant_id
    assert same.key == same.variant_id
    for change in (
        {"source": variant.source + " "},
        {"flags": (*variant.flags, "-DX")},
        {"b_layout": "kn" if variant.b_layout == "nk" else "nk"},
        {"launch": variant.launch.model_copy(update={"cooperative": not variant.launch.cooperative})},
    ):
        assert variant.model_copy(update=change).variant_id != variant.variant_id
    assert Variant.from_json(variant.to_json()).variant_id == variant.variant_id


@given(plans)
def test_plan_id_depends_on_every_field_but_not_on_order(plan: Plan) -> None:
    assert plan.model_copy(update={"knobs": dict(reversed(plan.knobs.items()))}).plan_id == plan.plan_id
    for change in ({"family": plan.family + "x"}, {"revision": plan.revision + 1}, {"knobs": {**plan.knobs, "ZZ": 1}}):
        assert plan.model_copy(update=change).plan_id != plan.plan_id


# --- validators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        (Outcome, {"status": "ok", "reason": "race"}, "do not go together"),
        (Outcome, {"status": "failed", "detail": "x"}, "do not go together"),
        (Outcome, {"status": "unavailable"}, "needs a detail"),
        (Outcome, {"status": "failed", "reason": "race"}, "needs a detail"),
        (CompileResult, {"status": "ok", "variant_id": "v"}, "build_id"),
        (VerifyResult, {"status": "ok", "variant_key": "v", "task_id": "t", "depth": "quick"}, "tiers"),
        (
            VerifyResult,
            {
                "status": "ok",
                "variant_key": "v",
                "task_id": "t",
                "depth": "quick",
                "tiers": [{"tier": "a", "ok": False, "checked": 1}],
            },
            "passed",
        ),
        (SanitizeResult, {"status": "ok", "variant_key": "v"}, "checks"),
        (
            TimingResult,
            {"status": "ok", "variant_key": "v", "task_id": "t", "mode": "server", "budget": "final"},
            "rows",
        ),
        (Evaluation, {"status": "ok", "variant_key": "v", "task_id": "t"}, "compile, verify and timing"),
        (LaunchSpec, {"launches": []}, "at least 1"),
        (ArgSpec, {}, "exactly one"),
        (ArgSpec, {"tensor": "A", "i32": 1}, "exactly one"),
        (TensorMapSpec, {"tensor": "A", "dims": [1, 2], "box": [1]}, "rank-2"),
        (TensorMapSpec, {"tensor": "A", "dims": [1, 2], "box": [1, 1], "strides": [1, 1]}, "1 strides"),
        (TensorMapSpec, {"tensor": "A", "dims": [], "box": []}, "1 to 5"),
        (TensorMapSpec, {"tensor": "A", "dims": [1], "box": [1], "swizzle": 16}, "swizzle"),
        (Task, {"op": "x", "dims": {"M": 0}, "tensors": []}, "M must be a positive integer"),
        (
            Task,
            {"op": "x", "dims": {"M": 1}, "tensors": [{"role": "A", "dtype": "float16", "dims": ["M", "Q"]}]},
            "dimension Q",
        ),
    ],
)
def test_fields_that_do_not_go_together(model: type[Record], fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    assert words in str(caught.value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["ratio", "ratio_lo", "ratio_hi", "time_us", "ref_us"])
def test_times_are_positive_and_finite(name: str, value: float) -> None:
    """One zero time would collapse a geometric mean."""
    row = {
        "task_id": "t",
        "dims": {"M": 1},
        "b_layout": "nk",
        "mode": "offline",
        "budget": "final",
        "reference": "cublaslt_auto",
        "ratio": 1.25,
        "ratio_lo": 1.2,
        "ratio_hi": 1.3,
        "time_us": 2.0,
        "ref_us": 2.5,
        "samples": 9,
        "key": "k",
        "device": "d",
        "driver": "580",
        "measured_at": "now",
    }
    assert TimingRow.model_validate(row).speedup == pytest.approx(0.25)
    with pytest.raises(ValidationError, match="positive and finite"):
        TimingRow.model_validate({**row, name: value})


def test_argument_shorthand() -> None:
    launch = KernelLaunch.model_validate(
        {"entry": "k", "grid": [1, 1, 1], "block": [1, 1, 1], "args": ["A", "workspace", {"i32": "M"}]}
    )
    assert launch.args == (ArgSpec(tensor="A"), ArgSpec(workspace=True), ArgSpec(i32="M"))


def test_usage_adds_up() -> None:
    total = Usage(input_tokens=1, output_tokens=2, cost_usd=0.5) + Usage(
        input_tokens=10, cached_tokens=3, cost_usd=0.25
    )
    assert total == Usage(input_tokens=11, output_tokens=2, cached_tokens=3, cost_usd=0.75)


def test_the_headline_is_a_reference() -> None:
    assert records.HEADLINE_REFERENCE in records.REFERENCES
    assert set(records.MODES) == set(get_args(records.Mode))


def test_device_info() -> None:
    info = DeviceInfo(
        name="NVIDIA H200",
        label="x",
        kind="cuda",
        sm_count=132,
        compute_capability="9.0",
        memory_bytes=1,
        l2_bytes=1,
        smem_per_block_bytes=232448,
        driver="580",
        cuda_runtime="13.0",
    )
    assert "recorded_on" not in json.loads(info.to_json())


# --- the task --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape"), [("64,64,64", (64, 64, 64)), ("4096x128X64", (4096, 128, 64)), (" 1 , 2 , 3 ", (1, 2, 3))]
)
def test_shapes(text: str, shape: tuple[int, int, int]) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    "text",
    [
        "",
        "64",
        "64,64",
        "1,2,3,4",
        "0,1,1",
        "-1,2,3",
        "a,b,c",
        "1.5,2,3",
        "1,,2",
        "2147483648,1,1",
        "64_0,1,1",
        "٦٤,1,1",
        "9" * 5000 + ",1,1",
    ],
)
def test_bad_shapes_are_one_sentence(text: str) -> None:
    with pytest.raises(ShapeError) as caught:
        parse_shape(text)
    assert f"'{text}'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hgemm() -> None:
    task = hgemm(2, 3, 5)
    assert task.task_id == "hgemm-f32acc/M=2,N=3,K=5"
    assert hgemm(2, 3, 5, "float16").task_id == "hgemm-f16acc/M=2,N=3,K=5"
    assert task.label == "2x3x5"
    assert flops(task) == 60
    assert min_bytes(task) == 2 * (10 + 15 + 6)
    assert len(grid()) == len(set(grid())) == 1000
