"""The process that holds a local model: answers one framed JSON request after another on a private pipe.

``python -m policy.local_worker --in-fd N --out-fd M``. Out of memory, or a crash in a kernel, costs this process and no
session. On a GPU it takes the lock of tools/gpu/lock.py while it loads and while it computes, so that no
timing runs beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policy.base import PolicyError
from policy.base_model import BaseSettings, adapter_id, device_of, gpu_lock, load_adapter, load_base, weights_id
from policy.chat import ChatError, Message, Tokenizer, segments
from policy.grammar import Allowed, frame_of, turn_grammar
from policy.local_policy import MEMORY_WORDS
from policy.picking import Sampling
from policy.sampling import Row, Sampler
from tools.frames import exit_on_hangup, read_frame, worker_parser, write_frame
from tools.gpu.lock import GpuLock
from tools.records import content_hash

#: Where turns may wait for others, a batch on a GPU is over when this part of its turns is: the last tenth takes as
#: many steps as all others.
MOST = 0.9


class Worker:
    """One base, and one adapter or none. Raises PolicyError."""

    def __init__(self, settings: BaseSettings, adapter: Path | None, home: Path, lock: GpuLock | None) -> None:
        import torch

        self._lock = lock
        with self._beside_no_timing():
            self.base = load_base(settings, home)
            model = load_adapter(self.base, adapter) if adapter is not None else self.base.model
            weights = weights_id(model)
            if adapter is not None and self.base.model.dtype is torch.float32:
                # A product less in every layer. In bfloat16 the sum would be rounded, and no training rounds it.
                model = model.merge_and_unload()
        self._frame = frame_of(self.base.tokenizer, self.base.template)
        self._sampler = Sampler(model, self.base.tokenizer)
        self.model_id = content_hash([self.base.fingerprint, adapter_id(adapter) if adapter is not None else None])
        config = (adapter / "adapter_config.json").read_text(encoding="utf-8") if adapter is not None else ""
        self._loaded = [self.model_id, weights, config]

    def about(self) -> dict[str, Any]:
        return {
            "base": self.base.name,
            "model": self.model_id,
            "tokenizer": self.base.tokenizer_id,
            "device": str(self.base.model.device),
            "identity": self.identity,
        }

    @property
    def identity(self) -> str:
        """Of all that the same order's answer depends on, this code aside."""
        import torch

        model, tokenizer = self.base.model, self.base.tokenizer
        on = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
        template = self.base.template if self.base.template is not None else str(tokenizer.chat_template)
        made_by = [on, str(model.dtype), torch.__version__]
        return content_hash([*self._loaded, self.base.tokenizer_id, tokenizer.eos_token, template, made_by])

    def sample(
        self, rows: Sequence[Mapping[str, Any]], sampling: Sampling, words: int, may_wait: bool = False
    ) -> list[dict[str, Any] | None]:
        """``may_wait``: a turn may be None, and is to be asked for again with others."""
        drawn = []
        contexts = [
            context_of(self.base.tokenizer, row["messages"], row["tools"], self.base.template, row["own"])
            for row in rows
        ]
        for row, context in zip(rows, contexts, strict=True):
            allowed = Allowed(row["lead"], row["calls"], dict(row["numbered"]))
            grammar = turn_grammar(allowed, self._frame, words)
            drawn.append(Row(context, grammar, row["seed"], row["conversation"]))
        share = MOST if may_wait and self.base.model.device.type == "cuda" else 1.0
        with self._beside_no_timing():
            turns = self._sampler.draw_most(drawn, sampling, share)
        return [
            None
            if turn is None
            else {
                "context_ids": context,
                "token_ids": turn.ids,
                "logprobs": turn.logprobs,
                "mask": turn.mask,
                "text": self.base.tokenizer.decode(turn.ids[:-1], skip_special_tokens=False),
            }
            for context, turn in zip(contexts, turns, strict=True)
        ]

    def _beside_no_timing(self) -> contextlib.AbstractContextManager[None]:
        return self._lock.held(exclusive=False) if self._lock is not None else contextlib.nullcontext()


def context_of(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    template: str | None,
    own: Sequence[Sequence[int] | None],
) -> list[int]:
    """What the next turn is sampled from. ``own``: the tokens that the earlier turns were sampled as, which need not be
    those that their texts would be cut into; None for a turn of which they are not known."""
    turns = iter(own)
    ids: list[int] = []
    for segment in segments(tokenizer, messages, tools, template, next_turn=True):
        known = next(turns, None) if segment.own else None
        ids += known if known is not None else tokenizer.encode(segment.text, add_special_tokens=False)
    return ids


def _lock_of(settings: BaseSettings) -> GpuLock | None:
    import torch

    return gpu_lock(torch.device(device_of(settings)))


def _answer(worker: Worker | None, request: Mapping[str, Any]) -> tuple[Worker | None, dict[str, Any]]:
    match request["op"]:
        case "load":
            adapter = Path(request["adapter"]) if request["adapter"] else None
            settings = BaseSettings.model_validate(request["base"])
            worker = Worker(settings, adapter, Path(request["home"]), _lock_of(settings))
            found: dict[str, Any] = worker.about()
        case _:
            if worker is None:
                raise PolicyError("no model is loaded")
            sampling = Sampling(request["temperature"], request["top_p"])
            found = {
                "turns": worker.sample(request["rows"], sampling, request["words"], request.get("may_wait", False))
            }
    return worker, found | {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _out_of_memory(error: BaseException | None) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in MEMORY_WORDS)


def main() -> None:
    options = worker_parser().parse_args()
    exit_on_hangup(options.out_fd)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    worker: Worker | None = None
    while (frame := read_frame(options.in_fd)) is not None:
        try:
            worker, reply = _answer(worker, json.loads(frame))
        except (PolicyError, ChatError) as error:
            reply = {"error": "memory" if _out_of_memory(error.__cause__) else str(error)}
        except (MemoryError, RuntimeError, OSError, ImportError) as error:
            if not _out_of_memory(error):
                raise
            reply = {"error": "memory"}
        write_frame(options.out_fd, json.dumps(reply).encode())


if __name__ == "__main__":
    main()
