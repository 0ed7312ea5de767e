"""responses.parquet: what every trained sample said, and how likely its engine found it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.metrics.safe_files import replacing

SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("response", pa.list_(pa.int32()), nullable=False),
        pa.field("log_probs", pa.list_(pa.float32()), nullable=False),
    ]
)


def write_responses(
    path: Path, samples: Sequence[int], responses: Sequence[np.ndarray], log_probs: Sequence[np.ndarray]
) -> None:
    """Write one row per sample, by sample id: its tokens and the log-probability of each when it was sampled."""
    order = np.argsort(np.asarray(samples, dtype=np.int64))
    table = pa.Table.from_pydict(
        {
            "sample_id": [samples[i] for i in order],
            "response": [responses[i].astype(np.int32) for i in order],
            "log_probs": [log_probs[i] for i in order],
        },
        schema=SCHEMA,
    )
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def read_responses(path: Path) -> pa.Table:
    """What `write_responses` wrote."""
    return pq.read_table(path, schema=SCHEMA)
