"""Offline GRPO: rewards of logged groups → advantages → a clipped policy gradient (training/grpo_trainer.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from policy.base_model import Base
from training.credit import advantages
from training.errors import TrainingError
from training.folder import RunFolder
from training.loop import Job, Result, arguments, in_folder, process_count, reasons, run, trainable
from training.rows import Row
from training.samples import Sample, credited, grouped, in_split, one_temperature, samples_of
from training.settings import GrpoSettings


def train_grpo(job: Job) -> Result:
    """Raises TrainingError, TrainingStopped, ModelError. The same call goes on where a stopped one was."""
    return in_folder(job, _train)


def _train(job: Job, base: Base, folder: RunFolder, rows: list[Row]) -> Result:
    left_out: Counter[str] = Counter()
    samples = prepared(job, base, rows, left_out)
    if not samples:
        raise TrainingError(f"{job.rows} has no group to learn from: {reasons(left_out)}{_hint(left_out)}")
    size = job.settings.grpo.group_size
    job.show(f"{len(samples) // size} groups of {size}; left out: {reasons(left_out)}")
    model = trainable(base, job)
    return run(job, base, folder, lambda c: trainer(job, base, folder, model, samples, c), len(samples), left_out)


def prepared(job: Job, base: Base, rows: Sequence[Row], left_out: Counter[str]) -> list[Sample]:
    """Groups of one size, one after the other."""
    settings = job.settings.grpo
    known = advantages(in_split(rows, settings.split, left_out), settings, job.settings.reward, left_out)
    taught = [row for row in rows if row.row_id in known]
    samples = []
    for sample in samples_of(taught, base, settings.max_length, left_out):
        if (found := credited(sample, known[sample.row_id])) is None:
            left_out["where its turns begin is not known"] += 1
        else:
            samples.append(found)
    return grouped(samples, settings, left_out)


def _hint(left_out: Counter[str]) -> str:
    if left_out["no log-probabilities"]:
        return (
            ". Only the local policy logs log-probabilities, of its base's tokens: take rows of agent collect, or of "
            "--policy local, or let rows count as sampled from the reference with --set grpo.behaviour=reference"
        )
    if left_out["equal rewards in the group"] or left_out["alone in its group"]:
        return ". A group teaches by its differences: collect groups of 4 or more (--group-size, session.group_size)"
    return ""


def trainer(
    job: Job, base: Base, folder: RunFolder, model: Any, samples: Sequence[Sample], callbacks: list[Any]
) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig

    from training.grpo_trainer import OfflineGRPOTrainer

    settings = job.settings.grpo
    groups = len(samples) // settings.group_size
    processes = process_count()
    batch, accumulate = _batches(settings, groups, processes)
    config = GRPOConfig(
        **{**arguments(job), "per_device_train_batch_size": batch},
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate,
        num_iterations=1,
        num_generations=settings.group_size,
        max_completion_length=max(len(s.completion_ids) for s in samples),
        temperature=one_temperature(samples),
        beta=settings.kl,
        epsilon=settings.clip,
        epsilon_high=settings.clip_high,
        loss_type=settings.loss,
        importance_sampling_level=settings.ratio,
        disable_dropout=True,
        use_bias_correction_kl=False,  # of far-off rows the ratio would take over the divergence
    )
    return OfflineGRPOTrainer(
        folder=folder,
        samples=samples,
        model=model,
        reward_funcs=_logged_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [""] * len(samples), "index": list(range(len(samples)))}),
        processing_class=base.tokenizer,
        callbacks=callbacks,
    )


def _batches(settings: GrpoSettings, groups: int, processes: int) -> tuple[int, int]:
    """Rows a device at a time, batches a step: a step holds whole groups, shared out evenly."""
    for per_step in range(min(settings.groups_per_step, groups), 0, -1):
        rows = per_step * settings.group_size
        if rows % processes == 0:
            here = rows // processes
            batch = next(size for size in range(min(settings.batch_size, here), 0, -1) if here % size == 0)
            return batch, here // batch
    raise TrainingError(
        f"{groups} groups of {settings.group_size} cannot be shared out over {processes} processes: set "
        "grpo.group_size to a multiple of them, or give more rows"
    )


def _logged_reward(**_: Any) -> list[float]:
    raise TrainingError("nothing is sampled in an offline training, so nothing is rewarded")
