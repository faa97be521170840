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
        super().__init__(**given)

    def _get_train_sampler(self, dataset: Any = None) -> GroupSampler:
        return GroupSampler(
            groups=len(self.samples) // self.num_generations,
            group_size=self.num_generations,
            groups_per_step=self.args.generation_batch_size // self.num_generations,
            repeats=self.num_iterations * self.args.steps_per_generation,
            seed=self.args.seed,
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """A step's rows out of the log, as TRL's ``_compute_loss`` wants them."""
        samples = [self.samples[row["index"]] for row in inputs]
        batch = collate(samples, self._tokenizer.pad_token_id, self.accelerator.device)
        reference = self._reference_logps(batch) if self.beta != 0.0 else None
        logged = batch.pop("logged_logps")
        has_logged = torch.tensor([s.logprobs is not None for s in samples], device=logged.device).unsqueeze(1)
        old = logged if reference is None else torch.where(has_logged, logged, reference)
        counted = (batch["completion_mask"] * batch["tool_mask"]).sum()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["rows_that_count"].append(float(sum(any(s.mask) for s in samples)))
        metrics["advantage_abs"].append(float(batch["advantages"].abs().mean()))
        batch |= {"old_per_token_logps": old, "num_items_in_batch": self.accelerator.gather(counted).sum()}
        return batch if reference is None else {**batch, "ref_per_token_logps": reference}

    def _reference_logps(self, batch: dict[str, Any]) -> Any:
        """Of the model as it was before: the frozen copy, or the adapter that the training began with."""
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
        "advantages": torch.tensor([s.advantage for s in samples], dtype=torch.float32, device=device),
    }
