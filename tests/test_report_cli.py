"""`agent report`: files, stdout, stores with several devices, and one sentence for every bad database."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

from agent.report_cli import build_report, report
from agent.reporting.model import Report
from agent.reporting.source import load
from memory.store import Store
from tests.fakes import raw_variant
from tests.report_kit import FAMILIES, UnevenDevice, make_record
from tools.extras import install_command
from tools.families import accepted_plans
from tools.gate import Toolbox
from tools.hgemm import hgemm
from tools.records import MODES, Variant

ROOT = Path(__file__).resolve().parent.parent
SHAPES = [(64, 64, 64), (512, 256, 128), (2048, 2048, 2048)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_record(tmp_path_factory.mktemp("records") / "r.sqlite", SHAPES)


def fill(
    path: Path, name: str = "NVIDIA H200", shapes: Sequence[tuple[int, int, int]] = SHAPES, session: bool = True
) -> None:
    """A store as sessions leave it: two plans and a raw source through the whole gate."""
    device = UnevenDevice(name=name)
    with Store(path) as store:
        toolbox = Toolbox(device, store, FAMILIES)
        if session:
            store.create_session(f"on {name}", {"device_info": device.info.model_dump(mode="json")})
        for shape in shapes:
            task = hgemm(*shape)
            toolbox.baselines(task, "offline", "final")
            for variant in [*accepted_plans(FAMILIES, task)[:2], raw_variant("mine")]:
                store.put_variant(variant)
                assert toolbox.compile(variant).ok
                assert toolbox.verify(variant, task, "full").ok
                assert toolbox.sanitize(variant, task).ok
                for mode in MODES:
                    assert toolbox.time(variant, task, mode, "final").ok
                assert toolbox.profile(variant, task).ok


def agent(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = "import sys; sys.path.insert(0, sys.argv.pop(1)); from agent.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", command, str(ROOT), "report", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_three_files_and_the_headline(recorded: Path, tmp_path: Path) -> None:
    done = agent("--from", str(recorded), "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    found = Report.from_json((tmp_path / "out" / "report.json").read_text())
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["offline", "rotating", "server"]
    stats = found.headline("offline")
    assert stats is not None
    assert f"mean speedup {100 * stats.mean_speedup:+.1f} %" in lines[0]
    assert lines[3].startswith("3 shapes in the database, 3 with a kernel")
    assert "3 of the grid's 1,000 shapes" in lines[3]


def test_stdout_alone_writes_no_file(recorded: Path, tmp_path: Path) -> None:
    for flag, begins in (("--json", "{"), ("--markdown", "# HGEMM on NVIDIA H200 (scripted)")):
        done = agent("--from", str(recorded), flag, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(begins)
        assert list(tmp_path.iterdir()) == []
    both = agent("--from", str(recorded), "--json", "--markdown", cwd=tmp_path)
    assert both.returncode == 1
    assert both.stderr == "error: --json and --markdown both write to stdout: give one of them\n"


def test_json_keeps_what_was_not_measured(tmp_path: Path) -> None:
    path = make_record(tmp_path / "r.sqlite", [(128, 128, 64), (64, 64, 64)])  # no kernel passes at the first
    document = json.loads(build_report(path).document())
    none = next(s for s in document["shapes"] if (s["m"], s["n"], s["k"]) == (128, 128, 64))
    assert none["best"] is None
    assert none["why_none"] == "no candidate was timed at the final budget"
    assert document["shapes_known"] == 2
    assert document["shapes_with_kernel"] == 1


def test_a_store_says_the_same_as_a_record_file_of_the_same_measurements(tmp_path: Path) -> None:
    fill(tmp_path / "store.sqlite")
    found = build_report(tmp_path / "store.sqlite")
    assert found.shapes_with_kernel == 3
    device = UnevenDevice(name="NVIDIA H200")
    for shape in found.shapes:
        task = hgemm(shape.m, shape.n, shape.k)
        variants = {v.key: v for v in [*accepted_plans(FAMILIES, task)[:2], raw_variant("mine")]}
        best = min(variants.values(), key=lambda v: device.time_us(v, task))
        assert shape.best == best.key
        timing = shape.timing("server")
        assert timing is not None
        assert timing.time_us == pytest.approx(device.time_us(best, task, "server"))
    facts = {fact.name: fact.value for fact in found.provenance}
    assert facts["libraries"] == "scripted BLAS 1"
    assert facts["sessions"] == "1"


def test_a_raw_source_is_shown_in_full(tmp_path: Path) -> None:
    """Slow plans, so that the raw source wins."""

    class Slow(UnevenDevice):
        def time_us(self, variant: Variant, task: object, mode: object = "offline") -> float:
            return super().time_us(variant, task, mode) * (9.0 if variant.plan else 1.0)  # type: ignore[arg-type]

    raw = raw_variant("</pre><script>alert(1)</script>")
    task = hgemm(64, 64, 64)
    with Store(tmp_path / "store.sqlite") as store:
        toolbox = Toolbox(Slow(), store, FAMILIES)
        for variant in (accepted_plans(FAMILIES, task)[0], raw):
            store.put_variant(variant)
            assert toolbox.compile(variant).ok
            assert toolbox.verify(variant, task, "full").ok
            assert toolbox.sanitize(variant, task).ok
            assert toolbox.time(variant, task, "offline", "final").ok
    from agent.reporting.html import render_html

    found = build_report(tmp_path / "store.sqlite")
    assert found.kernels[0].key == raw.key
    assert raw.source in [source.text for source in found.sources]
    page = render_html(found)
    assert "<script>alert" not in page
    assert "&lt;/pre&gt;&lt;script&gt;alert(1)" in page
    assert "rotating, mean speedup</span>\n<b>-</b><span>not measured" in page


def test_a_store_of_two_devices_wants_one_named(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    fill(path, "NVIDIA H200", SHAPES[:1])
    fill(path, "NVIDIA H100", SHAPES[:2], session=False)
    done = agent("--from", str(path), cwd=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: .*store.sqlite holds measurements of 2 devices: name one with --device, of: NVIDIA H100, driver 1.0, "
        r"scope [0-9a-f]{16}; NVIDIA H200 \(scripted\)\n",
        done.stderr,
    )
    assert load(path, "h100").device.name == "NVIDIA H100"
    assert len(load(path, "h100").tasks) == 2
    assert load(path, "h200").device.name == "NVIDIA H200"
    none = agent("--from", str(path), "--device", "B200", cwd=tmp_path)
    assert "holds no device 'B200': name one" in none.stderr


def test_a_sweeps_rows_name_the_device_and_why_a_shape_has_no_kernel(tmp_path: Path) -> None:
    path = tmp_path / "sweep.sqlite"
    fill(path, "NVIDIA H200", SHAPES[:1], session=False)
    with Store(path) as store:
        (scope,) = store.scopes()
        row = {
            "scope": scope,
            "device": "NVIDIA H200",
            "driver": "1.0",
            "device_label": "replayed from NVIDIA H200",
            "task_id": "hgemm-f32acc/M=8,N=8,K=8",
            "status": "not_recorded",
            "detail": "the shape 8x8x8 was not recorded",
        }
        store.put("sweep-abc", "sweep", json.dumps(row))
    found = build_report(path)
    assert found.device == "replayed from NVIDIA H200"
    none = next(s for s in found.shapes if s.label == "8x8x8")
    assert none.why_none == "no candidate was timed at the final budget; the shape 8x8x8 was not recorded"


# --- bad databases ---------------------------------------------------------------------------------------------------


def empty_store(path: Path) -> None:
    Store(path).close()


def newer_store(path: Path) -> None:
    empty_store(path)
    alter(path, "UPDATE meta SET value = '99' WHERE key = 'schema_version'")


def alter(path: Path, sql: str) -> None:
    db = sqlite3.connect(path)
    with db:
        db.execute(sql)
    db.close()


def test_databases_that_cannot_be_reported(recorded: Path, tmp_path: Path) -> None:
    def copy(name: str, source: Path = recorded) -> Path:
        return Path(shutil.copy(source, tmp_path / name))

    cases: list[tuple[Path, str]] = [(tmp_path / "gone.sqlite", "there is no database .*gone.sqlite")]
    cases.append((tmp_path, "is a folder: give the database in it"))
    (tmp_path / "nothing.sqlite").touch()
    cases.append((tmp_path / "nothing.sqlite", "is empty: nothing to report"))
    (tmp_path / "text.sqlite").write_text("M,N,K\n1,2,3\n")
    cases.append((tmp_path / "text.sqlite", "is not a database of measurements"))
    cut = copy("cut.sqlite")
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    cases.append((cut, "is truncated|is damaged"))
    newer = copy("newer.sqlite")
    alter(newer, "UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    cases.append((newer, "schema version 99, newer than"))
    protocol = copy("protocol.sqlite")
    alter(protocol, "UPDATE meta SET value = '77' WHERE key = 'protocol_version'")
    cases.append((protocol, "measured under protocol version 77"))
    unfinished = copy("unfinished.sqlite")
    alter(unfinished, "DELETE FROM timings WHERE budget > 0")
    cases.append((unfinished, "holds no timing at the final budget of any of its 3 shapes"))
    bare = copy("bare.sqlite")
    for table in ("timings", "verifies", "tasks", "baselines", "profiles"):
        alter(bare, f"DELETE FROM {table}")
    cases.append((bare, "holds no measurements of HGEMM"))
    inside = copy("inside.sqlite")
    alter(inside, "UPDATE verifies SET data = x'00ff' WHERE depth = 1")
    cases.append((inside, "is damaged inside"))
    empty_store(tmp_path / "empty-store.sqlite")
    cases.append((tmp_path / "empty-store.sqlite", "holds no timings: nothing to report"))
    newer_store(tmp_path / "newer-store.sqlite")
    cases.append((tmp_path / "newer-store.sqlite", "schema version 99 but this program reads up to"))
    alter(tmp_path / "other.sqlite", "CREATE TABLE birds (name TEXT)")
    cases.append((tmp_path / "other.sqlite", "neither a record file nor a store"))
    from agent.errors import UsageError
    from memory.store import StoreError
    from tools.device import DeviceBroken

    for path, sentence in cases:
        with pytest.raises((UsageError, StoreError, DeviceBroken), match=sentence) as raised:
            load(path)
        assert "\n" not in str(raised.value), path
    done = agent("--from", str(cases[0][0]), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no database ")
    assert done.stderr.count("\n") == 1


def test_a_truncated_store(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    fill(path)
    path.write_bytes(path.read_bytes()[:20_000])
    done = agent("--from", str(path), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "damaged" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_made(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = agent("--from", str(recorded), "--out", "file/sub", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "cannot be written" in done.stderr


def test_without_the_extra_the_command_to_install_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in ("plotly", "scipy") else found(name, *a)
    )
    with pytest.raises(typer.Exit) as exit_:
        report(source=None, out=Path("never"), device=None, json_output=False, markdown=False)
    assert exit_.value.exit_code == 1
    assert capsys.readouterr().err == f"error: agent report needs scipy and plotly: {install_command('report')}\n"
