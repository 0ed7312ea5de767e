"""Parquet files of runs: written whole or not at all, and read within bounds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harness.config.files import refuse_special
from harness.metrics.atomic_files import replacing

_FREE_BYTES, _EXPANSION = 1 << 30, 64
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}
_GROUP_ROWS, _GROUP_BYTES = 1 << 20, 256 << 20


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet, atomically."""
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def write_tokens(path: Path, table: pa.Table) -> None:
    """Write a table with lists of tokens as Parquet, ordered by its first column, copying a part of it at a time."""
    order = np.argsort(table[0].to_numpy(), kind="stable")
    rows = max(1, min(_GROUP_ROWS, _GROUP_BYTES * len(order) // max(1, table.nbytes)))
    with replacing(path) as temporary, pq.ParquetWriter(temporary, table.schema) as writer:
        for start in range(0, len(order), rows):
            writer.write_table(table.take(order[start : start + rows]).combine_chunks())


def read_columns(path: Path, columns: Sequence[str] | None = None, rows: pc.Expression | None = None) -> pa.Table:
    """Columns of a Parquet file; rows: which. Raises ValueError for one that is no file, and for one that would be over
    1 GiB and 64 times as large in memory as on the disk, which no run writes: equal values take no room there, so that
    a few bytes may stand for as many as fit no memory. That is counted before any value is written out."""
    refuse_special(path)
    most = max(_FREE_BYTES, _EXPANSION * path.stat().st_size)
    told = _metadata_of(path)
    groups = [told.row_group(number) for number in range(told.num_row_groups)]
    chunks = [group.column(place) for group in groups for place in range(group.num_columns)]
    found = {chunk.path_in_schema: chunk.physical_type for chunk in chunks}
    texts = [name for name, kind in found.items() if kind == "BYTE_ARRAY" and "." not in name]
    if strange := [name for name, kind in found.items() if kind not in _WIDTHS and name not in texts]:
        raise ValueError(f"its column {strange[0]} holds neither numbers nor texts, and no run writes such")
    size = sum(chunk.num_values * _WIDTHS.get(chunk.physical_type, 0) for chunk in chunks)
    if size <= most:
        table = pq.read_table(path, columns=columns, filters=rows, read_dictionary=texts)
        short = [chunk for name in table.column_names if name in texts for chunk in table.column(name).chunks]
        # Of a text that stands in many rows there is one so far.
        size += sum(pc.sum(pc.binary_length(each.dictionary).take(each.indices)).as_py() or 0 for each in short)
    if size > most:
        raise ValueError(f"it would take {size:,} bytes of memory, more than any run writes into so small a file")
    types = told.schema.to_arrow_schema()
    return table.cast(pa.schema([types.field(name) for name in table.column_names], table.schema.metadata))


def _metadata_of(path: Path) -> pq.FileMetaData:
    """A Parquet file's metadata. OSError or ValueError where they contradict themselves: asked about such chunks,
    pyarrow ends the process, but not where it reads them. So a row is read; no lists, as one may fill memory."""
    try:
        with pq.ParquetFile(path) as file:
            leaves = [file.metadata.schema.column(place) for place in range(file.metadata.num_columns)]
            if flat := [leaf.path for leaf in leaves if leaf.max_repetition_level == 0]:
                for group in range(file.metadata.num_row_groups):
                    next(file.iter_batches(batch_size=1, row_groups=[group], columns=flat), None)
            return file.metadata
    except pa.ArrowNotImplementedError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_as(path: Path, expected: pa.Schema, rows: pc.Expression | None = None) -> pa.Table:
    """A Parquet file as a table of these columns, then whatever others it has; rows: which. A column that may be null
    and is not there reads as null, so that older runs stay readable. Raises ValueError where another one is missing, or
    one has another type."""
    found = read_columns(path, rows=rows)
    columns = []
    for field_ in expected:
        if field_.name not in found.column_names and field_.nullable:
            columns.append(pa.nulls(found.num_rows, field_.type))
            continue
        if field_.name not in found.column_names or found.schema.field(field_.name).type != field_.type:
            raise ValueError(
                f"{path} cannot be read: column {field_.name} ({field_.type}) is missing or of another type; it has"
                f"\n{found.schema.remove_metadata()}"
            )
        columns.append(found.column(field_.name))
        if columns[-1].null_count and not field_.nullable:
            raise ValueError(f"{path} cannot be read: column {field_.name} has no value in some rows")
    others = [name for name in found.column_names if name not in expected.names]
    schema = pa.schema([*expected, *(found.schema.field(name) for name in others)])
    return pa.table([*columns, *(found.column(name) for name in others)], schema=schema)
