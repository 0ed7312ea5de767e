"""Rows of a profile: timings, as a JSON file that any machine can read; and models of more layers by a line."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from harness.config import ConfigError, ModelConfig, first_line

Phase = Literal[
    "decode", "prefill", "log_prob", "train", "optimizer", "load", "sleep", "wake", "copy_to_host", "copy_to_device"
]
PHASES: tuple[str, ...] = get_args(Phase)


@dataclass(frozen=True)
class TimingRow:
    """One timing. samples of `length` tokens each (decode: in the cache); bytes that were moved; seconds: the median of
    several; spread: (third quartile - first) / median."""

    phase: Phase
    layers: int
    samples: int
    length: int
    bytes: int
    seconds: float
    spread: float

    def __str__(self) -> str:
        return f"{self.phase}, {self.layers} layers, {self.samples} x {self.length}: {self.seconds:.6f} s"


@dataclass(frozen=True)
class TransferRow:
    """Weights of so many bytes from `ranks` training ranks, each with its shards, to one receiver that copies them to
    memory of its own. Medians: send_s until the trainer may go on; stage_s from then until all is in the receiver's
    host memory, where it is staged; load_s of the receiver: the whole transfer, or where staged the copy from there.
    spread: as of Row, the largest of the three."""

    transport: str
    ranks: int
    bytes: int
    send_s: float
    stage_s: float
    load_s: float
    spread: float

    def __str__(self) -> str:
        taken = f"{self.send_s:.6f} s, {self.stage_s:.6f} s, {self.load_s:.6f} s"
        return f"{self.transport} from {self.ranks}, {self.bytes / 1e6:.4g} MB: {taken}"


@dataclass(frozen=True)
class DeviceProfile:
    """Timings of one model on one device; transfers: between devices of this machine. kind: of the device; versions: of
    packages."""

    model: ModelConfig
    device: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    threads: int
    versions: dict[str, str]
    rows: tuple[TimingRow, ...]
    transfers: tuple[TransferRow, ...] = ()

    def of(self, *phases: Phase) -> list[TimingRow]:
        """The rows of these phases, for all of the model's layers. Where fewer were measured, they are extrapolated."""
        return [row for phase in phases for row in deep([row for row in self.rows if row.phase == phase], self.model)]

    def depths(self, phase: Phase) -> list[int]:
        """Layers that were measured."""
        return sorted({row.layers for row in self.rows if row.phase == phase and row.layers})


def deep(rows: Sequence[TimingRow], model: ModelConfig) -> list[TimingRow]:
    """Each row as it would be with all layers, by the line through the two depths at which it was measured. A decoder's
    layers are equal and run one after another, so all that a layer takes is linear in their number; what does not grow
    (embeddings, logits) is where the line begins. Rows of no layers (copies) stay as they are."""
    alike: dict[tuple[str, int, int], list[TimingRow]] = defaultdict(list)
    found = []
    for row in rows:
        if row.layers in (0, model.layers):
            found.append(row)
        else:
            alike[row.phase, row.samples, row.length].append(row)
    for pair in alike.values():
        low, high = sorted(pair, key=lambda row: row.layers)
        times = (model.layers - low.layers) / (high.layers - low.layers)
        found.append(
            TimingRow(
                low.phase,
                model.layers,
                low.samples,
                low.length,
                round(low.bytes + times * (high.bytes - low.bytes)),
                low.seconds + times * max(0.0, high.seconds - low.seconds),
                max(low.spread, high.spread),
            )
        )
    return found


def write_profile(path: Path, profile: DeviceProfile) -> None:
    """Write a profile as JSON, a row a line."""
    head = asdict(profile)
    lists = {name: ",\n  ".join(json.dumps(row) for row in head.pop(name)) for name in ("rows", "transfers")}
    rows = ",\n".join(f' "{name}": [\n  {listed}\n ]' for name, listed in lists.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(head, indent=1)[:-2]},\n{rows}\n}}\n", encoding="utf-8")


GATE = "results.json"  # the file in which the GPU gate keeps what it found, a profile among it


def read_gate(path: Path) -> DeviceProfile:
    """The profile that the GPU gate recorded. Raises ConfigError as `read_profile`, and where its part `profile` has
    not run."""
    return _profile(path, lambda results: results["profile"], "`cadence gate-gpu parts=profile` writes one into it")


def read_profile(path: Path) -> DeviceProfile:
    """Raises ConfigError for a file that is not there, or holds no profile."""
    return _profile(path, lambda whole: whole, "`cadence profile model=tiny` writes one")


def _profile(path: Path, part: Callable[[Any], object], fix: str) -> DeviceProfile:
    """The profile that is this part of a JSON file."""
    try:
        return TypeAdapter(DeviceProfile).validate_python(part(json.loads(path.read_bytes())), strict=False)
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there; {fix}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = first_line(error) if isinstance(error, ValidationError) else error
        raise ConfigError(f"{path} holds no profile: {why}; {fix}") from error
