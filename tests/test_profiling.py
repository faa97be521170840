"""ncu's CSV → metrics, stalls and sentences; and its child: a scripted ncu where there is no GPU."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nvcc import small_variant
from tools.hgemm import hgemm
from tools.oneshot_job import Launchable
from tools.profiling import (
    METRICS,
    STALLS,
    missing_metrics,
    ncu_command,
    ncu_failure,
    parse_ncu_csv,
    profile_jobs,
    summarise,
    wanted_metrics,
)
from tools.records import LaunchSpec, ProfileResult, Reason, Status, Variant
from tools.sentences import sentences
from tools.toolchain import Tool, Toolchain

IDENTITY = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",'
    '"Block Size","Grid Size","Device","CC"'
)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def table(metrics: list[tuple[str, str]], rows: list[tuple[str, list[str]]], blank: str = "") -> str:
    """``--csv --page raw``: header, units, one row a launch. ``metrics`` are (name, unit)."""
    header = IDENTITY + "".join(f',"{name}"' for name, _ in metrics)
    units = ",".join(['""'] * 11) + "".join(f',"{unit}"' for _, unit in metrics)
    lines = ["==PROF== Connected to process 7 (/usr/bin/python3.12)", blank + header, units]
    for number, (kernel, cells) in enumerate(rows):
        place = f'"{number}","7","python3.12","host","{kernel}","1","7","(128, 1, 1)","(4, 4, 1)","0","9.0"'
        lines.append(place + "".join(f',"{cell}"' for cell in cells))
    return "\n".join([*lines, "==PROF== Disconnected from process 7", ""])


BASE = [
    ("gpu__time_duration.sum", "ns"),
    ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "%"),
    ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "%"),
    ("lts__t_sector_hit_rate.pct", "%"),
    ("launch__registers_per_thread", "register/thread"),
    ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", ""),
    ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", ""),
    ("dram__bytes_read.sum", "byte"),
    (STALL.format("long_scoreboard"), "inst"),
    (STALL.format("barrier"), "inst"),
    (STALL.format("selected"), "inst"),
    (STALL.format("wait"), "inst"),
]
ROW = ["205,344", "71.25", "12.5", "88.1", "168", "1,024", "65,536", "33,554,432", "4.5", "0.75", "1.00", "n/a"]


def test_several_launches_in_one_table() -> None:
    launches = parse_ncu_csv(table(BASE, [("gemm", ROW), ("reduce", ["2,048", *ROW[1:]]), ("gemm", ROW)]))
    assert [launch.kernel for launch in launches] == ["gemm", "reduce", "gemm"]
    assert [launch.values["gpu__time_duration.sum"] for launch in launches] == [205344, 2048, 205344]
    assert STALL.format("wait") not in launches[0].values  # n/a is not a number, and not zero


def test_summary_of_one_launch() -> None:
    metrics, stalls = summarise(parse_ncu_csv(table(BASE, [("gemm", ROW)])))
    assert metrics == {
        "time_us": 205.344,
        "tensor_pipe_pct": 71.25,
        "dram_pct": 12.5,
        "l2_hit_pct": 88.1,
        "registers": 168,
        "bank_conflicts": 1024,
        "shared_wavefronts": 65536,
        "dram_bytes_read": 33554432,
    }
    assert stalls == {"long_scoreboard": 4.5, "barrier": 0.75}


def test_summary_of_a_call_of_two_launches() -> None:
    """Times and counts add up, percentages are weighed by time, registers are the larger."""
    short = ["68,448", "0", "50", "20", "32", "0", "0", "1,000", "0", "0", "1", "n/a"]
    metrics, _ = summarise(parse_ncu_csv(table(BASE, [("gemm", ROW), ("reduce", short)])))
    assert metrics["time_us"] == pytest.approx(273.792)
    assert metrics["tensor_pipe_pct"] == pytest.approx(71.25 * 0.75, rel=1e-6)
    assert metrics["registers"] == 168
    assert metrics["dram_bytes_read"] == 33555432


@pytest.mark.parametrize(
    ("unit", "cell", "time_us"),
    [
        ("ns", "1,500", 1.5),
        ("nsecond", "1500", 1.5),
        ("us", "1.5", 1.5),
        ("usecond", "1.50", 1.5),
        ("ms", "0.0015", 1.5),
        ("second", "0.0000015", 1.5),
    ],
)
def test_units_of_time(unit: str, cell: str, time_us: float) -> None:
    metrics, _ = summarise(parse_ncu_csv(table([("gpu__time_duration.sum", unit)], [("k", [cell])])))
    assert metrics["time_us"] == pytest.approx(time_us)


def test_units_of_memory() -> None:
    metrics, _ = summarise(parse_ncu_csv(table([("dram__bytes_read.sum", "Mbyte")], [("k", ["2.5"])])))
    assert metrics["dram_bytes_read"] == 2.5e6


@pytest.mark.parametrize(
    "text",
    ["", "==ERROR== x\n", IDENTITY + "\n", "a,b,c\n1,2,3\n", table(BASE, []), table(BASE, [("k", ROW[:3])]), '"ID'],
)
def test_tables_that_hold_nothing(text: str) -> None:
    assert parse_ncu_csv(text) == []
    assert summarise([]) == ({}, {})
    assert sentences({}, {}) == ()


@given(st.text(alphabet='"ID,\n=KernelName 0123__.', max_size=200))
def test_any_text_parses(text: str) -> None:
    parse_ncu_csv(text)


def test_missing_metrics_are_named() -> None:
    text = (
        "==ERROR== Failed to find metric regex:^flop_count_sp\\.(sum|min|max|avg|pct|ratio|max_rate)$\n"
        "==ERROR== Failed to find metric sm__x_y.avg.pct\n"
        "==ERROR== Failed to find metric regex:^lts__z\\.sum$\n"
    )
    assert missing_metrics(text) == ("flop_count_sp", "sm__x_y.avg.pct", "lts__z.sum")
    assert missing_metrics("==PROF== all well") == ()


def test_an_unknown_name_is_replaced_by_its_alternative() -> None:
    first, second = METRICS["dram_pct"]
    assert first in wanted_metrics() and second not in wanted_metrics()
    without = wanted_metrics(frozenset((first,)))
    assert second in without and first not in without
    assert len(wanted_metrics()) == len(METRICS) + len(STALLS)


@pytest.mark.parametrize(
    ("text", "code", "status", "words"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters",
            1,
            Status.UNAVAILABLE,
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", 1, Status.UNAVAILABLE, "LibraryNotLoaded"),
        (
            "oneshot: CUDA_ERROR_INVALID_VALUE\n==ERROR== The application returned an error code (3).",
            3,
            Status.FAILED,
            "CUDA_ERROR_INVALID_VALUE",
        ),
        ("what?", 9, Status.UNAVAILABLE, "code 9: what?"),
    ],
)
def test_failures(text: str, code: int, status: Status, words: str) -> None:
    failure = ncu_failure(text, code)
    assert failure is not None
    assert failure[0] is status
    assert words in failure[2]
    assert (failure[1] is None) == (status is Status.UNAVAILABLE)


def test_a_good_run_is_no_failure() -> None:
    assert ncu_failure(table(BASE, [("gemm", ROW)]), 0) is None


def test_command_line() -> None:
    command = ncu_command(Path("/n/ncu"), Path("/j.json"), Path("/o.csv"), ["a", "b"])
    assert command[0] == "/n/ncu"
    for option, value in (
        ("--clock-control", "none"),
        ("--page", "raw"),
        ("--print-units", "base"),
        ("--metrics", "a,b"),
    ):
        assert command[command.index(option) + 1] == value
    assert command[-3:] == ["-m", "tools.gpu.oneshot", "/j.json"]


# --- sentences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"tensor_pipe_pct": 91.0, "dram_pct": 20.0, "time_us": 200.0}, "compute-bound: the tensor cores at 91 %"),
        ({"tensor_pipe_pct": 9.0, "dram_pct": 85.0, "l2_pct": 40.0}, "memory-bound: device memory at 85 %"),
        ({"tensor_pipe_pct": 3.0, "dram_pct": 5.0, "l2_pct": 11.0, "time_us": 2.25}, "latency-bound"),
        ({"tensor_pipe_pct": 50.0, "l2_pct": 45.0}, "No single limit"),
        ({"shared_pct": 88.0, "tensor_pipe_pct": 30.0}, "throughput-bound: shared-memory bandwidth"),
        ({"registers": 40.0}, "No unit's utilisation"),
    ],
)
def test_the_first_sentence_says_what_binds(metrics: dict[str, float], words: str) -> None:
    assert words in sentences(metrics, {})[0]


def test_the_other_sentences() -> None:
    metrics = {
        "registers": 168.0,
        "occupancy_pct": 18.0,
        "occupancy_limit_pct": 18.75,
        "waves": 1.2,
        "bank_conflicts": 10.0,
        "shared_wavefronts": 40.0,
        "l2_hit_pct": 80.0,
    }
    _, stall, shape = sentences(metrics, {"not_selected": 9.0, "long_scoreboard": 3.0, "barrier": 1.0})
    assert stall.startswith("Warps stall most on long_scoreboard (3.00 warps per issue, 75 %")
    assert shape == (
        "168 registers a thread, occupancy 18 % of at most 19 %, 1.20 waves, the last one thin, "
        "bank conflicts in 25 % of shared-memory wavefronts, L2 hit rate 80 %."
    )
    assert "SMs stand idle" in sentences({"waves": 0.3}, {})[2]


@given(
    st.dictionaries(st.sampled_from(sorted(METRICS)), st.floats(0, 1e9), min_size=1),
    st.dictionaries(st.sampled_from(STALLS), st.floats(0, 100)),
)
def test_three_sentences_whatever_was_measured(metrics: dict[str, float], stalls: dict[str, float]) -> None:
    found = sentences(metrics, stalls)
    assert len(found) == 3
    assert all(s[0].isupper() or s[0].isdigit() for s in found)
    assert all(s.endswith(".") and "\n" not in s for s in found)


# --- children --------------------------------------------------------------------------------------------------------


def scripted(folder: Path, body: str) -> Toolchain:
    """An ncu that is a shell script: ``$out`` is the file to write, ``$n`` counts the calls from 1."""
    path = folder / "ncu"
    path.write_text(
        f"""#!/bin/sh
echo x >> {folder}/calls; n=$(wc -l < {folder}/calls)
while [ "$1" != --log-file ]; do shift; done; out=$2; metrics=$4
for job; do :; done
{body}
"""
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return Toolchain(ncu=Tool("ncu", path))


def jobs(count: int, launches: int = 1) -> list[Launchable]:
    base = small_variant("int x;")
    spec = LaunchSpec(launches=base.launch.launches * launches)
    return [
        (Variant(source=f"// {i}", launch=spec), hgemm(64, 64, 64 + i), Path(f"/c/{i}.cubin")) for i in range(count)
    ]


def profiled(
    folder: Path, body: str, work: list[Launchable], files: dict[str, str] | None = None
) -> list[ProfileResult]:
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    return profile_jobs(work, toolchain=scripted(folder, body), deadline_s=5.0)


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().split())


def rows(*times_ns: int) -> str:
    return table(BASE, [("gemm", [str(t), *ROW[1:]]) for t in times_ns])


def test_one_process_profiles_many(tmp_path: Path) -> None:
    results = profiled(tmp_path, f"cp {tmp_path}/all.csv $out", jobs(3), {"all.csv": rows(1000, 2000, 3000)})
    assert [r.metrics["time_us"] for r in results] == [1.0, 2.0, 3.0]
    assert [r.task_id for r in results] == [task.task_id for _, task, _ in jobs(3)]
    assert all(r.ok and len(r.sentences) == 3 for r in results)
    assert calls(tmp_path) == 1


def test_calls_of_several_launches(tmp_path: Path) -> None:
    results = profiled(
        tmp_path, f"cp {tmp_path}/a.csv $out", jobs(2, launches=2), {"a.csv": rows(1000, 500, 3000, 700)}
    )
    assert [r.metrics["time_us"] for r in results] == [1.5, 3.7]


def test_unknown_metrics_are_left_out_and_the_rest_measured(tmp_path: Path) -> None:
    body = f"""
case $metrics in *gmma*) echo '==ERROR== Failed to find metric {STALL.format("gmma")}' > $out; exit 1;; esac
cp {tmp_path}/a.csv $out"""
    results = profiled(tmp_path, body, jobs(1), {"a.csv": rows(1000)})
    assert results[0].ok
    assert calls(tmp_path) == 2


def test_an_ncu_that_knows_no_metric_ends(tmp_path: Path) -> None:
    body = 'echo "==ERROR== Failed to find metric ${metrics%%,*}" > $out; exit 1'
    (result,) = profiled(tmp_path, body, jobs(1))
    assert result.status is Status.UNAVAILABLE
    assert calls(tmp_path) < 20


def test_a_failing_candidate_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    body = f"""
case $n in
  1) cp {tmp_path}/first.csv $out
     echo 'oneshot: cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS' >&2
     echo '==ERROR== The application returned an error code (3).' >> $out; exit 3;;
  *) cp {tmp_path}/rest.csv $out;;
esac"""
    results = profiled(tmp_path, body, jobs(4), {"first.csv": rows(1000), "rest.csv": rows(3000, 4000)})
    assert [r.status for r in results] == [Status.OK, Status.FAILED, Status.OK, Status.OK]
    assert results[1].reason is Reason.LAUNCH_FAILED
    assert "ILLEGAL_ADDRESS" in results[1].detail
    assert [r.metrics.get("time_us") for r in results] == [1.0, None, 3.0, 4.0]
    assert calls(tmp_path) == 2


def test_a_hanging_candidate(tmp_path: Path) -> None:
    body = f"case $n in 1) cp {tmp_path}/first.csv $out; sleep 60;; *) cp {tmp_path}/rest.csv $out;; esac"
    work = jobs(3)
    for name, text in {"first.csv": rows(1000), "rest.csv": rows(3000)}.items():
        (tmp_path / name).write_text(text)
    results = profile_jobs(work, toolchain=scripted(tmp_path, body), deadline_s=1.0)
    assert [r.reason for r in results] == [None, Reason.HANG, None]


def test_no_permission_answers_for_all_at_once(tmp_path: Path) -> None:
    results = profiled(tmp_path, "echo '==ERROR== ERR_NVGPUCTRPERM - no' > $out; exit 1", jobs(3))
    assert {r.status for r in results} == {Status.UNAVAILABLE}
    assert calls(tmp_path) == 1


def test_nothing_profiled_is_unavailable(tmp_path: Path) -> None:
    (result,) = profiled(tmp_path, "echo '==WARNING== No kernels were profiled.' > $out", jobs(1))
    assert result.status is Status.UNAVAILABLE


def test_no_ncu() -> None:
    results = profile_jobs(jobs(2), toolchain=Toolchain())
    assert {r.status for r in results} == {Status.UNAVAILABLE}
    assert "apt-get install" in results[0].detail
