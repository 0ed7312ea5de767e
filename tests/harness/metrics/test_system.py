"""How busy the machine was: samples of it, and how much of it was other processes."""

import threading
from typing import Any

import pytest

from harness.metrics import system
from harness.metrics.system import LoadWatch, SystemSampler
from tests.support.fake_nvml import FakeGpu, install


def test_this_machine_answers_and_own_work_is_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    load = LoadWatch().so_far()
    assert set(load) == {"average_at_start", "average_at_end", "others"}
    assert 0.0 <= load["others"] <= 1.0 and load["average_at_start"] >= 0.0
    now, busy, own = [100.0], [1000.0], [50.0]
    monkeypatch.setattr(system.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(system, "_busy_seconds", lambda: busy[0])
    monkeypatch.setattr(system, "own_seconds", lambda root: own[0])
    monkeypatch.setattr(system, "_cores", lambda: [0, 1])
    watch = LoadWatch()
    now[0], busy[0], own[0] = 110.0, 1016.0, 62.0  # of 20 seconds on two cores: 12 its own, 4 of others, 4 idle
    assert watch.so_far()["others"] == pytest.approx(0.2)
    own[0] = 90.0
    assert watch.so_far()["others"] == 0.0


def test_the_machine_is_sampled_to_the_end_where_failures_are_raised() -> None:
    samples: list[Any] = []
    with SystemSampler([samples.append], seconds=3600.0) as sampler:
        pass
    sampler.close()
    (sample,) = samples
    assert {"time", "system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= sample.keys()
    assert 0 < sample["system/system_memory_usage_percentage"] <= 100
    assert all(isinstance(value, float) for value in sample.values())

    def fail(_: Any) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), SystemSampler([fail], seconds=3600.0):
        pass


def test_the_first_sample_is_of_the_time_since_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def percent() -> float:
        asked.append(threading.current_thread().name)
        return 50.0

    monkeypatch.setattr(system.psutil, "cpu_percent", percent)
    samples: list[Any] = []
    with SystemSampler([samples.append], seconds=3600.0):
        pass
    assert asked == ["system-metrics"] * 2, "psutil tells each thread the share since its own last question"
    assert [sample["system/cpu_utilization_percentage"] for sample in samples] == [50.0]


def test_gpus_are_sampled_by_the_numbers_that_the_run_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = FakeGpu("GPU-b", mib=1000, used_mib=250, utilization=97, milliwatts=350_000, celsius=61)
    divided = FakeGpu("GPU-c", instances=[("1g.10gb", 9984)], divided=True)
    install(monkeypatch, FakeGpu("GPU-a"), busy, divided, visible="1,2")
    samples: list[Any] = []
    with SystemSampler([samples.append], seconds=3600.0):
        pass
    found = {name.removeprefix("system/"): value for name, value in samples[0].items() if "gpu" in name}
    assert found == {
        "gpu_0_utilization_percentage": 97.0,
        "gpu_0_memory_usage_percentage": 25.0,
        "gpu_0_memory_usage_megabytes": 262.1,
        "gpu_0_power_usage_watts": 350.0,
        "gpu_0_power_usage_percentage": 50.0,
        "gpu_0_temperature_celsius": 61.0,
        "gpu_1_memory_usage_percentage": 0.0,
        "gpu_1_memory_usage_megabytes": 0.0,
    }, "an instance of a divided GPU tells no more than its memory"
