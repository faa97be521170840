"""Timings and quick verifies as a few dozen bytes, so that ten thousand of each fit a file that git can hold. Pure.

Numbers are kept to six significant digits (float32 holds seven), which is far below the noise of any measurement.
Byte layouts, little-endian, are written beside each struct; records/README.md repeats them for other readers.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from tools.records import Clocks, Record, TierResult, TimingResult, TimingRow, VerifyResult

#: A text → its number in the file's table of texts, and back.
Intern = Callable[[str], int]
Lookup = Callable[[int], str]

_NOISY, _THROTTLED, _CLOCKS, _SPREAD, _EMPTY, _OWN = (1 << bit for bit in range(6))
# flags, number of rows, spread, empty_kernel_us, measured_at (Unix seconds), candidate time_us, samples
_HEAD = struct.Struct("<BBffIfI")
# sm_mhz min, median, max, limit (0: unknown), power_w, temperature_c, text of the throttle reasons (JSON list)
_CLOCK = struct.Struct("<HHHHfBI")
# text of the reference (a file begins with their texts, so 16 bits do), ratio, ratio_lo, ratio_hi, ref_us
_ROW = struct.Struct("<Hffff")
# with flag _OWN each row ends in its own time_us and samples
_OWN_PART = struct.Struct("<fI")

_REPEATABLE, _NOT_REPEATABLE, _ERROR, _CUBLAS, _PEAK = (1 << bit for bit in range(5))
# flags, max_abs_error, cublas_max_abs_error, peak_memory_bytes, text of the tiers (JSON)
_QUICK = struct.Struct("<BffQI")


def pack_timing(result: TimingResult, intern: Intern) -> bytes:
    """The measured part of a timing that is ok. Its status, key, task, mode and budget are columns of their own."""
    rows = result.rows
    first = rows[0]
    own = any((r.time_us, r.samples) != (first.time_us, first.samples) for r in rows)
    flags = (
        _NOISY * result.noisy
        | _THROTTLED * result.throttled
        | _CLOCKS * (result.clocks is not None)
        | _SPREAD * (result.spread is not None)
        | _EMPTY * (result.empty_kernel_us is not None)
        | _OWN * own
    )
    measured_at = int(datetime.fromisoformat(first.measured_at).timestamp())
    parts = [
        _HEAD.pack(
            flags,
            len(rows),
            _f32(result.spread),
            _f32(result.empty_kernel_us),
            measured_at,
            _f32(first.time_us),
            first.samples,
        )
    ]
    if result.clocks is not None:
        c = result.clocks
        reasons = intern(json.dumps(c.throttle_reasons))
        mhz = (c.sm_mhz_min, c.sm_mhz_median, c.sm_mhz_max, c.sm_mhz_limit or 0)
        parts.append(_CLOCK.pack(*mhz, _f32(c.power_w_max), c.temperature_c_max, reasons))
    for row in rows:
        ratios = (row.ratio, row.ratio_lo, row.ratio_hi, row.ref_us)
        parts.append(_ROW.pack(intern(row.reference), *(_f32(value) for value in ratios)))
        if own:
            parts.append(_OWN_PART.pack(_f32(row.time_us), row.samples))
    return b"".join(parts)


def unpack_timing(data: bytes, same: Mapping[str, Any], lookup: Lookup) -> dict[str, Any]:
    """Fields of a TimingResult. ``same`` holds what all rows share and the columns say: key, task, mode, device …"""
    flags, count, spread, empty_us, seconds, time_us, samples = _HEAD.unpack_from(data)
    at = _HEAD.size
    clocks = None
    if flags & _CLOCKS:
        low, median, high, limit, power, temperature, reasons = _CLOCK.unpack_from(data, at)
        at += _CLOCK.size
        clocks = Clocks(
            sm_mhz_min=low,
            sm_mhz_median=median,
            sm_mhz_max=high,
            sm_mhz_limit=limit or None,
            power_w_max=_six(power),
            temperature_c_max=temperature,
            throttle_reasons=tuple(json.loads(lookup(reasons))),
        )
    measured_at = datetime.fromtimestamp(seconds, UTC).isoformat()
    rows = []
    for _ in range(count):
        reference, ratio, low, high, ref_us = _ROW.unpack_from(data, at)
        at += _ROW.size
        if flags & _OWN:
            time_us, samples = _OWN_PART.unpack_from(data, at)
            at += _OWN_PART.size
        rows.append(
            TimingRow(
                **same,
                reference=lookup(reference),
                ratio=_six(ratio),
                ratio_lo=_six(low),
                ratio_hi=_six(high),
                ref_us=_six(ref_us),
                time_us=_six(time_us),
                samples=samples,
                measured_at=measured_at,
            )
        )
    return {
        "rows": tuple(rows),
        "spread": _six(spread) if flags & _SPREAD else None,
        "empty_kernel_us": _six(empty_us) if flags & _EMPTY else None,
        "clocks": clocks,
        "noisy": bool(flags & _NOISY),
        "throttled": bool(flags & _THROTTLED),
    }


def pack_quick(result: VerifyResult, intern: Intern) -> bytes:
    """What a quick verify found. Status, reason and detail are columns of their own."""
    tiers = json.dumps(
        [[t.tier, int(t.ok), t.checked, t.mismatches, _round(t.max_abs_error), t.detail] for t in result.tiers],
        separators=(",", ":"),
    )
    flags = (
        _REPEATABLE * (result.bitwise_repeatable is True)
        | _NOT_REPEATABLE * (result.bitwise_repeatable is False)
        | _ERROR * (result.max_abs_error is not None)
        | _CUBLAS * (result.cublas_max_abs_error is not None)
        | _PEAK * (result.peak_memory_bytes is not None)
    )
    return _QUICK.pack(
        flags,
        _f32(result.max_abs_error),
        _f32(result.cublas_max_abs_error),
        result.peak_memory_bytes or 0,
        intern(tiers),
    )


def unpack_quick(data: bytes, lookup: Lookup) -> dict[str, Any]:
    """Fields of a VerifyResult."""
    flags, error, cublas, peak, tiers = _QUICK.unpack(data)
    return {
        "bitwise_repeatable": True if flags & _REPEATABLE else False if flags & _NOT_REPEATABLE else None,
        "max_abs_error": _six(error) if flags & _ERROR else None,
        "cublas_max_abs_error": _six(cublas) if flags & _CUBLAS else None,
        "peak_memory_bytes": peak if flags & _PEAK else None,
        "tiers": tuple(
            TierResult(tier=t, ok=bool(ok), checked=n, mismatches=wrong, max_abs_error=worst, detail=detail)
            for t, ok, n, wrong, worst, detail in json.loads(lookup(tiers))
        ),
    }


def renumbered_timing(data: bytes, number: Callable[[int], int]) -> bytes:
    """A packed timing for a file that numbers its texts otherwise; all else stays, bit for bit."""
    out = bytearray(data)
    at = _HEAD.size
    if data[0] & _CLOCKS:
        at += _CLOCK.size
        _renumber(out, "<I", at - 4, number)
    for row in range(data[1]):
        _renumber(out, "<H", at + row * (_ROW.size + (_OWN_PART.size if data[0] & _OWN else 0)), number)
    return bytes(out)


def renumbered_quick(data: bytes, number: Callable[[int], int]) -> bytes:
    """The same of a packed quick verify."""
    out = bytearray(data)
    _renumber(out, "<I", _QUICK.size - 4, number)
    return bytes(out)


def _renumber(data: bytearray, kind: str, at: int, number: Callable[[int], int]) -> None:
    struct.pack_into(kind, data, at, number(struct.unpack_from(kind, data, at)[0]))


def pack_json(record: Record) -> bytes:
    return zlib.compress(record.to_json().encode(), 9)


def unpack_json(data: bytes) -> bytes:
    return zlib.decompress(data)


def _f32(value: float | None) -> float:
    """A value that a float32 takes: overflow becomes infinite, None (told by a flag) zero."""
    if value is None:
        return 0.0
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _six(value: float) -> float:
    return float(f"{value:.6g}")


def _round(value: float | None) -> float | None:
    return None if value is None else _six(value)
