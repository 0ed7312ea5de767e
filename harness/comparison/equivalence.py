"""Whether two runs are the same to the bit (docs/equivalence.md), and what a gate made of such pairs found."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from harness.config.files import MIB, read_json
from harness.metrics.done import CRITIC
from harness.metrics.parquet import read_as
from harness.metrics.run_files import load_metrics, load_samples, weight_files
from harness.metrics.samples import RESPONSES_SCHEMA
from harness.metrics.schemas import reading

GATE = "gate.json"  # file of the gate's result in an experiment's folder
GATE_RUNS = "-gate"  # ends the name of the experiment that the gate's own runs are in, beside the one it is for
LEARNT = ("reward/", "filter/", "response_length/", "policy/", "critic/", "staleness/", "ledger/")
"""Metrics that say nothing of time."""

_SAMPLES = ["sample_id", "group_id", "response_tokens", "reward", "exact_match", "lag_worst", "version_first"]


def differences(one: Path, other: Path) -> list[str]:
    """Differences between the runs in two folders, time aside; empty where they are equal to the bit. Compared are
    samples with their rewards and lags (`timeless`), tokens and log-probs of every response, what was learnt in each
    iteration, and the final weights, the critic's as well."""
    a, b = (read_as(folder / "responses.parquet", RESPONSES_SCHEMA) for folder in (one, other))
    samples = [timeless(load_samples(folder)).select(_SAMPLES) for folder in (one, other)]
    equal = {
        "samples, rewards and lags": samples[0].equals(samples[1]),
        "tokens of responses": a.column("response").equals(b.column("response")),
        "log-probs of responses": a.column("log_probs").equals(b.column("log_probs")),
        "loss masks of responses": a.column("loss_mask").equals(b.column("loss_mask")),
        "metrics of what was learnt": _learnt(one) == _learnt(other),
        "final weights": _weights(one) == _weights(other),
        "final critic": _contents(weight_files(one, CRITIC)) == _contents(weight_files(other, CRITIC)),
    }
    return [what for what, same in equal.items() if not same]


def timeless(samples: pa.Table) -> pa.Table:
    """The samples without rewards of spares and stale ones, which may be dropped before or after they are judged."""
    in_time = pc.invert(pc.is_in(samples["fate"], value_set=pa.array(["dropped_spare", "dropped_stale"])))
    for name in ("reward", "exact_match"):
        place = samples.schema.get_field_index(name)
        samples = samples.set_column(place, name, pc.if_else(in_time, samples[name], None))
    return samples


def _learnt(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in metrics.items() if name.startswith(LEARNT)} for metrics in load_metrics(folder)
    ]


def _weights(folder: Path) -> list[tuple[str, bytes]]:
    """Raises FileNotFoundError where the run kept none: then nothing could be said."""
    weights = _contents(weight_files(folder))
    if not weights:
        raise FileNotFoundError(f"{folder} holds no final weights; run it with save_weights=true")
    return weights


def _contents(files: Iterable[Path]) -> list[tuple[str, bytes]]:
    return [(file.name, file.read_bytes()) for file in files]


@dataclass(frozen=True)
class GatePair:
    """A schedule that may not lag, held against the synchronous one. path: of its run, in the results folder;
    differing: what of it was not equal."""

    name: str
    path: str
    differing: tuple[str, ...]


@dataclass(frozen=True)
class Gate:
    """The result of the equivalence gate. made_from: settings and digest of the sources, by which it is found again."""

    baseline: str
    baseline_path: str
    pairs: tuple[GatePair, ...]
    samples: int
    iterations: int
    model: str
    note: str
    failure: str
    made_from: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether it ran to its end and every pair is equal."""
        return not self.failure and not any(pair.differing for pair in self.pairs)

    def summary(self) -> list[str]:
        """The result in lines: the verdict, then whatever explains it."""
        names = " and ".join(pair.name for pair in self.pairs)
        job = f"{self.iterations} iterations and {self.samples} samples of {self.model} on the real backend"
        if self.failure:
            return [f"equivalence gate FAILED: {self.failure}"]
        if self.passed:
            lines = [
                f"equivalence gate passed: {names} equal {self.baseline} bit for bit in tokens, log-probs, rewards "
                f"and weights ({job})"
            ]
        else:
            lines = [f"equivalence gate FAILED ({job})"]
            lines += [
                f"  {pair.name} differs from {self.baseline} in {', '.join(pair.differing)}: {pair.path}"
                for pair in self.pairs
                if pair.differing
            ]
        return [*lines, self.note] if self.note else lines


def as_json(gate: Gate) -> str:
    """gate.json."""
    return json.dumps({"passed": gate.passed, **asdict(gate)}, indent=1) + "\n"


def read_gate(folder: Path) -> Gate | None:
    """The gate's result in the folder of an experiment; None where it has not run."""
    path = folder / GATE
    if not path.exists():
        return None
    with reading(path, "take it away: `cadence compare` runs the gate again"):
        return msgspec.convert(read_json(path, MIB), Gate)
