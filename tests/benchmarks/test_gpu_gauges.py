"""Gauges: summaries, and a machine without the driver's library."""

from __future__ import annotations

from tests.benchmark_modules import load_benchmark_module

gauges = load_benchmark_module("gpu_gauges")


def make_sample(at_s, sm_mhz, power_w, is_capped):
    return gauges.GaugeSample(at_s=at_s, sm_mhz=sm_mhz, power_w=power_w, is_capped=is_capped)


def test_a_summary_has_medians_and_the_share_under_the_limit():
    samples = [make_sample(1.0, 1980, 300.0, False), make_sample(2.0, 1600, 690.0, True)]
    samples.append(make_sample(3.0, 1650, 695.0, True))
    assert gauges.summary(samples) == {"sm_mhz": 1650, "power_w": 690.0, "capped": 0.67}
    assert gauges.summary([]) == {"sm_mhz": None, "power_w": None, "capped": None}


def test_without_the_driver_s_library_the_fault_is_told_and_nothing_is_read(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gauges.ctypes, "CDLL", missing)
    found = gauges.GpuGauges("GPU-0")
    assert "libnvidia-ml.so.1" in found.fault
    assert found.between(0.0, float("inf")) == []
    found.close()


def test_readings_are_taken_until_the_end_and_by_their_time(monkeypatch):
    class Library:
        def __getattr__(self, name):
            def call(*args):
                values = {"nvmlDeviceGetClockInfo": 1500, "nvmlDeviceGetPowerUsage": 650_500}
                values["nvmlDeviceGetCurrentClocksThrottleReasons"] = 4
                if name in values:
                    args[-1]._obj.value = values[name]
                return 0

            return call

    monkeypatch.setattr(gauges.ctypes, "CDLL", lambda name: Library())
    found = gauges.GpuGauges("GPU-0")
    found.close()
    assert found.fault == ""
    (first, *_) = found.between(0.0, float("inf"))
    assert (first.sm_mhz, first.power_w, first.is_capped) == (1500, 650.5, True)
    assert found.between(first.at_s + 1e6, float("inf")) == []
