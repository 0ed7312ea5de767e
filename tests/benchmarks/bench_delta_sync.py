"""Weights of a policy in training, whole and as what changed (`cluster.delta_weights`), from one process to another.

    python -m tests.benchmarks.bench_delta_sync [--steps 50] [--layers 24] [--transport collective] [--only tiny]

A model drawn from its config, in float32, makes steps of AdamW, as trainers do, on a loss of policy gradients: tokens
and advantages are random, so that gradients are mostly noise, as they are in RL. Each version goes to another process
twice, whole and as what changed, in turn, and that process compares digests of the last ones. qwen0.5b takes 12 GB of
memory, with fewer layers less: its embedding, the largest part, is always whole.

Changed: shares of numbers and of words of 4 bytes that differ from the version before. Bytes, of the whole. Seconds
from when both sides are ready until the receiver has been handed all. Codec: CPU seconds that one core takes to compare
a version and to put it in place. Pays below: bytes a second of a network, below which what it saves is more than that.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Any

import torch

from engines.torch.model import build_model
from harness.config.compose import compose_job
from harness.config.transports import transport_of
from harness.weight_sync.difference import apply, difference
from harness.weight_sync.plan import plan_transfer
from harness.weight_sync.process_group import HOST, GroupOffer, TransferGroup, open_rendezvous
from tests.support.weight_ends import Weights

TIMEOUT_S = 600.0
CASES = (
    ("tiny", "float32", 5e-4),
    ("tiny", "bfloat16", 5e-4),
    ("qwen0.5b", "bfloat16", 1e-6),
    ("qwen0.5b", "bfloat16", 1e-5),
)
SAMPLES, LENGTH = 4, 16


class Trainer:
    """Master weights in float32, and the weights that are served."""

    def __init__(self, model: str, dtype: str, rate: float, layers: int) -> None:
        job = compose_job([f"model={model}"])
        config = replace(job.model, dtype="float32", checkpoint=None, warm_start=False)
        self.model = build_model(replace(config, layers=min(layers, config.layers)))
        self.dtype, self.vocabulary = getattr(torch, dtype), config.vocabulary
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, betas=job.algorithm.betas, weight_decay=job.algorithm.weight_decay
        )
        self.random = torch.Generator().manual_seed(0)

    def served(self) -> Weights:
        return {name: parameter.detach().to(self.dtype, copy=True) for name, parameter in self.model.named_parameters()}

    def step(self) -> None:
        tokens = torch.randint(self.vocabulary, (SAMPLES, LENGTH), generator=self.random)
        advantages = torch.randn(SAMPLES, 1, generator=self.random)
        logits = self.model(tokens).logits[:, :-1]
        chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        (-(advantages * chosen).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def receive(offers: list[GroupOffer], versions: int, pipe: Connection) -> None:
    """Take each version by every offer; in the end, say whether all brought the same."""
    torch.set_num_threads(1)
    ends: list[Any] = [offer.receiver(0, HOST) for offer in offers]
    last: list[bytes] = []
    for version in range(versions):
        for end in ends:
            pipe.send("ready")
            if hasattr(end, "stage"):
                asyncio.run(end.stage(version))
                arriving = end.staged(version)
            else:
                arriving = end.receive(version)
            digest = blake2b()
            for _, tensor in arriving:
                if version == versions - 1:
                    digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
            last.append(digest.digest())
            pipe.send("done")
    pipe.send(last[-1] == last[-2])


def counted(group: TransferGroup) -> list[int]:
    """Bytes of each broadcast from now on."""
    sent: list[int] = []
    as_it_is = group.broadcast

    def broadcast(data: torch.Tensor) -> Any:
        sent.append(data.nbytes)
        return as_it_is(data)

    group.broadcast = broadcast  # type: ignore[method-assign]
    return sent


def changed(new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor], dtype: torch.dtype) -> float:
    """Share of the numbers of this dtype that are others than before."""
    differ = sum(int((new[name].view(dtype) != old[name].view(dtype)).sum()) for name in new)
    return differ / sum(tensor.nbytes // dtype.itemsize for tensor in new.values())


def codec_s(new: Weights, old: Weights) -> float:
    """CPU seconds to compare all weights and to put what changed in place."""
    seconds = 0.0
    for name, tensor in new.items():
        bytes_of, held = tensor.view(-1).view(torch.uint8), old[name].clone().view(-1).view(torch.uint8)
        start = time.process_time()
        apply(difference(bytes_of, held), held)
        seconds += time.process_time() - start
    return seconds


async def send(end: Any, version: int, parameters: Weights) -> None:
    await end.send(version, parameters)
    if hasattr(end, "wait_arrived"):
        await end.wait_arrived(version)


def run(model: str, dtype: str, rate: float, steps: int, layers: int, transport: str) -> None:
    trainer = Trainer(model, dtype, rate, layers)
    weights = trainer.served()
    met = [open_rendezvous("127.0.0.1", 1, TIMEOUT_S) for _ in range(2)]
    carrier = transport_of(transport).with_ends()
    offers = [
        carrier.offer(plan_transfer(weights.items(), 64 << 20, delta=delta), rendezvous, HOST, within_gpu=False)[1]
        for delta, (rendezvous, _) in zip((False, True), met, strict=True)
    ]
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    receiver = context.Process(target=receive, args=(offers, steps + 1, there), daemon=True)
    receiver.start()
    there.close()  # so that its death is heard of
    ends = [offer.sender(store, HOST) for offer, (_, store) in zip(offers, met, strict=True)]
    sent = [counted(end._group) for end in ends]
    rows: list[tuple[float, ...]] = []
    for version in range(steps + 1):
        before = weights
        if version:
            trainer.step()
            weights = trainer.served()
        seconds = []
        for end, bytes_sent in zip(ends, sent, strict=True):
            bytes_sent.clear()
            assert here.recv() == "ready"
            start = time.perf_counter()
            asyncio.run(send(end, version, weights))
            assert here.recv() == "done"
            seconds.append(time.perf_counter() - start)
        if version:
            words = changed(weights, before, torch.int32)
            numbers = changed(weights, before, torch.int16) if trainer.dtype == torch.bfloat16 else words
            codec = codec_s(weights, before) if version == steps else 0.0
            rows.append((numbers, words, sum(sent[1]) / sum(sent[0]), *seconds, codec))
    assert here.recv(), "what changed did not make the same weights"
    receiver.join(TIMEOUT_S)
    report(f"{model}, {dtype}, {rate:g}, {transport}", sum(sent[0]), rows)


def report(case: str, whole: int, rows: list[tuple[float, ...]]) -> None:
    later = rows[len(rows) // 5 :]
    numbers, words, part, whole_s, delta_s, _ = (statistics.median(column) for column in zip(*later, strict=True))
    codec = rows[-1][-1]
    print(
        f"{case}: {whole / 1e6:.1f} MB; changed, numbers {100 * numbers:.2f} % (first {100 * rows[0][0]:.1f}), words "
        f"{100 * words:.2f} %; bytes {100 * part:.1f} % (first {100 * rows[0][2]:.1f}); seconds {whole_s:.4f} whole, "
        f"{delta_s:.4f} changed; codec {whole / codec / 1e9:.2f} GB/s, pays below "
        f"{max(0.0, (1 - part) * whole / codec / 1e9):.2f} GB/s; the last versions are the same bits",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--transport", choices=("collective", "host_staged"), default="collective")
    parser.add_argument("--only", choices=[case[0] for case in CASES])
    options = parser.parse_args()
    for case in CASES:
        if options.only in (None, case[0]):
            run(*case, options.steps, options.layers, options.transport)


if __name__ == "__main__":
    main()
