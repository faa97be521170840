"""The committed certificate of an H200: whole, of all regimes, with NVML traces, and in agreement with the record."""

from __future__ import annotations

from agent import certify_record
from agent.certify_against import agreement, of_recording
from tools.paths import records_dir
from tools.record_file import RecordReader
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
    """Made the day before, by another process and, for the kernels, at another budget. The record names some of the
    plans by a knob that they did not have yet; their machine code says that they are the same."""
    records = RecordReader(records_dir() / "h200.sqlite")
    known = {plan.plan_id for plan in records.plans()}
    by_cubin = {records.compiled(plan_id).cubin_sha256: plan_id for plan_id in known}  # type: ignore[union-attr]
    name_of = {
        entry.variant_key: entry.variant_key if entry.variant_key in known else by_cubin[entry.compile.cubin_sha256]
        for entry in CERTIFICATE.entries
        if entry.compile is not None
    }
    keys = [(entry.task.task_id, name_of[entry.variant_key]) for entry in CERTIFICATE.entries]
    earlier = of_recording(records_dir() / "h200.sqlite", keys)
    old_name = {new: old for old, new in name_of.items()}
    rows = tuple(row.model_copy(update={"key": old_name.get(row.key, row.key)}) for row in earlier.rows)
    found = agreement(earlier.model_copy(update={"rows": rows}), CERTIFICATE, slack=0.02)
    assert len(found.differences) == 20 * 2 * 8
    # Both files are what they are: three ratios of two shapes, docs/sweeps.md names them.
    assert len(found.disagreeing) <= 3, [f"{d.shape} {d.mode} {d.reference}" for d in found.disagreeing]
