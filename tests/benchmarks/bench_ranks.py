"""Two training ranks, half of the groups long: seconds of a micro-batch whose groups are shared as they come, and by
tokens; the fullest rank's tokens over the mean.

    python -m tests.benchmarks.bench_ranks [--rounds 12] [--groups 8] [--long 16]

The tiny model, a thread a rank, FSDP over Gloo; both ways in turn, in one run. --groups: of a micro-batch, in random
order; --long: how many times as long.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
from torch.distributed import TCPStore, barrier

from harness.rl.micro_batches import part_of
from harness.transfer_queue.control.policies import SPLITS
from tests.benchmarks.bench_layouts import ALGORITHM, TINY, batch_of
from tests.support.fsdp_samples import World, computed
from tests.support.processes import run_in_processes

GROUP, RESPONSE, PROMPT = 8, 16, 5


def timed(micro_batches: list[np.ndarray], rank: int, port: int) -> dict[str, tuple[float, float]]:
    """Seconds of each split, and tokens of the fullest rank over the mean; micro_batches: lengths, int64 [groups]."""
    taken = dict.fromkeys(SPLITS, (0.0, 0.0))
    store = TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False)
    with World(store, rank, 2) as world:
        engine = world.engine(replace(ALGORITHM, batch_groups=len(micro_batches[0])), model=TINY)
        for number, lengths in enumerate(micro_batches):
            batch = batch_of(TINY.vocabulary, PROMPT, np.repeat(lengths, GROUP))
            for name, split in SPLITS.items():
                shares = split(np.arange(len(lengths)), 2, lengths + PROMPT)
                mine = part_of(batch, (shares[rank][:, None] * GROUP + np.arange(GROUP)).ravel())
                barrier()
                start = time.perf_counter()
                computed(engine.accumulate(mine))
                barrier()
                if number > 1:
                    most = max((lengths[share] + PROMPT).sum() for share in shares)
                    seconds, fullest = taken[name]
                    fullest += most / (lengths + PROMPT).sum() * 2 / (len(micro_batches) - 2)
                    taken[name] = (seconds + time.perf_counter() - start, fullest)
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
    found, _ = run_in_processes(timed, [(micro_batches, rank, store.port) for rank in range(2)], 600)
    for name, (seconds, fullest) in found.items():
        print(f"{name:10}  {seconds / given.rounds:.4f} s a micro-batch, fullest rank {fullest:.2f} of the mean")
    print(f"balanced is {found['contiguous'][0] / found['balanced'][0]:.2f} times as fast")


if __name__ == "__main__":
    main()
