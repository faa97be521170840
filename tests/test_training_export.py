"""Trajectories → rows: nothing secret leaves, what is unknown is masked, each content once, tokens where they fit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_kit import DEVICE, answers, row, sampled, says, trajectory

from memory.store import Store
from policy.compact import PROMPT_VERSION
from policy.redacting import Secrets
from tools.records import Step
from training.export import Counts, Filters, export, row_of, rows_of
from training.rows import Provenance, Row, read_rows
from training.scrub import scrub_text

KEY = "sk-ant-api03-abcdefghijklmnop"
PROMPT = (Step(role="system", text="s"), Step(role="user", text="u"))


def made(*turns: Step, secrets: Secrets | None = None, compact: bool = False, **given: object) -> Row:
    found = row_of(trajectory(*turns, **given), {}, 2.0, compact, secrets or Secrets(), DEVICE)
    assert isinstance(found, Row)
    return found


# --- what must not leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "open /home/anna/kernels/fast.cu: no such file",
        "in ~/.hgemm-agent/store.sqlite",
        "ptxas /tmp/tmpa1b2c3/kernel.cubin, line 3",
        r"C:\Users\anna\kernel.cu(12)",
        "file:///srv/data/corpus.txt is stale",
        '{"path":"/scratch/anna/x.json"}',
        f"the key {KEY} was refused",
        "Authorization: Bearer abcdefghijklmnopqrstuvwx",
        "hf_abcdefghijklmnopqrstuv and AKIAABCDEFGHIJKLMNOP",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
        "my-own-server-key-4711 in the environment",
        "http://anna:geheim@example.org/v1",
    ],
)
def test_keys_and_absolute_paths_stay_behind(text: str) -> None:
    clean = scrub_text(text, Secrets(["my-own-server-key-4711"]))
    for word in (
        "anna",
        "tmpa1b2c3",
        "srv",
        "/scratch",
        ".hgemm-agent",
        KEY,
        "abcdefghijklmnop",
        "MIIE",
        "4711",
        "geheim",
    ):
        assert word not in clean


@pytest.mark.parametrize(
    "text",
    [
        "wgmma_tile/nk[BM=64 BN=32]",
        "21.3 FLOP a byte, 3 us/call, M/N/K",
        "a = b / c / d; x = y /z/ 2;",
        "include/cute/atom.hpp:12",
        "see https://docs.nvidia.com/cuda/ptx/index.html",
        "// C:1 D:2 plain words and a ~ tilde",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert scrub_text(text, Secrets()) == text


def test_every_part_of_a_row_is_clean_and_spoilt_tokens_go() -> None:
    secret = Secrets(["my-own-server-key-4711"])
    found = made(
        says("look in /home/anna/x.cu", source="// my-own-server-key-4711", sampled=sampled((1,), (2,))),
        answers(detail="/home/anna/kernel.cu: my-own-server-key-4711", status="failed"),
        prompt=PROMPT,
        policy="local",
        secrets=secret,
    )
    text = found.to_json()
    assert "anna" not in text and "4711" not in text and found.tokens is None


@pytest.mark.parametrize("place", ["prompt", "arguments"])
def test_tokens_of_what_was_taken_out_of_the_prompt_or_a_call_go(place: str) -> None:
    leak = "look in /home/anna/x.cu"
    prompt = (PROMPT[0], Step(role="user", text=leak if place == "prompt" else "u"))
    given = {"note": leak} if place == "arguments" else {}
    found = made(says("a", sampled=sampled((1,), (2,)), **given), answers(status="ok"), prompt=prompt, policy="local")
    assert "anna" not in found.to_json() and found.tokens is None


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_search_gets_the_short_prompt_and_says_nothing() -> None:
    found = made(says("search: 1 plans", family="f"), answers(key="k", status="ok", ratio=1.1, mma={"a": 1}))
    assert "hgemm M=64 N=64 K=64 on NVIDIA H200" in found.prompt[1].content
    assert "cuBLASLt 2 us" in found.prompt[1].content and found.provenance.prompt_version > 0
    assert found.turns[0].content == "" and json.loads(found.turns[1].content) == {
        "key": "k",
        "status": "ok",
        "ratio": 1.1,
    }
    assert [tool["name"] for tool in json.loads(found.tools)] == ["evaluate_plan", "submit"]


def test_a_device_that_is_known_by_its_label_only_gets_the_same_prompt() -> None:
    """A sweep's trajectories have no session that says more."""
    replayed = made(says("a"), answers(status="ok"), device="replayed from NVIDIA H200, driver 1, 2026-01-01")
    live = made(says("a"), answers(status="ok"), device="NVIDIA H200, driver 2")
    assert replayed.prompt == live.prompt and "floor 1.4 us" in live.prompt[1].content
    assert replayed.provenance.recorded_on == "2026-01-01" and live.provenance.recorded_on == ""


def test_a_model_keeps_its_own_prompt_unless_the_short_one_is_wanted() -> None:
    told = made(says("a"), answers(status="ok"), prompt=PROMPT, policy="anthropic")
    assert told.prompt[1].content == "u" and told.provenance.prompt_version == 0
    assert "compile_source" in told.tools
    short = made(says("a"), answers(status="ok"), prompt=PROMPT, policy="anthropic", compact=True)
    assert "hgemm M=64" in short.prompt[1].content and short.turns[0].content == "a"


def test_not_recorded_is_masked() -> None:
    unknown = answers(status="not_recorded", detail="no such plan")
    found = made(says("a"), unknown, says("b", 1), answers(1, status="ok"), reward=None, reward_parts={})
    assert [turn.trained for turn in found.turns] == [False, False, True, False]
    assert found.status == "not_recorded" and found.reward is None
    assert made(says("a"), answers(status="failed")).turns[0].trained


@pytest.mark.parametrize("second", [0, 1])  # the second call may be named as the first was
def test_not_recorded_is_masked_in_the_tokens_too(second: int) -> None:
    found = made(
        says("a", sampled=sampled((1,), (2, 3))),
        answers(status="not_recorded", detail="no such plan"),
        says("b", second, sampled=sampled((1, 2, 3, 8), (5,), logprob=-0.25)),
        answers(second, status="ok"),
        prompt=PROMPT,
        policy="local:sft",
    )
    assert [turn.trained for turn in found.turns] == [False, False, True, False] and found.tokens is not None
    assert found.tokens.mask == (0, 0, 0, 1) and found.tokens.logprobs == (0.0, 0.0, 0.0, -0.25)


@pytest.mark.parametrize("compact", [False, True])
def test_the_local_policys_rows_are_as_it_was_asked(compact: bool) -> None:
    """Two tools, answers cut to their verdict, and the prompt that its tokens begin with."""
    turns = (says("a", sampled=sampled((1,), (2,))), answers(key="k", status="ok", ratio=1.25, mma={"a": 1}))
    found = made(*turns, prompt=PROMPT, policy="local:sft", compact=compact)
    assert [m.content for m in found.prompt] == ["s", "u"] and found.tokens is not None
    assert [tool["name"] for tool in json.loads(found.tools)] == ["evaluate_plan", "submit"]
    assert json.loads(found.turns[1].content) == {"key": "k", "status": "ok", "ratio": 1.25}
    assert found.provenance.prompt_version == PROMPT_VERSION
    greedy = made(says("a"), turns[1], prompt=PROMPT, policy="local:sft", compact=compact)
    assert (greedy.prompt, greedy.tools, greedy.tokens) == (found.prompt, found.tools, None)


def test_a_prompt_that_is_replaced_takes_the_tokens_with_it() -> None:
    turns = (says("a", sampled=sampled((1,), (2,))), answers(status="ok"))
    assert made(*turns, prompt=PROMPT, policy="other", compact=True).tokens is None
    assert made(*turns, prompt=PROMPT, policy="other").tokens is not None
    assert made(*turns, policy="local:sft").tokens is None  # it has no prompt to begin with


def test_the_short_prompt_grants_what_the_loop_granted(tmp_path: Path) -> None:
    """The session's settings leave rounds and the size of a group to their defaults."""
    settings = {"budget": {"evaluations": 256}, "session": {"rounds": None, "group_size": None}}
    with Store(tmp_path / "store.sqlite") as store:
        store.create_session("session-a", {"settings": settings})
        for number, quota in enumerate((42, None)):
            store.put_trajectory(
                trajectory(
                    *(says("a"), answers(status="ok"), says("b"), answers(status="ok"), says("c")),
                    trajectory_id=f"session-a/{number}",
                    round=number,
                    quota=quota,
                    prompt=PROMPT,
                    policy="anthropic:m",
                )
            )
        rows = list(rows_of(store, None, Filters(compact=True), Secrets(), DEVICE))
    told = [row.prompt[1].content for row in rows if isinstance(row, Row)]
    assert "\nevaluations 42\n" in told[0] and "\nevaluations 2\n" in told[1]  # an older one: what it used


def test_the_loop_writes_down_what_it_granted(tmp_path: Path) -> None:
    given = ("optimize", "--shape", "64,64,64", "--device", "replay:h200", "--policy", "random", "--session", "s", "-q")
    sizes = ("--evaluations", "9", "--set", "session.group_size=2", "--set", "session.rounds=2")
    assert agent(tmp_path, *given, *sizes).returncode in (0, 2)
    with Store(tmp_path / "store.sqlite") as store:
        assert [one.quota for one in store.trajectories("s")] == [2, 2, 2, 2]


def test_a_failure_is_a_failure() -> None:
    assert (
        made(says("a"), answers(status="failed"), reward=-1.0, reward_parts={"compile_failure": -1.0}).status
        == "failed"
    )
    assert made(says("a"), answers(status="failed"), reward=-0.5, reward_parts={"speed": 0.0}).status == "failed"
    nan = made(says("a"), answers(status="ok"), reward=float("nan"))
    assert nan.reward is None


def test_turns_become_one_sequence_with_the_tools_tokens_masked() -> None:
    first = sampled((1, 2), (3, 4), mask=(0, 1))
    second = sampled((1, 2, 3, 4, 8, 9), (5,), logprob=-0.25)
    found = made(
        says("a", sampled=first), answers(status="ok"), says("b", 1, sampled=second), prompt=PROMPT, policy="local"
    )
    assert found.tokens is not None
    assert found.tokens.prompt_ids == (1, 2) and found.tokens.completion_ids == (3, 4, 8, 9, 5)
    assert found.tokens.mask == (0, 1, 0, 0, 1) and found.tokens.logprobs == (0.0, -0.5, 0.0, 0.0, -0.25)


@pytest.mark.parametrize(
    "second",
    [
        None,  # a turn without tokens
        sampled((1, 2, 7), (5,)),  # a context that is another
        sampled((1, 2, 3, 4), (5,), temperature=0.5),
        sampled((1, 2, 3, 4), (5,), model="other"),
        sampled((1, 2, 3, 4), (5,), logprob=float("nan")),
    ],
)
def test_turns_that_do_not_fit_together_have_no_tokens(second: object) -> None:
    first = sampled((1, 2), (3, 4))
    turns = (says("a", sampled=first), answers(status="ok"), says("b", 1, sampled=second))  # type: ignore[arg-type]
    assert made(*turns, prompt=PROMPT, policy="local").tokens is None


def test_a_rollout_without_a_turn_is_no_row() -> None:
    assert row_of(trajectory(prompt=PROMPT), {}, None, False, Secrets(), DEVICE) == "no turn of the policy"


# --- choosing ---------------------------------------------------------------------------------------------------------


def kept(rows: list[Row | str], **filters: object) -> tuple[list[str], dict[str, int]]:
    counts = Counts()
    found = [r.row_id for r in export(rows, Filters(**filters), counts)]  # type: ignore[arg-type]
    return found, dict(counts.left_out)


def test_each_content_once_but_for_the_rollouts_of_a_group() -> None:
    same = row(0, "g").model_copy(update={"row_id": "again", "provenance": row(1).provenance})
    elsewhere = row(0, "h")
    found, left_out = kept([row(0, "g"), row(0, "g"), same, elsewhere])
    assert found == ["g-0", "again"] and left_out == {"duplicate": 2}


def test_filters() -> None:
    rows: list[Row | str] = [
        row(0, reward=0.5),
        row(1, reward=1.5),
        row(2, reward=None),
        row(3, shape=(128, 64, 64)),
        "why",
    ]
    assert kept(rows, min_reward=1.0)[0] == ["g-1", "g-3"]
    assert kept(rows, shapes={"128x64x64"})[0] == ["g-3"]
    assert kept(rows, statuses={"none"})[0] == ["g-2"]
    assert kept(rows, policies={"local"}) == ([], {"another policy": 4, "why": 1})


def test_a_policy_is_chosen_by_its_name_or_its_kind() -> None:
    names = ("anthropic:m", "anthropic:n", "search", "anthropic-like")
    of = [Provenance(source="session", protocol=2, policy=name, index=n) for n, name in enumerate(names)]
    rows: list[Row | str] = [row(n, provenance=one) for n, one in enumerate(of)]
    assert kept(rows, policies={"anthropic"})[0] == ["g-0", "g-1"]
    assert kept(rows, policies={"anthropic:n", "search"})[0] == ["g-1", "g-2"]


# --- the command ------------------------------------------------------------------------------------------------------


def agent(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HGEMM_AGENT_HOME": str(home), "SOME_API_KEY": "my-own-server-key-4711"}
    return subprocess.run(
        [sys.executable, "-m", "agent", *words], capture_output=True, text=True, env=environ, check=False, timeout=120
    )


def test_the_command_end_to_end(tmp_path: Path) -> None:
    with Store(tmp_path / "store.sqlite") as store:
        store.create_session("session-a", {"device_info": DEVICE.model_dump(mode="json"), "settings": {}})
        for number in range(3):
            turns = (
                says("a", number=number, note=str(number)),
                answers(number, status="ok", note="my-own-server-key-4711"),
            )
            store.put_trajectory(
                trajectory(
                    *turns, trajectory_id=f"session-a/{number}", index_in_group=number, prompt=PROMPT, policy="openai"
                )
            )
    out = tmp_path / "out" / "rows.jsonl"
    done = agent(tmp_path, "export-trajectories", "session-a", "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["rows"] == 3 and said["groups"] == 1 and said["splits"] == {"train": 3}
    assert "4711" not in out.read_text() and str(tmp_path) not in out.read_text()
    assert [r.provenance.device for r in read_rows(out)] == [DEVICE.label] * 3
    twice = agent(tmp_path, "export-trajectories", "session-a", str(tmp_path / "store.sqlite"), "--out", str(out))
    assert "left out: 3 (duplicate)" in twice.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--out", "x.jsonl"), "nothing to export"),
        (("nowhere", "--out", "x.jsonl"), "no session"),
        (("nowhere/db.sqlite", "--out", "x.jsonl"), "there is no file nowhere/db.sqlite"),
        (("--from-records", "nowhere.sqlite", "--out", "x.jsonl"), "nowhere.sqlite"),
        (("--from-records", "h200", "--out", "x.csv"), "must end in .jsonl or .parquet"),
        (("--from-records", "h200", "--out", "x.jsonl", "--status", "good"), "--status is one of"),
        (("--from-records", "h200", "--out", "/dev/full/x.jsonl"), "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    done = agent(tmp_path, "export-trajectories", *words)
    assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
