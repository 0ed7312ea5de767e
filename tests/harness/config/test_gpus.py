"""Which GPUs a process may use, by what a made-up driver says and CUDA_VISIBLE_DEVICES."""

import pynvml
import pytest

from harness.config import ConfigError
from harness.config.machine import gpu_kind, gpus, this_machine
from harness.runtime.local_runtime import device_environment
from tests.support.fake_nvml import FakeGpu, FakeNvml, install

MIB = 1 << 20


def four() -> list[FakeGpu]:
    return [FakeGpu(f"GPU-{letter * 8}") for letter in "abcd"]


def divided() -> FakeGpu:
    """Two instances, in the first and the third of its places."""
    made = [("3g.40gb", 40448), None, ("1g.10gb", 9984), None]
    return FakeGpu("GPU-eeeeeeee", instances=made, divided=True)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "abcd"),
        ("", ""),
        ("-1", ""),
        ("2", "c"),
        ("3, 1", "db"),
        ("GPU-b", "b"),
        ("GPU-cccccccc,0", "ca"),
        ("1,-1,2", "b"),
        ("1,9,2", "b"),
        ("1,1", ""),
        ("GPU-", ""),
        ("NoDevFiles", ""),
    ],
)
def test_devices_are_those_that_cuda_shows(visible: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(monkeypatch, *four(), visible=visible)
    assert "".join(gpu.uuid[4] for gpu in gpus()) == found
    assert library.started == 0, "the driver is let go"


def test_the_machine_has_what_is_visible_under_the_users_names(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu("GPU-a", mib=40000), FakeGpu("GPU-b"), visible="1")
    assert (this_machine().gpus, this_machine().gpu_bytes, gpu_kind()) == (1, 81559 * MIB, "h100")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert (this_machine().gpus, this_machine().gpu_bytes) == (2, 40000 * MIB)
    install(monkeypatch, *four(), visible="GPU-d, 2")
    assert [device_environment(devices)["CUDA_VISIBLE_DEVICES"] for devices in ((0,), (1,), ())] == ["GPU-d", "2", ""]
    assert device_environment((1, 0)) == {"CUDA_VISIBLE_DEVICES": "2,GPU-d"}, "an engine over several"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert device_environment((3,)) == {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-d")
    assert device_environment((2,)) == {"CUDA_VISIBLE_DEVICES": "GPU-d"}, "in a trial it stands for all"


def test_instances_of_a_divided_gpu_are_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, divided(), FakeGpu("GPU-ffffffff", instances=[None]))
    assert [str(gpu) for gpu in gpus()] == [
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb, 40448 MiB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb, 9984 MiB",
        "NVIDIA H100 80GB HBM3, 81559 MiB",
    ]
    assert [gpu.instance for gpu in gpus()] == [True, True, False]
    assert device_environment((1,)) == {"CUDA_VISIBLE_DEVICES": "MIG-eeeeeeee-2"}, "its index is that of the whole GPU"
    assert device_environment((2,)) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert this_machine().gpu_bytes == 9984 * MIB
    assert gpu_kind() is None, "of an instance no peak is known"


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("0", [0, 2]),
        ("GPU-eeee", [0, 2]),
        ("MIG-eeeeeeee-2", [2]),
        ("MIG-eeeeeeee-2,MIG-eeeeeeee-0", [2, 0]),
        ("MIG-e", []),
    ],
)
def test_instances_are_named_singly_or_by_gpu(visible: str, found: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, divided(), visible=visible)
    assert [gpu.visible_as for gpu in gpus()] == [f"MIG-eeeeeeee-{place}" for place in found]


def test_without_a_driver_there_are_no_gpus_but_a_silent_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *four(), broken=FakeNvml.NVMLError_LibraryNotFound)
    assert gpus() == () and this_machine().gpus == 0 and gpu_kind() is None
    install(monkeypatch, *four(), broken=FakeNvml.NVMLError_LibRmVersionMismatch)
    with pytest.raises(ConfigError, match=r"version mismatch; .*CUDA_VISIBLE_DEVICES= \(empty\)"):
        gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus() == (), "and it is not asked"


def test_what_is_made_up_here_has_the_names_of_the_real_library() -> None:
    made_up = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML"))]
    assert made_up and [name for name in made_up if not hasattr(pynvml, name)] == []
