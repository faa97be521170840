"""The local policy: calls that would be run and nothing else, log-probabilities that are the model's, groups in one
batch, the same seed for the same session; and what can be wrong with a base, an adapter or a machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import ScriptedDevice
from loop_kit import make_deps
from loop_kit import run as run_session
from pydantic import ValidationError

pytestmark = pytest.mark.slow
for needed in ("torch", "transformers", "llguidance", "peft"):
    pytest.importorskip(needed, reason="needs the extra train")

from tiny_model import make_tiny_model  # noqa: E402

from agent import session as sessions  # noqa: E402
from agent.config import load_settings  # noqa: E402
from memory.exemplars_read import Selection  # noqa: E402
from memory.shortlist import Expected  # noqa: E402
from policy.base import PolicyError, PolicyRequest, Trial  # noqa: E402
from policy.base_model import Base, BaseSettings, load_base  # noqa: E402
from policy.chat import OPEN, messages_of, parse_turn, segments, tool_messages  # noqa: E402
from policy.compact import compact_prompt, compact_tools  # noqa: E402
from policy.factory import make_policy  # noqa: E402
from policy.grammar import allowed_calls, frame_of, options, turn_grammar  # noqa: E402
from policy.local_policy import LocalPolicy, _lost, sampling_seed  # noqa: E402
from policy.local_worker import Worker, context_of  # noqa: E402
from policy.picking import Picked, Sampling, pick  # noqa: E402
from policy.sampling import Row, Sampler  # noqa: E402
from policy.settings import PolicySettings  # noqa: E402
from policy.tool_schemas import PlanArguments, parse_arguments  # noqa: E402
from tools.families import accepted_plans, load_families, validate_plan  # noqa: E402
from tools.gpu.lock import GpuLock  # noqa: E402
from tools.hgemm import hgemm  # noqa: E402
from tools.proc import Child  # noqa: E402
from tools.records import Plan, Status, Step  # noqa: E402

TASK = hgemm(64, 64, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost a shared machine more than a tiny model wins by them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(folder: Path) -> Base:
    return load_base(BaseSettings(name=str(folder), device="cpu"), folder)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return [v.plan for v in accepted_plans(load_families(), TASK) if v.plan is not None]


def request(*trials: Trial, evaluations: int = 4, seed: int = 0, rollout: int = 0, beside: int = 1) -> PolicyRequest:
    info = ScriptedDevice().info
    return PolicyRequest(
        task=TASK,
        device=info,
        steps=compact_prompt(TASK, info, 5.0, Selection(), evaluations),
        trials=trials,
        evaluations_left=evaluations,
        turns_left=9,
        seed=seed,
        rollout=rollout,
        beside=beside,
    )


def trial(plan: Plan, ratio: float | None = 1.0) -> Trial:
    status = Status.OK if ratio is not None else Status.FAILED
    return Trial(key=plan.plan_id, label=plan.label, plan=plan, status=status, ratio=ratio)


def row(base: Base, asked: PolicyRequest, plans: list[Plan], seed: str, words: int = 24) -> Row:
    context = context_of(base.tokenizer, messages_of(asked.steps), tool_messages(compact_tools()), base.template, [])
    allowed = allowed_calls(asked, options(plans))
    grammar = turn_grammar(allowed, frame_of(base.tokenizer, base.template), words)
    return Row(context, grammar, seed)


def settings(folder: Path, **local: object) -> PolicySettings:
    base = {"name": str(folder), "device": "cpu"}
    return PolicySettings.model_validate({"name": "local", "local": {"base": base, "words": 16, **local}})


# --- what may be said -------------------------------------------------------------------------------------------------


def test_whatever_the_seed_every_turn_is_one_call_that_would_be_run(base: Base, plans: list[Plan]) -> None:
    families, sampler = load_families(), Sampler(base.model, base.tokenizer)
    asked = request(trial(plans[0]), trial(plans[1], None))
    rows = [row(base, asked, plans, f"seed {i}") for i in range(24)]
    seen = set()
    for drawn in sampler.draw(rows, Sampling(1.5)):
        assert drawn.ids[-1] == base.tokenizer.eos_token_id
        step = parse_turn(base.tokenizer.decode(drawn.ids[:-1]))
        (call,) = step.tool_calls
        arguments = parse_arguments(call)  # raises for what is no valid call
        assert isinstance(arguments, PlanArguments)
        plan = validate_plan(families[arguments.family], arguments.b_layout, arguments.knobs)
        assert plan in plans and plan not in plans[:2]
        seen.add(plan.plan_id)
        assert step.text.startswith("4 left.") and len(step.text) <= len("4 left.") + 24
    assert len(seen) > 10


def test_a_rollout_spends_its_evaluations_and_then_submits_what_passed(plans: list[Plan]) -> None:
    known = options(plans)
    assert all('"evaluate_plan"' in call for call in allowed_calls(request(), known).calls)
    assert len(allowed_calls(request(), known).calls) == len(plans)
    done = request(trial(plans[0], 0.5), trial(plans[1], 0.9), trial(plans[2], None), evaluations=0)
    keys = [json.loads(call)["arguments"]["key"] for call in allowed_calls(done, known).calls]
    assert keys == [plans[1].plan_id, plans[0].plan_id]
    assert allowed_calls(request(trial(plans[0], None), evaluations=0), known).calls == []
    answer = Step(role="tool", text=json.dumps({"key": plans[0].plan_id}), call_id="c", tool="evaluate_plan")
    (own,) = allowed_calls(done.model_copy(update={"steps": (*done.steps, answer)}), known).calls
    assert plans[0].plan_id in own  # what this conversation evaluated itself
    left = request(*(trial(plan) for plan in plans))
    assert all('"submit"' in call for call in allowed_calls(left, known).calls)  # nothing is left to be evaluated


def test_a_number_of_the_list_is_followed_by_its_call_and_nothing_else(base: Base, plans: list[Plan]) -> None:
    """What is said is what is called: after the number no token is a choice; one that was tried cannot be said."""
    import llguidance.hf

    listed = [Expected(plan, 5.0) for plan in plans[:4]]
    asked = request(trial(plans[1]))
    prompt = compact_prompt(TASK, asked.device, 5.0, Selection(), 4, listed)
    asked = asked.model_copy(update={"steps": prompt})
    allowed = allowed_calls(asked, options(plans))
    assert {n: json.loads(call)["arguments"]["knobs"] for n, call in allowed.numbered.items()} == {
        n: dict(plans[n - 1].knobs) for n in (1, 3, 4)
    }
    frame = frame_of(base.tokenizer, base.template)
    grammar = turn_grammar(allowed, frame, 24)
    tokens = llguidance.hf.from_tokenizer(base.tokenizer, n_vocab=base.model.config.vocab_size)
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    assert matcher.consume_tokens(base.tokenizer.encode("4 left. Next: #", add_special_tokens=False))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert {base.tokenizer.decode([token]) for token in np.flatnonzero(bits)} == {"1", "3", "4"}
    assert matcher.consume_tokens(base.tokenizer.encode("3", add_special_tokens=False))
    forced = matcher.compute_ff_tokens()
    assert base.tokenizer.decode(forced) == frame.after_words + allowed.numbered[3] + frame.end
    assert matcher.consume_tokens(forced) and matcher.is_stopped()


def test_words_can_be_forbidden(base: Base, plans: list[Plan]) -> None:
    (drawn,) = Sampler(base.model, base.tokenizer).draw([row(base, request(), plans, "s", words=0)], Sampling(1.0))
    assert base.tokenizer.decode(drawn.ids).startswith(OPEN)


def test_a_turn_without_any_choice_has_one_end_token(base: Base, plans: list[Plan]) -> None:
    asked = request(trial(plans[0]), evaluations=0)
    turns = [row(base, asked, plans, "s", words=0), row(base, request(), plans, "s", words=0)]
    only, other = Sampler(base.model, base.tokenizer).draw(turns, Sampling(1.0))
    assert only.ids.count(base.tokenizer.eos_token_id) == 1 and not any(only.mask)
    step = parse_turn(base.tokenizer.decode(only.ids[:-1]))
    assert step.text == "" and step.tool_calls[0].arguments == {"key": plans[0].plan_id}
    assert parse_turn(base.tokenizer.decode(other.ids[:-1])).tool_calls


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_a_forward_pass_over_the_same_tokens(base: Base, plans: list[Plan]) -> None:
    one = row(base, request(), plans, "a")
    other = row(base, request(trial(plans[3])), plans, "b")._replace(context=[*one.context[:50], *one.context[90:]])
    for temperature in (1.0, 0.7):
        drawn = Sampler(base.model, base.tokenizer).draw([one, other, one], Sampling(temperature))
        for asked, turn in zip([one, other, one], drawn, strict=True):
            close(base, asked.context, turn, 1e-4, temperature)


def test_a_batch_is_what_its_rows_are_alone(base: Base, plans: list[Plan]) -> None:
    rows = [row(base, request(), plans, f"s{i}") for i in range(3)]
    rows[2] = rows[2]._replace(context=[*rows[2].context, *rows[2].context[-7:]])
    together = Sampler(base.model, base.tokenizer).draw(rows, Sampling(1.0))
    for asked, turn in zip(rows, together, strict=True):
        (alone,) = Sampler(base.model, base.tokenizer).draw([asked], Sampling(1.0))
        assert (alone.ids, alone.mask) == (turn.ids, turn.mask)
        assert np.allclose(alone.logprobs, turn.logprobs, atol=1e-4)


def continued(base: Base, rows: list[Row], drawn: list[Any], told: str) -> list[Row]:
    """The rows of the next turn: what was said, and what was answered."""
    answer = base.tokenizer.encode(told, add_special_tokens=False)
    return [
        r._replace(context=[*r.context, *d.ids, *answer], seed=r.seed + "+") for r, d in zip(rows, drawn, strict=True)
    ]


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_later_turns_go_on_from_what_was_read_and_are_what_a_fresh_model_says(
    folder: Path, plans: list[Plan], dtype: str, is_shared: bool
) -> None:
    base = load_base(BaseSettings(name=str(folder), device="cpu", dtype=dtype), folder)
    kept = Sampler(base.model, base.tokenizer, is_shared)
    rows = [row(base, request(), plans, f"s{i}")._replace(conversation=f"c{i}") for i in range(4)]
    read = 0
    for turn in range(4):
        turns = kept.draw(rows, Sampling(1.0))
        fresh = Sampler(base.model, base.tokenizer, is_shared)
        for one, again in zip(turns, fresh.draw(rows, Sampling(1.0)), strict=True):
            if dtype == "float32":
                assert one.ids == again.ids and np.allclose(one.logprobs, again.logprobs, atol=1e-4)
        new, read = kept.tokens_read - read, kept.tokens_read
        if turn:
            assert new < 0.6 * fresh.tokens_read  # what was said is short here, beside the prompt
            for asked, one in zip(rows, turns, strict=True):
                close(base, asked.context, one, 1e-4 if dtype == "float32" else 0.1)
        rows = continued(base, rows, turns, "<answer>")
        if turn == 0:  # one is over, the others come in another order
            rows = [rows[2], rows[0], rows[3]]
        if turn == 1:  # and one that begins otherwise takes its place
            rows = [rows[1], row(base, request(evaluations=2), plans, "new")._replace(conversation="new"), rows[2]]


@pytest.mark.parametrize("is_shared", [True, False])
def test_turns_that_wait_for_others_are_what_they_are_alone(base: Base, plans: list[Plan], is_shared: bool) -> None:
    def asked(number: int) -> Row:
        made = row(base, request(evaluations=1 + number % 4), plans, f"s{number // 2}", words=60)
        return made._replace(conversation=f"c{number}")

    alone = {n: Sampler(base.model, base.tokenizer, is_shared).draw([asked(n)], Sampling(1.0))[0] for n in range(8)}
    sampler = Sampler(base.model, base.tokenizer, is_shared)
    waiting, left, found, calls = list(range(4)), list(range(4, 8)), {}, 0
    while waiting:
        turns = sampler.draw_most([asked(n) for n in waiting], Sampling(1.0), 0.1)
        calls += 1
        assert any(turn is not None for turn in turns)
        found |= {n: turn for n, turn in zip(waiting, turns, strict=True) if turn is not None}
        waiting = [n for n, turn in zip(waiting, turns, strict=True) if turn is None]
        while left and len(waiting) < 4:
            waiting.insert(0, left.pop(0))
    assert calls > 2 and not sampler._begun
    for number, turn in alone.items():
        assert (turn.ids, turn.mask) == (found[number].ids, found[number].mask)
        assert np.allclose(turn.logprobs, found[number].logprobs, atol=1e-4)


def close(base: Base, context: Any, drawn: Any, tolerance: float, temperature: float = 1.0) -> None:
    """Its log-probabilities are those of a forward pass over the same tokens."""
    import torch

    ids = torch.tensor([[*context, *drawn.ids]])
    base.model.set_attn_implementation("eager")  # not the sampler's own way
    with torch.inference_mode():
        logits = base.model(input_ids=ids).logits[0].double() / temperature
    expected = torch.log_softmax(logits, -1)
    places = range(len(context) - 1, ids.shape[1] - 1)
    found = [
        (float(expected[at, token]), logprob)
        for at, token, logprob, chosen in zip(places, drawn.ids, drawn.logprobs, drawn.mask, strict=True)
        if chosen
    ]
    assert found and np.allclose(*np.array(found).T, atol=tolerance)
    assert all(p == 0.0 for p, chosen in zip(drawn.logprobs, drawn.mask, strict=True) if not chosen)


def test_nothing_depends_on_what_was_kept(base: Base, plans: list[Plan]) -> None:
    """Other prompts, a conversation of the same name that says something else, rows that are held apart as on a GPU."""
    first, second = row(base, request(), plans, "x"), row(base, request(evaluations=2), plans, "y")
    other = first._replace(context=[*first.context[:200], *first.context[100:]])
    batches = [[first, second], [second, first], [first], [other, first], [first, first, second]]
    batches = [[one._replace(conversation=f"c{i}") for i, one in enumerate(batch)] for batch in batches]
    for is_shared in (True, False):
        sampler = Sampler(base.model, base.tokenizer, is_shared)
        for batch in batches:
            fresh = Sampler(base.model, base.tokenizer)
            found, expected = sampler.draw(batch, Sampling(1.0)), fresh.draw(batch, Sampling(1.0))
            assert [one.ids for one in found] == [one.ids for one in expected]
            for one, same in zip(found, expected, strict=True):
                assert np.allclose(one.logprobs, same.logprobs, atol=1e-4)


def test_what_does_not_fit_at_once_is_sampled_in_parts(base: Base, plans: list[Plan]) -> None:
    rows = [row(base, request(), plans, f"s{i}") for i in range(5)]
    whole = Sampler(base.model, base.tokenizer).draw(rows, Sampling(1.0))
    small = Sampler(base.model, base.tokenizer)
    small._batch_tokens = len(rows[0].context) + 600
    assert [one.ids for one in small.draw(rows, Sampling(1.0))] == [one.ids for one in whole]


def test_a_long_context_passes_through_in_chunks(base: Base, plans: list[Plan], monkeypatch: Any) -> None:
    rows = [row(base, request(), plans, f"s{i}")._replace(conversation=str(i)) for i in range(2)]
    rows[1] = rows[1]._replace(context=[*rows[1].context, *rows[1].context[-90:]])
    expected = Sampler(base.model, base.tokenizer).draw(rows, Sampling(1.0))
    monkeypatch.setattr("policy.sampling.CHUNK", 37)
    apart = Sampler(base.model, base.tokenizer, is_shared=False)
    assert [one.ids for one in apart.draw(rows, Sampling(1.0))] == [one.ids for one in expected]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    import torch

    logits = torch.log(torch.tensor([0.5, 0.2, 0.2, 0.1]))

    def picked(sampling: Sampling, *uniforms: float) -> list[Picked]:
        masks = np.full((len(uniforms), 1), 0b1011, np.int32)
        return pick(logits.repeat(len(uniforms), 1), masks, sampling, uniforms)

    def tokens(sampling: Sampling, count: int) -> list[int]:
        return [one.token for one in picked(sampling, *((i + 0.5) / count for i in range(count)))]

    drawn = tokens(Sampling(1.0), 800)
    assert [drawn.count(token) for token in (0, 1, 2, 3)] == [500, 200, 0, 100]
    (last,) = picked(Sampling(1.0), 0.99)
    assert last.token == 3 and last.logprob == pytest.approx(np.log(0.1)) and last.allowed == 3
    assert set(tokens(Sampling(1.0, 0.6), 50)) == {0}
    assert set(tokens(Sampling(1.0, 0.7), 50)) == {0, 1}
    assert picked(Sampling(0.0), 0.9)[0].token == 0
    cold = tokens(Sampling(0.5), 300)
    assert [cold.count(token) for token in (0, 1, 3)] == [250, 40, 10]


def test_a_context_keeps_the_tokens_that_earlier_turns_were_sampled_as(base: Base) -> None:
    steps = (*request().steps, Step(role="assistant", text="ab"), Step(role="user", text="go on"))
    tools = tool_messages(compact_tools())
    plain = context_of(base.tokenizer, messages_of(steps), tools, base.template, [None])
    text = "".join(s.text for s in segments(base.tokenizer, messages_of(steps), tools, base.template, next_turn=True))
    assert plain == base.tokenizer.encode(text, add_special_tokens=False)
    own = [7, 8, 9, base.tokenizer.eos_token_id]
    kept = context_of(base.tokenizer, messages_of(steps), tools, base.template, [own])
    prompt = context_of(base.tokenizer, messages_of(steps[:2]), tools, base.template, [])
    assert kept[: len(prompt) + 4] == [*prompt, *own]
    assert kept[len(prompt) + 4 :] == plain[len(prompt) + 3 :]


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(folder: Path) -> object:
    made = LocalPolicy(settings(folder), load_families(), home=folder)
    yield made
    made.close()


def test_a_group_is_sampled_at_once_and_reproducibly(policy: LocalPolicy, plans: list[Plan]) -> None:
    def group() -> list[Step]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(lambda i: policy.step(request(rollout=i, beside=4)), range(4)))

    first, second = group(), group()
    assert first == second and len({step.text for step in first}) > 1
    for step in first:
        assert step.sampled is not None and step.stop == "tool_calls" and step.usage is not None
        assert step.usage.output_tokens == len(step.sampled.token_ids)
        assert set(step.sampled.mask) == {0, 1} and step.sampled.temperature == 1.0
    at_once = policy.steps([request(rollout=i) for i in range(4)])
    assert at_once == first
    done = request(trial(plans[0], None), evaluations=0)
    assert [step.stop for step in policy.steps([done, request(rollout=1)])] == ["end", "tool_calls"]
    alone = policy.step(request(rollout=2))
    assert alone.tool_calls == first[2].tool_calls
    assert policy.name == "local:tiny" and 0 < policy.peak_rss_bytes < 2.5e9


def test_the_same_seed_draws_other_numbers_at_every_shape_rollout_and_turn() -> None:
    first = request()
    others = [
        request(seed=1),
        request(rollout=1),
        first.model_copy(update={"task": hgemm(64, 64, 128)}),  # else all shapes would be one sample
        first.model_copy(update={"steps": first.steps[:1]}),
    ]
    assert len({sampling_seed(one) for one in (first, *others)}) == 5 and sampling_seed(first) == sampling_seed(
        request()
    )


def test_no_timing_runs_while_a_model_is_put_onto_its_gpu(folder: Path, tmp_path: Path) -> None:
    uuid = f"GPU-test-{os.getpid()}"
    adapter = adapter_of(folder, tmp_path / "adapter", None)

    def load() -> Worker:
        return Worker(BaseSettings(name=str(folder), device="cpu"), adapter, tmp_path, GpuLock(uuid))

    load()  # what it imports is not waited for below
    with ThreadPoolExecutor(1) as pool:
        with GpuLock(uuid).held(exclusive=True):
            loading = pool.submit(load)
            with pytest.raises(TimeoutError):
                loading.result(timeout=2.0)
        loading.result(timeout=30.0)
    Path(f"/tmp/hgemm-agent-{uuid}.lock").unlink()


def test_a_turn_waits_for_others_only_so_long(policy: LocalPolicy) -> None:
    assert policy.step(request(beside=3)).tool_calls  # the other two were answered before a kill


def test_nothing_to_call_is_said_without_asking(policy: LocalPolicy, plans: list[Plan]) -> None:
    step = policy.step(request(trial(plans[0], None), evaluations=0))
    assert step.stop == "end" and step.tool_calls == () and "no plan passed" in step.text


def test_a_model_that_died_is_a_sentence_and_the_next_turn_has_a_new_one(folder: Path) -> None:
    made = LocalPolicy(settings(folder), load_families(), home=folder)
    try:
        before = made.step(request())
        os.kill(made._child.pid, signal.SIGKILL)
        with pytest.raises(PolicyError, match="was killed, as a system does that runs out of memory"):
            made._ask({"op": "sample"}, 5.0)
        assert made.step(request()) == before
    finally:
        made.close()


def test_the_same_seed_gives_the_same_session(policy: LocalPolicy, tmp_path: Path) -> None:
    def session(name: str) -> tuple[list[object], list[Step]]:
        (tmp_path / name).mkdir()
        given = {"session__group_size": 2, "session__rounds": 2, "budget__evaluations": 4, "session__seed": 1}
        deps = make_deps(tmp_path / name, policy, families=load_families(), policy__name="local", **given)
        state, summary = run_session(deps, concurrency=2)
        assert summary.best is not None
        steps = [step for number in range(4) for step in deps.trajectory(number).steps]
        return [(row["rollout"], row["key"], row["ratio"]) for row in state["trials"]], steps

    trials, steps = session("a")
    assert session("b") == (trials, steps)
    turns = [step for step in steps if step.role == "assistant"]
    assert len(turns) >= 4 and all(step.sampled is not None for step in turns)
    assert steps[0].text.startswith("You choose plans") and "evaluations 1\n" in steps[1].text
    listed = [step.text.partition("expected here:\n")[2] for step in steps if step.role == "user"]
    assert all(len(text.splitlines()) == 8 for text in listed) and listed[0] != listed[-1]  # less what was tried


def test_a_sweep_with_a_local_model_is_resumed_and_another_adapter_is_another_sweep(
    base: Base, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("distributed", reason="needs the extra sweep")
    from sweep_kit import Options, run_options

    def sweep(adapter: Path | None) -> Any:
        local = settings(folder, adapter=str(adapter) if adapter is not None else None).local
        given = {"policy.local": local.model_dump(), "session.group_size": 2, "session.rounds": 1}
        log = tmp_path / "log"
        options = Options(str(tmp_path / "db"), str(log), [[64, 64, 64]], ("fake",), "local", 2, settings=given)
        return run_options(options)

    first, again = sweep(None), sweep(None)
    assert [(row.policy, row.evaluations) for row in first.rows] == [("local:tiny", 2)] and not first.unfinished
    assert (first.resumed, again.resumed, again.rows) == (0, 1, first.rows)
    other = sweep(adapter_of(folder, tmp_path / "tuned", base.fingerprint))
    assert other.resumed == 0 and other.rows[0].policy == "local:tuned" and other.config_id != first.config_id


# --- bad input --------------------------------------------------------------------------------------------------------


def adapter_of(base_folder: Path, out: Path, fingerprint: str | None) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base_folder), LoraConfig(target_modules="all-linear"))
    model.save_pretrained(out)
    if fingerprint is not None:
        (out / "training.json").write_text(json.dumps({"base": {"name": "other", "fingerprint": fingerprint}}))
    return out


def test_an_adapter_changes_what_is_said_and_who_said_it(
    base: Base, folder: Path, policy: LocalPolicy, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    adapter = adapter_of(folder, tmp_path / "tuned", base.fingerprint)
    weights = load_file(adapter / "adapter_model.safetensors")
    torch.manual_seed(1)
    save_file({name: torch.randn_like(w) for name, w in weights.items()}, adapter / "adapter_model.safetensors")
    tuned = LocalPolicy(settings(folder, adapter=str(adapter)), load_families(), home=folder)
    try:
        a, b = policy.step(request()), tuned.step(request())
    finally:
        tuned.close()
    assert tuned.name == "local:tuned" and a.sampled is not None and b.sampled is not None
    assert a.sampled.model != b.sampled.model and a.sampled.tokenizer == b.sampled.tokenizer
    assert a.sampled.token_ids != b.sampled.token_ids


def test_an_adapter_for_another_base_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    adapter = adapter_of(folder, tmp_path / "adapter", "0123")
    made = LocalPolicy(settings(folder, adapter=str(adapter)), load_families(), home=folder)
    with pytest.raises(PolicyError, match=r"was trained on other .*0123.* set base\.name") as caught:
        made.step(request())
    made.close()
    assert "\n" not in str(caught.value)


def test_paths_that_are_not_there_are_found_before_a_session_begins(folder: Path, tmp_path: Path) -> None:
    def refused(given: PolicySettings) -> str:
        with pytest.raises(PolicyError) as caught:
            make_policy(given, {}, {})
        return str(caught.value)

    assert "there is no folder /nowhere/model" in refused(settings(Path("/nowhere/model")))
    assert "does not exist" in refused(settings(folder, adapter="/nowhere/adapter"))
    assert "leads nowhere" in refused(settings(folder, adapter="~nobody-of-that-name/adapter"))
    assert "leads nowhere" in refused(settings(Path("~nobody-of-that-name/base")))
    with pytest.raises(PolicyError, match="leads nowhere"):  # of a training
        load_base(BaseSettings(name="~nobody-of-that-name/base"), tmp_path)
    assert "holds no adapter" in refused(settings(folder, adapter=str(tmp_path)))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "it is an adapter" in refused(settings(tmp_path))


def test_a_gpu_that_is_not_there_is_a_sentence(folder: Path) -> None:
    with pytest.raises(PolicyError, match=r"base\.device is cuda:999, but torch "):
        load_base(BaseSettings(name=str(folder), device="cuda:999"), folder)
    with pytest.raises(ValidationError, match="should match pattern"):
        BaseSettings(name=str(folder), device="cuda:")


def test_the_models_process_sees_the_gpus_that_its_worker_sees(folder: Path, monkeypatch: Any) -> None:
    """As a sweep's worker does, which is shown its own GPU alone: the model goes to that one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    made = LocalPolicy(settings(folder), load_families(), home=folder)
    try:
        made.identity()
        assert made._child is not None
        shown = Path(f"/proc/{made._child.pid}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=7" in shown
    finally:
        made.close()


def test_paths_are_whole_wherever_the_process_works(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("mybase").symlink_to(folder)
    adapter_of(folder, Path("tuned"), None)
    Path("t.jinja").write_text(Path(__file__).parent.parent.joinpath("configs/chat/tools.jinja").read_text())
    local = {"base": {"device": "cpu", "chat_template": "t.jinja"}, "adapter": "tuned", "words": 0}
    for model in ("mybase", "./mybase"):  # neither is a hub's id
        given = load_settings(None, {}, {"policy.name": "local", "policy.model": model, "session.shape": "64,64,64"})
        given = given.model_copy(
            update={"policy": PolicySettings.model_validate({"name": "local", "model": model, "local": local})}
        )
        info = ScriptedDevice().info
        sessions.create(tmp_path / "home", given, f"s{len(model)}", "fake", info)
        kept = sessions.load(tmp_path / "home", f"s{len(model)}").settings.policy
        assert (kept.model, kept.local.base.name) == (None, str(tmp_path / "here" / "mybase"))
        assert kept.local.adapter == str(tmp_path / "here" / "tuned")
        assert kept.local.base.chat_template == str(tmp_path / "here" / "t.jinja")
    made = LocalPolicy(given.policy, load_families(), home=folder)
    try:
        assert made.step(request()).tool_calls and made.name == "local:tuned"
    finally:
        made.close()
    monkeypatch.chdir(tmp_path)
    LocalPolicy(kept, load_families(), home=folder).close()  # as `agent resume` from another folder
    with pytest.raises(PolicyError, match="there is no file"):
        LocalPolicy(given.policy.model_copy(update={"model": str(folder)}), {}, home=folder)


def test_a_missing_extra_is_named_with_the_command_that_brings_it(folder: Path) -> None:
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "import policy.local_policy as l, policy.packaged as p\n"
        "p.find_spec = lambda n: None if n == 'llguidance' else find(n)\n"
        "from policy.settings import PolicySettings\n"
        "l.LocalPolicy(PolicySettings(name='local'), {})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "(--policy local or base, an adapter) needs llguidance: " in last, last
    assert "-m pip install" in last and "[local]" in last


def test_too_little_memory_is_a_sentence(folder: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from policy.base import PolicyRequest\n"
        "from policy.local_policy import LocalPolicy\n"
        "from policy.settings import PolicySettings\n"
        "import sys\n"
        "request = PolicyRequest.from_json(sys.argv[2])\n"
        "from tools.families import load_families\n"
        "made = LocalPolicy(PolicySettings.model_validate_json(sys.argv[1]), load_families(), Path('/tmp'))\n"
        "made.step(request)\n"
    )
    arguments = [sys.executable, "-c", code, settings(folder).model_dump_json(), request().to_json()]
    root = Path(__file__).parent.parent
    told = []
    for mib in (500, 600, 700):  # what runs out first, and so how it is said, is a matter of chance
        shell = ["/bin/sh", "-c", f'ulimit -v {mib << 10}; exec "$@"', "sh"]
        done = subprocess.run([*shell, *arguments], capture_output=True, text=True, cwd=root)
        told.append(done.stderr.strip().splitlines()[-1])
        assert done.returncode == 1 and "PolicyError" in told[-1]
    assert any("memory" in last and "dtype=bfloat16" in last for last in told), told


@pytest.mark.parametrize("last", ["what():  std::bad_alloc", "MemoryError", "RuntimeError: Cannot allocate memory"])
def test_a_worker_whose_last_words_are_of_memory(last: str) -> None:
    child = Child([sys.executable, "-c", f"import sys; sys.exit({last!r})"])
    assert child.recv(30) is None
    assert "not enough memory" in _lost(child, 30)
    child.kill()


def test_a_conversation_that_is_too_long_is_a_sentence(base: Base, plans: list[Plan]) -> None:
    one = row(base, request(), plans, "s")
    with pytest.raises(PolicyError, match="the base reads 8192"):
        Sampler(base.model, base.tokenizer).draw([one._replace(context=[5] * 8000)], Sampling(1.0))
