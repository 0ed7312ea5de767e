"""Process groups of two devices up to all there are, as the training world makes them: results, and bandwidth.

NCCL between GPUs, a device each. Between cores Gloo, two processes."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from engines.gloo_groups import listening_store
from engines.torch.fsdp import init_world
from harness.acceptance.gpu_gate.part import GateSetting
from harness.acceptance.gpu_gate.parts.common import per_second, seconds_of
from harness.acceptance.gpu_gate.results import Check

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Found:
    """Results of one rank. seconds: of an all-reduce and a broadcast of `bytes`."""

    wrong: list[str]
    met_s: float
    bytes: int
    all_reduce_s: float
    broadcast_s: float


def run(setting: GateSetting) -> Iterator[Check]:
    """Checks of process groups of several sizes."""
    devices = torch.cuda.device_count() if setting.gpu else 2
    sizes = sorted({size for size in (1, 2, 4, 8) if size <= devices} | {devices})
    for size in sizes if setting.gpu else [2]:
        yield _world(setting, size)


def _world(setting: GateSetting, size: int) -> Check:
    store = listening_store("127.0.0.1", size, _TIMEOUT_S)
    ranks: list[Found] = in_processes(
        _rank, [(rank, size, store.port, setting.kind) for rank in range(size)], 2 * _TIMEOUT_S
    )
    wrong = sorted({name for found in ranks for name in found.wrong})
    first = ranks[0]
    around = 2 * (size - 1) / size * first.bytes  # what each rank sends, at least, in an all-reduce
    speed = (
        ""
        if size == 1
        else (
            f"all-reduce {per_second(around, first.all_reduce_s, 'B')} of each rank's link, broadcast "
            f"{per_second(first.bytes, first.broadcast_s, 'B')}, "
        )
    )
    said = f"{speed}met in {max(found.met_s for found in ranks):.1f} s" + f"; wrong: {', '.join(wrong)}" * bool(wrong)
    return Check(f"a world of {size} over {'NCCL' if setting.gpu else 'Gloo'}", said, not wrong)


def _rank(rank: int, size: int, port: int, kind: str) -> Found:
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(device)
    start = time.monotonic()
    store = dist.TCPStore("127.0.0.1", port, size, False)
    mesh = init_world(store, rank, size, device, _TIMEOUT_S)
    group = mesh.get_group()
    wrong = list(_wrong(rank, size, device, group))
    met_s = time.monotonic() - start
    data = torch.ones((256 if kind == "cuda" else 16) << 18, device=device)
    all_reduce_s = seconds_of(lambda: dist.all_reduce(data.fill_(1.0), group=group), device)
    broadcast_s = seconds_of(lambda: dist.broadcast(data, 0, group=group), device)
    dist.destroy_process_group()
    return Found(wrong, met_s, data.nbytes, all_reduce_s, broadcast_s)


def _wrong(rank: int, size: int, device: torch.device, group: dist.ProcessGroup) -> Iterator[str]:
    """Names of the collectives whose results are not those of whole numbers added up."""
    own = torch.arange(1000, device=device, dtype=torch.float32) + rank
    every = [torch.arange(1000, device=device, dtype=torch.float32) + other for other in range(size)]
    summed = own.clone()
    dist.all_reduce(summed, group=group)
    if not torch.equal(summed, torch.stack(every).sum(0)):
        yield "all-reduce"
    for source in range(size):
        sent = own.clone()
        dist.broadcast(sent, source, group=group)
        if not torch.equal(sent, every[source]):
            yield f"broadcast from {source}"
    gathered = torch.empty(size * 1000, device=device)
    dist.all_gather_into_tensor(gathered, own, group=group)
    if not torch.equal(gathered, torch.cat(every)):
        yield "all-gather"
    shard = torch.empty(8, device=device)
    dist.reduce_scatter_tensor(shard, torch.arange(8.0 * size, device=device), group=group)
    if not torch.equal(shard, size * torch.arange(8.0 * rank, 8.0 * (rank + 1), device=device)):
        yield "reduce-scatter"


def forking(module: str) -> ForkServerContext:
    """A way to start processes, which are forked from one that has imported this module: one that has used CUDA cannot
    be forked itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


Made = TypeVar("Made")


def in_processes(work: Callable[..., Made], of: Sequence[tuple[Any, ...]], limit_s: float) -> list[Made]:
    """Results of `work` for each of these arguments, all computed at the same time. Raises what one of them raised
    first, or TimeoutError after `limit_s`; the gate's runner ends what is left."""
    with ProcessPoolExecutor(len(of), forking(work.__module__)) as pool:
        waiting = [pool.submit(work, *arguments) for arguments in of]
        return [future.result(limit_s) for future in waiting]
