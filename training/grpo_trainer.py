"""TRL's GRPOTrainer on logged rollouts: nothing is sampled, and no step waits for a measurement.

The loss is TRL's own (ratio, clipping, divergence, masks). What it would make by generating comes from the log instead:
tokens, masks, the log-probabilities they were sampled with, and advantages that were computed beforehand, once for each
whole group. It overrides a private method, so TRL is pinned, and a test holds the loss to a hand-computed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad, use_adapter

from training.samples import Sample
from training.shared_prompts import Pack, SharedAttention, is_possible, pack, unpacked
from training.watching import BesideTimings, WholeCheckpoints


class GroupSampler(Sampler[int]):
    """Indices of samples, group after group, in an order of its own for every epoch; a last part of a step is left out.

    ``repeats``: TRL loads a step's rows once for each of its batches.
    """

    def __init__(self, groups: int, group_size: int, groups_per_step: int, repeats: int, seed: int) -> None:
        self._groups = groups
        self._size = group_size
        self._per_step = groups_per_step
        self._repeats = repeats
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """So that a resumed training goes through the rest of its epoch in the same order."""
        self._epoch = epoch

    def __len__(self) -> int:
        return (self._groups // self._per_step) * self._per_step * self._size * self._repeats

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(self._groups, generator=generator).tolist()
        for begin in range(0, self._groups - self._per_step + 1, self._per_step):
            for _ in range(self._repeats):
                for group in order[begin : begin + self._per_step]:
                    yield from range(group * self._size, (group + 1) * self._size)


class OfflineGRPOTrainer(BesideTimings, WholeCheckpoints, GRPOTrainer):
    """``samples`` in the order of the dataset's rows: groups of ``num_generations``, one after the other."""

    def __init__(self, *, samples: Sequence[Sample], **given: Any) -> None:
        self.samples = samples
        self._reference: dict[int, Any] = {}  # log-probabilities, by sample: the reference does not change
        self._attention = SharedAttention()
        self._packed: Pack | None = None
        self._batches: list[dict[str, Any]] = []  # of the step that is being made
        super().__init__(**given)

    def _get_train_sampler(self, dataset: Any = None) -> GroupSampler:
        return GroupSampler(
            groups=len(self.samples) // self.num_generations,
            group_size=self.num_generations,
            groups_per_step=self.args.generation_batch_size // self.num_generations,
            repeats=self.num_iterations * self.args.steps_per_generation,
            seed=self.args.seed,
        )

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> dict[str, Any]:
        """One batch of a step. Its groups stay together, and those of a length in one batch."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        batches = self.args.steps_per_generation
        if self._step % batches == 0 or not self._batches:
            parts = in_batches([row["index"] for row in generation_batch], self.samples, batches)
            made = [self._generate_and_score_completions([{"index": i} for i in part]) for part in parts]
            counted = torch.stack([one["num_items_in_batch"] for one in made]).sum()
            self._batches = [one | {"num_items_in_batch": counted} for one in made]
            samples = [self.samples[row["index"]] for row in generation_batch]
            metrics = self._metrics["train"]
            metrics["rows_that_count"].append(float(sum(any(s.mask) for s in samples)))
            metrics["advantage_abs"].append(_mean_abs(samples))
        batch: dict[str, Any] = self._batches[self._step % batches]
        return batch

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Rows out of the log, as TRL's ``_compute_loss`` wants them."""
        indices = [row["index"] for row in inputs]
        samples = [self.samples[index] for index in indices]
        device = self.accelerator.device
        batch = collate(samples, self._tokenizer.pad_token_id, device)
        plain = self._plain(self.model)
        batch["pack"] = pack(samples, plain.dtype, device) if is_possible(plain.config) else None
        reference = self._reference_logps(indices, batch) if self.beta != 0.0 else None
        logged = batch.pop("logged_logps")
        has_logged = torch.tensor([s.logprobs is not None for s in samples], device=logged.device).unsqueeze(1)
        old = logged if reference is None else torch.where(has_logged, logged, reference)
        counted = (batch["completion_mask"] * batch["tool_mask"]).sum()
        batch |= {"old_per_token_logps": old, "num_items_in_batch": self.accelerator.gather(counted).sum()}
        return batch if reference is None else {**batch, "ref_per_token_logps": reference}

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self._packed = inputs["pack"]
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *given: Any, **more: Any
    ) -> Any:
        """0 where nothing counts. Each prompt is read once, and only what counts is projected onto the vocabulary."""
        packed = self._packed
        if packed is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *given, **more
            )
        self._attention.begin(self._plain(model), packed)
        with self.accelerator.autocast():
            found = model(
                input_ids=packed.ids,
                position_ids=packed.positions,
                # Four dimensions are taken as they are: nothing is made of them, and nothing is read from them.
                attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=packed.ids.device),
                shift_labels=packed.labels,
                fused_lm_head=True,
            )
        shape = (input_ids.size(0), logits_to_keep)
        entropies = unpacked(found.entropy, packed, shape) if more.get("compute_entropy") else None
        return unpacked(found.log_probs, packed, shape), entropies, None

    def _plain(self, model: Any) -> Any:
        """Without what accelerate and peft put around it."""
        model = self.accelerator.unwrap_model(model)
        return getattr(model, "get_base_model", lambda: model)()

    def _reference_logps(self, indices: Sequence[int], batch: dict[str, Any]) -> Any:
        """Of the model as it was before: the frozen copy, or the adapter that the training began with. Asked for once
        a row, however many epochs there are."""
        length = batch["completion_ids"].size(1)
        if any(index not in self._reference for index in indices):
            found = self._reference_forward(batch)
            for index, row in zip(indices, found, strict=True):
                self._reference[index] = row[: len(self.samples[index].completion_ids)]
        rows = [self._reference[index] for index in indices]
        return torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in rows])

    def _reference_forward(self, batch: dict[str, Any]) -> Any:
        self._packed = batch["pack"]
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        size = self.args.per_device_train_batch_size
        arguments = (ids, attention, batch["completion_ids"].size(1), size)
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self.ref_model is not None:
                return self._get_per_token_logps_and_entropies(self.ref_model, *arguments)[0]
            model = self.accelerator.unwrap_model(self.model)
            with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
                return self._get_per_token_logps_and_entropies(self.model, *arguments)[0]


def in_batches(indices: Sequence[int], samples: Sequence[Sample], count: int) -> list[list[int]]:
    """``count`` parts of one size: rows of a prompt side by side, prompts ordered by the length of their longest row,
    for a batch is padded to its longest."""
    longest: dict[tuple[int, ...], int] = {}
    for index in indices:
        sample = samples[index]
        longest[sample.prompt_ids] = max(longest.get(sample.prompt_ids, 0), sample.length)
    first = {prompt: place for place, prompt in enumerate(longest)}

    def order(index: int) -> tuple[int, int]:
        prompt = samples[index].prompt_ids
        return longest[prompt], first[prompt]

    ordered = sorted(indices, key=order)
    size = len(ordered) // count
    return [ordered[begin : begin + size] for begin in range(0, size * count, size)]


def collate(samples: Sequence[Sample], pad_token_id: int, device: Any) -> dict[str, Any]:
    """Prompts padded on the left, completions on the right. ``tool_mask`` is 0 where the model said nothing."""

    def padded(values: Sequence[Sequence[float]], kind: Any, side: str, filler: float) -> Any:
        return pad([torch.tensor(v, dtype=kind) for v in values], padding_value=filler, padding_side=side).to(device)

    prompts, completions = [s.prompt_ids for s in samples], [s.completion_ids for s in samples]
    logged = [s.logprobs if s.logprobs is not None else (0.0,) * len(s.completion_ids) for s in samples]
    return {
        "prompt_ids": padded(prompts, torch.long, "left", pad_token_id),
        "prompt_mask": padded([[1] * len(p) for p in prompts], torch.long, "left", 0),
        "completion_ids": padded(completions, torch.long, "right", pad_token_id),
        "completion_mask": padded([[1] * len(c) for c in completions], torch.long, "right", 0),
        "tool_mask": padded([s.mask for s in samples], torch.long, "right", 0),
        "logged_logps": padded(logged, torch.float32, "right", 0.0),
        "advantages": padded([s.advantages for s in samples], torch.float32, "right", 0.0),
    }


def _mean_abs(samples: Sequence[Sample]) -> float:
    """Of the advantages of tokens that count."""
    counted = [abs(value) for s in samples for value, use in zip(s.advantages, s.mask, strict=True) if use]
    return sum(counted) / len(counted) if counted else 0.0
