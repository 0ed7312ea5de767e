"""Versions, the devices, and what the first of them reaches bare: products, memory, copies to the host and back."""

import os
import platform
from collections.abc import Iterator

import torch
import transformers

from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.parts.common import card, exact_products, per_second, seconds_of
from harness.acceptance.gpu_gate.results import Check, Figure, LeftOut
from harness.calibration.profile.record import device_name


def run(setting: GateSetting) -> Iterator[Check]:
    """Checks of the device. Raises LeftOut where there is no GPU."""
    if setting.gpu and not torch.cuda.is_available():
        raise LeftOut("torch finds no GPU; device=cpu asks the cores")
    yield Check("versions", _versions(setting.gpu))
    yield Check("devices", _devices(setting.device))
    exact_products()
    yield _product(setting)
    yield from _bandwidths(setting)


def _versions(gpu: bool) -> str:
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    found.append(f"transformers {transformers.__version__}")
    if gpu:
        found.append(f"CUDA {torch.version.cuda}")
        found.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
        found.append(f"cuDNN {torch.backends.cudnn.version()}")
    return ", ".join(found)


def _devices(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{device_name(device)}, {len(os.sched_getaffinity(0))} cores"
    found = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        found.append(
            f"{properties.name}, {properties.total_memory >> 20} MiB, {properties.multi_processor_count} processors, "
            f"capability {properties.major}.{properties.minor}"
        )
    return "; ".join(found)


def _product(setting: GateSetting) -> Check:
    """Check a product of whole numbers, exact in float32, against the CPU; and the speed of half precision."""
    device, size = setting.device, 8192 if setting.gpu else 768
    whole = torch.randint(-8, 9, (256, 256), generator=torch.Generator().manual_seed(0)).float()
    right = torch.equal((whole.to(device) @ whole.to(device)).cpu(), (whole.double() @ whole.double()).float())
    factor = torch.ones((size, size), dtype=torch.bfloat16 if setting.gpu else torch.float32, device=device)
    seconds = seconds_of(lambda: factor @ factor, device)
    made, there = card(setting.kind), 2 * size**3
    figure = Figure("products of half precision", there / seconds, "FLOP/s", made.flops if made else None)
    return Check(f"products of {size} x {size}", per_second(there, seconds, "FLOP"), right, (figure,))


def _bandwidths(setting: GateSetting) -> Iterator[Check]:
    device, size = setting.device, (1 << 30 if setting.gpu else 1 << 26)
    here = torch.ones(size, dtype=torch.uint8, pin_memory=setting.gpu)
    there, other = here.to(device), torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = seconds_of(lambda: other.copy_(there), device)
    made = card(setting.kind)
    link = made.host_bytes_per_s if made else None
    figure = Figure("memory", 2 * size / seconds, "B/s", made.memory_bytes_per_s if made else None)
    yield Check("a copy in its memory", per_second(2 * size, seconds, "B"), bool((other == 1).all()), (figure,))
    if setting.gpu:
        seconds = seconds_of(lambda: there.copy_(here), device)
        figure = Figure(
            "from pinned memory of the host", size / seconds, "B/s", made.host_bytes_per_s if made else None
        )
        yield Check(figure.what, per_second(size, seconds, "B"), figures=(figure,))
        seconds = seconds_of(lambda: here.copy_(there), device)
        figure = Figure("to pinned memory of the host", size / seconds, "B/s", link)
        yield Check(figure.what, per_second(size, seconds, "B"), figures=(figure,))
