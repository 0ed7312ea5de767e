"""Memory that passes from one process of a GPU to another. There is no GPU: torch's allocator is one that counts."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines import device_memory, host_memory
from engines.device_memory import pass_to_engine
from engines.sglang.client import ServerControl
from harness.config.machine import Gpu

MIB = 1 << 20
CUDA = torch.device("cuda:0")


class Allocator:
    """A GPU of 1,000 MiB with another process on it, and torch's view of this one: what it freed it still holds."""

    def __init__(self, others: int) -> None:
        self.others, self.used, self.held = others * MIB, 0, 0

    def allocate(self, mib: int) -> None:
        self.used += mib * MIB
        self.held = max(self.held, self.used)

    def empty_cache(self) -> None:
        self.held = self.used

    def free(self) -> int:
        return 1000 * MIB - self.others - self.held


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    there = Allocator(others=300)
    cuda: Any = SimpleNamespace(
        synchronize=lambda _: None,
        ipc_collect=lambda: None,
        empty_cache=there.empty_cache,
        mem_get_info=lambda _: (there.free(), 1000 * MIB),
        memory_allocated=lambda _: there.used,
        memory_reserved=lambda _: there.held,
        get_device_properties=lambda _: SimpleNamespace(uuid="0"),
    )
    monkeypatch.setattr(device_memory.torch, "cuda", cuda)
    monkeypatch.setattr(device_memory, "gpu_processes", lambda uuid: {4711: there.others} if uuid == "GPU-0" else {})
    return there


def test_an_engine_finds_what_training_freed_or_is_refused(gpu: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.allocate(500)
    gpu.allocate(-450)
    assert gpu.free() == 200 * MIB, "the trainer's process keeps what it has freed"
    pass_to_engine(CUDA, 600 * MIB, "kv cache of engine 0")
    assert gpu.free() == 650 * MIB
    gpu.allocate(350)
    with pytest.raises(MemoryError) as refused:
        pass_to_engine(CUDA, 301 * MIB, "kv cache of engine 0")
    assert str(refused.value) == (
        "kv cache of engine 0 needs 301 MiB of cuda:0, and 300 of 1000 are free: tensors of this process hold 400, "
        "gaps between them 0, process 4711 300"
    )
    there = [Gpu("H100", f"GPU-{number}", 1000 * MIB, f"{4 + number}", f"GPU-{number}") for number in range(2)]
    monkeypatch.setattr(device_memory, "gpus", lambda: tuple(there))
    monkeypatch.setattr(device_memory, "gpu_free", lambda uuid: {"GPU-1": 250 * MIB}[uuid])
    pass_to_engine(CUDA, 250 * MIB, "weights of engine 0", others=1)
    with pytest.raises(MemoryError) as refused:
        pass_to_engine(CUDA, 251 * MIB, "weights of engine 0", others=1)
    assert str(refused.value) == (
        "weights of engine 0 needs 251 MiB of GPU 5, and 250 of 1000 are free: others hold the rest"
    )


def test_a_server_is_asked_for_no_memory_that_is_not_there() -> None:
    said: list[str] = []

    async def post(path: str, body: Any = None) -> None:
        said.append(path)

    def make_room(part: str) -> None:
        said.append(part)
        if part == "kv_cache":
            raise MemoryError

    async def sleep_and_wake() -> None:
        control = ServerControl(SimpleNamespace(post=post, timeout_s=1.0), make_room)  # type: ignore[arg-type]
        await control.sleep()
        said.clear()
        await control.wake()

    with pytest.raises(MemoryError):
        asyncio.run(sleep_and_wake())
    assert said == ["weights", "/resume_memory_occupation", "kv_cache"]


def test_buffers_on_the_host_share_blocks_and_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "BLOCK", 1024)
    sizes = [512, 0, 100, 256, 0, 3000, 300, 1024, 0]
    buffers = host_memory.host_buffers(sizes, pinned=False)
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert [buffer.tolist() for buffer in buffers] == [[number] * size for number, size in enumerate(sizes)]
    blocks = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in buffers}
    assert sorted(blocks.values()) == [512, 1024, 1024, 3072]
