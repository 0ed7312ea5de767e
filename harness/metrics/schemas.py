"""Schemas of what is relied on in the files of a run, whatever else they say, how large each may be, and what is said
of one that is missing, was cut off, or holds what no run writes: a folder may be anybody's, and of an earlier
version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pyarrow as pa
import yaml  # type: ignore[import-untyped]

from harness.config import Backend, ConfigError
from harness.config.files import MIB
from harness.metrics.ledger import ENGINE_EVENTS, DropReason

LARGEST = {
    "manifest.json": 4 * MIB,
    "summary.json": MIB,
    "ledger.json": 256 * MIB,
    "metrics.jsonl": 256 * MIB,
    "system.jsonl": 256 * MIB,
    "eval.jsonl": 64 * MIB,
    "restarts.jsonl": 64 * MIB,
    "trace.json": 1024 * MIB,
}
"""Bytes, by name: many times what the longest runs here wrote."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][\w.=+:-]*$", max_length=400)]
_Folder = Annotated[str, msgspec.Meta(pattern=r"^[^./\x00-\x1f][^/\x00-\x1f]*$", max_length=255)]
_Command = Annotated[list[str], msgspec.Meta(min_length=1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class _Git(msgspec.Struct):
    commit: str
    dirty: bool


class _Hardware(msgspec.Struct):
    cpu: str
    cores: Count | None
    memory_bytes: Count
    gpus: list[str]
    platform: str


class _Load(msgspec.Struct):
    others: float = 0.0


class _Input(msgspec.Struct):
    setting: str
    digest: str


class _UsersCode(msgspec.Struct):
    path: str
    sha256: str


class ManifestFile(msgspec.Struct):
    """The part of manifest.json that is relied on."""

    experiment: _Folder
    cell: _Folder
    seed: Count
    schedule: _Name
    model: _Name
    engine: _Name
    backend: Backend
    smoke: bool
    started_at: Annotated[datetime, msgspec.Meta(tz=True)]
    command: _Command
    git: _Git | None
    python: str
    packages: dict[str, str | None]
    hardware: _Hardware
    trial: bool = False
    inputs: list[_Input] = []
    plugins: list[_UsersCode] = []
    load: _Load = msgspec.field(default_factory=_Load)


class IterationLine(msgspec.Struct):
    """A line of metrics.jsonl. samples, seconds: since the run began."""

    iteration: Count
    samples: Count
    seconds: Seconds


class ComparedLine(msgspec.Struct):
    """A line of metrics.jsonl, for comparisons."""

    samples: _Positive
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    iteration_s: Seconds = msgspec.field(name="time/iteration_s")
    tokens_per_s: Seconds = msgspec.field(name="throughput/tokens_per_s")
    in_flight: Seconds = msgspec.field(name="staleness/in_flight_mean")
    in_queue: Seconds = msgspec.field(name="staleness/in_queue_mean")
    response_length: Seconds = msgspec.field(name="response_length/mean")
    admitted: Seconds = msgspec.field(name="ledger/admitted")
    trained: Seconds = msgspec.field(name="ledger/trained")


class EvaluationLine(msgspec.Struct):
    """A line of eval.jsonl."""

    version: Count
    at_s: float
    problems: Count
    k: Count
    greedy: float
    sampled: float | None
    pass_at_k: float | None


class EngineEvent(msgspec.Struct):
    """An engine that was lost, left or joined."""

    engine: str
    what: str
    at_s: float
    why: str

    def __post_init__(self) -> None:
        if self.what not in ENGINE_EVENTS:
            raise ValueError(f"an engine {self.what!r}: one of {', '.join(ENGINE_EVENTS)} was expected")


class LedgerFile(msgspec.Struct):
    """The part of ledger.json that is relied on."""

    admitted: Count
    trained: Count
    in_flight: Count
    dropped_stale: Count
    trained_by_iteration: dict[str, Count]
    in_flight_ids: list[int]
    dropped_ids: dict[DropReason, list[int]]
    dropped_filtered: Count = 0
    dropped_baseline: Count = 0
    dropped_straggler: Count = 0
    dropped_failed: Count = 0
    dropped_spare: Count = 0
    engines: list[EngineEvent] = []
    restarts: list[Restart] = []
    tokens: dict[str, Count] = {}


class _SpanOf(msgspec.Struct):
    engine: str
    version: int
    iteration: int


class TraceSpan(msgspec.Struct, tag_field="ph", tag="X"):
    """A span of the trace. ts, dur: microseconds."""

    name: str
    cat: str
    ts: float
    dur: Seconds
    args: _SpanOf


class TraceName(msgspec.Struct, tag_field="ph", tag="M"):
    """A name for viewers."""


class TraceMark(msgspec.Struct, tag_field="ph", tag="i"):
    """A mark for viewers."""


class _Placed(msgspec.Struct):
    role: str
    engine: str
    pool: str
    devices: tuple[str, ...]


class _TraceFacts(msgspec.Struct):
    started_at: float
    warmup: Count
    iteration_ends: dict[str, float]
    placement: list[_Placed]


class TraceFile(msgspec.Struct):
    """trace.json."""

    trace_events: list[TraceSpan | TraceName | TraceMark] = msgspec.field(name="traceEvents")
    other_data: _TraceFacts = msgspec.field(name="otherData")


class _Named(msgspec.Struct):
    name: str


class _ClusterSettings(msgspec.Struct):
    devices: _Positive
    kind: str
    threads_per_device: _Positive
    oversubscribe: bool


class _AlgorithmSettings(msgspec.Struct):
    batch_groups: _Positive
    group_size: _Positive
    mini_batches: _Positive = 1
    epochs: _Positive = 1


class _CostSettings(msgspec.Struct):
    kind: str


class ConfigFile(msgspec.Struct):
    """config.yaml, for comparisons."""

    backend: Literal["auto", "real", "virtual", "paced"]
    iterations: _Positive
    warmup_iterations: Count
    max_tokens: int | None
    schedule: _Named
    model: _Named
    engine: _Named
    task: _Named
    algorithm: _AlgorithmSettings
    cluster: _ClusterSettings
    cost: _CostSettings | None = None
    device: _Named | None = None


class DamagedFile(ConfigError):
    """A file of a finished run cannot be read as what it should be."""


@contextmanager
def reading(file: Path, fix: str = "make the run again with force=true, or take its folder away") -> Iterator[None]:
    """Read `file`, to its last value, inside of this. Raises DamagedFile, one line, where that fails."""
    try:
        yield
    except DamagedFile:
        raise
    except FileNotFoundError as error:
        raise DamagedFile(f"{file} is missing; {fix}") from error
    except _UNREADABLE as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else f"{error}"
        raise DamagedFile(f"{file} is damaged: {' '.join(why.split())}; {fix}") from error


_UNREADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError),
    *(pa.ArrowException, yaml.YAMLError, msgspec.MsgspecError),
)


class Restart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Roles that died and were started again. roles: that were lost; why: how they died; done: what was done about it;
    at_s: when that was, on the run's clock; took_s: until they were at work again."""

    roles: list[str]
    why: str
    done: str
    at_s: float
    took_s: float

    @property
    def line(self) -> str:
        """The restart as a line."""
        return f"lost {', '.join(self.roles)}: {self.why}; {self.done}, at work again after {self.took_s:.1f} s"
