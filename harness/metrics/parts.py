"""The findings of a run so far, in tables that grow batch by batch while it goes on, so that its driver need not
remember it: samples, responses, problems and spans, in the folder `parts` of the run.

Each is a file in Arrow's stream format. It can be read at any moment; what follows the last whole batch, where its
writer died, is left out. When the run is over they become samples.parquet, responses.parquet, problems.parquet and
trace.json."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from harness.config.files import refuse_special
from harness.metrics.arrivals import ARRIVALS, Arrivals, RunOf, line_of, run_starts
from harness.metrics.atomic_files import GrowingFile
from harness.metrics.definitions import CUSTOM
from harness.metrics.samples import (
    HELD_OUT_SCHEMA,
    LONGEST_ANSWER,
    PROBLEM_ROW,
    PROBLEMS_SCHEMA,
    RESPONSES_SCHEMA,
    SCHEMA,
    VERSION_RUN,
    SampleRecord,
    before_custom,
)
from harness.metrics.timeline import Place, Timeline
from harness.protocols import Span
from harness.tasks import Problem
from harness.transfer_queue import Ragged

PARTS = "parts"
SAMPLES, RESPONSES, SPANS = "samples.arrows", "responses.arrows", "spans.arrows"
DROPPED = "dropped.arrows"
PROBLEMS, HELD_OUT = "problems.arrows", "held_out.arrows"
PART_FILES = (SAMPLES, RESPONSES, DROPPED, SPANS, PROBLEMS, HELD_OUT)

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
_ITERATION_END = "iteration_end"  # the kind of a row that is no span: `end` is when the iteration ended


class GrowingTable:
    """A `GrowingFile` of batches. One that was begun with fewer columns, before this version of the code, has those."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.schema, self.file = schema, GrowingFile(path)
        if self.file.size:
            self.schema = read_growing(path).schema
        else:
            self.file.append(schema.serialize())

    def append(self, columns: Mapping[str, Any]) -> None:
        """Write a batch of rows; of each column a sequence, a Ragged, or what Arrow has of it."""
        made = [_column(field.type, columns[field.name]) for field in self.schema]
        if len(made[0]):
            self.file.append(pa.RecordBatch.from_arrays(made, schema=self.schema).serialize())


def read_growing(path: Path) -> pa.Table:
    """All whole batches; their memory is the file's. Raises ValueError where the file does not begin as such a one."""
    refuse_special(path)
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
    """Files of a run that grow while it lasts. files: by path in the run's folder."""

    def __init__(self, files: Mapping[str, GrowingFile]) -> None:
        self.files = files

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by its path in the run's folder."""
        return {path: file.size for path, file in self.files.items()}

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the same."""
        return {path: file.digest for path, file in self.files.items()}

    def close(self) -> None:
        """Closes the files."""
        with ExitStack() as closing:
            for file in self.files.values():
                closing.callback(file.close)


class SampleParts(Parts):
    """The files of a run that grow sample by sample: samples and responses in its parts, and arrivals.jsonl.
    extra_names: of the values that scores may have; run_of: the first line of arrivals, which there are none of
    without."""

    def __init__(self, run: Path, extra_names: Sequence[str], run_of: RunOf | None) -> None:
        folder = run / PARTS
        folder.mkdir(exist_ok=True)
        self._samples = GrowingTable(folder / SAMPLES, pa.schema([*SCHEMA, *_custom(extra_names)]))
        self._responses = GrowingTable(folder / RESPONSES, RESPONSES_SCHEMA)
        self._dropped = GrowingTable(folder / DROPPED, RESPONSES_SCHEMA)
        self._extra_names = list(extra_names)
        tables = {SAMPLES: self._samples, RESPONSES: self._responses, DROPPED: self._dropped}
        files = {f"{PARTS}/{name}": table.file for name, table in tables.items()}
        if run_of is not None:
            files[ARRIVALS] = GrowingFile(run / ARRIVALS)
            if not files[ARRIVALS].size:
                files[ARRIVALS].append(line_of(run_of))
        super().__init__(files)

    @classmethod
    def cut_back(
        cls, run: Path, sizes: Mapping[str, int], extra_names: Sequence[str], run_of: RunOf | None
    ) -> SampleParts:
        """Opens them as they were when they had these sizes."""
        for path, size in sizes.items():
            os.truncate(run / path, size)
        return cls(run, extra_names, run_of)

    def samples(self, records: Sequence[SampleRecord]) -> None:
        """Appends rows of samples."""
        columns: dict[str, Any] = {name: [getattr(r, name) for r in records] for name in SCHEMA.names}
        columns |= {CUSTOM + name: [r.custom.get(name) for r in records] for name in self._extra_names}
        self._samples.append(columns)

    def responses(self, samples: np.ndarray, columns: Iterable[Ragged], *, trained: bool) -> None:
        """Appends responses of samples that were trained, or were not. columns: tokens of each sample, log-probs, which
        the policy sampled, and by which version."""
        *others, versions = columns
        told = dict(zip(RESPONSES_SCHEMA.names, [samples, *others, _runs(versions)], strict=True))
        (self._responses if trained else self._dropped).append(told)

    def arrivals(self, told: Arrivals) -> None:
        """Appends what of an iteration depended on timing."""
        self.files[ARRIVALS].append(line_of(told))


def _custom(extra_names: Sequence[str]) -> list[pa.Field]:
    return [pa.field(CUSTOM + name, pa.float64()) for name in extra_names]


_NUMBERS = {
    pa.bool_(): np.bool_,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.float32(): np.float32,
    pa.float64(): np.float64,
}


def _column(kind: pa.DataType, column: Any) -> pa.Array:
    """The values as Arrow lays them out. `pa.array` would load pandas, to see whether it was given some of it: a third
    of a second in every process that writes."""
    if isinstance(column, pa.Array):
        return column
    if isinstance(column, Ragged):
        offsets = _column(pa.int32(), column.offsets)
        return pa.ListArray.from_arrays(offsets, _column(kind.value_type, column.values))
    known: np.ndarray | None = None
    if not isinstance(column, np.ndarray):
        known = np.fromiter((value is not None for value in column), np.bool_, len(column))
    validity = None if known is None or known.all() else pa.py_buffer(np.packbits(known, bitorder="little"))
    if pa.types.is_string(kind):
        texts = [(value or "").encode() for value in column]
        offsets = np.cumsum([0, *map(len, texts)]).astype(np.int32)
        return pa.Array.from_buffers(kind, len(texts), [validity, *map(pa.py_buffer, (offsets, b"".join(texts)))])
    values = column if validity is None else [0 if value is None else value for value in column]
    values = np.asarray(values, _NUMBERS[kind])
    packed = np.packbits(values, bitorder="little") if pa.types.is_boolean(kind) else np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(packed)])


def _runs(versions: Ragged) -> pa.ListArray:
    """Runs of tokens that one version sampled, a list for each response. versions: of each token, one at least."""
    values, (starts, firsts) = versions.values, run_starts(versions)
    of_runs = [_column(pa.int32(), part) for part in (values[starts], np.diff(starts, append=values.size))]
    runs = pa.StructArray.from_arrays(of_runs, fields=list(VERSION_RUN))
    return pa.ListArray.from_arrays(_column(pa.int32(), firsts), runs)


class DriverParts(Parts):
    """The growing tables of one run that its driver writes. timeline: of the spans; extra_names: of scores' values."""

    def __init__(self, folder: Path, timeline: Timeline, extra_names: Sequence[str] = ()) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        places = [
            {"role": role, "engine": engine, "pool": place.pool, "devices": list(place.devices)}
            for (role, engine), place in timeline.placement.items()
        ]
        told = {
            "placement": json.dumps(places),
            "warmup": str(timeline.warmup),
            "started_at": repr(timeline.started_at),
        }
        self._spans = GrowingTable(folder / SPANS, _SPAN_SCHEMA.with_metadata(told))
        self._problems = GrowingTable(folder / PROBLEMS, PROBLEMS_SCHEMA)
        self._held_out = GrowingTable(folder / HELD_OUT, pa.schema([*HELD_OUT_SCHEMA, *_custom(extra_names)]))

        tables = {SPANS: self._spans, PROBLEMS: self._problems, HELD_OUT: self._held_out}
        super().__init__({f"{PARTS}/{name}": table.file for name, table in tables.items()})

    def spans(self, spans: Iterable[Span], ended: Mapping[int, float]) -> None:
        """ended: iterations, and when."""
        ends = [Span("", "", _ITERATION_END, at, at, 0, iteration) for iteration, at in ended.items()]
        rows = [*spans, *ends]
        self._spans.append({name: [getattr(row, name) for row in rows] for name in _SPAN_SCHEMA.names})

    def problems(self, admitted: Sequence[tuple[int, Problem]]) -> None:
        """Appends groups with their problems. Of a group that is admitted again after a checkpoint the last counts."""
        if not admitted:
            return
        problems = [problem for _, problem in admitted]
        columns = {
            "group_id": [group for group, _ in admitted],
            "row": [problem.row or None for problem in problems],
            "prompt": Ragged.from_rows([problem.prompt for problem in problems]),
            "answer": [problem.answer[:LONGEST_ANSWER] for problem in problems],
        }
        self._problems.append(columns)

    def held_out(self, responses: Mapping[str, Any]) -> None:
        """Appends responses to held-out problems, by column."""
        self._held_out.append({**responses, "answer": [answer[:LONGEST_ANSWER] for answer in responses["answer"]]})


def read_samples_so_far(folder: Path) -> pa.Table:
    """Samples as samples.parquet has them: by sample id, with the rows of problems and `custom/` columns in use."""
    table = _filled(read_growing(folder / SAMPLES)).sort_by("sample_id").combine_chunks()
    problems = read_problems_so_far(folder)
    places = pa.compute.index_in(table["group_id"], problems["group_id"])
    return table.add_column(before_custom(table), PROBLEM_ROW, problems["row"].take(places))


def _filled(table: pa.Table) -> pa.Table:
    """The table with those of its `custom/` columns that have a value, by name, behind all others."""
    custom = sorted(name for name in table.column_names if name.startswith(CUSTOM))
    filled = [name for name in custom if table.column(name).null_count < len(table)]
    return table.select([*(name for name in table.column_names if name not in custom), *filled])


def _so_far(path: Path, schema: pa.Schema) -> pa.Table:
    """All batches; none of a run that was begun before such tables were kept."""
    return read_growing(path) if path.exists() else schema.empty_table()


def read_held_out_so_far(folder: Path) -> pa.Table:
    """Responses to held-out problems, as eval_responses.parquet has them, version by version."""
    return _filled(_so_far(folder / HELD_OUT, HELD_OUT_SCHEMA))


def read_dropped_so_far(folder: Path) -> pa.Table:
    """Responses that were not trained, as dropped_responses.parquet has them."""
    return _so_far(folder / DROPPED, RESPONSES_SCHEMA)


def read_problems_so_far(folder: Path) -> pa.Table:
    """Problems as problems.parquet has them, by group."""
    groups = _so_far(folder / PROBLEMS, PROBLEMS_SCHEMA)
    _, newest = np.unique(groups["group_id"].to_numpy()[::-1], return_index=True)
    return groups.take(len(groups) - 1 - newest)


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
