"""What our trainers have in common: plain metrics, stopping between two steps, whole checkpoints, turns on the GPU.

Imports transformers, so only the trainings import it.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import TrainerCallback

from policy.base_model import gpu_lock
from tools.gpu.lock import GpuLock
from training.errors import TrainingError
from training.folder import COMPLETE, RunFolder

#: Between two turns on a GPU: who takes its lock again at once leaves others waiting.
YIELD_S = 0.001


class Metrics(TrainerCallback):
    """A line of JSON for every logged step, and a line for people. ``model_fraction``: of the time since the last line,
    how much went into steps of the model."""

    def __init__(self, folder: RunFolder, show: Callable[[str], None]) -> None:
        self._folder = folder
        self._show = show
        self._last = time.monotonic()
        self._begun: float | None = None
        self._busy_s = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._begun is not None:
            self._busy_s += time.monotonic() - self._begun

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        row: dict[str, Any] = {"step": state.global_step, "of": state.max_steps, "elapsed_s": round(elapsed, 3)}
        row["model_fraction"] = round(min(1.0, self._busy_s / elapsed), 3) if elapsed > 0 else None
        self._busy_s = 0.0
        row |= {name: _number(value) for name, value in (logs or {}).items()}
        try:
            with self._folder.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise TrainingError(
                f"{self._folder.metrics} cannot be written: {error.strerror}; free some space"
            ) from error
        known = [
            f"{name} {row[name]:.4g}" for name in ("loss", "eval_loss", "reward", "kl") if _is_number(row.get(name))
        ]
        if known:
            self._show(f"step {state.global_step} of {state.max_steps}: {', '.join(known)}")


class StopBetweenSteps(TrainerCallback):
    """Once asked to, ends the training after a step, with a checkpoint. All processes of a training agree on it."""

    def __init__(self, requested: Callable[[], bool]) -> None:
        self._requested = requested
        self.stopped = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if _any_process(self._requested(), args):
            self.stopped = state.global_step < state.max_steps
            control.should_training_stop = control.should_save = True
        return control


class GpuTurns(TrainerCallback):
    """Of a GPU, shared with timings (tools/gpu/lock.py): a step waits until none runs, and a timing until the step is
    over. Nothing to wait for on a CPU."""

    def __init__(self) -> None:
        self._lock: GpuLock | None = None
        self._held = ExitStack()

    def begin(self, device: Any) -> None:
        if self._lock is None:
            self._lock = gpu_lock(device)
        if self._lock is not None:
            self._held.enter_context(self._lock.held(exclusive=False))

    def end(self, device: Any) -> None:
        if self._lock is None:
            return
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
        self._held.close()
        time.sleep(YIELD_S)

    def let_go(self) -> None:
        self._held.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begin(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end(args.device)


class BesideTimings:
    """Before a Trainer in the order of bases: its steps and its evaluation's batches are turns on the GPU."""

    def __init__(self, *, callbacks: Sequence[Any], **given: Any) -> None:
        self._turns = GpuTurns()  # the first callback, so that waiting is no time of the model
        super().__init__(callbacks=[self._turns, *callbacks], **given)  # type: ignore[call-arg]

    def train(self, *given: Any, **more: Any) -> Any:
        try:
            return super().train(*given, **more)  # type: ignore[misc]
        finally:
            self._turns.let_go()

    def prediction_step(self, *given: Any, **more: Any) -> Any:
        device = self.args.device  # type: ignore[attr-defined]
        self._turns.begin(device)
        try:
            return super().prediction_step(*given, **more)  # type: ignore[misc]
        finally:
            self._turns.end(device)


class WholeCheckpoints:
    """Before a Trainer in the order of bases."""

    def __init__(self, *, folder: RunFolder, **given: Any) -> None:
        self.folder = folder
        super().__init__(**given)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step  # type: ignore[attr-defined]
        place = self.folder.checkpoints / f"checkpoint-{step}"
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            if self.is_world_process_zero():  # type: ignore[attr-defined]
                (place / COMPLETE).touch()
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(place, ignore_errors=True)
            raise TrainingError(
                f"the checkpoint of step {step} could not be written ({_said(error)}): free some space, and the same "
                "command goes on from the one before"
            ) from error

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's own card names folders of this machine; ours is training.json."""


def _any_process(here: bool, args: Any) -> bool:
    if args.world_size <= 1:
        return here
    import torch

    flag = torch.tensor([int(here)], device=args.device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())


def _said(error: Exception) -> str:
    text = str(getattr(error, "strerror", "") or error).strip()
    return text.splitlines()[0][:160] if text else type(error).__name__


def _number(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str) or value is None else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def remove_checkpoints(folder: RunFolder) -> None:
    """Of a finished training: they hold optimiser states several times its size."""
    shutil.rmtree(folder.checkpoints, ignore_errors=True)


def newest_log(folder: Path) -> dict[str, Any]:
    """The last line of metrics.jsonl that has a loss; empty if there is none."""
    try:
        lines = folder.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        row = json.loads(line)
        if "loss" in row:
            return dict(row)
    return {}
