"""Times the transports of `harness.weight_sync` between processes of this machine, as a real run connects them:
training ranks with a shard each, and one receiver that copies what comes to memory of its own, as an engine does."""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from engines.torch.model import outline_model
from harness.calibration.profile.rows import TransferRow
from harness.calibration.profile.timing import wait_for
from harness.config import ModelConfig
from harness.config.placement import sending_ranks
from harness.config.transports import connected_transports, transport_of
from harness.rpc.sockets import forget, new_path
from harness.weight_sync.endpoints import GatherOnlySender, HostReceiver, HostSender, WeightReceiver, WeightSender
from harness.weight_sync.plan import TransferPlan, plan_transfer
from harness.weight_sync.process_group import open_rendezvous

_LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 120.0
_ROUNDS, _WARMUP = 7, 2
_MOST_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}  # of one transfer: from there on time grows by the byte alone
_PARTS = (0.125, 0.35, 1.0)  # of the weights
_MOST_RANKS = {"cpu": 2, "cuda": 4}

Shapes = Mapping[str, tuple[int, ...]]
Moments = tuple[float, float, float]


@dataclass(frozen=True)
class TransferCase:
    """The transfers that are timed in one set of processes: each transport with each of the weights."""

    transports: tuple[str, ...]
    ranks: int
    kind: str
    weights: tuple[Shapes, ...]
    dtype: str
    bucket_bytes: int

    def __iter__(self) -> Iterator[tuple[str, Shapes]]:
        return ((transport, shapes) for transport in self.transports for shapes in self.weights)

    def device(self, number: int) -> torch.device:
        """Device of rank `number`; the receiver comes after the ranks. All share the only GPU where there is one."""
        if self.kind == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", number if torch.cuda.device_count() > 1 else 0)

    @property
    def one_gpu(self) -> bool:
        """Whether all ranks share one GPU."""
        return self.kind == "cuda" and torch.cuda.device_count() == 1


def time_transfers(
    model: ModelConfig, device: torch.device, bucket_bytes: int, ranks: Sequence[int] | None = None
) -> Iterator[TransferRow]:
    """Time every transport that this machine has, from so many training ranks; None: from one, and from as many as
    there are devices for. Raises RuntimeError, naming the process, where one fails or does not answer in time."""
    for number in training_ranks(device.type) if ranks is None else ranks:
        weights = parts_of(model, _MOST_BYTES[device.type])
        yield from _timed(
            TransferCase(transports(device.type), number, device.type, weights, model.dtype, bucket_bytes)
        )


def training_ranks(kind: str) -> tuple[int, ...]:
    """Powers of two, so that a device is left for the receiver. Ranks of a CPU are processes."""
    there = _MOST_RANKS[kind] + 1 if kind == "cpu" else torch.cuda.device_count()
    return tuple(n for n in (1, 2, 4) if n <= _MOST_RANKS[kind] and (n == 1 or n < there))


def transports(kind: str) -> tuple[str, ...]:
    """NCCL joins no two processes of one GPU."""
    alone = kind == "cuda" and torch.cuda.device_count() == 1
    return tuple(name for name in connected_transports() if not (alone and transport_of(name).over == "device"))


def parts_of(model: ModelConfig, most_bytes: int) -> tuple[Shapes, ...]:
    """Parameters of the model by their names, some of them and then more, up to `most_bytes`; tensors that are larger
    than a third of that are left out."""
    size = getattr(torch, model.dtype).itemsize
    drawn = replace(model, checkpoint=None)
    shapes = {name: tuple(each.shape) for name, each in outline_model(drawn).model.named_parameters()}
    small = [(name, shape) for name, shape in shapes.items() if size * prod(shape) <= most_bytes / len(_PARTS)]
    ends = np.cumsum([size * prod(shape) for _, shape in small])
    total = min(int(ends[-1]), most_bytes)
    counts = sorted({max(1, int(np.searchsorted(ends, part * total, side="right"))) for part in _PARTS})
    return tuple(dict(small[:count]) for count in counts)


# -- in the process that times


def _timed(case: TransferCase) -> Iterator[TransferRow]:
    context = multiprocessing.get_context("forkserver")  # one that has used CUDA cannot be forked itself
    context.set_forkserver_preload([__name__, "engines.torch.fsdp", "torch.distributed.tensor"])
    together = context.Barrier(case.ranks + 1)
    names = [f"training rank {rank}" for rank in range(case.ranks)] + ["receiver"]
    pipes, processes = [], []
    try:
        for number, name in enumerate(names):
            here, there = context.Pipe()
            process = context.Process(target=_take_part, args=(case, number, together, there), name=name, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        world = _answer(pipes[0], names[0])
        for pipe in pipes[1:]:
            pipe.send(world)
        for transport, shapes in case:
            offer = _answer(pipes[0], names[0])
            for pipe in pipes[1:]:
                pipe.send(offer)
            moments = np.array([_answer(pipe, name) for pipe, name in zip(pipes, names, strict=True)])
            yield _row(case, transport, shapes, moments)
        for process in processes:
            process.join(_TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _row(case: TransferCase, transport: str, shapes: Shapes, moments: np.ndarray) -> TransferRow:
    """The row of one set of timings. moments: float64 [processes, rounds, 3], the receiver last: when it began, when it
    had sent or staged, when it was done. Seconds of one clock, which all processes of a machine share."""
    ranks, receiver = moments[:-1], moments[-1]
    sent_at = ranks[:, :, 1].max(axis=0)
    staged = transport_of(transport).staged
    parts = {
        "send_s": sent_at - ranks[:, :, 0].min(axis=0),
        "stage_s": np.maximum(0.0, receiver[:, 1] - sent_at) if staged else np.zeros(len(sent_at)),
        "load_s": receiver[:, 2] - (receiver[:, 1] if staged else ranks[:, :, 0].min(axis=0)),
    }
    low, median, high = np.percentile(np.stack(list(parts.values())), (25, 50, 75), axis=1)
    spread = float(((high - low) / np.maximum(median, 1e-9)).max())
    size = sum(prod(shape) for shape in shapes.values()) * getattr(torch, case.dtype).itemsize
    send_s, stage_s, load_s = median.tolist()
    return TransferRow(transport, case.ranks, size, send_s, stage_s, load_s, spread)


def _answer(pipe: Connection, name: str) -> Any:
    try:
        if not pipe.poll(_TIMEOUT_S):
            raise RuntimeError(f"timing weight transfers: {name} did not answer within {_TIMEOUT_S:.0f} s")
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        raise RuntimeError(f"timing weight transfers: {name} died; what it printed is above") from None


# -- in training ranks and the receiver


def _take_part(case: TransferCase, number: int, together: Any, pipe: Connection) -> None:
    torch.set_num_threads(1)
    device = case.device(number)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if number == case.ranks:
        pipe.recv()  # where the training world meets
        _receive(case, device, together, pipe)
    else:
        _train(case, number, device, together, pipe)


def _train(case: TransferCase, rank: int, device: torch.device, together: Any, pipe: Connection) -> None:
    """Rank 0 offers; all send what is theirs of shards in float32, cast as they are gathered, as training ranks do."""
    from torch.distributed import TCPStore, destroy_process_group
    from torch.distributed.tensor import Shard, distribute_tensor

    from engines.gloo_groups import listening_store
    from engines.torch.fsdp import ByName, init_world

    if rank == 0:
        world = listening_store(_LOOPBACK, case.ranks, _TIMEOUT_S)
        pipe.send(world.port)
    else:
        world = TCPStore(_LOOPBACK, pipe.recv(), case.ranks, False, wait_for_workers=False)
    mesh = init_world(world, rank, case.ranks, device, _TIMEOUT_S)
    for transport, shapes in case:
        whole = {name: torch.ones(shape, device=device) for name, shape in shapes.items()}
        shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
        del whole
        dtype = getattr(torch, case.dtype)
        weights = ByName(lambda name, of=shards, dtype=dtype: of[name].to(dtype), shards)  # type: ignore[misc]
        plan = plan_transfer(weights.items(), case.bucket_bytes)
        place = new_path()
        sender = _sender(case, transport, rank, plan, device, pipe, place)
        together.wait(_TIMEOUT_S)
        pipe.send(_moments(partial(timed_sending, sender, weights, device), device, together))
        together.wait(_TIMEOUT_S)
        forget(place)
    destroy_process_group()


def _sender(
    case: TransferCase,
    transport: str,
    rank: int,
    plan: TransferPlan,
    device: torch.device,
    pipe: Connection,
    place: str,
) -> Any:
    senders = sending_ranks(transport, case.ranks, len(plan.buckets))
    if rank > 0:
        offer = pipe.recv()
        if rank >= senders:
            return GatherOnlySender(plan, senders)
        return offer.sender(offer.rendezvous.connect(), device, None, rank)
    rendezvous, store = open_rendezvous(place, 1, _TIMEOUT_S, senders)
    source, offer = transport_of(transport).with_ends().offer(plan, rendezvous, device, within_gpu=case.one_gpu)
    pipe.send(offer)
    sender = source.sender(store, device)
    offer.withdraw()
    return sender


def _receive(case: TransferCase, device: torch.device, together: Any, pipe: Connection) -> None:
    for _, shapes in case:
        receiver = pipe.recv().receiver(0, device)
        dtype = getattr(torch, case.dtype)
        own = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        together.wait(_TIMEOUT_S)
        pipe.send(_moments(partial(timed_arrival, receiver, own, device), device, together))
        together.wait(_TIMEOUT_S)


def _moments(transfer: Callable[[int], Moments], device: torch.device, together: Any) -> list[Moments]:
    """Moments of each version that is timed; all processes begin with it together."""
    moments = []
    for version in range(_WARMUP + _ROUNDS):
        wait_for(device)
        together.wait(_TIMEOUT_S)
        moments.append(transfer(1 + version))
    return moments[_WARMUP:]


# -- one transfer


def timed_sending(
    sender: WeightSender, weights: Mapping[str, torch.Tensor], device: torch.device, version: int
) -> Moments:
    """Send weights; seconds of time.perf_counter when that began, when they were sent, when all had arrived."""

    async def send() -> Moments:
        began_at = time.perf_counter()
        await sender.send(version, weights)
        wait_for(device)
        sent_at = time.perf_counter()
        if isinstance(sender, HostSender):
            await sender.wait_arrived(version)
        return began_at, sent_at, time.perf_counter()

    return asyncio.run(send())


def timed_arrival(
    receiver: WeightReceiver | HostReceiver, own: Mapping[str, torch.Tensor], device: torch.device, version: int
) -> Moments:
    """Copy weights into tensors of one's own, as an engine does; seconds of time.perf_counter when that began, when all
    were staged (where they are), when all were copied."""
    began_at = staged_at = time.perf_counter()
    if isinstance(receiver, HostReceiver):
        asyncio.run(receiver.stage(version))
        staged_at = time.perf_counter()
        arriving = receiver.staged(version)
    else:
        arriving = receiver.receive(version)
    for name, tensor in arriving:
        own[name].copy_(tensor)
    wait_for(device)
    return began_at, staged_at, time.perf_counter()
