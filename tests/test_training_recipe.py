"""The whole way at the size of a test: optimise on replay → export → SFT → offline GRPO, stopped and gone on with, and
what can go wrong in between. Everything through the command, as a user has it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_model import make_tiny_model
from training_kit import row

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

from tools.gpu.lock import GpuLock  # noqa: E402
from training import watching  # noqa: E402
from training.errors import TrainingError, TrainingStopped  # noqa: E402
from training.folder import COMPLETE, RunFolder  # noqa: E402
from training.grpo import train_grpo  # noqa: E402
from training.loop import Job, Result, less_memory  # noqa: E402
from training.rows import PromptMessage, Row, RowTokens, read_rows  # noqa: E402
from training.settings import TrainSettings  # noqa: E402
from training.sft import train_sft  # noqa: E402
from training.writing import write_rows  # noqa: E402

SETTINGS = {
    "sft": {"max_length": 8000, "batch_size": 2, "log_steps": 1, "eval_rows": 2},
    "grpo": {"max_length": 8000, "batch_size": 2, "log_steps": 1, "group_size": 2, "groups_per_step": 1},
    "lora": {"rank": 2},
    "base": {"device": "cpu"},
}
SMALL = [word for s, v in SETTINGS.items() for name, value in v.items() for word in ("--set", f"{s}.{name}={value}")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    make_tiny_model(folder / "tiny")
    return folder


def environ(home: Path) -> dict[str, str]:
    return {**os.environ, "HGEMM_AGENT_HOME": str(home), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def agent(home: Path, *words: str | Path, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    command: Sequence[str | Path] = [sys.executable, "-m", "agent", *words]
    if limit is not None:
        command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "-", *command]
    return subprocess.run(
        command, capture_output=True, text=True, env=environ(home), cwd=home, check=False, timeout=240
    )


def train(home: Path, kind: str, rows: Path, out: str, *words: str | Path, limit: int | None = None):
    given = ("train", kind, rows, "--base", home / "tiny", "--out", home / out, *SMALL, *words)
    return agent(home, *given, limit=limit)


def train_here(
    home: Path, kind: str, rows: Path, out: str, stop_requested=lambda: False, **changed: object
) -> tuple[Result, str]:
    """The same without a process of its own, and what it said. ``changed`` are fields of the section ``kind``."""
    sections = {**SETTINGS, "base": {"name": str(home / "tiny"), "device": "cpu"}}
    settings = TrainSettings.model_validate({**sections, kind: {**SETTINGS[kind], **changed}})
    said: list[str] = []
    job = Job(kind, rows, home / out, settings, home, stop_requested=stop_requested, show=said.append)  # type: ignore[arg-type]
    result = train_sft(job) if kind == "sft" else train_grpo(job)
    return result, "\n".join(said)


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: "), done.stderr
    return last


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(home: Path) -> Path:
    """Groups with log-probabilities, as a local policy would have logged them, of the tiny model's own tokenizer."""
    from policy.base_model import BaseSettings, load_base
    from training.samples import sample_of

    base = load_base(BaseSettings(name=str(home / "tiny"), device="cpu"), home)
    made = []
    for group in range(3):
        for number in range(2):
            plain = row(number, f"g{group}", reward=float(number), shape=(64, 64, 64))
            sample = sample_of(plain, base)
            tokens = RowTokens(
                model="m",
                tokenizer=base.tokenizer_id,
                temperature=1.0,
                prompt_ids=sample.prompt_ids,
                completion_ids=sample.completion_ids,
                mask=sample.mask,
                logprobs=tuple(-5.5 * m for m in sample.mask),
            )
            made.append(plain.model_copy(update={"tokens": tokens}))
    made += [row(i, "unseen", reward=float(i), shape=(64, 64, 128)) for i in range(2)]
    write_rows(home / "rows.jsonl", made)
    return home / "rows.jsonl"


def test_from_a_search_on_replay_to_an_adapter(home: Path) -> None:
    search = (
        "optimize --shape 64,64,64 --device replay:h200 --policy random --evaluations 16 --session made -q "
        "--set session.group_size=4 --set session.rounds=2 --set policy.batch=2"
    )
    assert agent(home, *search.split()).returncode in (0, 2)
    exported = agent(home, "export-trajectories", "made", "--out", "made.jsonl", "--json")
    said = json.loads(exported.stdout)
    assert said["rows"] == 8 and said["groups"] == 2
    made = read_rows(home / "made.jsonl")
    assert len({r.prompt for r in made}) == 1 and {r.provenance.commit for r in made} != {"x"}
    imitated = train(home, "sft", home / "made.jsonl", "sft", "--set", "sft.max_steps=2", "--json")
    assert imitated.returncode == 0, imitated.stderr
    assert json.loads(imitated.stdout)["steps"] == 2
    steps = [m["loss"] for m in metrics(home / "sft") if "loss" in m]
    assert len(steps) == 2 and all(loss > 0 for loss in steps)
    (home / "other").mkdir()
    (home / "other" / "adapter_config.json").write_text("{}")
    (home / "other" / "training.json").write_text('{"base": {"name": "some-7b", "fingerprint": "0123"}}')
    strange = train(home, "grpo", home / "made.jsonl", "grpo-made", "--adapter", home / "other")
    assert "was trained on some-7b (0123), not on tiny" in one_sentence(strange)
    unlogged = train(home, "grpo", home / "made.jsonl", "grpo-made", "--adapter", home / "sft")
    assert "no log-probabilities" in one_sentence(unlogged) and "--policy local" in unlogged.stderr
    improved = train(
        home, "grpo", home / "made.jsonl", "grpo-made", "--adapter", home / "sft", "--fresh",
        "--set", "grpo.behaviour=reference", "--set", "grpo.max_steps=2",
    )  # fmt: skip
    assert improved.returncode == 0, improved.stderr
    card = json.loads((home / "grpo-made" / "training.json").read_text())
    assert card["kind"] == "grpo" and card["base"]["name"] == "tiny" and card["adapter"]
    for path in (home / "grpo-made").iterdir():
        assert str(home) not in path.read_text(errors="replace"), path.name
    assert sorted(p.name for p in (home / "grpo-made").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "lock", "metrics.jsonl", "run.json", "training.json"
    ]  # fmt: skip


def test_grpo_on_logged_tokens_makes_the_better_row_likelier(home: Path, rows: Path) -> None:
    given = {"epochs": 4, "learning_rate": 0.01, "schedule": "constant", "kl": 0, "method": "full"}
    _, said = train_here(home, "grpo", rows, "grpo", **given)
    assert "2 held out" in said and "3 groups of 2" in said

    from policy.base_model import BaseSettings, load_base
    from training.samples import sample_of

    def gap(folder: Path) -> float:
        """Of the log-probability of the better rollout over that of the worse one, a token."""
        import torch

        base = load_base(BaseSettings(name=str(folder), device="cpu"), home)
        means = []
        for one in read_rows(rows)[:2]:
            sample = sample_of(one, base)
            ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
            with torch.no_grad():
                logps = torch.log_softmax(base.model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
            own = torch.tensor(sample.mask, dtype=torch.float)
            means.append((logps[len(sample.prompt_ids) - 1 :] * own).sum() / own.sum())
        return float(means[1] - means[0])

    assert gap(home / "grpo") > gap(home / "tiny") + 1e-4
    again, _ = train_here(home, "grpo", rows, "grpo", **given)
    assert again.already and again.figures["step"] == 12
    with pytest.raises(TrainingError, match=r"with another settings\.grpo\.kl: choose another --out, or --fresh"):
        train_here(home, "grpo", rows, "grpo", **{**given, "kl": 0.1})


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_a_checkpoint_and_the_same_command_goes_on(
    home: Path, rows: Path, number: signal.Signals, code: int
) -> None:
    out = home / f"stopped-{code}"
    words = ["train", "sft", rows, "--base", home / "tiny", "--out", out, *SMALL, "--set", "sft.max_steps=5000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", *map(str, words)], env=environ(home), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not ((out / "metrics.jsonl").is_file() and len(metrics(out)) >= 3):
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "the same command goes on from there" in said and "Traceback" not in said
    reached = max(m["step"] for m in metrics(out))
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert (checkpoint / COMPLETE).is_file() and int(checkpoint.name.rpartition("-")[2]) >= reached - 1
    stopped = int(checkpoint.name.rpartition("-")[2])
    _, said = train_here(home, "sft", rows, out.name, max_steps=stopped + 2)
    assert f"going on from checkpoint-{stopped}" in said
    assert metrics(out)[-1]["step"] == stopped + 2 and not (out / "checkpoints").exists()


def test_stopped_and_gone_on_with_is_the_same_as_never_stopped(home: Path, rows: Path) -> None:
    from safetensors.torch import load_file

    given = {"schedule": "constant", "warmup": 0, "save_steps": 2}
    train_here(home, "grpo", rows, "once", **given, max_steps=5)
    answers = iter([False, True])  # asked after every step
    with pytest.raises(TrainingStopped, match="stopped after step 2 of 5"):
        train_here(home, "grpo", rows, "twice", stop_requested=lambda: next(answers), **given, max_steps=5)
    _, said = train_here(home, "grpo", rows, "twice", **given, max_steps=5)
    assert "going on from checkpoint-2" in said
    one, two = (load_file(home / name / "adapter_model.safetensors") for name in ("once", "twice"))
    assert one.keys() == two.keys() and all((one[k] - two[k]).abs().max() < 1e-3 for k in one)


@pytest.mark.parametrize(
    ("kind", "less"), [("sft", {"batch_size": 1, "accumulate": 2}), ("grpo", {"batch_size": 1})], ids=str
)
def test_a_training_goes_on_with_less_memory(home: Path, rows: Path, kind: str, less: dict[str, int]) -> None:
    """As the sentence says that is told when the GPU's is too little."""
    given = {"best_of_group": None, "epochs": 2} if kind == "sft" else {"epochs": 2}
    answers = iter([False, True])
    with pytest.raises(TrainingStopped, match="stopped after step 2 of 6"):
        train_here(home, kind, rows, f"less-{kind}", stop_requested=lambda: next(answers), **given)
    result, said = train_here(home, kind, rows, f"less-{kind}", **given, **less, gradient_checkpointing=True)
    assert "going on from checkpoint-2" in said and result.steps == 6
    with pytest.raises(TrainingError, match=f"another settings.{kind}.max_length"):
        train_here(home, kind, rows, f"less-{kind}", **given, max_length=7000)


def test_what_is_told_when_the_gpus_memory_is_too_little() -> None:
    def told(kind: str, **changed: object) -> str:
        settings = TrainSettings.model_validate({kind: changed})
        return less_memory(Job(kind, Path("rows"), Path("out"), settings, Path("home")))  # type: ignore[arg-type]

    assert "--set sft.batch_size=4 --set sft.accumulate=2 or --set sft.gradient_checkpointing=true goes" in told("sft")
    assert "with --set grpo.batch_size=2 goes on" in told("grpo", batch_size=4, gradient_checkpointing=True)
    assert "too little memory for one row" in told("sft", batch_size=1, gradient_checkpointing=True)


def test_two_processes_share_the_steps_of_the_warm_up_and_end_in_order(home: Path, rows: Path, tmp_path: Path) -> None:
    """Both leave before Python's own end, where a thread of gloo's aborts a process now and then."""
    script = tmp_path / "watched.py"
    script.write_text(
        "import os, runpy\n"
        "leave = os._exit\n"
        "def watched(code):\n"
        "    print('left with', code, flush=True)\n"
        "    leave(code)\n"
        "os._exit = watched\n"
        "runpy.run_module('agent', run_name='__main__')\n"
    )
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    given = ("train", "sft", rows, "--base", home / "tiny", "--out", tmp_path / "two", *SMALL)
    more = ("best_of_group=null", "batch_size=1", "epochs=2", "warmup=0.5")
    words = [*launch, *given, *(word for one in more for word in ("--set", f"sft.{one}"))]
    done = subprocess.run(
        words,
        env=environ(home) | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left with 0") == 2 and "6 steps on 6 rows" in done.stdout
    rates = [m["learning_rate"] for m in metrics(tmp_path / "two") if "learning_rate" in m]
    assert len(rates) == 6 and rates.index(max(rates)) == 3  # 6 rows, 2 at a time, twice: 3 steps of warm-up


def test_a_step_waits_for_a_timing_and_a_timing_for_a_step(
    home: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"test-{os.getpid()}"
    monkeypatch.setattr(watching, "gpu_lock", lambda device: GpuLock(name))  # this machine may have no GPU
    is_timed, is_over, is_timed_again = threading.Event(), threading.Event(), threading.Event()

    def time_twice() -> None:
        with GpuLock(name).held(exclusive=True):
            is_timed.set()
            time.sleep(1.0)
            is_over.set()
        time.sleep(0.05)
        with GpuLock(name).held(exclusive=True):  # beside one step after the other
            is_timed_again.set()

    timing = threading.Thread(target=time_twice)
    timing.start()
    is_timed.wait()
    steps = []

    def after_a_step() -> bool:
        steps.append(is_over.is_set())
        return is_timed_again.is_set()

    try:
        with pytest.raises(TrainingStopped):
            train_here(home, "sft", rows, "beside", stop_requested=after_a_step, max_steps=5000)
    finally:
        timing.join()
        Path(f"/tmp/hgemm-agent-{name}.lock").unlink()
    assert all(steps) and len(steps) < 1000  # steps that never yielded would be all 5000


def test_a_full_disk_at_checkpoint_time(home: Path, rows: Path) -> None:
    words = ("--set", "sft.max_steps=2", "--set", "sft.save_steps=1")
    sentence = one_sentence(train(home, "sft", rows, "full", *words, limit=4))
    assert "the checkpoint of step 1 could not be written" in sentence and "free some space" in sentence
    assert not list((home / "full" / "checkpoints").glob("checkpoint-*"))
    done, _ = train_here(home, "sft", rows, "full", max_steps=2, save_steps=1)
    assert done.steps == 2


def test_a_checkpoint_that_a_kill_left_half_written_is_not_used(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step, whole in ((2, True), (4, True), (6, False)):
        (folder.checkpoints / f"checkpoint-{step}").mkdir(parents=True)
        if whole:
            (folder.checkpoints / f"checkpoint-{step}" / COMPLETE).touch()
    found = folder.resume_from()
    assert found is not None and found.name == "checkpoint-4"
    assert not (folder.checkpoints / "checkpoint-6").exists()


def test_bad_rows(home: Path, rows: Path, tmp_path: Path) -> None:
    def refused(kind: str, name: str, made: list[Row] | None = None, out: str = "bad") -> str:
        if made is not None:
            write_rows(tmp_path / name, made)
        shutil.rmtree(home / "bad", ignore_errors=True)
        with pytest.raises(TrainingError) as caught:
            train_here(home, kind, tmp_path / name, out)
        return str(caught.value)

    (tmp_path / "cut.jsonl").write_bytes(rows.read_bytes()[:-500])
    assert "was cut off in the middle" in refused("sft", "cut.jsonl")
    alike = refused("grpo", "alike.jsonl", [row(i, "g", reward=1.0) for i in range(2)] + [row(0, "alone")])
    assert "1 alone in its group, 2 equal rewards in the group" in alike and "session.group_size" in alike
    write_rows(tmp_path / "nan.jsonl", [row(i, "g", reward=float(i)) for i in range(2)])
    text = (tmp_path / "nan.jsonl").read_text()
    (tmp_path / "nan.jsonl").write_text(text.replace('"reward":1.0', '"reward":NaN'))
    assert "1 reward is no number" in refused("grpo", "nan.jsonl")
    assert "1 too long" in refused(
        "sft", "long.jsonl", [row(0, prompt=(PromptMessage(role="user", content="x" * 9000),))]
    )
    assert "1 held out" in refused("sft", "unseen.jsonl", [row(0, shape=(64, 64, 128))])
    assert "does not exist" in refused("sft", "missing.parquet")
    (home / "notes").mkdir()
    (home / "notes" / "mine.txt").write_text("x")
    assert "holds no training" in refused("sft", "fine.jsonl", [row(0)], out="notes")


def test_bad_commands_are_one_sentence(home: Path, rows: Path) -> None:
    nowhere = agent(home, "train", "sft", rows, "--base", "./nowhere", "--out", home / "bad")
    assert "there is no folder ./nowhere" in one_sentence(nowhere)
    numbered = train(home, "sft", rows, "bad3", "--set", "base.device=cuda:1")
    assert "say which GPUs train with CUDA_VISIBLE_DEVICES" in one_sentence(numbered)
    assert "there is no section 'sftt'" in one_sentence(train(home, "sft", rows, "bad2", "--set", "sftt.epochs=3"))
