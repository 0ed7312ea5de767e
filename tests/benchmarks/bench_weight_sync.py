"""Weights of a 500M-parameter model (bfloat16, 1 GB) from one process to another, held against the bare act.

    python -m tests.benchmarks.bench_weight_sync [--rounds 7] [--bucket-mib 64] [--layers 24] [--verify]

Bandwidth: each round times the bare act and the transport in turn, from when both sides are ready to when both are
done; ratios are of one round, and their median is reported. The bare act is one broadcast of the same bytes from one
tensor into another over a process group of its own; of ipc, one copy of them in memory. The receiver is handed every
tensor and keeps none: what an engine does with them is its own. Target: 0.85.

Memory: the growth of a process's peak, from before it had its end of the transport to after the first transfer, in
buckets (the largest one: the embedding). Target: 2; host_staged holds whole copies on purpose.

Exposed: seconds in which the trainer hands its weights to host_staged, and in which an engine takes them from there,
against a copy of all tensors, one by one. Target: 1.2.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engines.torch.model import outline_model
from harness.config.compose import compose_job
from harness.weight_sync.collective import CollectiveOffer
from harness.weight_sync.host_staged import HostStagedOffer
from harness.weight_sync.ipc import SharedOffer, share_slots
from harness.weight_sync.plan import TransferPlan, plan_transfer
from harness.weight_sync.process_group import HOST, Rendezvous, open_rendezvous
from tests.benchmarks.lost_tokens import table

TRANSPORTS = ("collective", "ipc", "host_staged")
TIMEOUT_S = 120.0

Offer = CollectiveOffer | HostStagedOffer | SharedOffer
Weights = dict[str, torch.Tensor]


def make_weights(layers: int) -> Weights:
    model = replace(compose_job(["model=qwen0.5b"]).model, checkpoint=None, layers=layers)
    named = outline_model(model).model.named_parameters()
    return {name: torch.full(outlined.shape, 1.5, dtype=torch.bfloat16) for name, outlined in named}


@dataclass
class Round:
    """Seconds of the bare act and of the transport."""

    bare: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.bare / self.ours


class Side:
    """One of the two processes: it has both ends' barrier, the bare act, and its clock."""

    def __init__(self, plan: TransferPlan, rendezvous: Rendezvous, store: dist.Store | None) -> None:
        self.plan = plan
        timeout = timedelta(seconds=TIMEOUT_S)
        if store is None:
            store = rendezvous.connect()
            self.rank = 1
        else:
            self.rank = 0
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("bench", store), self.rank, 2, timeout)
        self.flat = torch.ones(plan.bytes, dtype=torch.uint8)
        self.into = torch.zeros(plan.bytes, dtype=torch.uint8)

    def timed(self, act: Callable[[], Any]) -> float:
        self.group.barrier(dist.BarrierOptions()).wait()
        start = time.perf_counter()
        act()
        self.group.barrier(dist.BarrierOptions()).wait()
        return time.perf_counter() - start

    def bare(self, transport: str) -> None:
        if transport == "ipc":
            if self.rank == 0:
                self.into.copy_(self.flat)
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self.group.broadcast([self.flat], options).wait()


def peak_bytes() -> int:
    """The most memory that this process has had since `forget_peak`."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def forget_peak() -> int:
    """Begin anew; bytes in use now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_bytes()


def receive(offer: Offer, bench: Rendezvous, transport: str, rounds: int, layers: int, reports: Connection) -> None:
    torch.set_num_threads(1)
    side = Side(offer.plan, bench, None)
    parameters = make_weights(layers)
    before = forget_peak()
    end: Any = offer.receiver(0, HOST)

    def take(version: int) -> None:
        if transport == "host_staged":
            asyncio.run(end.stage(version))
        else:
            for _ in end.receive(version):
                pass

    swaps: list[Round] = []
    take(1)
    grown = peak_bytes() - before
    for version in range(2, rounds + 2):
        side.timed(lambda: side.bare(transport))
        side.timed(lambda version=version: take(version))
        if transport == "host_staged":
            swaps.append(swap(end, version, parameters))
    reports.send((grown, swaps))


def swap(end: Any, version: int, parameters: Weights) -> Round:
    """What an engine that loads into its weights waits for, against a copy of the same tensors."""
    copies = [tensor.clone() for tensor in parameters.values()]
    start = time.perf_counter()
    for parameter, tensor in zip(parameters.values(), copies, strict=True):
        parameter.copy_(tensor)
    middle = time.perf_counter()
    for name, tensor in end.staged(version):
        parameters[name].copy_(tensor)
    return Round(middle - start, time.perf_counter() - middle)


def run(transport: str, rounds: int, bucket_bytes: int, layers: int, checked: bool) -> None:
    parameters = make_weights(layers)
    plan = plan_transfer(parameters.items(), bucket_bytes, checked)
    rendezvous, store = open_rendezvous("127.0.0.1", 1, TIMEOUT_S)
    bench, bench_store = open_rendezvous("127.0.0.1", 1, TIMEOUT_S)
    offers = {"collective": CollectiveOffer, "host_staged": HostStagedOffer, "ipc": share_slots}
    offer: Any = offers[transport](plan, rendezvous)
    reader, writer = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    receiver = context.Process(target=receive, args=(offer, bench, transport, rounds, layers, writer), daemon=True)
    receiver.start()
    side = Side(plan, bench, bench_store)
    before = forget_peak()
    end = offer.sender(store, HOST)
    if transport == "ipc":
        offer.withdraw()
    handed: list[Round] = []
    asyncio.run(send(end, 1, parameters, transport))
    grown = peak_bytes() - before
    timed = []
    for version in range(2, rounds + 2):
        bare = side.timed(lambda: side.bare(transport))
        copies = [tensor.clone() for tensor in parameters.values()] if transport == "host_staged" else []
        start = time.perf_counter()
        for copy, tensor in zip(copies, parameters.values(), strict=False):
            copy.copy_(tensor)
        copied = time.perf_counter() - start
        waited: list[float] = []

        def ours_once(version: int = version, waited: list[float] = waited) -> None:
            waited.append(asyncio.run(send(end, version, parameters, transport)))

        ours = side.timed(ours_once)
        if transport == "host_staged":  # the copy is exposed, and the rest travels
            handed.append(Round(copied, waited[0]))
            ours -= waited[0]
        timed.append(Round(bare, ours))
    theirs, swaps = reader.recv()
    receiver.join(TIMEOUT_S)
    report(transport, plan, timed, (grown, theirs), {"handing over": handed, "taking": swaps})


async def send(end: Any, version: int, parameters: Weights, transport: str) -> float:
    """Seconds until the trainer may go on."""
    start = time.perf_counter()
    await end.send(version, parameters)
    waited = time.perf_counter() - start
    if transport == "host_staged":
        await end.wait_arrived(version)
    return waited


def report(
    transport: str, plan: TransferPlan, timed: list[Round], grown: tuple[int, int], exposed: dict[str, list[Round]]
) -> None:
    bare, ours = (statistics.median(getattr(each, of) for each in timed) for of in ("bare", "ours"))
    ratios = [each.ratio for each in timed]
    print(
        f"{transport:12} {plan.bytes / bare / 1e9:6.2f} GB/s bare {plan.bytes / ours / 1e9:6.2f} GB/s ours, ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} ... {max(ratios):.2f}); peak memory beyond the weights: "
        f"sender {grown[0] / plan.largest:.1f}, receiver {grown[1] / plan.largest:.1f} buckets of "
        f"{plan.largest / 2**20:.0f} MiB",
        flush=True,
    )
    for what, rounds in exposed.items():
        if rounds:
            times = [1 / each.ratio for each in rounds]
            print(
                f"{'':12} exposed, {what}: {statistics.median(each.ours for each in rounds):.3f} s, "
                f"{statistics.median(times):.2f} of a bare copy ({min(times):.2f} ... {max(times):.2f})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--verify", action="store_true", help="with a digest of every tensor")
    parser.add_argument("--only", choices=TRANSPORTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for transport in [options.only] if options.only else TRANSPORTS:
        run(transport, options.rounds, options.bucket_mib << 20, options.layers, options.verify)
    print()
    print(table())


if __name__ == "__main__":
    main()
