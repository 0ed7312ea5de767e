"""Two training ranks, half of the groups long: seconds that the busiest rank computes in a micro-batch whose groups are
shared as they come, and by tokens; the fullest rank's tokens over the mean.

    python -m tests.benchmarks.bench_ranks [--rounds 12] [--groups 8] [--long 16]

The tiny model in packed rows (padded, every sample costs as much as its share's longest), a thread a rank, FSDP over
Gloo; both ways in turn, in one run. Seconds are of the rank's thread, without its waits, so that other processes do not
count. --groups: of a micro-batch, in random order; --long: how many times as long.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
from torch.distributed import TCPStore

from harness.config import TrainingConfig
from harness.rl.micro_batches import part_of
from harness.transfer_queue.control.policies import SPLITS
from tests.benchmarks.bench_layouts import ALGORITHM, TINY, batch_of
from tests.support.fsdp_samples import World, computed
from tests.support.processes import run_in_processes

GROUP, RESPONSE, PROMPT = 8, 16, 5


def shares_of(lengths: np.ndarray, name: str) -> list[np.ndarray]:
    return SPLITS[name](np.arange(len(lengths)), 2, lengths + PROMPT)


def timed(micro_batches: list[np.ndarray], rank: int, port: int) -> dict[str, list[float]]:
    """Seconds of this rank in every micro-batch, by split; micro_batches: lengths of responses, int64 [groups]."""
    taken: dict[str, list[float]] = {name: [] for name in SPLITS}
    store = TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)
    with World(store, rank, 2) as world:
        algorithm = replace(ALGORITHM, batch_groups=len(micro_batches[0]))
        engine = world.engine(algorithm, TrainingConfig(layout="packed"), TINY)
        for lengths in micro_batches:
            batch = batch_of(TINY.vocabulary, PROMPT, np.repeat(lengths, GROUP))
            for name in SPLITS:
                mine = shares_of(lengths, name)[rank]
                start = time.thread_time()
                computed(engine.accumulate(part_of(batch, (mine[:, None] * GROUP + np.arange(GROUP)).ravel())))
                taken[name].append(time.thread_time() - start)
                computed(engine.step())
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--long", type=int, default=16)
    given = parser.parse_args()
    random, half = np.random.default_rng(0), given.groups // 2
    lengths = np.repeat([RESPONSE, RESPONSE * given.long], [given.groups - half, half])
    micro_batches = [random.permutation(lengths) for _ in range(given.rounds + 2)]
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    both = run_in_processes(timed, [(micro_batches, rank, store.port) for rank in range(2)], 600)
    seconds = {name: sum(map(max, *(found[name][2:] for found in both))) for name in SPLITS}
    for name, total in seconds.items():
        most = sum(max((n[share] + PROMPT).sum() for share in shares_of(n, name)) for n in micro_batches[2:])
        fullest = 2 * most / sum((n + PROMPT).sum() for n in micro_batches[2:])
        print(f"{name:10}  {total / given.rounds:.4f} s a micro-batch, fullest rank {fullest:.2f} of the mean")
    print(f"balanced takes {seconds['balanced'] / seconds['contiguous']:.2f} times as long")


if __name__ == "__main__":
    main()
