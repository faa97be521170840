"""The command line: results, exit codes, and one sentence for everything a user can get wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import ScriptedDevice, raw_variant
from pytest_httpserver import HTTPServer
from records_kit import agent, make_record
from typer.testing import CliRunner, Result
from werkzeug import Request, Response

from agent import checking, devices
from agent.checking import check, load_variant
from agent.cli import app
from agent.config import load_settings, parse_assignment
from agent.devices import check_fits
from agent.errors import UsageError
from tools import recording
from tools.families import accepted_plans, load_families
from tools.families import plans as plans_of
from tools.hgemm import hgemm
from tools.records import MODES, Reason, Status, Task, Variant
from tools.shapes import spread
from tools.visible_gpus import VisibleGpu

KERNEL = 'extern "C" __global__ void gemm(const void* A, const void* B, void* C) {}\n'
LAUNCH = {"launches": [{"entry": "gemm", "grid": [1, 1, 1], "block": [32, 1, 1], "args": ["A", "B", "C"]}]}


@pytest.fixture(scope="module")
def record_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("record") / "h.sqlite", (64, 64, 64), (256, 256, 256))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HGEMM_AGENT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def optimize(record_path: Path, *more: str) -> Result:
    return invoke("optimize", "--shape", "64,64,64", "--device", f"replay:{record_path}", "-q", *more)


# --- optimize, resume, show -------------------------------------------------------------------------------------------


def test_optimize_prints_the_best_variant_and_where_it_lies(record_path: Path, home: Path) -> None:
    done = optimize(record_path, "--session", "a", "--evaluations", "32")
    assert done.exit_code == 0, done.output
    out = done.stdout
    assert "replayed from Scripted GPU, driver 1.0" in out and "speedup" in out
    source = home / "sessions" / "a" / "best" / "kernel.cu"
    assert str(source) in out and source.is_file()
    for word in ("offline", "rotating", "server", "cublaslt_auto", "torch", "verified  ok", "sanitized ok", "…"):
        assert word in out, word
    assert "empty kernel 1.25 us" in out


def test_json_is_one_document(record_path: Path) -> None:
    done = optimize(record_path, "--session", "a", "--evaluations", "32", "--json")
    summary = json.loads(done.stdout)
    assert summary["best"]["admitted"] and summary["evaluations"] == 32 and summary["finished"]
    offline = next(m for m in summary["best"]["modes"] if m["mode"] == "offline")
    row = next(r for r in offline["rows"] if r["reference"] == "cublaslt_auto_max")
    assert row["ratio_lo"] <= row["ratio"] <= row["ratio_hi"]
    assert json.loads(invoke("resume", "a", "--json", "-q").stdout) == summary
    assert json.loads(invoke("show", "a", "--json").stdout)["best"] == summary["best"]
    listed = json.loads(invoke("show", "--json").stdout)
    assert [(s["session"], s["finished"]) for s in listed] == [("a", True)]


def test_show_tells_leaderboard_curve_and_source(record_path: Path) -> None:
    summary = json.loads(optimize(record_path, "--session", "a", "--evaluations", "32", "--json").stdout)
    shown = invoke("show", "a").stdout
    assert summary["best"]["key"] in shown and "Leaderboard" in shown and "after    1 variants" in shown
    assert "a " in invoke("show").stdout
    source = invoke("show", "--source", summary["best"]["key"])
    assert source.exit_code == 0 and "#define" in source.stdout
    variant = Variant.from_json(invoke("show", "--source", summary["best"]["key"], "--json").stdout)
    assert variant.key == summary["best"]["key"]


def test_show_without_sessions() -> None:
    done = invoke("show")
    assert done.exit_code == 0 and "agent optimize" in done.stdout


def test_random_and_search_spend_the_same_budget(record_path: Path) -> None:
    for policy in ("random", "search"):
        summary = json.loads(optimize(record_path, "--policy", policy, "--evaluations", "24", "--json").stdout)
        assert summary["evaluations"] == 24 and summary["policy"] == policy


def test_progress_goes_to_stderr_in_plain_lines(record_path: Path, home: Path) -> None:
    flags = ["--shape", "64,64,64", "--device", f"replay:{record_path}", "--evaluations", "16", "--json"]
    done = agent(home, "optimize", *flags)
    json.loads(done.stdout)
    assert "best so far" in done.stderr and "finish:" in done.stderr and "\x1b" not in done.stderr


def test_no_kernel_is_exit_2(tmp_path: Path) -> None:
    racy = ScriptedDevice(lambda tool, variant, task: Reason.RACE if tool == "sanitize" else None)
    path = make_record(tmp_path / "racy.sqlite", (64, 64, 64), device=racy)
    done = optimize(path, "--evaluations", "8")
    assert done.exit_code == 2, done.output
    assert "no variant passed the whole gate" in done.stdout and "sanitize: race" in done.stdout


def test_a_model_behind_a_compatible_server(record_path: Path, httpserver: HTTPServer) -> None:
    """Through the real client: two plans, one nonsense call, then the better plan is submitted."""
    family = load_families()["plain_tiled"]
    plans = [plan for plan in plans_of(family) if plan.b_layout == "nk"][:2]

    def reply(request: Request) -> Response:
        told = [m for m in json.loads(request.get_data())["messages"] if m["role"] == "tool"]
        if not told:
            calls = [
                ("evaluate_plan", {"family": plan.family, "b_layout": "nk", "knobs": plan.knobs}) for plan in plans
            ]
            calls.append(("fly", {}))
        else:
            results = [json.loads(m["content"]) for m in told]
            assert "no tool 'fly'" in results[2]["error"]
            calls = [("submit", {"key": max(results[:2], key=lambda r: r["ratio"])["key"]})]
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for i, (name, arguments) in enumerate(calls)
            ],
        }
        body = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010},
        }
        return Response(json.dumps(body), content_type="application/json")

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(reply)
    server = ["--policy", "openai", "--model", "m", "--base-url", httpserver.url_for("/v1")]
    done = optimize(record_path, *server, "--set", "session.rounds=1", "--set", "session.group_size=2", "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["policy"] == "openai:m" and summary["evaluations"] == 2
    assert summary["best"]["key"] in {plan.plan_id for plan in plans}
    assert summary["input_tokens"] == 4000, "two rollouts of two turns"
    assert not summary["cost_known"] and summary["cost_usd"] == 0


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("optimize", "a shape is needed"),
        ("optimize --shape 64,64", "'64,64' is not a shape"),
        ("optimize --shape 64,64,0", "is not a shape"),
        ("optimize --shape a,b,c", "is not a shape"),
        ("optimize --shape 64,64,-1", "is not a shape"),
        ("optimize --shape 64,64,64 --device gpu", "there is no device 'gpu'"),
        ("optimize --shape 64,64,64 --device replay:", "there is no device 'replay:'"),
        ("optimize --shape 64,64,64 --device replay:/no/such/file", "/no/such/file"),
        ("optimize --shape 64,64,64 --device replay:RECORD --policy genius", "policy.name"),
        ("optimize --shape 64,64,64 --device replay:RECORD --policy anthropic", "export ANTHROPIC_API_KEY="),
        ("optimize --shape 64,64,64 --device replay:RECORD --policy openai", "export OPENAI_API_KEY="),
        ("optimize --shape 64,64,64 --evaluations 0", "budget.evaluations"),
        ("optimize --shape 64,64,64 --wall -5", "budget.wall_s"),
        ("optimize --shape 64,64,64 --seed -1", "session.seed"),
        ("optimize --shape 64,64,64 --set nonsense", "is not a setting"),
        ("optimize --shape 64,64,64 --set budget.evaluatoins=3", "did you mean 'evaluations'"),
        ("optimize --shape 64,64,64 --set sesion.seed=3", "did you mean 'session'"),
        ("optimize --shape 64,64,64 --set session.modes=[server]", "offline"),
        ("optimize --shape 64,64,64 --config /no/such.yaml", "/no/such.yaml does not exist"),
        ("optimize --shape 64,64,64 --device replay:RECORD --session ../../etc", "is not a session name"),
        ("optimize --shape 900000,900000,900000 --device replay:RECORD", "GiB to verify"),
        ("optimize --shape 128,64,64 --device replay:RECORD", "the nearest are 64,64,64 or 256,256,256"),
        ("resume nothing", "there is no session nothing"),
        ("resume ../x", "is not a session name"),
        ("show nothing", "there is no session nothing"),
        ("show --source feed", "there are no variants yet"),
        ("check k.cu --launch l.json --shape 1,2", "is not a shape"),
        ("check k.cu --launch l.json --shape 64,64,64", "the kernel k.cu does not exist"),
        ("record --out x --deadline 1 --device replay:h200", "records are made on a GPU"),
    ],
)
def test_one_sentence_and_exit_1(record_path: Path, home: Path, arguments: str, words: str) -> None:
    done = invoke(*arguments.replace("RECORD", str(record_path)).split())
    assert done.exit_code == 1, done.output
    assert words in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert not list(home.glob("sessions/*")), "nothing is left behind"


def test_home_that_cannot_be_written(record_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HGEMM_AGENT_HOME", str(tmp_path / "file"))
    done = optimize(record_path)
    assert done.exit_code == 1 and done.stderr.count("\n") == 1 and "HGEMM_AGENT_HOME" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("budget: 5", "'budget' must be a mapping"),
        ("budget: {evaluations: many}", "config.yaml: budget.evaluations"),
        ("budgets: {evaluations: 5}", "did you mean 'budget'"),
    ],
)
def test_unreadable_config(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    done = invoke("optimize", "--shape", "64,64,64", "--config", "config.yaml")
    assert done.exit_code == 1 and words in done.stderr, done.stderr


# --- settings ---------------------------------------------------------------------------------------------------------


def test_one_precedence(tmp_path: Path) -> None:
    """defaults < file < environment < flags."""
    file = tmp_path / "c.yaml"
    file.write_text("budget: {evaluations: 1, wall_s: 10, tokens: 100}\nsession: {shape: [64, 64, 128]}\n")
    environ = {"HGEMM_AGENT_BUDGET__EVALUATIONS": "2", "HGEMM_AGENT_BUDGET__WALL_S": "20", "HGEMM_AGENT_HOME": "/x"}
    found = load_settings(file, environ, {"budget.evaluations": 3})
    assert (found.budget.evaluations, found.budget.wall_s, found.budget.tokens) == (3, 20.0, 100)
    assert found.session.task == hgemm(64, 64, 128) and found.session.top_k == 3
    assert load_settings(None, {}).evaluations == 400
    assert load_settings(None, {}, {"policy.name": "local"}).evaluations == 24


def test_the_default_budget_holds_every_plan_of_any_shape() -> None:
    families = load_families()
    most = max(len(accepted_plans(families, hgemm(*shape))) for shape in spread(64))
    assert 200 < most <= load_settings(None, {}).evaluations


def test_environment_mistakes_name_the_variable() -> None:
    with pytest.raises(UsageError, match=r"HGEMM_AGENT_BUDGET__EVALUATIONS: budget\.evaluations"):
        load_settings(None, {"HGEMM_AGENT_BUDGET__EVALUATIONS": "lots"})
    with pytest.raises(UsageError, match="HGEMM_AGENT_BUDGTE__X: there is no section 'budgte'"):
        load_settings(None, {"HGEMM_AGENT_BUDGTE__X": "1"})


def test_record_is_the_recording_of_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One recorder behind both commands: what it is given, and what its exit codes become."""
    given: list[list[str]] = []
    codes = iter((0, 1, recording.OUT_OF_TIME, 130))
    monkeypatch.setattr(recording, "main", lambda arguments: given.append(arguments) or next(codes))
    monkeypatch.setattr(devices, "missing_gpu_modules", list)
    monkeypatch.setattr(devices, "visible_gpus", lambda: [VisibleGpu(n, "H200", (9, 0)) for n in range(2)])
    arguments = ["record", "--out", "x.sqlite", "--deadline", "5", "--device", "cuda:1", "--top", "2"]
    assert [invoke(*arguments).exit_code for _ in range(4)] == [0, 1, 1, 130]
    assert given == [["--out=x.sqlite", "--device=cuda:1", "--deadline=5.0", "--top=2"]] * 4
    assert "records are made on a GPU" in invoke(*arguments[:-4], "--device", "replay:h200").stderr
    monkeypatch.setattr(devices, "missing_gpu_modules", lambda: ["cupy"])
    assert "cuda:1 needs cupy" in invoke(*arguments).stderr


def test_what_is_not_honoured_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the command line: .*accumulate can only be float32: compile, verify and"):
        load_settings(None, {}, {"session.accumulate": "float16"})
    done = invoke("optimize", "--shape", "64,64,64", "--set", "session.accumulate=float16")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1


def test_nested_settings_and_prices() -> None:
    price = parse_assignment("policy.prices.mine={input: 1, output: 2, cache_read: 0.1}")
    found = load_settings(None, {}, dict([price]))
    assert found.policy.prices["mine"].output == 2 and "claude-opus-5-5" in found.policy.prices


def test_rounds_follow_the_kind_of_policy() -> None:
    assert (load_settings(None, {}).rounds, load_settings(None, {}).group_size) == (1, 1)
    model = load_settings(None, {}, {"policy.name": "anthropic"})
    assert (model.rounds, model.group_size) == (3, 2)
    assert load_settings(None, {}, {"session.rounds": 5}).rounds == 5


def test_shape_must_fit_the_gpu() -> None:
    info = ScriptedDevice().info
    check_fits(hgemm(16384, 16384, 16384), info)
    with pytest.raises(UsageError, match="141 GiB of memory"):
        check_fits(hgemm(400_000, 200_000, 64), info)
    # 15 GiB of operands, but B and |B| in FP64 take eight times as much.
    with pytest.raises(UsageError, match="64x90000x90000 needs about 155 GiB to verify"):
        check_fits(hgemm(64, 90_000, 90_000), info)


def test_what_verify_needs_is_asked_before_a_session_begins(tmp_path: Path, home: Path) -> None:
    device = ScriptedDevice()
    device.info = device.info.model_copy(update={"memory_bytes": 4 << 30})
    record = make_record(tmp_path / "small.sqlite", (64, 64, 64), device=device)
    done = optimize(record)
    assert done.exit_code == 1 and "64x64x64 needs about 4 GiB to verify; the GPU has 4 GiB" in done.stderr
    assert not (home / "sessions").exists()


# --- check ------------------------------------------------------------------------------------------------------------


def write_kernel(folder: Path, launch: object = LAUNCH) -> tuple[str, ...]:
    (folder / "k.cu").write_text(KERNEL)
    text = launch if isinstance(launch, str) else json.dumps(launch)
    (folder / "l.json").write_text(text)
    return ("check", str(folder / "k.cu"), "--launch", str(folder / "l.json"), "--shape", "64,64,64")


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ("{", "l.json is not JSON"),
        ({}, "launches: is missing"),
        ({"launches": []}, "launches"),
        ({"launches": [{**LAUNCH["launches"][0], "args": [{"i32": 1, "i64": 2}]}]}, "exactly one of"),
        ({"launches": [{**LAUNCH["launches"][0], "gird": [1, 1, 1]}]}, "gird"),
    ],
)
def test_broken_launch_spec(tmp_path: Path, record_path: Path, launch: object, words: str) -> None:
    done = invoke(*write_kernel(tmp_path, launch), "--device", f"replay:{record_path}")
    assert done.exit_code == 1 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_check_on_a_replay_device_says_that_it_cannot_tell(tmp_path: Path, record_path: Path) -> None:
    done = invoke(*write_kernel(tmp_path), "--device", f"replay:{record_path}", "--json")
    report = checking.CheckReport.from_json(done.stdout)
    assert done.exit_code == 1 and report.verdict == "incomplete"
    assert report.stages[-1].status is Status.NOT_RECORDED


def variant() -> Variant:
    return raw_variant()


TASK = hgemm(64, 64, 64)


def test_check_runs_every_stage() -> None:
    device = ScriptedDevice()
    report = check(device, variant(), TASK, full=True, modes=MODES)
    names = [stage.name for stage in report.stages]
    assert names == ["compile", "verify", "sanitize", "time offline", "time rotating", "time server", "profile"]
    assert report.verdict == "passed" and report.exit_code == 0
    assert all(stage.sentence for stage in report.stages)
    assert "ratio" in report.stages[3].sentence and "64 registers" in report.stages[0].sentence
    quick = check(ScriptedDevice(), variant(), TASK, full=False, modes=MODES)
    assert [stage.name for stage in quick.stages] == ["compile", "verify", "time offline"] and quick.exit_code == 0


@pytest.mark.parametrize("tool", ["compile", "verify", "sanitize", "time"])
def test_check_stops_at_the_first_rejection(tool: str) -> None:
    def script(name: str, candidate: Variant, task: Task | None) -> Reason | None:
        return Reason.CRASH if name == tool else None

    report = check(ScriptedDevice(script), variant(), TASK, full=True, modes=MODES)
    assert report.exit_code == 2 and report.verdict == "rejected"
    assert report.stages[-1].name.startswith(tool) and report.stages[-1].reason == "crash"


def test_check_without_a_sanitizer_is_incomplete_and_without_ncu_is_not() -> None:
    def lacks(tool: str) -> ScriptedDevice:
        return ScriptedDevice(lambda name, candidate, task: Status.UNAVAILABLE if name == tool else None)

    assert check(lacks("sanitize"), variant(), TASK, full=True, modes=MODES).verdict == "incomplete"
    assert check(lacks("profile"), variant(), TASK, full=True, modes=MODES).verdict == "passed"


def test_files_of_a_user_keep_their_layout(tmp_path: Path) -> None:
    write_kernel(tmp_path)
    found = load_variant(tmp_path / "k.cu", tmp_path / "l.json", "kn")
    assert found.b_layout == "kn" and found.source == KERNEL and found.launch.launches[0].entry == "gemm"
    (tmp_path / "k.cu").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not a text file"):
        load_variant(tmp_path / "k.cu", tmp_path / "l.json", "kn")


# --- devices, doctor --------------------------------------------------------------------------------------------------


def test_devices_and_doctor_answer() -> None:
    listed = json.loads(invoke("devices", "--json").stdout)
    assert "replay:h200" in [entry["spec"] for entry in listed]
    done = invoke("doctor", "--json")
    checks = json.loads(done.stdout)
    missing = [c for c in checks if c["needed"] and not c["ok"]]
    assert done.exit_code == (1 if missing else 0)
    assert all(c["fix"] for c in missing)
