"""How long simulated responses are: a draw per (seed, sample id), whatever the schedule, the engine and the time."""

from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from harness.config import JobConfig, LatencyConfig, LengthsConfig
from harness.config.fields import whole_number
from harness.config.job import DEALT_AGAIN

_BLOCK = 4096  # samples drawn at a time
_SAMPLES, _GROUPS = 0x6C656E67746873, 0x67726F757073  # key the generators
_TURN = 1 << 40  # samples of a run are fewer
_WORDS = 4  # 64-bit numbers that Philox gives for one value of its counter


class ResponseLengths:
    """The lengths of one run's responses.

    Sample `i` gets the words at counter `i` of a Philox generator keyed by the seed (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", SC 2011), so no draw depends on which others are made; what the samples of a group
    have in common is drawn by the group's number from another. group_size: samples of a group; batch_samples: of a
    batch, where lengths drift from batch to batch. Raises OSError or ValueError, naming the line, where a trace cannot
    be read."""

    def __init__(self, config: LengthsConfig, seed: int, group_size: int = 1, batch_samples: int | None = None) -> None:
        self.cap = config.cap
        self._seed, self._kind, self._sigma = seed, config.kind, config.sigma
        self._group_size, self._common = group_size, config.common
        self._drift, self._batch_samples = config.drift, batch_samples
        self._mean = 1.0 if config.mean is None else config.mean
        self._trace = np.array(config.values, np.int64) if config.path is None else read_trace(Path(config.path))

    @classmethod
    def of_job(cls, job: JobConfig, seed: int) -> Self:
        """The lengths of a job's run."""
        return cls(job.cost.lengths, seed, job.algorithm.group_size, job.algorithm.batch_samples)

    def of(self, sample_ids: np.ndarray, turns: np.ndarray | int = 0) -> np.ndarray:
        """Tokens of these samples: int64 [n], each from 1 to `cap`, for ids int64 [n] in [0, 2**40). turns: which turn
        of each, from 0, below 2**23."""
        ids = np.asarray(sample_ids, np.int64) + turns * (_TURN // self._group_size * self._group_size)
        tokens = self._scaled(_draw(self._seed, _SAMPLES, ids), ids // self._group_size)
        if self._drift != 1:
            assert self._batch_samples is not None, "lengths that drift are of a job"
            with np.errstate(over="ignore"):
                places = np.asarray(sample_ids, np.int64) % (DEALT_AGAIN * self._group_size)
                tokens = np.minimum(tokens * self._drift ** (places // self._batch_samples), self.cap)
        return np.clip(np.rint(tokens), 1, self.cap).astype(np.int64)

    def batches(self, first: int, count: int, samples: int) -> np.ndarray:
        """Tokens of so many batches from one on: int64 [count, samples], of batches of `samples` samples."""
        return self.of(np.arange(first * samples, (first + count) * samples)).reshape(count, samples)

    def _scaled(self, uniform: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Uniform numbers in (0, 1), [n, 2], and group numbers, [n], as tokens, [n], before rounding."""
        if self._kind == "constant":
            return np.full(len(uniform), self._mean)
        if self._kind == "uniform":
            return 0.5 + uniform[:, 0] * (2 * self._mean - 1)
        if self._kind == "trace":
            return self._trace[(uniform[:, 0] * self._trace.size).astype(np.int64)]
        normal = _normal(uniform)
        if self._common:
            shared = _normal(_draw(self._seed, _GROUPS, groups))
            normal = np.sqrt(self._common) * shared + np.sqrt(1 - self._common) * normal
        return np.exp(np.log(self._mean) - self._sigma**2 / 2 + self._sigma * normal)


def drawn_tokens(config: LengthsConfig, random: np.random.Generator) -> int:
    """One length, by the numbers of `random`."""
    tokens = ResponseLengths(config, 0)._scaled(_drawn(random), np.zeros(1, np.int64))
    return int(np.clip(np.rint(tokens), 1, config.cap)[0])


def drawn_latency(config: LatencyConfig, random: np.random.Generator) -> float:
    """One latency in seconds, by the numbers of `random`."""
    if config.kind == "constant" or config.mean == 0:
        return config.mean
    normal = _normal(_drawn(random))[0]
    return float(np.exp(np.log(config.mean) - config.sigma**2 / 2 + config.sigma * normal))


def _drawn(random: np.random.Generator) -> np.ndarray:
    """Two numbers in (0, 1), float64 [1, 2]."""
    return (random.integers(0, 1 << 52, size=(1, 2)) + 0.5) * 2.0**-52


def _normal(uniform: np.ndarray) -> np.ndarray:
    """Box and Muller, "A note on the generation of random normal deviates" (1958): [n, 2] to [n]."""
    return np.sqrt(-2 * np.log(uniform[:, 0])) * np.cos(2 * np.pi * uniform[:, 1])


def _draw(seed: int, what: int, numbers: np.ndarray) -> np.ndarray:
    """Two numbers in (0, 1) for each of these samples, or groups: float64 [n, 2] for int64 [n]."""
    blocks, places = np.divmod(numbers, _BLOCK)
    uniform = np.empty((numbers.size, 2))
    for block in np.unique(blocks).tolist():
        here = blocks == block
        uniform[here] = _uniforms(seed, what, block)[places[here]]
    return uniform


@lru_cache(maxsize=256)
def _uniforms(seed: int, what: int, block: int) -> np.ndarray:
    """Uniform numbers of a whole block: float64 [_BLOCK, 2]."""
    generator = np.random.Philox(key=np.array([seed, what], np.uint64), counter=block * _BLOCK)
    words = generator.random_raw(_BLOCK * _WORDS).reshape(_BLOCK, _WORDS)[:, :2]
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def read_trace(path: Path) -> np.ndarray:
    """Recorded lengths, a whole number of tokens per line: int64 [lines]."""
    lengths = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split(), 1):
        if not (length := whole_number(line)):
            raise ValueError(
                f"{path}:{number}: {line[:40]!r} is no number of tokens; write a whole number >= 1 per line"
            )
        lengths.append(length)
    if not lengths:
        raise ValueError(f"{path} holds no length; write a whole number of tokens per line")
    return np.array(lengths, np.int64)
