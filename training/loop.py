"""One training from its rows to its result: what SFT and GRPO share. Heavy imports inside the functions."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from policy.base_model import CARD, Base, adapter_id, check_adapter, load_adapter, load_base
from policy.compact import PROMPT_VERSION
from tools.extras import install_command
from tools.revision import commit
from training.errors import TrainingError, TrainingStopped
from training.folder import RunFolder
from training.rows import ROW_VERSION, Row, read_rows
from training.settings import LoopSettings, LoraSettings, TrainSettings

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")


@dataclass(frozen=True)
class Job:
    """``adapter``: trained on instead of beginning a new one. ``home``: where converted bases lie."""

    kind: Literal["sft", "grpo"]
    rows: Path
    out: Path
    settings: TrainSettings
    home: Path
    adapter: Path | None = None
    fresh: bool = False
    keep_checkpoints: bool = False
    stop_requested: Callable[[], bool] = lambda: False
    show: Callable[[str], None] = lambda line: None

    @property
    def loop(self) -> LoopSettings:
        return self.settings.sft if self.kind == "sft" else self.settings.grpo


@dataclass
class Result:
    """What a training came to; ``left_out`` counts rows by reason."""

    out: Path
    rows: int
    left_out: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    elapsed_s: float = 0.0
    already: bool = False
    figures: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "rows": self.rows,
            "left_out": {name: n for name, n in sorted(self.left_out.items()) if n},
            "steps": self.steps,
            "elapsed_s": round(self.elapsed_s, 1),
            "already_finished": self.already,
            "figures": self.figures,
        }


def check_installed() -> None:
    """Raises TrainingError with the command that adds what is missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise TrainingError(f"training needs {', '.join(missing)}: {install_command('train')}")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """What they warn of concerns whoever calls them, not whoever runs this command."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield


def is_main_process() -> bool:
    """Of those that accelerate started; the only one that writes and prints."""
    return int(os.environ.get("RANK", "0")) == 0


def process_count() -> int:
    """Of those that accelerate started, itself included."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait_for_all(job: Job) -> None:
    """Until the main process has made the folder ready: the others read in it what there is to go on with."""
    if process_count() > 1:
        import torch
        from accelerate import PartialState

        PartialState(cpu=job.settings.base.device == "cpu" or not torch.cuda.is_available()).wait_for_everyone()


def asked(job: Job, base: Base) -> dict[str, Any]:
    """run.json: what makes two trainings the same one."""
    dumped = job.settings.model_dump(mode="json")
    return {
        "kind": job.kind,
        "rows": {"file": job.rows.name, "sha256": _digest(job.rows)},
        "base": {"name": base.name, "fingerprint": base.fingerprint},
        "adapter": adapter_id(job.adapter) if job.adapter is not None else None,
        "settings": {job.kind: dumped[job.kind], "lora": dumped["lora"], "reward": dumped["reward"]},
        "formats": {"rows": ROW_VERSION, "prompt": PROMPT_VERSION},
    }


def trainable(base: Base, job: Job) -> Any:
    """The model as it is trained: with a new adapter, with the given one, or as it is."""
    if job.adapter is not None:
        if job.loop.method == "full":
            raise TrainingError("an adapter is trained on as an adapter: leave method=lora, or merge it into its base")
        return load_adapter(base, job.adapter, trainable=True)
    if job.loop.method == "full":
        return base.model
    return _with_lora(base.model, job.settings.lora, job.loop.seed)


def arguments(job: Job) -> dict[str, Any]:
    """Of TRL's config classes, what SFT and GRPO have in common."""
    import torch

    loop = job.loop
    on_gpu = torch.cuda.is_available() and job.settings.base.device != "cpu"
    bf16 = on_gpu and job.settings.base.dtype != "float32" and torch.cuda.is_bf16_supported()
    return {
        "output_dir": str(job.out / "checkpoints"),
        "per_device_train_batch_size": loop.batch_size,
        "learning_rate": loop.learning_rate,
        "lr_scheduler_type": loop.schedule,
        "warmup_steps": loop.warmup,  # less than 1 is a part of the steps, which the Trainer counts over all processes
        "weight_decay": loop.weight_decay,
        "max_grad_norm": loop.max_grad_norm,
        "num_train_epochs": loop.epochs,
        "max_steps": loop.max_steps or -1,
        "logging_steps": loop.log_steps,
        "logging_first_step": True,
        "save_strategy": "steps",
        "save_steps": loop.save_steps,
        "save_total_limit": loop.keep_checkpoints,
        "seed": loop.seed,
        "gradient_checkpointing": loop.gradient_checkpointing,
        "use_cpu": not on_gpu,
        "bf16": bf16,
        "report_to": ["tensorboard"] if find_spec("tensorboard") is not None else "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
    }


def in_folder(job: Job, train: Callable[[Job, Base, RunFolder, list[Row]], Result]) -> Result:
    """What every training begins with: rows, base, and the folder, which one process at a time works in. One that is
    finished answers with its result."""
    rows = read_rows(job.rows)
    check_installed()
    _on_own_gpu(job)
    with quiet_libraries():
        base = load_base(job.settings.base, job.home)
        if job.adapter is not None:
            check_adapter(base, job.adapter)
        folder = RunFolder(job.out)
        with folder.locked() if is_main_process() else nullcontext():
            if is_main_process():
                folder.begin(asked(job, base), job.fresh)
            wait_for_all(job)
            return finished(job, folder) if folder.is_finished else train(job, base, folder, rows)


def _on_own_gpu(job: Job) -> None:
    """Each process of a training has a GPU of its own, which accelerate names by its number. Raises TrainingError."""
    import torch

    if ":" in job.settings.base.device:
        raise TrainingError(
            f"base.device={job.settings.base.device} is for sampling: say which GPUs train with CUDA_VISIBLE_DEVICES"
        )
    if job.settings.base.device != "cpu" and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def reasons(left_out: Mapping[str, int]) -> str:
    """Why rows were left out, and how many."""
    return ", ".join(f"{n} {why}" for why, n in sorted(left_out.items()) if n) or "none"


def run(
    job: Job, base: Base, folder: RunFolder, make_trainer: Callable[[list[Any]], Any], rows: int, left_out: Counter[str]
) -> Result:
    """Trains, or goes on, and writes the result. Raises TrainingError, or TrainingStopped with a checkpoint written."""
    from transformers import PrinterCallback

    from training.watching import Metrics, StopBetweenSteps, newest_log, remove_checkpoints

    begun = time.monotonic()
    stopping = StopBetweenSteps(job.stop_requested)
    trainer = make_trainer([Metrics(folder, job.show), stopping])
    trainer.remove_callback(PrinterCallback)
    newest = folder.resume_from()
    if newest is not None:
        job.show(f"going on from {newest.name}")
    _train(job, trainer, newest)
    steps = int(trainer.state.global_step)
    if stopping.stopped:
        raise TrainingStopped(f"stopped after step {steps} of {trainer.state.max_steps}")
    result = Result(job.out, rows, left_out, steps, time.monotonic() - begun)
    result.figures = newest_log(folder.metrics)
    if is_main_process():
        _write_result(trainer, job, base, folder, result)
        if not job.keep_checkpoints:
            remove_checkpoints(folder)
    return result


def finished(job: Job, folder: RunFolder) -> Result:
    from training.watching import newest_log

    return Result(job.out, 0, already=True, figures=newest_log(folder.metrics))


def _train(job: Job, trainer: Any, newest: Path | None) -> None:
    import torch

    try:
        trainer.train(resume_from_checkpoint=str(newest) if newest is not None else None)
    except torch.cuda.OutOfMemoryError as error:
        raise TrainingError(less_memory(job)) from error


def less_memory(job: Job) -> str:
    """What to do where the GPU has too little, of what a training may change on its way (training/folder.py)."""
    kind, loop, ways = job.kind, job.loop, []
    if loop.batch_size > 1:
        ways.append(f"--set {kind}.batch_size={loop.batch_size // 2}")
        if kind == "sft":  # as many rows a step as before; GRPO counts a step in groups
            ways[0] += f" --set sft.accumulate={2 * job.settings.sft.accumulate}"
    if not loop.gradient_checkpointing:
        ways.append(f"--set {kind}.gradient_checkpointing=true")
    if not ways:
        return (
            f"the GPU has too little memory for one row: lower {kind}.max_length, with --fresh, or take a smaller base"
        )
    told = " or ".join(ways)
    return (
        f"the GPU has too little memory for this batch: the same command with {told} goes on from the last checkpoint"
    )


def _with_lora(model: Any, settings: LoraSettings, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed

    set_seed(seed)  # the adapter begins random
    targets: Any = settings.targets if settings.targets == "all-linear" else settings.targets.split(",")
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise TrainingError(f"lora.targets: {str(error).splitlines()[0]}") from error


def _write_result(trainer: Any, job: Job, base: Base, folder: RunFolder, result: Result) -> None:
    """Whole files only, training.json last: its presence says that the training is finished."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    new = Path(tempfile.mkdtemp(dir=job.out, prefix=".new-"))
    try:
        try:
            _save(model, base, job, new)
            for path in sorted(new.iterdir()):
                path.chmod(0o644)
                path.replace(job.out / path.name)
        except Exception as error:  # safetensors, torch and the system each have their own
            raise TrainingError(
                f"the result could not be written to {job.out} ({str(error).strip().splitlines()[0][:160]}): free some "
                "space, and the same command goes on from the last checkpoint"
            ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    folder.write_json(CARD, _card(job, base, result))


def _save(model: Any, base: Base, job: Job, folder: Path) -> None:
    if hasattr(model, "peft_config"):
        for config in model.peft_config.values():
            config.base_model_name_or_path = base.name  # never a place on this machine
        # Embeddings are not trained; to find out whether they were, peft would ask the hub.
        _halved(model).save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False)
        with contextlib.suppress(FileNotFoundError):
            (folder / "README.md").unlink()  # peft's draft of a card
    else:
        model.config._name_or_path = base.name
        model.save_pretrained(folder)
        base.tokenizer.save_pretrained(folder)


def _halved(model: Any) -> Any:
    """Adapters travel with the repository: in bfloat16 they take half the room, and bases run in it anyway."""
    import torch

    for name, weight in model.named_parameters():
        if ".default." in name or name.endswith(".default"):
            weight.data = weight.data.to(torch.bfloat16)
    return model


def _card(job: Job, base: Base, result: Result) -> Mapping[str, Any]:
    return {
        **asked(job, base),
        "result": result.as_json() | {"out": job.out.name},
        "tokenizer": base.tokenizer_id,
        "chat_template": "own" if base.template is None else base.template,
        "commit": commit(),
        "versions": {name: _version(name) for name in PACKAGES},
        "device": _device(job),
    }


def _device(job: Job) -> str:
    """What it was trained on: names without a place."""
    import torch

    if job.settings.base.device == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return f"{process_count()} x {torch.cuda.get_device_name()}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
