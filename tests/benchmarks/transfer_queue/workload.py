"""What is moved: samples of different lengths, and the four tasks of GRPO that read and write their columns.

Runs in the peer's environment too: NumPy and the standard library only, like `contract`, `workers`, `cases` and `side`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

MEDIAN_TOKENS, SPREAD, FEWEST, MOST = 610, 0.6, 64, 2048  # log-normal: 730 tokens, or 9.5 KB, in the mean
RAGGED = {"tokens": "int64", "loss_mask": "uint8", "log_probs": "float32"}  # one item a token
DENSE = {"reward": "float32", "sample": "int64", "stamp": "float64"}  # one item a sample; stamp: when it was put
WRITTEN = {"old_log_prob": "old_log_probs", "ref_log_prob": "ref_log_probs", "advantages": "advantages"}  # float32
ROLLOUT = (*RAGGED, *DENSE)
_OF_ALL = ("sample", "stamp")

Tasks = Mapping[str, tuple[str, ...]]
TRAINING: Tasks = {
    "old_log_prob": ("tokens", "loss_mask", *_OF_ALL),
    "ref_log_prob": ("tokens", "loss_mask", *_OF_ALL),
    "advantages": ("reward", "loss_mask", *_OF_ALL),
    "actor_train": ("tokens", "loss_mask", "log_probs", *WRITTEN.values(), *_OF_ALL),
}
READING: Tasks = {f"read_{i}": ROLLOUT for i in range(4)}
STORED: Tasks = {"read_number": ("reward",)}
FLOWS: Mapping[str, Tasks] = {"training": TRAINING, "reading": READING, "stored": STORED}
"""Each runs on a queue of its own."""


@dataclass(frozen=True)
class Samples:
    """ragged: for each column one array a sample; dense: for each column one array of all samples."""

    ragged: Mapping[str, list[np.ndarray]] = field(repr=False)
    dense: Mapping[str, np.ndarray] = field(repr=False)


def lengths(count: int, seed: int) -> np.ndarray:
    """Tokens of each sample, int64 [count]."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN_TOKENS), SPREAD, count)
    return np.clip(drawn, FEWEST, MOST).astype(np.int64)


def token_value(column: str, samples: np.ndarray) -> np.ndarray:
    """What every token of these samples holds in a ragged column: any reader can tell whether it got what was put."""
    if column in WRITTEN.values():
        return np.zeros(samples.size)
    return {"tokens": samples, "loss_mask": np.ones(samples.size), "log_probs": -(samples % 7)}[column]


def make_samples(count: int, seed: int) -> Samples:
    """Samples 0 to count."""
    sizes, ids = lengths(count, seed), np.arange(count)
    ragged = {
        name: [np.full(size, value, RAGGED[name]) for size, value in zip(sizes, token_value(name, ids), strict=True)]
        for name in RAGGED
    }
    dense = {"reward": ids % 2, "sample": ids, "stamp": np.zeros(count)}
    return Samples(ragged, {name: column.astype(DENSE[name]) for name, column in dense.items()})
