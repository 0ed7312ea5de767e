"""The findings of a run so far, in tables that grow batch by batch while it goes on, so that its driver need not
remember it: samples, responses and spans, in the folder `parts` of the run.

Each is a file in Arrow's stream format. It can be read at any moment; what follows the last whole batch, where its
writer died, is left out. When the run is over they become samples.parquet, responses.parquet and trace.json.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from harness.metrics.atomic_files import GrowingFile
from harness.metrics.samples import CUSTOM, RESPONSES_SCHEMA, SCHEMA, SampleRecord
from harness.metrics.timeline import Place, Timeline
from harness.protocols import Span

PARTS = "parts"
SAMPLES, RESPONSES, SPANS = "samples.arrows", "responses.arrows", "spans.arrows"

Response = tuple[int, np.ndarray, np.ndarray, np.ndarray]
"""Sample id, tokens int64 [L], log-probs float32 [L], mask bool [L]."""

_SPAN_SCHEMA = pa.schema(
    [
        pa.field("role", pa.string()),
        pa.field("engine", pa.string()),
        pa.field("kind", pa.string()),
        pa.field("start", pa.float64()),
        pa.field("end", pa.float64()),
        pa.field("version", pa.int64()),
        pa.field("iteration", pa.int64()),
    ]
)
_ITERATION_END = "iteration_end"
"""The kind of a row that is no span: `end` is when the iteration ended."""


class GrowingTable:
    """A `GrowingFile` of batches."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.schema, self.file = schema, GrowingFile(path)
        if not self.file.size:
            self.file.append(schema.serialize())

    def append(self, columns: Mapping[str, Sequence[object]]) -> None:
        """Write a batch of rows."""
        table = pa.table(dict(columns), schema=self.schema)
        for batch in table.to_batches():
            self.file.append(batch.serialize())


def read_growing(path: Path) -> pa.Table:
    """All whole batches; their memory is the file's. Raises ValueError where the file does not begin as such a one."""
    source = pa.memory_map(str(path))
    try:
        reader = pa.ipc.open_stream(source)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} holds no table: {error}") from error
    batches = []
    while True:
        try:
            batches.append(reader.read_next_batch())
        except (StopIteration, pa.ArrowInvalid, OSError):  # its end, or a batch that was cut off
            return pa.Table.from_batches(batches, reader.schema)


class Parts:
    """The growing tables of one run. timeline: whose spans they are; extra_names: of the values that scores may
    have."""

    def __init__(self, folder: Path, timeline: Timeline, extra_names: Sequence[str]) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        custom = [pa.field(CUSTOM + name, pa.float64()) for name in extra_names]
        places = [
            {"role": role, "engine": engine, "pool": place.pool, "devices": list(place.devices)}
            for (role, engine), place in timeline.placement.items()
        ]
        told = {
            "placement": json.dumps(places),
            "warmup": str(timeline.warmup),
            "started_at": repr(timeline.started_at),
        }
        self._tables = {
            SAMPLES: GrowingTable(folder / SAMPLES, pa.schema([*SCHEMA, *custom])),
            RESPONSES: GrowingTable(folder / RESPONSES, RESPONSES_SCHEMA),
            SPANS: GrowingTable(folder / SPANS, _SPAN_SCHEMA.with_metadata(told)),
        }
        self._extra_names = list(extra_names)

    @property
    def files(self) -> dict[str, GrowingFile]:
        """Growing files by name."""
        return {name: table.file for name, table in self._tables.items()}

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Append samples."""
        columns: dict[str, list[object]] = {name: [getattr(r, name) for r in records] for name in SCHEMA.names}
        columns |= {CUSTOM + name: [r.custom.get(name) for r in records] for name in self._extra_names}
        self._tables[SAMPLES].append(columns)

    def responses(self, responses: Sequence[Response]) -> None:
        """Append responses."""
        names = RESPONSES_SCHEMA.names
        ids, tokens, log_probs, masks = (
            (list(column) for column in zip(*responses, strict=True)) if responses else ([] for _ in names)
        )
        columns = [ids, [row.astype(np.int32) for row in tokens], log_probs, masks]
        self._tables[RESPONSES].append(dict(zip(names, columns, strict=True)))

    def spans(self, spans: Iterable[Span], ended: Mapping[int, float]) -> None:
        """ended: iterations, and when."""
        ends = [Span("", "", _ITERATION_END, at, at, 0, iteration) for iteration, at in ended.items()]
        rows = [*spans, *ends]
        self._tables[SPANS].append({name: [getattr(row, name) for row in rows] for name in _SPAN_SCHEMA.names})

    def close(self) -> None:
        """Close all tables."""
        with ExitStack() as closing:
            for file in self.files.values():
                closing.callback(file.close)

    def remove(self) -> None:
        """All of it is in other files."""
        self.close()
        shutil.rmtree(self.folder)


def read_samples_so_far(folder: Path) -> pa.Table:
    """Samples as samples.parquet has them: by sample id, with those of the `custom/` columns that have a value."""
    table = read_growing(folder / SAMPLES)
    custom = sorted(name for name in table.column_names if name.startswith(CUSTOM))
    filled = [name for name in custom if table.column(name).null_count < len(table)]
    return table.select([*SCHEMA.names, *filled]).sort_by("sample_id").combine_chunks()


def read_timeline_so_far(folder: Path) -> Timeline:
    """The timeline of all spans so far."""
    table = read_growing(folder / SPANS)
    told = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    placement = {
        (one["role"], one["engine"]): Place(one["pool"], tuple(one["devices"])) for one in json.loads(told["placement"])
    }
    started_at = float(told.get("started_at", 0.0))
    timeline = Timeline(placement, started_at=started_at, warmup=int(told["warmup"]))
    for row in table.to_pylist():
        if row["kind"] == _ITERATION_END:
            timeline.end_iteration(row["iteration"], row["end"])
        else:
            timeline.add([Span(**row)])
    return timeline
