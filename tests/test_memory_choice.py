"""Which earlier variants are shown: distinct buckets, the limits of the temperature, the same choice for a seed."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from fakes import ScriptedDevice, raw_variant, toy_families
from hypothesis import given
from hypothesis import strategies as st
from records_kit import make_record

from memory.exemplars import STRATEGIES, MemorySettings, Scored, buckets, choose
from memory.exemplars_read import Tried, nearest, negative_examples, recorded_at, select, sibling, tried, tried_at
from memory.store import Store
from tools.families import accepted_plans, load_families, render
from tools.gate import MemoryResults, Toolbox
from tools.hgemm import hgemm
from tools.record_file import RecordReader
from tools.records import Reason, Task, Variant

TASK = hgemm(512, 256, 128)
FAMILIES = toy_families()
PLANS = accepted_plans(FAMILIES, TASK)

ratios = st.floats(0.01, 10.0, allow_nan=False)
populations = st.lists(ratios, min_size=1, max_size=40).map(lambda rs: [Scored(f"{i:03}", r) for i, r in enumerate(rs)])


def bucket_of(scored: list[Scored], key: str, count: int) -> int:
    return next(i for i, group in enumerate(buckets(scored, count)) if key in {s.key for s in group})


@given(populations, st.integers(2, 12), st.sampled_from([0.0, 1e-6, 0.1, 3.0, math.inf]), st.integers(0, 50))
def test_contrast_takes_two_distinct_buckets_whenever_there_are_two(
    scored: list[Scored], count: int, temperature: float, seed: int
) -> None:
    settings = MemorySettings(buckets=count, temperature=temperature)
    keys = choose(scored, 2, seed, settings)
    places = [bucket_of(scored, key, count) for key in keys]
    assert len(set(places)) == len(places) == min(2, len(buckets(scored, count)))
    if len({s.score for s in scored}) > 1:
        assert len(keys) == 2, "two different scores are two buckets"


@given(populations, st.integers(2, 12))
def test_buckets_hold_everything_once_in_order(scored: list[Scored], count: int) -> None:
    groups = buckets(scored, count)
    assert sorted(s for group in groups for s in group) == sorted(scored) and len(groups) <= count
    for lower, higher in pairwise(groups):
        assert max(s.score for s in lower) < min(s.score for s in higher)


@given(populations, st.sampled_from(sorted(STRATEGIES)), st.integers(0, 5), st.integers(0, 20), st.randoms())
def test_choice_depends_on_the_set_and_the_seed_alone(
    scored: list[Scored], strategy: str, count: int, seed: int, shuffler: object
) -> None:
    settings = MemorySettings.model_validate({"strategy": strategy})
    chosen = choose(scored, count, seed, settings)
    mixed = list(scored)
    shuffler.shuffle(mixed)  # type: ignore[attr-defined]
    assert choose(mixed, count, seed, settings) == chosen
    assert len(chosen) == len(set(chosen)) <= count and set(chosen) <= {s.key for s in scored}
    score = dict(scored)
    assert [score[key] for key in chosen] == sorted((score[key] for key in chosen), reverse=True)


@given(populations, st.integers(0, 30))
def test_cold_contrast_takes_the_two_best_buckets(scored: list[Scored], seed: int) -> None:
    settings = MemorySettings(temperature=0.0)
    places = [bucket_of(scored, key, settings.buckets) for key in choose(scored, 2, seed, settings)]
    assert places == sorted(range(len(buckets(scored, settings.buckets))), reverse=True)[:2]


def test_hot_contrast_takes_any_pair_of_buckets_alike() -> None:
    scored = [Scored(f"{i:02}", i / 10) for i in range(4) for _ in range(1)]
    settings = MemorySettings(temperature=math.inf, buckets=4)
    pairs = Counter(tuple(choose(scored, 2, seed, settings)) for seed in range(3000))
    assert len(pairs) == 6
    # Uniform: 500 each; five standard deviations of a binomial are 102.
    assert all(abs(n - 500) < 102 for n in pairs.values()), pairs


def test_softmax_is_what_cuda_l1_says() -> None:
    """One bucket of mean 1.0 and one of 0.8 at temperature 0.2: the better one is drawn first e times as often."""
    scored = [Scored("a", 1.0), Scored("b", 0.9), Scored("c", 0.8)]
    settings = MemorySettings(temperature=0.2, buckets=3)
    first = Counter(choose(scored, 1, seed, settings)[0] for seed in range(6000))
    weights = {key: math.exp(score / 0.2) for key, score in scored}
    for key, weight in weights.items():
        assert first[key] / 6000 == pytest.approx(weight / sum(weights.values()), abs=0.03)


def test_inside_a_bucket_every_variant_is_as_likely() -> None:
    scored = [Scored(f"{i}", 1.0 - 0.001 * i) for i in range(5)] + [Scored("low", 0.1)]
    counts = Counter(choose(scored, 2, seed, MemorySettings())[0] for seed in range(2500))
    assert set(counts) == {"0", "1", "2", "3", "4"} and all(abs(n - 500) < 110 for n in counts.values())


def test_best_k_and_islands() -> None:
    scored = [Scored(f"{i:02}", (7 * i % 20) / 20) for i in range(20)]
    assert choose(scored, 3, 1, MemorySettings(strategy="best-k")) == [
        s.key for s in sorted(scored, key=lambda s: -s.score)[:3]
    ]
    lone = MemorySettings(strategy="islands", islands=1, temperature=0.0)
    assert choose(scored, 3, 1, lone) == choose(scored, 3, 2, MemorySettings(strategy="best-k"))
    many = {tuple(choose(scored, 2, seed, MemorySettings(strategy="islands"))) for seed in range(100)}
    assert len(many) > 5, "several islands are visited"


# --- reading ----------------------------------------------------------------------------------------------------------


def toolbox_of(device: ScriptedDevice | None = None) -> Toolbox:
    return Toolbox(device or ScriptedDevice(), MemoryResults(), FAMILIES)


def test_everything_known_of_a_variant_is_read_and_nothing_is_measured() -> None:
    device = ScriptedDevice()
    box = toolbox_of(device)
    plan = PLANS[0]
    nothing = tried(box, plan, TASK)
    assert nothing.score is None and nothing.failure is None and nothing.compiled is None
    found = box.evaluate(plan, TASK)
    box.profile(plan, TASK)
    box.verify(plan, TASK, "full")
    box.sanitize(plan, TASK)
    box.time(plan, TASK, "server", "final")
    calls = list(device.calls)
    one = tried(box, plan, TASK)
    assert device.calls == calls
    assert one.score == found.ratio and one.verified is not None and one.verified.depth == "full"
    assert one.profile is not None and one.sanitized is not None and one.compiled is not None
    assert one.timing("server") is not None and one.timing("rotating") is None


def test_a_later_verdict_takes_the_score_away() -> None:
    device = ScriptedDevice(lambda tool, v, task: Reason.RACE if tool == "sanitize" else None)
    box = toolbox_of(device)
    box.evaluate(PLANS[0], TASK)
    assert tried(box, PLANS[0], TASK).score is not None
    box.sanitize(PLANS[0], TASK)
    one = tried(box, PLANS[0], TASK)
    assert one.score is None and one.failure is not None and one.failure.reason is Reason.RACE


def test_other_sessions_variants_are_found_in_the_store(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        box = Toolbox(ScriptedDevice(), store, FAMILIES)
        for plan in PLANS[:4]:
            store.put_variant(plan)
            box.evaluate(plan, TASK)
        own = [PLANS[2].key]
        everything = tried_at(store, box, TASK, store.variant, own, True)
        assert {one.key for one in everything} == {plan.key for plan in PLANS[:4]} and everything[-1].key == own[0]
        assert [one.key for one in tried_at(store, box, TASK, store.variant, own, False)] == own
        other = Toolbox(ScriptedDevice(driver="2.0"), store, FAMILIES)
        assert tried_at(store, other, TASK, store.variant, (), True) == [], "another device's results do not count"


def measured(box: Toolbox, plans: list[Variant], task: Task = TASK) -> list[Tried]:
    for plan in plans:
        box.evaluate(plan, task)
    return [tried(box, plan, task) for plan in plans]


def test_shapes_with_few_variants_borrow_from_the_nearest() -> None:
    box = toolbox_of()
    settings = MemorySettings(min_variants=3)
    neighbour = hgemm(512, 256, 256)
    own = measured(box, PLANS[:2])
    near = measured(box, PLANS[:6], neighbour)
    chosen = select(own, iter([near]), 2, 0, settings)
    assert {one.task.label for one in chosen.exemplars} == {neighbour.label} and len(chosen.exemplars) == 2
    assert {one.key for one in chosen.own} == {one.key for one in own}
    enough = select(measured(box, PLANS[:3]), iter([near]), 2, 0, settings)
    assert {one.task.label for one in enough.exemplars} == {TASK.label} and enough.own == ()
    alone = select(own, iter([]), 2, 0, settings)
    assert {one.task.label for one in alone.exemplars} == {TASK.label}, "better two of one's own than none"


def test_nearest_shapes() -> None:
    tasks = [hgemm(*s) for s in ((512, 256, 128), (512, 256, 256), (4096, 256, 128), (512, 128, 128), (1024, 256, 128))]
    ids = [t.task_id for t in tasks] + [
        "softmax/M=1",
        "hgemm-f16acc/M=512,N=256,K=256",
        "rubbish",
        "hgemm-f32acc/M=0,N=1,K=1",
    ]
    found = nearest(TASK, ids, 3)
    assert {t.label for t in found} == {"512x256x256", "512x128x128", "1024x256x128"}
    assert sibling(TASK, tasks[1].task_id) == tasks[1]


def test_negative_examples_tell_every_reason_once_before_any_twice() -> None:
    reasons = [Reason.WRONG_RESULT, Reason.WRONG_RESULT, Reason.HANG, Reason.WRONG_RESULT]
    variants = [raw_variant(str(i)) for i in range(len(reasons))]
    why = {v.key: r for v, r in zip(variants, reasons, strict=True)}
    box = toolbox_of(ScriptedDevice(lambda tool, v, task: why[v.key] if tool == "verify" else None))
    rejected = measured(box, variants)
    assert [one.key for one in negative_examples(rejected, 2)] == [variants[3].key, variants[2].key]
    assert [one.key for one in negative_examples(rejected, 9)] == [variants[i].key for i in (3, 2, 1, 0)]


def test_the_record_file_as_prior_knowledge(tmp_path: Path) -> None:
    families = load_families()
    reader = RecordReader(make_record(tmp_path / "r.sqlite", (64, 64, 64), (256, 64, 64)))
    task = reader.tasks()[0]
    found = recorded_at(reader, families, task)
    assert len(found) > 50 and all(one.score is not None and "Scripted GPU" in one.origin for one in found)
    best = max(found, key=lambda one: one.score or 0)
    assert best.variant.plan is not None and best.variant == render(
        families[best.variant.plan.family], best.variant.plan
    )
    assert any(one.profile is not None and one.timing("server") is not None for one in found)
    newer = {name: family.model_copy(update={"revision": 99}) for name, family in families.items()}
    assert recorded_at(reader, newer, task) == [], "of another revision there is no source"
    reader.close()
