"""Certificates: the protocol on a scripted device, the signed file, and whether two runs agree."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import ScriptedDevice, raw_variant, toy_families
from typer.testing import CliRunner

from agent import certify_against, certify_cli, certify_record
from agent.certify import Candidate, Event, certify
from agent.certify_inputs import at_shapes, of_certificate, of_database, of_plans, of_recording, rendered
from agent.certify_record import Certificate, CertifySettings
from agent.cli import app
from agent.errors import UsageError
from memory.store import Store
from tests import simulated_gpu
from tools.cuda_device import TIME_TIMEOUT_S, CudaDevice, Lost
from tools.device import CertifyTimer
from tools.families import render, validate_plan
from tools.gate import Toolbox
from tools.gpu.nvml import ClockLog
from tools.hgemm import hgemm
from tools.recording import record
from tools.records import (
    ClockTrace,
    CompileResult,
    DeviceInfo,
    Mode,
    Reason,
    Status,
    Task,
    TimingResult,
    Variant,
)

TRACE = ClockTrace(
    t_s=(0.0, 1.0), sm_mhz=(1980, 1965), power_w=(500.0, 640.5), temperature_c=(40, 55), throttle=("", "sw_power_cap")
)
SETTINGS = CertifySettings(warm_s=1.0, timed_s=2.0, modes=("offline", "server"))
SHAPES = ((64, 64, 64), (128, 128, 128), (256, 128, 64))


class CertifyingDevice(ScriptedDevice):
    """Takes its seconds from the caller, as a GPU does. ``drift`` changes every ratio by a factor."""

    def __init__(self, drift: float = 1.0, **fields: Any) -> None:
        super().__init__(**fields)
        self.drift = drift
        self.asked: list[tuple[Mode, float, float]] = []

    def time_certify(
        self, variant: Variant, task: Task, mode: Mode, *, warm_s: float, aim_s: float
    ) -> tuple[TimingResult, ClockTrace | None]:
        self.asked.append((mode, warm_s, aim_s))
        result = self.time(variant, task, mode, "certify")
        rows = tuple(
            row.model_copy(update={n: getattr(row, n) * self.drift for n in ("ratio", "ratio_lo", "ratio_hi")})
            for row in result.rows
        )
        return result.model_copy(update={"rows": rows}), TRACE


def variant_of(bm: int = 64, bn: int = 64) -> Variant:
    toy = toy_families()["toy"]
    return render(toy, validate_plan(toy, "nk", {"BM": bm, "BN": bn}))


def candidates() -> list[Candidate]:
    return [Candidate(hgemm(*shape), variant_of()) for shape in SHAPES]


def run(device: ScriptedDevice, out: Path, wanted: list[Candidate] | None = None, **fields: Any) -> Certificate:
    given: dict[str, Any] = {"settings": SETTINGS, "inputs": "a test", "families": toy_families(), **fields}
    return certify(device, wanted or candidates(), out=out, **given)


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_each_kernel_goes_through_the_gate_and_is_timed_for_the_given_seconds(tmp_path: Path) -> None:
    device = CertifyingDevice()
    events: list[Event] = []
    found = run(device, tmp_path / "c.json", observer=events.append)
    assert isinstance(device, CertifyTimer) and found.complete
    assert device.asked == [("offline", 1.0, 2.0), ("server", 1.0, 2.0)] * 3
    # Nine subjects (the kernel, four references in two layouts) share the time; the server's empty kernel is the tenth.
    assert (SETTINGS.run_s("offline"), SETTINGS.run_s("server")) == (9.0, 10.0)
    assert [call.tool for call in device.calls][:5] == ["compile", "verify", "sanitize", "time", "time"]
    assert [call.setting for call in device.calls if call.tool == "verify"] == ["full"] * 3
    entry = found.entries[0]
    assert entry.status == "certified" and entry.why == "" and entry.timings[0].trace == TRACE
    assert {row.reference for row in entry.timings[0].result.rows} >= {
        "torch", "cublas", "cublaslt_heuristic", "cublaslt_auto",
    }  # fmt: skip
    for best in entry.timings[0].best_of:
        assert best.max_ratio == max(1.0, best.ratio)
    assert [event.done for event in events if event.entry is not None] == [1, 2, 3]


def test_a_rejected_kernel_is_in_the_certificate_with_the_reason(tmp_path: Path) -> None:
    def script(tool: str, variant: Variant, task: Task | None) -> Reason | None:
        return Reason.RACE if tool == "sanitize" else None

    device = CertifyingDevice(script=script)
    entry = run(device, tmp_path / "c.json").entries[0]
    assert entry.status == "rejected" and entry.why.startswith("sanitize: race") and entry.timings == ()
    assert device.count("time") == 0


def test_a_device_that_cannot_be_told_answers_with_what_it_has(tmp_path: Path) -> None:
    def script(tool: str, variant: Variant, task: Task | None) -> Status | None:
        return Status.NOT_RECORDED if tool == "time" else None

    device = ScriptedDevice(script)
    found = run(device, tmp_path / "c.json")
    assert {entry.status for entry in found.entries} == {"incomplete"}
    before = len(device.calls)
    again = run(ScriptedDevice(), tmp_path / "c.json")
    assert before and {entry.status for entry in again.entries} == {"certified"}, "what was missing is tried again"


def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "c.json"

    class Killed(BaseException):
        pass

    def kill(event: Event) -> None:
        if event.entry is not None and event.done == 2:
            raise Killed

    device = CertifyingDevice()
    with pytest.raises(Killed):
        run(device, out, observer=kill)
    half = certify_record.read(out)
    assert len(half.entries) == 2 and not half.complete
    again = CertifyingDevice()
    found = run(again, out)
    assert found.complete and len(again.asked) == 2, "only the third is measured"
    assert found.entries[:2] == half.entries and found.created_at == half.created_at
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"settings": SETTINGS.model_copy(update={"timed_s": 3.0})},
        {"device": CertifyingDevice(driver="2.0")},
        {"wanted": [Candidate(hgemm(64, 64, 128), variant_of())]},
    ],
)
def test_another_run_does_not_mix_with_it(tmp_path: Path, change: dict[str, Any]) -> None:
    run(CertifyingDevice(), tmp_path / "c.json")
    with pytest.raises(UsageError, match="another run"):
        run(**{"device": CertifyingDevice(), "out": tmp_path / "c.json", **change})


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_says_everything_and_its_digest_covers_it(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    found = run(CertifyingDevice(), out)
    read = certify_record.read(out)
    assert read == found and len(read.sha256) == 64
    document = json.loads(out.read_text())
    assert document["software"]["python"] and document["protocol_version"] and document["device"]["driver"] == "1.0"
    entry = document["entries"][0]
    assert {"source_sha256", "launch_sha256", "variant_id", "plan"} <= set(entry)
    assert entry["compile"]["cubin_sha256"] and entry["verify"]["tiers"] and entry["sanitize"]["checks"]
    document["entries"][0]["timings"][0]["result"]["rows"][0]["ratio"] *= 1.01
    out.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="not as it was written"):
        certify_record.read(out)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is not a certificate"), ("[]", "is not a certificate"), ("{}", "is not a certificate"),
     ('{"format_version": 9, "sha256": ""}', "format 9")],
)  # fmt: skip
def test_a_file_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UsageError, match=words):
        certify_record.read(tmp_path / "c.json")
    with pytest.raises(UsageError, match="does not exist"):
        certify_record.read(tmp_path / "gone.json")


# --- against ----------------------------------------------------------------------------------------------------------


def agreement_of(tmp_path: Path, drift: float, slack: float = 0.02, **fields: Any) -> certify_against.Agreement:
    old = run(CertifyingDevice(), tmp_path / "old.json")
    new = run(CertifyingDevice(drift, **fields), tmp_path / "new.json")
    return certify_against.agreement(certify_against.of_certificate(tmp_path / "old.json", old), new, slack)


@pytest.mark.parametrize(
    ("drift", "slack", "agrees"),
    [
        (1.0, 0.0, True),
        (1.015, 0.0, True),  # both intervals are 1 % to either side: they still overlap
        (1.03, 0.02, True),  # 1.03 * 0.99 - 1.01 = 0.0097 apart
        (1.03, 0.005, False),
        (1 / 1.03, 0.005, False),
        (1.2, 0.02, False),
    ],
)
def test_runs_agree_within_their_intervals_and_the_slack(
    tmp_path: Path, drift: float, slack: float, agrees: bool
) -> None:
    found = agreement_of(tmp_path, drift, slack)
    assert found.agrees == agrees and len(found.differences) == 3 * 2 * 8
    assert all(d.change == pytest.approx(drift - 1) for d in found.differences)
    assert (found.only_old, found.only_new) == (0, 0)


def test_another_gpu_does_not_compare(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="on Scripted GPU, this run on Other GPU: the numbers do not compare"):
        agreement_of(tmp_path, 1.0, name="Other GPU")


def test_another_driver_compares_and_is_named(tmp_path: Path) -> None:
    found = agreement_of(tmp_path, 1.0, driver="2.0")
    assert found.agrees and "driver 1.0" in found.old_device and "driver 2.0" in found.new_device


def test_another_protocol_and_other_kernels_do_not_compare(tmp_path: Path) -> None:
    new = run(CertifyingDevice(), tmp_path / "new.json")
    old = certify_against.of_certificate(tmp_path / "old.json", new)
    with pytest.raises(UsageError, match="protocol version 0"):
        certify_against.agreement(old.model_copy(update={"protocol_version": 0}), new, 0.02)
    with pytest.raises(UsageError, match="in common"):
        certify_against.agreement(old.model_copy(update={"rows": ()}), new, 0.02)


# --- where the kernels come from --------------------------------------------------------------------------------------


def test_an_old_certificates_kernels_are_made_again(tmp_path: Path) -> None:
    raw = Candidate(hgemm(64, 64, 64), raw_variant("mine"))
    found = run(CertifyingDevice(), tmp_path / "c.json", [*candidates(), raw])
    again = of_certificate(found, toy_families())
    assert [(c.task, c.variant) for c in again] == [(c.task, c.variant) for c in [*candidates(), raw]]
    families = toy_families()
    families["toy"] = families["toy"].model_copy(update={"revision": 5})
    with pytest.raises(UsageError, match="revision 1 of toy, this program has revision 5"):
        of_certificate(found, families)
    assert variant_of().plan is not None
    with pytest.raises(UsageError, match="no family toy"):
        rendered(variant_of().plan, {})  # type: ignore[arg-type]


def test_the_best_admitted_kernel_of_each_shape_of_a_store(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    task = hgemm(128, 128, 128)
    with Store(path) as store:
        toolbox = Toolbox(ScriptedDevice(), store, toy_families())
        for variant in (variant_of(32, 32), variant_of(64, 64), variant_of(128, 32)):
            store.put_variant(variant)
            toolbox.compile(variant)
            toolbox.verify(variant, task, "full")
            toolbox.sanitize(variant, task)
            toolbox.time(variant, task, "offline", "final")
        best = store.leaderboard(task.task_id)[0].variant_key
    found = of_database(path, toy_families())
    assert [(c.task, c.variant.key) for c in found] == [(task, best)]
    with pytest.raises(UsageError, match="there is no database"):
        of_database(tmp_path / "gone.sqlite", {})
    Store(tmp_path / "empty.sqlite").close()
    with pytest.raises(UsageError, match="no kernel that passed"):
        of_database(tmp_path / "empty.sqlite", {})


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "gpu.sqlite"
    record(ScriptedDevice(), toy_families(), SHAPES[:2], path, deadline_s=100, echo=lambda line: None)
    return path


def test_a_recordings_winners_and_agreement_with_it(recording: Path, tmp_path: Path) -> None:
    chosen = of_recording(recording, toy_families())
    assert [c.task.label for c in chosen] == ["64x64x64", "128x128x128"]
    device = ScriptedDevice()
    for candidate in chosen:
        everyone = [variant_of(bm, bn) for bm in (32, 64, 128) for bn in (32, 64, 128)]
        assert device.time_us(candidate.variant, candidate.task) <= min(
            device.time_us(variant, candidate.task) for variant in everyone
        )
    found = run(CertifyingDevice(), tmp_path / "c.json", chosen)
    keys = [(c.task.task_id, c.variant.key) for c in chosen]
    old = certify_against.of_recording(recording, keys)
    agreement = certify_against.agreement(old, found, 0.02)
    assert agreement.agrees and len(agreement.differences) == 2 * 2 * 8
    assert agreement.only_old == 2 * 8, "the recording has rotating timings too"
    assert not certify_against.agreement(old, run(CertifyingDevice(1.2), tmp_path / "d.json", chosen), 0.02).agrees


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "not JSON"),
        ("[]", "must be a list"),
        ([{"shape": "64,64,64", "family": "toy", "b_layout": "nk"}], "entry 1"),
        ([{"shape": "64,64", "family": "toy", "b_layout": "nk", "knobs": {"BM": 64, "BN": 64}}], "entry 1.*'64,64'"),
        ([{"shape": "64,64,64", "family": "no", "b_layout": "nk", "knobs": {}}], "entry 1.*no family 'no'"),
        ([{"shape": "64,64,64", "family": "toy", "b_layout": "nk", "knobs": {"BM": 63, "BN": 64}}], "entry 1.*BM"),
    ],
)
def test_a_file_of_plans_with_a_mistake(tmp_path: Path, data: Any, words: str) -> None:
    path = tmp_path / "plans.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(UsageError, match=words):
        of_plans(path, toy_families())


def test_plans_and_chosen_shapes(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    lines = [
        {"shape": "x".join(map(str, shape)), "family": "toy", "b_layout": "nk", "knobs": {"BM": 64, "BN": 64}}
        for shape in SHAPES
    ]
    path.write_text(json.dumps(lines))
    found = of_plans(path, toy_families())
    assert found == candidates()
    assert [c.task.label for c in at_shapes(found, [hgemm(*SHAPES[2]), hgemm(*SHAPES[0])])] == [
        "256x128x64",
        "64x64x64",
    ]
    with pytest.raises(UsageError, match="no kernel to certify at 1x1x1"):
        at_shapes(found, [hgemm(1, 1, 1)])


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("HGEMM_AGENT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tools.families.load_families", toy_families)
    monkeypatch.setattr("agent.devices.open_device", lambda spec: CertifyingDevice(float(spec.partition("*")[2] or 1)))
    return CliRunner()


def test_certify_then_against_with_exit_codes(cli: CliRunner, recording: Path, tmp_path: Path) -> None:
    old, new, bad = (str(tmp_path / f"{name}.json") for name in ("old", "new", "bad"))
    short = ["--warm", "0", "--timed", "0.1"]
    first = cli.invoke(app, ["certify", "--records", str(recording), "--device", "fake", "--out", old, *short])
    assert first.exit_code == 0, first.output
    assert "2 certified" in first.stdout and certify_record.read(Path(old)).sha256 in first.stdout
    same = cli.invoke(app, ["certify", "--against", old, "--device", "fake*1.01", "--out", new, *short])
    assert same.exit_code == 0 and "32 of 32 ratios agree" in same.stdout, same.output
    other = cli.invoke(app, ["certify", "--against", old, "--device", "fake*1.1", "--out", bad, *short, "--json"])
    assert other.exit_code == 2
    document = json.loads(other.stdout)
    assert document["agreement"]["agrees"] is False and document["agreement"]["slack"] == 0.02
    assert document["certificate"]["sha256"] == certify_record.read(Path(bad)).sha256
    wide = cli.invoke(app, ["certify", "--compare-only", bad, "--against", old, "--slack", "0.1"])
    assert wide.exit_code == 0 and "slack 10 %" in wide.stdout
    whole = certify_record.read(Path(old))
    half = whole.model_copy(update={"entries": whole.entries[:1]}).signed()
    (tmp_path / "half.json").write_text(half.to_json())
    broken = cli.invoke(app, ["certify", "--compare-only", str(tmp_path / "half.json"), "--against", old])
    assert broken.exit_code == 1 and "it broke off: 1 of 2 kernels are in it" in broken.stdout
    recorded = cli.invoke(app, ["certify", "--compare-only", bad, "--against", str(recording)])
    assert recorded.exit_code == 2 and "before" in recorded.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--db", "a", "--plans", "b"], "one of --db, --plans and --records"),
        (["--db", "/nowhere.sqlite"], "there is no database"),
        ([], "there is no database"),
        (["--records", "/nowhere.sqlite"], "there is no record file"),
        (["--against", "/nowhere.json"], "does not exist"),
        (["--compare-only", "x.json"], "needs --against"),
        (["--mode", "fast", "--records", "RECORDING"], "no mode 'fast'"),
        (["--shape", "1,1,1", "--records", "RECORDING"], "no kernel to certify at 1x1x1"),
        (["--shape", "1,1", "--records", "RECORDING"], "is not a shape"),
    ],
)
def test_bad_input_is_one_sentence(cli: CliRunner, recording: Path, arguments: list[str], words: str) -> None:
    given = [str(recording) if a == "RECORDING" else a for a in arguments]
    result = cli.invoke(app, ["certify", *given])
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert words in result.stderr.strip().splitlines()[-1]


def test_a_recording_is_known_by_its_first_bytes(recording: Path, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    assert certify_cli.is_recording(recording)
    assert not certify_cli.is_recording(tmp_path / "c.json") and not certify_cli.is_recording(tmp_path / "gone")


# --- what a GPU is asked ----------------------------------------------------------------------------------------------


class Asked(CudaDevice):
    """With a worker that answers from here."""

    def __init__(self, reply: Mapping[str, Any] | None, folder: Path) -> None:
        super().__init__(cache_dir=folder)
        self.reply = reply
        self.requests: list[tuple[dict[str, Any], float]] = []

    @property
    def info(self) -> DeviceInfo:
        return ScriptedDevice().info

    def compile(self, variant: Variant) -> CompileResult:
        return ScriptedDevice().compile(variant)

    def _cubin_path(self, compiled: CompileResult) -> Path:
        return Path("x.cubin")

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | Lost:
        self.requests.append((request, timeout_s))
        return dict(self.reply) if self.reply is not None else Lost(died=False, timeout_s=timeout_s)


def test_the_worker_is_asked_for_the_seconds_and_the_trace(tmp_path: Path) -> None:
    variant, task = variant_of(), hgemm(64, 64, 64)
    answer = ScriptedDevice().time(variant, task, "server", "certify")
    device = Asked({"record": answer.model_dump(mode="json"), "trace": TRACE.model_dump(mode="json")}, tmp_path)
    result, trace = device.time_certify(variant, task, "server", warm_s=2.0, aim_s=3000.0)
    request, timeout_s = device.requests[0]
    assert (request["warm_s"], request["aim_s"], request["trace"], request["mode"]) == (2.0, 3000.0, True, "server")
    assert request["budget"] == "certify" and timeout_s >= 2.0 + 5 * 3000.0 + TIME_TIMEOUT_S["certify"]
    assert result == answer and trace == TRACE
    device.reply = {"record": answer.model_dump(mode="json")}
    assert device.time_certify(variant, task, "server", warm_s=2.0, aim_s=3.0)[1] is None, "without NVML"
    device.reply = None
    hung = device.time_certify(variant, task, "server", warm_s=2.0, aim_s=3.0)[0]
    assert hung.reason is Reason.HANG
    assert isinstance(device, CertifyTimer) and not isinstance(ScriptedDevice(), CertifyTimer)
    device.close()


@pytest.mark.parametrize("mode", ["offline", "server"])
def test_the_workers_run_ends_when_every_pair_has_its_seconds(mode: Mode) -> None:
    """On a simulated GPU. A server's calls are mostly gap: without it, microseconds of kernels would never sum up."""
    task, aim_s = hgemm(24, 16, 40), {"offline": 0.004, "server": 0.15}[mode]
    request = {"op": "time", "mode": mode, "budget": "certify", "cubin": "", "warm_s": 0.02, "aim_s": aim_s}
    request |= {"variant": simulated_gpu.variant().model_dump(mode="json"), "task": task.model_dump(mode="json")}
    costs = {"first": 3.0, "second": 2.0, "gemmex": 2.5}
    with simulated_gpu.simulated_worker(simulated_gpu.honest, 1.0, task.dims, costs) as gpu:
        started = time.monotonic()
        reply = gpu.ask({**request, "trace": True})
        took_s = time.monotonic() - started
    assert set(reply) == {"record", "restart"}, "no NVML, no trace"
    result = TimingResult.model_validate(reply["record"])
    row = result.row("cublaslt_auto")
    assert result.ok and row is not None and row.ratio == pytest.approx(2.0)
    assert row.samples >= 30 and took_s < 60
    if mode == "offline":
        assert row.samples * 40 * 3e-6 >= aim_s, "40 launches a round of 1 us and of 2 us"
        assert row.samples * 40 * 3e-6 < 2 * aim_s or row.samples == 30


class Nvml:
    """As much of pynvml as a trace needs."""

    nvmlClocksEventReasonSwPowerCap = 4  # noqa: N815 - NVML's name
    nvmlClocksThrottleReasonHwSlowdown = 8  # noqa: N815


def test_a_trace_is_thinned_and_names_what_throttled() -> None:
    log = ClockLog("GPU-of-nobody")
    assert log.trace() is None
    log._nvml = Nvml
    log.readings = [(1980 - i, 500.0 + i, 40, 4 if i >= 500 else 0, 100.0 + i / 50) for i in range(1000)]
    log.readings[999] = (*log.readings[999][:3], 12, log.readings[999][4])
    trace = log.trace(points=100)
    assert trace is not None and len(trace.t_s) == 100
    assert trace.t_s[0] == 0.0 and trace.t_s[1] == pytest.approx(0.2) and trace.sm_mhz[1] == 1970
    assert trace.throttle[0] == "" and trace.throttle[-1] == "sw_power_cap"
    summary = log.summary()
    assert summary is not None and summary.throttle_reasons == ("sw_power_cap", "hw_slowdown"), "the summary sees all"
    full = log.trace(points=1000)
    assert full is not None and full.throttle[-1] == "sw_power_cap+hw_slowdown"


def test_medians_of_many_samples_are_those_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certify run has 1e5 samples; the quick way must draw and count as the plain one does."""
    from tools import stats

    rng = np.random.default_rng(5)
    for size in (513, 600):
        own, ref = rng.lognormal(0, 0.05, size).round(2), rng.lognormal(0.1, 0.05, size).round(2)
        quick = stats.paired_ratio(own, ref, resamples=300)
        monkeypatch.setattr(stats, "_FEW", 10**9)
        plain = stats.paired_ratio(own, ref, resamples=300)
        monkeypatch.undo()
        assert (quick.lo, quick.hi) == pytest.approx((plain.lo, plain.hi), abs=1e-12)
