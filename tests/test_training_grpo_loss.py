"""The loss of offline GRPO: TRL's, on logged rows, equals one computed by hand from the model's own probabilities."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_model

from policy.base_model import BaseSettings, load_base
from training.folder import RunFolder
from training.loop import Job
from training.samples import Sample
from training.settings import TrainSettings

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

CLIP, CLIP_HIGH, KL, TEMPERATURE = 0.2, 0.3, 0.05, 0.7


def samples() -> list[Sample]:
    """One group of three, uneven in length, with a tool's answer inside, and one that only fills it up."""
    made = [
        Sample("a", "g", (5, 6, 7), (10, 11, 12, 13), (1, 0, 0, 1), (-5.0, 0.0, 0.0, -6.0), TEMPERATURE),
        Sample("b", "g", (5,), (20, 21), (1, 1), (-4.5, -6.5), TEMPERATURE),
        Sample("c", "g", (5, 6), (30, 31, 1), (1, 1, 1), (-5.4, -5.7, -5.5), TEMPERATURE),
    ]
    turns = ((1.2, 1.2, 1.2, -0.3), (-0.7,) * 2, (-0.5,) * 3)  # the first one has two turns
    made = [replace(sample, advantages=own) for sample, own in zip(made, turns, strict=True)]
    return [*made, replace(made[0], mask=(0, 0, 0, 0))]


def of_one_prompt() -> list[Sample]:
    """As a group is: what comes after the last token that counts decides nothing."""
    return [replace(s, prompt_ids=(5, 6, 7)) for s in samples()]


def log_probabilities(model, sample: Sample) -> list[float]:
    """Of the completion's tokens, one sequence at a time and without padding."""
    import torch

    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0].double() / TEMPERATURE
    begin = len(sample.prompt_ids)
    rows = torch.log_softmax(logits, -1)
    return [rows[begin + i - 1, token].item() for i, token in enumerate(sample.completion_ids)]


def weights(model: Any) -> list[Any]:
    return [weight for name, weight in model.named_parameters() if weight.requires_grad and ".ref." not in name]


def by_hand(rows: list[Sample], now: list[list[float]], old: list[list[float]], reference: list[list[float]]) -> float:
    """mean over rows of the mean over the model's tokens of -min(r A, clip(r) A) + KL (e^d - d - 1), d = ref - now."""
    total = 0.0
    for sample, mine, logged, frozen in zip(rows, now, old, reference, strict=True):
        terms = []
        for use, advantage, p, q, f in zip(sample.mask, sample.advantages, mine, logged, frozen, strict=True):
            if use:
                ratio = math.exp(p - q)
                clipped = min(max(ratio, 1 - CLIP), 1 + CLIP_HIGH)
                gain = min(ratio * advantage, clipped * advantage)
                terms.append(-gain + KL * (math.exp(f - p) - (f - p) - 1))
        total += sum(terms) / max(1, len(terms))
    return total / len(rows)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("behaviour", ["logged", "reference"])
@pytest.mark.parametrize("given_rows", [samples, of_one_prompt])
def test_the_loss_is_the_one_computed_by_hand(tmp_path: Path, method: str, behaviour: str, given_rows: Any) -> None:
    import torch

    from training.grpo import trainer
    from training.loop import trainable

    make_tiny_model(tmp_path / "tiny")
    given = {
        "base": {"name": str(tmp_path / "tiny"), "device": "cpu"},
        "lora": {"rank": 4},
        "grpo": {
            "method": method,
            "group_size": 4,
            "groups_per_step": 1,
            "batch_size": 4,
            "clip": CLIP,
            "clip_high": CLIP_HIGH,
            "kl": KL,
            "behaviour": behaviour,
        },
    }
    settings = TrainSettings.model_validate(given)
    base = load_base(BaseSettings(name=str(tmp_path / "tiny"), device="cpu"), tmp_path)
    job = Job("grpo", tmp_path / "rows.jsonl", tmp_path / "out", settings, tmp_path)
    rows = given_rows()
    if behaviour == "reference":
        rows = [replace(s, logprobs=None) for s in rows]
        rows[1] = replace(rows[1], logprobs=(-4.5, -6.5))  # what was logged still counts
    before = [log_probabilities(base.model, s) for s in rows]
    made = trainer(job, base, RunFolder(tmp_path / "out"), trainable(base, job), rows, [])
    torch.manual_seed(1)
    with torch.no_grad():  # so that the policy is neither the reference nor what was logged
        for name, weight in made.model.named_parameters():
            if weight.requires_grad and ".ref." not in name:
                weight.add_(0.3 * torch.randn_like(weight))
    model = made.model
    now = [log_probabilities(model, s) for s in rows]
    old = [list(s.logprobs) if s.logprobs is not None else frozen for s, frozen in zip(rows, before, strict=True)]
    model.train()
    made.current_gradient_accumulation_steps = 1
    batch = made._generate_and_score_completions([{"prompt": "", "index": i} for i in range(4)])
    loss = made.compute_loss(model, batch)
    expected = by_hand(rows, now, old, before)
    assert abs(expected) > 1e-3 and any(
        abs(p - q) > 0.3 for a, b in zip(now, old, strict=True) for p, q in zip(a, b, strict=True)
    )
    assert loss.item() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    batch = made._generate_and_score_completions([{"prompt": "", "index": i} for i in range(4)])
    assert batch["pack"] is not None
    unshared = made.compute_loss(model, {**batch, "pack": None})  # as TRL reads them: row by row, padded
    assert unshared.item() == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    gradients = [torch.autograd.grad(one, weights(model), allow_unused=True) for one in (loss, unshared)]
    for ours, theirs in zip(*gradients, strict=True):
        if ours is not None or theirs is not None:
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    loss = made.compute_loss(model, batch)
    loss.backward()
    trained = {n for n, w in model.named_parameters() if w.grad is not None and w.grad.abs().sum() > 0}
    assert trained and (method == "full" or all("lora" in name and ".ref." not in name for name in trained))


def test_the_sampler_keeps_groups_together_and_goes_on_in_the_same_order() -> None:
    from training.grpo_trainer import GroupSampler

    sampler = GroupSampler(groups=5, group_size=3, groups_per_step=2, repeats=2, seed=7)
    first = list(sampler)
    assert len(first) == len(sampler) == 24
    assert first[:6] == first[6:12] and all(first[i] + 1 == first[i + 1] for i in range(0, 6, 3))
    sampler.set_epoch(1)
    second = list(sampler)
    again = GroupSampler(groups=5, group_size=3, groups_per_step=2, repeats=2, seed=7)
    again.set_epoch(1)
    assert second == list(again) and second != first


def test_a_step_is_cut_into_batches_of_whole_groups_and_alike_in_length() -> None:
    from training.grpo_trainer import in_batches

    def group(number: int, length: int) -> list[Sample]:
        return [Sample(f"{number}-{i}", "g", (number,) * 4, (1,) * (length + i), (1,) * (length + i)) for i in range(2)]

    rows = [*group(1, 9), *group(2, 3), *group(3, 8), *group(4, 3)]
    assert in_batches(list(range(8)), rows, 2) == [[2, 3, 6, 7], [4, 5, 0, 1]]
    assert sorted(i for part in in_batches(list(range(8)), rows, 8) for i in part) == list(range(8))


def test_a_step_whose_batch_holds_nothing_that_counts_teaches_nothing(tmp_path: Path) -> None:
    import torch

    from training.shared_prompts import pack, unpacked

    silent = [replace(s, mask=(0,) * len(s.mask)) for s in samples()]
    packed = pack(silent, torch.float32, "cpu")
    assert packed.ids.tolist() == [[5, 6, 7]] and (packed.labels == -100).all()
    assert not unpacked(torch.ones(1, 3), packed, (4, 4)).any()


def test_an_adapter_of_another_base(tmp_path: Path) -> None:
    from policy.base_model import ModelError, load_adapter
    from training.loop import _save, trainable

    settings = TrainSettings.model_validate({"base": {"device": "cpu"}, "lora": {"rank": 2}})
    make_tiny_model(tmp_path / "one")
    make_tiny_model(tmp_path / "other", seed=1)
    make_tiny_model(tmp_path / "wider", hidden=32)
    one = load_base(BaseSettings(name=str(tmp_path / "one"), device="cpu"), tmp_path)
    job = Job("sft", tmp_path / "rows.jsonl", tmp_path / "out", settings, tmp_path)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    _save(trainable(one, job), one, job, adapter)
    assert str(tmp_path) not in (adapter / "adapter_config.json").read_text()
    wider = load_base(BaseSettings(name=str(tmp_path / "wider"), device="cpu"), tmp_path)
    with pytest.raises(ModelError, match="was trained on a model of another size, not on wider"):
        load_adapter(wider, adapter)
    card = {"base": {"name": "one", "fingerprint": one.fingerprint}}
    (adapter / "training.json").write_text(json.dumps(card))
    other = load_base(BaseSettings(name=str(tmp_path / "other"), device="cpu"), tmp_path)
    with pytest.raises(ModelError, match=r"was trained on one \(\w{16}\), not on other \(\w{16}\): set base.name"):
        load_adapter(other, adapter)
    again = load_base(BaseSettings(name=str(tmp_path / "one"), device="cpu"), tmp_path)
    assert load_adapter(again, adapter) is not None
    with pytest.raises(ModelError, match="there is no adapter in"):
        load_adapter(again, tmp_path / "nowhere")
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    whole, told = weights.read_bytes(), config.read_text()
    for left in (b"", whole[: len(whole) // 2], b"\xff" * 100):
        weights.write_bytes(left)
        with pytest.raises(ModelError, match=r"the weights of the adapter .* are damaged \(.*\): copy them anew"):
            load_adapter(again, adapter)
    weights.unlink()
    with pytest.raises(ModelError, match=r"there are no weights in .*: copy the whole folder"):
        load_adapter(again, adapter)
    weights.write_bytes(whole)
    for other_config in ("[]", "{}", told.replace('"r": ', '"r": "x", "rr": ')):
        config.write_text(other_config)
        with pytest.raises(ModelError, match=r"is damaged|cannot be loaded"):
            load_adapter(again, adapter)
