"""From the figures of all rounds to a table: cadence, the peer's, their ratio, the aim, and whether it was reached."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.benchmarks.transfer_queue.cases import MICRO_BATCH, RATE, STORED_ROWS, Figures

PEER, SHM = "peer", "cadence:shm"
SAME = 0.1  # of a figure: what counts as noise where two figures should be equal

Round = Mapping[str, Mapping[str, Figures]]
"""Of one round: figures by contestant and case."""


@dataclass(frozen=True)
class Row:
    """One line. cadence, peer: a figure of each round (None where it was not measured); aim: of the ratio, or of
    cadence if the unit is ms."""

    title: str
    unit: str
    cadence: list[float]
    peer: list[float]
    more_is_better: bool = True
    least_ratio: float | None = None
    most_ms: float | None = None

    @property
    def ratios(self) -> list[float]:
        """Of each round: how many times better Cadence is."""
        pairs = zip(self.cadence, self.peer, strict=True) if self.peer else ()
        return [cadence / peer if self.more_is_better else peer / cadence for cadence, peer in pairs]

    @property
    def verdict(self) -> str:
        if self.least_ratio is not None and self.peer:
            return _verdict(statistics.median(self.ratios) >= self.least_ratio)
        if self.most_ms is not None:
            return _verdict(statistics.median(self.cadence) <= self.most_ms)
        return ""

    def cells(self) -> list[str]:
        aim = f">= {self.least_ratio:g}x" if self.least_ratio else f"<= {self.most_ms:g} ms" if self.most_ms else ""
        ratio = _spread(self.ratios, "x") if self.peer else ""
        return [f"{self.title}, {self.unit}", _spread(self.cadence), _spread(self.peer), ratio, aim, self.verdict]


def rows(rounds: Sequence[Round]) -> Iterator[Row]:
    """Those that were measured, in the order of the table."""
    measured = set(rounds[0][SHM]) if SHM in rounds[0] else set()

    def row(contestant: str, case: str, figure: str, title: str, unit: str, **aim: Any) -> Row:
        quantile = aim.pop("quantile", 0.5)
        cadence, peer = (_by_round(rounds, name, case, figure, quantile) for name in (contestant, PEER))
        return Row(title, unit, cadence, peer, more_is_better=figure == "samples_per_s", **aim)

    for case in [case for case in measured_order(rounds[0]) if case in measured]:
        kind, *numbers = case.split()
        if kind == "put":
            aim = {"least_ratio": 8.0} if int(numbers[0]) in (16, 64) else {}
            yield row(SHM, case, "samples_per_s", f"put, batches of {numbers[0]}", "samples/s", **aim)
        elif kind == "get":
            many = "one consumer" if numbers[1] == "1" else f"{numbers[1]} consumers"
            title = f"get, micro-batches of {numbers[0]}, {many}"
            yield row(SHM, case, "samples_per_s", title, "samples/s", least_ratio=8.0)
        elif kind == "stream":
            yield row(SHM, case, "samples_per_s", "four-task stream", "samples/s", least_ratio=20.0)
            for who in ("client", "service"):
                yield row(SHM, case, f"{who}_cpu_ms", f"four-task stream, processor time of {who}s", "ms/sample")
        elif kind == "stored":
            title = f"get of {MICRO_BATCH}, {int(numbers[0]):,} rows stored"
            yield row(SHM, case, "call_ms", title, "ms")
        else:
            title = "put -> in hand, one consumer" if kind == "delay" else "put -> actor_train, whole chain"
            most = 3.0 if kind == "delay" else 8.0
            for name, quantile, aim in (("p50", 0.5, {"most_ms": most}), ("p99", 0.99, {})):
                yield row(
                    SHM, case, "delay_ms", f"{title}, at {RATE:g} samples/s, {name}", "ms", quantile=quantile, **aim
                )
    if "get 64 1" in measured:
        yield row(SHM, "get 64 1", "clear_ms", "clear of a full partition", "ms")
    for name in [name for name in rounds[0] if name not in (SHM, PEER)]:
        aim = {"least_ratio": 5.0} if name == "cadence:ray" else {}
        for case in rounds[0][name]:
            title = f"{name.removeprefix('cadence:')} backend: {_plain(case)}"
            figure = "samples_per_s" if "samples_per_s" in rounds[0][name][case] else "delay_ms"
            unit = "samples/s" if figure == "samples_per_s" else "ms"
            yield row(name, case, figure, title, unit, **(aim if case == "stream" else {}))


def measured_order(first: Round) -> list[str]:
    return list(next(iter(first.values())))


def print_table(rounds: Sequence[Round], control: Mapping[str, Mapping[int, list[float]]]) -> None:
    table = Table("", "cadence", "peer", "ratio", "aim", "", title="TransferQueue: median (lowest to highest round)")
    for row in rows(rounds):
        table.add_row(*row.cells())
    for verb, by_rows in control.items():
        table.add_row(*control_cells(verb, by_rows))
    Console(width=180 if not Console().is_terminal else None).print(table)


def control_cells(verb: str, by_rows: Mapping[int, list[float]]) -> list[str]:
    """The control plane alone: with as many rows stored as there can be, against few."""
    few, many = by_rows[STORED_ROWS[0]], by_rows[STORED_ROWS[-1]]
    same = abs(statistics.median(many) / statistics.median(few) - 1) <= SAME
    title = f"control plane, one {verb} of {MICRO_BATCH}, us: {STORED_ROWS[0]:,} | {STORED_ROWS[-1]:,} rows stored"
    return [title, f"{_spread(few)} | {_spread(many)}", "", "", "equal", _verdict(same)]


def _by_round(rounds: Sequence[Round], name: str, case: str, figure: str, quantile: float) -> list[float]:
    found = [one[name][case][figure] for one in rounds if case in one.get(name, {})]
    return [float(np.quantile(values, quantile)) for values in found]


def _plain(case: str) -> str:
    kind, *numbers = case.split()
    return {"put": "put, batches of {}", "get": "get, micro-batches of {}, consumers: {}"}.get(kind, case).format(
        *numbers
    )


def _verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def _spread(values: Sequence[float], unit: str = "") -> str:
    if not values:
        return "-"
    middle = f"{_number(statistics.median(values))}{unit}"
    return middle if len(values) == 1 else f"{middle} ({_number(min(values))} to {_number(max(values))})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
