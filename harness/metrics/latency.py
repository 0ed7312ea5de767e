"""Latency of requests: how long a sample waits for an engine, for its first token, and for each one after that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa

from harness.metrics.definitions import LATENCIES, LATENCY_PERCENTILES
from harness.metrics.samples import SampleRecord

TIMES = ("admitted_at", "started_at", "first_token_at", "finished_at", "response_tokens")
PERCENTILES = (50, 90, 99)


def latencies(times: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each of `LATENCIES`, seconds, float64 [k]; NaN where it is not known. times: float64 [k] by the names in `TIMES`,
    NaN where there is none."""
    admitted, started, first, finished, tokens = (times[name] for name in TIMES)
    between = np.where(tokens > 1, tokens - 1, np.nan)
    values = (started - admitted, first - started, (finished - first) / between, finished - started)
    return dict(zip(LATENCIES, values, strict=True))


def latency_metrics(records: Iterable[SampleRecord]) -> dict[str, float]:
    """latency/* of the trained samples among `records`, in seconds: what is known of them."""
    rows = [[getattr(one, name) for name in TIMES] for one in records if one.fate == "trained"]
    columns = np.array(rows, np.float64).reshape(-1, len(TIMES)).T  # None is NaN
    parts = latencies(dict(zip(TIMES, columns, strict=True)))
    return {
        f"latency/{part}_p{percentile}_s": value
        for part, values in parts.items()
        for percentile, value in percentiles(values, LATENCY_PERCENTILES).items()
    }


def percentiles(values: np.ndarray, which: Iterable[int] = PERCENTILES) -> dict[int, float]:
    """Percentiles of the values that are known, with linear interpolation; none where none is."""
    known = values[~np.isnan(values)]
    return {one: float(np.percentile(known, one)) for one in which} if known.size else {}


def latencies_by_engine(samples: Iterable[pa.Table]) -> dict[str, dict[str, np.ndarray]]:
    """`latencies` of the trained samples of runs, by the engine that finished them, engines in order. samples: of each
    run its samples.parquet."""
    table = pa.concat_tables([one.select(["engine", "fate", *TIMES]) for one in samples])
    trained = table.filter(pa.compute.equal(table["fate"], "trained"))
    times = {name: trained[name].cast(pa.float64()).to_numpy() for name in TIMES}
    numbers, which = np.unique(trained["engine"].cast(pa.int64()).to_numpy(), return_inverse=True)
    order, ends = np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1]
    parts = {part: np.split(values[order], ends) for part, values in latencies(times).items()}
    return {str(number): {part: of[place] for part, of in parts.items()} for place, number in enumerate(numbers)}
