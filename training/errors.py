"""Errors of exporting and training: one sentence each."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """The message is what the user reads."""


class TrainingStopped(TrainingError):
    """A signal asked the training to stop, and a checkpoint was written."""
