"""The committed certificate of an H200: whole, of all regimes, with NVML traces, and in agreement with the record."""

from __future__ import annotations

from agent import certify_record
from agent.certify_against import agreement, of_recording
from tools.paths import records_dir
from tools.shapes import regime

CERTIFICATE = certify_record.read(records_dir() / "h200-certificate.json")


def test_twenty_kernels_passed_the_whole_gate_at_shapes_of_every_regime() -> None:
    assert [entry.status for entry in CERTIFICATE.entries] == ["certified"] * 20
    assert {regime(entry.task) for entry in CERTIFICATE.entries} == {
        "tiny", "launch-bound", "few-tiles", "memory-bound", "compute-short", "compute-long",
    }  # fmt: skip
    assert CERTIFICATE.software["commit"] and CERTIFICATE.device.name == "NVIDIA H200"


def test_every_timing_has_a_trace_of_the_clocks() -> None:
    for entry in CERTIFICATE.entries:
        assert [timing.result.mode for timing in entry.timings] == ["offline", "server"]
        for timing in entry.timings:
            trace = timing.trace
            assert trace is not None and len(trace.t_s) == len(trace.sm_mhz) > 1, entry.label
            assert max(trace.sm_mhz) > 1000 and max(trace.power_w) > 80


def test_the_record_says_the_same() -> None:
    """Made the day before, by another process and, for the kernels, at another budget. Some of its plans
    have another name in the record, for their families got a knob; their machine code is the same."""
    keys = [(entry.task.task_id, entry.variant_key) for entry in CERTIFICATE.entries]
    earlier = of_recording(records_dir() / "h200.sqlite", keys, CERTIFICATE.entries)
    found = agreement(earlier, CERTIFICATE, slack=0.02)
    assert len(found.differences) == 20 * 2 * 8
    # Both files are what they are: three ratios of two shapes, docs/sweeps.md names them.
    assert len(found.disagreeing) <= 3, [f"{d.shape} {d.mode} {d.reference}" for d in found.disagreeing]
