"""arrivals.jsonl: what of a run depended on timing, a line an iteration as it ends. With it the run can be replayed
(docs/replay.md).

Every line is {"crc32": of the bytes of what it tells, "told": ...}; the first one tells which run it is."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import msgspec
import numpy as np
from msgspec import structs

from harness.transfer_queue import Ragged

ARRIVALS = "arrivals.jsonl"
FORMAT = 1


class DamagedArrivals(ValueError):
    """Raised where the file does not hold what was written."""


class RunOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run that is recorded. format: of the lines; group_size: samples of a group."""

    format: int
    seed: int
    iterations: int
    group_size: int


class Sampled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A response that was sampled. engine: that finished it; started_at: seconds on the run's clock, when it got its
    first token, the last time that it began; runs: (version, tokens) of each stretch that one version sampled, in
    order."""

    sample: int
    engine: int
    started_at: float
    runs: list[tuple[int, int]]


class Arrivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arrivals of an iteration. ranks: of each training rank that trains different groups its micro-batches, of
    samples, in order; drops: of each call that dropped stale groups since the iteration before, which; sampled: the
    responses that were trained; digest: of their tokens, log-probs and rewards."""

    iteration: int
    ranks: list[list[list[int]]]
    drops: list[list[int]]
    sampled: list[Sampled]
    digest: str


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    crc32: int
    told: msgspec.Raw


@dataclass(frozen=True)
class Recording:
    """A whole run's, read and checked."""

    run: RunOf
    iterations: tuple[Arrivals, ...]

    @property
    def sampled(self) -> Iterable[Sampled]:
        """All responses that were trained."""
        return (sampled for iteration in self.iterations for sampled in iteration.sampled)

    def with_whole_groups(self) -> Self:
        """The same, each group sampled by the engine of its first sample: where an attempt or an engine was lost,
        others may have sampled the rest, and which ones decides nothing."""
        n = self.run.group_size
        first = {one.sample // n: one.engine for one in self.sampled if one.sample % n == 0}
        return replace(
            self,
            iterations=tuple(
                structs.replace(
                    told, sampled=[structs.replace(one, engine=first[one.sample // n]) for one in told.sampled]
                )
                for told in self.iterations
            ),
        )


def line_of(told: RunOf | Arrivals) -> bytes:
    """A line for the file, with its end."""
    data = msgspec.json.encode(told)
    return msgspec.json.encode(_Line(crc32(data), msgspec.Raw(data))) + b"\n"


def run_starts(versions: Ragged) -> tuple[np.ndarray, np.ndarray]:
    """Places where runs of equal versions begin, int64 [runs], and each row's first run, int64 [rows + 1]."""
    values, offsets = versions.values, versions.offsets
    begins = np.diff(values, prepend=values[:1]) != 0
    begins[offsets[:-1][np.diff(offsets) > 0]] = True
    starts = np.flatnonzero(begins)
    return starts, np.searchsorted(starts, offsets)


def runs_of(versions: Ragged, tokens: Ragged | None = None) -> Iterator[list[tuple[int, int]]]:
    """Versions and tokens of the runs of each row. versions: int, of each token, or of so many `tokens`."""
    starts, firsts = run_starts(versions)
    ends = np.arange(versions.values.size + 1) if tokens is None else np.cumsum(np.append(0, tokens.values))
    counts = np.diff(ends[np.append(starts, versions.values.size)])
    runs = list(zip(versions.values[starts].tolist(), counts.tolist(), strict=True))
    return (runs[first:end] for first, end in pairwise(firsts.tolist()))


def digest_of(arrays: Iterable[np.ndarray]) -> str:
    """Digest of the arrays' bytes, in this order."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def read_arrivals(path: Path) -> Recording:
    """The recording of a run that is over. Raises DamagedArrivals, naming the line, where one is missing, was changed,
    or says what cannot have been: a sample that was trained twice, or is in no group of its iteration."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise DamagedArrivals(f"{path} is missing") from None
    if lines.pop():
        raise DamagedArrivals(f"{path}: its last line was cut off")
    if not lines:
        raise DamagedArrivals(f"{path} is empty")
    run: RunOf = _told(path, 1, lines[0], RunOf)
    if run.format != FORMAT:
        raise DamagedArrivals(f"{path} has format {run.format}; this code reads {FORMAT}")
    iterations: list[Arrivals] = []
    for number, line in enumerate(lines[1:], start=2):
        told: Arrivals = _told(path, number, line, Arrivals)
        if told.iteration != len(iterations):
            raise DamagedArrivals(f"{path}, line {number} is of iteration {told.iteration}, not {len(iterations)}")
        iterations.append(told)
    if len(iterations) != run.iterations:
        raise DamagedArrivals(f"{path} ends after {len(iterations)} of {run.iterations} iterations")
    _check_whole(path, iterations)
    return Recording(run, tuple(iterations))


def _told(path: Path, number: int, line: bytes, type_: type[Any]) -> Any:
    try:
        read = msgspec.json.decode(line, type=_Line)
        if crc32(read.told) != read.crc32:
            raise DamagedArrivals(f"{path}, line {number} is damaged: it is not what was written")
        return msgspec.json.decode(read.told, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedArrivals(f"{path}, line {number} is damaged: {error}") from error


def _check_whole(path: Path, iterations: Sequence[Arrivals]) -> None:
    """Every sample was trained once, and is told of there."""
    seen: set[int] = set()
    for told in iterations:
        trained = [sample for rank in told.ranks for batch in rank for sample in batch]
        where = f"{path}, iteration {told.iteration}"
        if sorted(trained) != sorted(sampled.sample for sampled in told.sampled):
            raise DamagedArrivals(f"{where}: the samples that were trained are not those that are told of")
        if twice := seen.intersection(trained) or len(set(trained)) < len(trained):
            raise DamagedArrivals(f"{where}: a sample was trained twice ({twice})")
        seen.update(trained)


def differences(recorded: Arrivals, found: Arrivals) -> str | None:
    """A sentence on what of an iteration came out otherwise than recorded, times aside; None: nothing."""
    if recorded.drops != found.drops:
        return f"groups {found.drops} were dropped, not {recorded.drops}"
    if recorded.ranks != found.ranks:
        return "other samples were trained, or in another order"
    there = {one.sample: one for one in recorded.sampled}
    for one in found.sampled:
        was = there[one.sample]
        if (one.engine, one.runs) != (was.engine, was.runs):
            return (
                f"sample {one.sample} was sampled by engine {one.engine} under (version, tokens) {one.runs}, not by "
                f"engine {was.engine} under {was.runs}"
            )
    return "tokens, log-probs or rewards are others" if recorded.digest != found.digest else None
