"""Supervised fine-tuning: imitate the best rollouts, their own turns only, with TRL's SFTTrainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from policy.base_model import Base
from training.errors import TrainingError
from training.folder import RunFolder
from training.loop import Job, Result, arguments, in_folder, reasons, run, trainable
from training.rows import Row
from training.samples import Sample, imitated, samples_of
from training.settings import SftSettings


def train_sft(job: Job) -> Result:
    """Raises TrainingError, TrainingStopped, ModelError. The same call goes on where a stopped one was."""
    return in_folder(job, _train)


def _train(job: Job, base: Base, folder: RunFolder, rows: list[Row]) -> Result:
    settings = job.settings.sft
    left_out: Counter[str] = Counter()
    samples = list(samples_of(imitated(rows, settings, left_out), base, settings.max_length, left_out))
    if not samples:
        raise TrainingError(f"{job.rows} has no row to imitate: {reasons(left_out)}")
    held_out = _held_out(rows, base, settings)
    job.show(f"{len(samples)} rows to imitate, {len(held_out)} held out; left out: {reasons(left_out)}")
    model = trainable(base, job)
    return run(
        job, base, folder, lambda c: _trainer(job, base, folder, model, samples, held_out, c), len(samples), left_out
    )


def _held_out(rows: Sequence[Row], base: Base, settings: SftSettings) -> list[Sample]:
    """The best of each held-out group: what the model should have said at shapes that it has not seen."""
    if settings.split == "all" or not settings.eval_rows:
        return []
    unseen = [row for row in rows if row.split == "heldout"]
    best = imitated(unseen, settings.model_copy(update={"split": "all", "best_of_group": 1}), Counter())
    return list(samples_of(best[: settings.eval_rows], base, settings.max_length, Counter()))


def _trainer(
    job: Job,
    base: Base,
    folder: RunFolder,
    model: Any,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    callbacks: list[Any],
) -> Any:
    from trl import SFTConfig, SFTTrainer

    from training.watching import BesideTimings, WholeCheckpoints

    class Trainer(BesideTimings, WholeCheckpoints, SFTTrainer):
        pass

    settings = job.settings.sft
    config = SFTConfig(
        **arguments(job),
        gradient_accumulation_steps=settings.accumulate,
        per_device_eval_batch_size=settings.batch_size,
        eval_strategy="epoch" if held_out else "no",
        max_length=None,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    return Trainer(
        folder=folder,
        model=model,
        args=config,
        train_dataset=_dataset(samples),
        eval_dataset=_dataset(held_out) if held_out else None,
        processing_class=base.tokenizer,
        callbacks=callbacks,
    )


def _dataset(samples: Sequence[Sample]) -> Any:
    from datasets import Dataset

    ids = [[*sample.prompt_ids, *sample.completion_ids] for sample in samples]
    return Dataset.from_dict({"input_ids": ids, "labels": [sample.labels for sample in samples]})
