"""Settings of a training. Values come from configs/sft.yaml and configs/grpo.yaml through agent/config.py."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from policy.base_model import BaseSettings
from policy.reward import RewardSettings


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LoraSettings(_Settings):
    rank: int = Field(default=16, ge=1, le=1024)
    alpha: int = Field(default=32, ge=1, le=4096)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: str = Field(
        default="all-linear", pattern=r"^(all-linear|[\w.]+(,[\w.]+)*)$", description="all-linear, or names of layers."
    )


class LoopSettings(_Settings):
    """What both trainings have."""

    method: Literal["lora", "full"] = Field(default="lora", description="An adapter, or all weights.")
    epochs: float = Field(default=1.0, gt=0, le=10_000)
    max_steps: int | None = Field(default=None, ge=1, le=10**8, description="null: as many as the epochs take.")
    learning_rate: float = Field(default=1e-4, gt=0, le=1)
    warmup: float = Field(default=0.03, ge=0, lt=1, description="Part of the steps in which the rate rises.")
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e6)
    batch_size: int = Field(default=8, ge=1, le=4096, description="Rows a device at a time.")
    max_length: int = Field(default=3072, ge=16, le=10**6, description="Tokens; longer rows are left out, never cut.")
    gradient_checkpointing: bool = Field(default=False, description="Less memory, a third more time.")
    seed: int = Field(default=0, ge=0, lt=2**31)
    log_steps: int = Field(default=10, ge=1, le=10**6)
    save_steps: int = Field(default=100, ge=1, le=10**8, description="Steps between two checkpoints.")
    keep_checkpoints: int = Field(default=2, ge=1, le=1000)
    split: Literal["train", "all"] = Field(default="train", description="all: also held-out shapes, for a last run.")


class SftSettings(LoopSettings):
    learning_rate: float = Field(default=2e-4, gt=0, le=1)
    epochs: float = Field(default=3.0, gt=0, le=10_000)
    accumulate: int = Field(default=1, ge=1, le=10_000, description="Batches a step.")
    min_reward: float | None = Field(default=None, description="Rows with less are not imitated.")
    best_of_group: int | None = Field(default=2, ge=1, le=1000, description="So many of each group; null: all.")
    eval_rows: int = Field(default=256, ge=0, le=10**6, description="Held-out rows whose loss is logged; 0: none.")


class GrpoSettings(LoopSettings):
    learning_rate: float = Field(default=2e-5, gt=0, le=1)
    group_size: int = Field(default=8, ge=2, le=1024, description="Rows of a group; smaller groups are filled up.")
    groups_per_step: int = Field(default=4, ge=1, le=10_000)
    clip: float = Field(default=0.2, gt=0, lt=1, description="The ratio to the logged policy stays in 1 - clip …")
    clip_high: float | None = Field(default=None, gt=0, le=10, description="… 1 + clip_high; null: clip.")
    kl: float = Field(default=0.02, ge=0, le=100, description="Weight of the divergence from the reference.")
    loss: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = Field(default="grpo", description="How tokens are averaged.")
    ratio: Literal["token", "sequence"] = "token"
    credit: Literal["rollout", "best", "turn", "gain"] = Field(
        default="rollout",
        description="A turn's worth: the rollout's reward (of what it submitted), the best ratio that it evaluated, "
        "the turn's own, or what the best owes to the turn.",
    )
    scale: Literal["group", "all", "none"] = Field(
        default="group",
        description="Unit of advantages: the group's spread, that of all groups (large differences weigh more), or 1.",
    )
    behaviour: Literal["logged", "reference"] = Field(
        default="logged",
        description="Rows without log-probabilities are left out (logged), or count as sampled from the reference.",
    )

    @model_validator(mode="after")
    def _reference_is_asked(self) -> Self:
        if self.behaviour == "reference" and self.kl == 0:
            raise ValueError("behaviour 'reference' needs the reference's log-probabilities: kl must be more than 0")
        return self


class TrainSettings(_Settings):
    base: BaseSettings = BaseSettings()
    lora: LoraSettings = LoraSettings()
    sft: SftSettings = SftSettings()
    grpo: GrpoSettings = GrpoSettings()
    reward: RewardSettings = RewardSettings()
