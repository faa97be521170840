"""NVML readings while something is timed: clocks, power, temperature, throttle reasons."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tools.records import Clocks, ClockTrace

_THROTTLES = {
    "sw_power_cap": "nvmlClocksEventReasonSwPowerCap",
    "hw_slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "sw_thermal": "nvmlClocksEventReasonSwThermalSlowdown",
    "hw_thermal": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "hw_power_brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
    "sync_boost": "nvmlClocksEventReasonSyncBoost",
}
INTERVAL_S = 0.02


@dataclass
class ClockLog:
    """Readings at most every INTERVAL_S; ``poll`` is cheap when it is not due. Without NVML nothing is recorded."""

    ordinal_uuid: str
    _handle: Any = None
    _nvml: Any = None
    _limit_mhz: int | None = None
    _next: float = 0.0
    #: SM clock in MHz, power in W, temperature in C, throttle bits, monotonic seconds.
    readings: list[tuple[int, float, int, int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.ordinal_uuid)
            self._limit_mhz = int(pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM))
            self._nvml = pynvml
        except Exception:  # NVML is an accessory: a missing library or permission must not stop a measurement
            self._nvml = None

    def start(self) -> None:
        self.readings.clear()
        self._next = 0.0

    def poll(self) -> None:
        if self._nvml is None or time.monotonic() < self._next:
            return
        nvml = self._nvml
        try:
            reading = (
                int(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)),
                nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
                int(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)),
                int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)),
                time.monotonic(),
            )
        except nvml.NVMLError:
            self._nvml = None
            return
        self.readings.append(reading)
        self._next = time.monotonic() + INTERVAL_S

    def summary(self) -> Clocks | None:
        if not self.readings or self._nvml is None:
            return None
        mhz = [r[0] for r in self.readings]
        bits = 0
        for reading in self.readings:
            bits |= reading[3]
        reasons = self._reasons(bits)
        return Clocks(
            sm_mhz_min=min(mhz),
            sm_mhz_median=int(statistics.median(mhz)),
            sm_mhz_max=max(mhz),
            sm_mhz_limit=self._limit_mhz,
            power_w_max=round(max(r[1] for r in self.readings), 1),
            temperature_c_max=max(r[2] for r in self.readings),
            throttle_reasons=reasons,
        )

    def trace(self, points: int = 200) -> ClockTrace | None:
        """The readings since ``start``, thinned to at most so many, evenly in number; None without NVML. What happened
        between two kept readings is in ``summary``, which sees all."""
        if not self.readings or self._nvml is None:
            return None
        step = -(-len(self.readings) // points)
        kept = self.readings[::step]
        began = self.readings[0][4]
        return ClockTrace(
            t_s=tuple(round(r[4] - began, 2) for r in kept),
            sm_mhz=tuple(r[0] for r in kept),
            power_w=tuple(round(r[1], 1) for r in kept),
            temperature_c=tuple(r[2] for r in kept),
            throttle=tuple("+".join(self._reasons(r[3])) for r in kept),
        )

    def _reasons(self, bits: int) -> tuple[str, ...]:
        return tuple(name for name, constant in _THROTTLES.items() if bits & int(getattr(self._nvml, constant, 0)))


@cache
def driver_version() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # NVML is an accessory; the version is then read where the kernel module publishes it
        with contextlib.suppress(OSError):
            return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("Module")[1].split()[0]
        return "unknown"
