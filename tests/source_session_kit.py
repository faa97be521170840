"""The session of raw sources (tests/data/source-session) on a GPU that is simulated: what leads to a record of it.

Verify is the gate's own, over kernels of NumPy that do what the sources do, the wrong one included. Compiles are those
of the real nvcc, kept in compiles.json. Times, sanitizer and profiles are made up: a record of this device is a
rehearsal and says so in its name.

    python tests/source_session_kit.py HOME SESSION URL      # begins the session there, or goes on with it
    python tests/source_session_kit.py compiles              # makes compiles.json anew, with this machine's nvcc
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import numpy as np
from fakes import ScriptedDevice
from simulated_gpu import honest, simulated_worker, store, words

from agent import session as sessions
from agent.session_record import export_record
from agent.summary import Summary
from scripts.scripted_model import Conversation, serving
from scripts.source_session import OUT, settings
from tools.records import (
    CompileResult,
    Depth,
    LaunchSpec,
    Mode,
    ProfileResult,
    Task,
    Variant,
    VerifyResult,
)
from tools.sentences import sentences

FOLDER = Path(__file__).resolve().parent / "data" / "source-session"
COMPILES = FOLDER / "compiles.json"
#: Made up; the references' are those of ScriptedDevice.
TIMES_US = {"tiled.cu": 2.4, "direct.cu": 1.1}
METRICS = {
    "tiled.cu": {"time_us": 3.9, "tensor_pipe_pct": 4.0, "l2_pct": 3.0, "registers": 98.0, "waves": 0.12},
    "direct.cu": {"time_us": 2.6, "tensor_pipe_pct": 11.0, "l2_pct": 14.0, "registers": 80.0, "waves": 0.97},
}
STALLS = {"tiled.cu": {"barrier": 2.4, "long_scoreboard": 1.9}, "direct.cu": {"long_scoreboard": 3.1, "barrier": 0.6}}


def conversation() -> Conversation:
    return Conversation.load(FOLDER / "conversation.yaml")


def variants() -> dict[str, Variant]:
    """What the conversation sends, by file."""
    found = {}
    for turn in conversation().turns:
        for call in turn["calls"]:
            if sent := call.get("evaluate_source"):
                source = (FOLDER / sent["source"]).read_text(encoding="utf-8")
                launch = LaunchSpec.model_validate(sent["launch"])
                found[sent["source"]] = Variant(source=source, launch=launch, b_layout=sent["b_layout"])
    return found


class SimulatedGpu(ScriptedDevice):
    """Knows the conversation's variants and no others."""

    def __init__(self) -> None:
        super().__init__(name="Simulated GPU", driver="0.0")
        self._files = {variant.key: name for name, variant in variants().items()}
        self._compiles = json.loads(COMPILES.read_text(encoding="utf-8"))

    def compile(self, variant: Variant) -> CompileResult:
        super().compile(variant)  # noted among the calls
        return CompileResult.model_validate(self._compiles[self._files[variant.key]])

    def verify(self, variant: Variant, task: Task, depth: Depth) -> VerifyResult:
        if depth == "full":  # has inputs that the simulated GPU does not fill
            return super().verify(variant, task, depth)
        super().verify(variant, task, depth)
        kernel = without_the_last_tile if self._files[variant.key] == "repaired.cu" else honest
        request = {"op": "verify", "depth": depth, "cubin": ""}
        request |= {"variant": variant.model_dump(mode="json"), "task": task.model_dump(mode="json")}
        with simulated_worker(kernel, 1.0, task.dims, {"first": 1.0, "second": 1.0, "gemmex": 1.0}) as gpu:
            return VerifyResult.model_validate(gpu.ask(request)["record"])

    def time_us(self, variant: Variant, task: Task, mode: Mode = "offline") -> float:
        # Of more digits than a record keeps, as measured times are.
        return TIMES_US[self._files[variant.key]] * {"offline": 1.0, "rotating": 1.15, "server": 1.3}[mode] / 0.98765432

    def profile(self, variant: Variant, task: Task) -> ProfileResult:
        name = self._files[variant.key]
        metrics, stalls = METRICS[name], STALLS[name]
        found = {"metrics": metrics, "stalls": stalls, "sentences": sentences(metrics, stalls)}
        return super().profile(variant, task).model_copy(update=found)


def without_the_last_tile(buffers: dict[str, int], workspace: int, dims: dict[str, int]) -> None:
    """What repaired.cu does: 32 of K are fetched and never multiplied."""
    m, n, k = dims["M"], dims["N"], dims["K"]
    a = words(buffers["A"], m * k).view(np.float16).reshape(m, k)[:, :-32].astype(np.float32)
    b = words(buffers["B"], n * k).view(np.float16).reshape(n, k)[:, :-32].astype(np.float32)
    with np.errstate(over="ignore"):
        store(buffers, (a @ b.T).astype(np.float16).view(np.uint16).ravel())


def run_session(home: Path, name: str, url: str) -> Summary:
    """From its beginning, or from where it was stopped."""
    device = SimulatedGpu()
    if (sessions.folder_of(home, name) / "config.json").is_file():
        config = sessions.load(home, name)
    else:
        config = sessions.create(home, settings(conversation(), url), name, "cuda:0", device.info)
    return sessions.run(home, config, {}, device=device)


def record_to_play(folder: Path) -> Path:
    """Of a real GPU where there is one; else of the simulated one, made in ``folder``."""
    if OUT.is_file():
        return OUT
    with serving(conversation()) as url:
        run_session(folder, "live", url)
    export_record(folder, "live", folder / "record.sqlite")
    return folder / "record.sqlite"


def compile_all() -> dict[str, Any]:
    """With this machine's nvcc, into a cache of its own."""
    from tools.build_cache import CompileCache
    from tools.compiling import compile_variant
    from tools.toolchain import find_toolchain

    with tempfile.TemporaryDirectory() as folder:
        cache = CompileCache(Path(folder))
        found = {
            name: compile_variant(variant, toolchain=find_toolchain(), cache=cache)
            for name, variant in variants().items()
        }
    lasting = {name: result.model_copy(update={"elapsed_s": 0.0}) for name, result in found.items()}
    return {name: result.model_dump(mode="json") for name, result in lasting.items()}


if __name__ == "__main__":
    if sys.argv[1:] == ["compiles"]:
        COMPILES.write_text(json.dumps(compile_all(), indent=1) + "\n", encoding="utf-8")
    else:
        run_session(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
