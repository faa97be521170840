"""Whether a second run agrees with a first one: per kernel, shape, mode and reference, on same-run ratios. Pure.

Two runs disagree at a row if their 95 % intervals lie apart by more than ``slack``: neither interval, nor the slack for
what differs between two days of one GPU (clocks, temperature, allocation), explains the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from agent.certify_record import Certificate, Certified
from agent.errors import UsageError
from tools.record_file import RecordReader
from tools.records import MODES, DeviceInfo, Mode, Record, TimingRow

RowKey = tuple[str, str, Mode, str]  # task_id, variant key, mode, reference


class Difference(Record):
    """One row of both runs. ``change`` = new ratio / old ratio - 1; ``gap`` is how far the intervals lie apart,
    relative to the old ratio, 0 where they overlap."""

    task_id: str
    shape: str
    variant_key: str
    mode: Mode
    reference: str
    old: tuple[float, float, float]  # ratio, lo, hi
    new: tuple[float, float, float]
    change: float
    gap: float
    agrees: bool


class Agreement(Record):
    """``only_old`` and ``only_new`` count rows that the other run does not have."""

    against: str
    slack: float
    old_device: str
    new_device: str
    differences: tuple[Difference, ...]
    only_old: int
    only_new: int

    @property
    def disagreeing(self) -> list[Difference]:
        return [d for d in self.differences if not d.agrees]

    @property
    def agrees(self) -> bool:
        return not self.disagreeing


class Earlier(Record):
    """What a new certificate is compared with."""

    name: str
    device: DeviceInfo
    protocol_version: int
    rows: tuple[TimingRow, ...]


def of_certificate(path: Path, certificate: Certificate) -> Earlier:
    return Earlier(
        name=path.name,
        device=certificate.device,
        protocol_version=certificate.protocol_version,
        rows=tuple(rows_of(certificate)),
    )


def of_recording(path: Path, keys: Iterable[tuple[str, str]], entries: Iterable[Certified] = ()) -> Earlier:
    """The final timings of these (task_id, variant key) in a record file. Raises DeviceBroken. Of ``entries``, a plan
    that the file has under another name, as its family got a knob or a revision since, is found by its machine code."""
    records = RecordReader(path)
    try:
        name_of = _renamed(records, entries)
        rows: list[TimingRow] = []
        for task_id, key in keys:
            for mode in MODES:
                timing = records.timed(name_of.get(key, key), task_id, mode, "final")
                found = timing.rows if timing is not None and timing.ok else ()
                rows += [row.model_copy(update={"key": key}) if key in name_of else row for row in found]
        protocol = records.protocol_version
        return Earlier(name=path.name, device=records.device, protocol_version=protocol, rows=tuple(rows))
    finally:
        records.close()


def _renamed(records: RecordReader, entries: Iterable[Certified]) -> dict[str, str]:
    """Variant key to plan_id: the same family, layout, knobs and cubin. Cubin alone would not do: plans that differ in
    what is passed at the launch share it."""
    plans = records.plans()
    known = {plan.plan_id for plan in plans}
    found = {}
    for entry in entries:
        was, built = entry.plan, entry.compile
        if entry.variant_key in known or was is None or built is None:
            continue
        for plan in plans:
            if (plan.family, plan.b_layout) != (
                was.family,
                was.b_layout,
            ) or not was.knobs.items() <= plan.knobs.items():
                continue
            compiled = records.compiled(plan.plan_id)
            if compiled is not None and compiled.cubin_sha256 == built.cubin_sha256:
                found[entry.variant_key] = plan.plan_id
    return found


def rows_of(certificate: Certificate) -> list[TimingRow]:
    return [row for entry in certificate.entries for timing in entry.timings for row in timing.result.rows]


def agreement(old: Earlier, new: Certificate, slack: float) -> Agreement:
    """Raises UsageError where the numbers do not compare: another GPU model, or another protocol."""
    if old.protocol_version != new.protocol_version:
        raise UsageError(
            f"{old.name} was measured under protocol version {old.protocol_version}, this run under "
            f"{new.protocol_version}: the numbers do not compare"
        )
    if old.device.name != new.device.name:
        raise UsageError(
            f"{old.name} was measured on {old.device.name}, this run on {new.device.name}: the numbers do not compare"
        )
    before, after = _by_key(old.rows), _by_key(rows_of(new))
    shared = [key for key in after if key in before]
    if after and not shared:
        raise UsageError(f"{old.name} and this run have no kernel, shape, mode and reference in common")
    return Agreement(
        against=old.name,
        slack=slack,
        old_device=f"{old.device.name}, driver {old.device.driver}",
        new_device=f"{new.device.name}, driver {new.device.driver}",
        differences=tuple(difference(before[key], after[key], slack) for key in shared),
        only_old=len(before) - len(shared),
        only_new=len(after) - len(shared),
    )


def difference(old: TimingRow, new: TimingRow, slack: float) -> Difference:
    gap = max(0.0, new.ratio_lo - old.ratio_hi, old.ratio_lo - new.ratio_hi) / old.ratio
    return Difference(
        task_id=new.task_id,
        shape="x".join(map(str, new.dims.values())),
        variant_key=new.key,
        mode=new.mode,
        reference=new.reference,
        old=(old.ratio, old.ratio_lo, old.ratio_hi),
        new=(new.ratio, new.ratio_lo, new.ratio_hi),
        change=new.ratio / old.ratio - 1.0,
        gap=gap,
        agrees=gap <= slack,
    )


def _by_key(rows: Sequence[TimingRow]) -> dict[RowKey, TimingRow]:
    return {(row.task_id, row.key, row.mode, row.reference): row for row in rows}
