"""Whether every sample and token of finished runs is accounted for: ledger, samples, responses, metrics agree."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from harness.comparison.runs import Run
from harness.comparison.selection import sampled_tokens
from harness.config.job import trained_in_iteration
from harness.metrics.parquet import read_columns
from harness.metrics.samples import FATES
from harness.metrics.schemas import reading

_RESPONSES = "responses.parquet"


@dataclass(frozen=True)
class Conservation:
    """The result of checking some runs. tokens: that were generated, as far as runs counted them; problems: one line
    each, with the run's folder; empty where all close."""

    runs: int
    admitted: int
    trained: int
    tokens: int
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every sample is accounted for."""
        return not self.problems

    def summary(self) -> str:
        """The result in one line."""
        if self.problems:
            return f"conservation FAILED: {len(self.problems)} contradictions in the ledgers of {self.runs} runs"
        return (
            f"conservation passed: {self.runs} ledgers close ({self.admitted:,} samples admitted, {self.trained:,} "
            f"trained; {self.tokens:,} tokens generated) and agree with samples, responses and metrics"
        )


def check_conservation(runs: Iterable[Run]) -> Conservation:
    """Hold the files of every run against each other."""
    listed = list(runs)
    return Conservation(
        runs=len(listed),
        admitted=sum(run.ledger["admitted"] for run in listed),
        trained=sum(run.ledger["trained"] for run in listed),
        tokens=sum(run.ledger.get("tokens", {}).get("generated", 0) for run in listed),
        problems=tuple(f"{run.path}: {problem}" for run in listed for problem in _problems(run)),
    )


def _problems(run: Run) -> Iterator[str]:
    yield from _of_ledger(run)
    yield from _of_samples(run)
    yield from _of_metrics(run)
    yield from _of_tokens(run)


def _of_ledger(run: Run) -> Iterator[str]:
    ledger = run.ledger
    accounted = sum(ledger.get(fate, 0) for fate in FATES)
    if accounted != ledger["admitted"]:
        yield f"ledger.json admitted {ledger['admitted']} samples and accounts for {accounted}"
    for fate, ids in _named(ledger).items():
        if len(set(ids)) != ledger.get(fate, 0):
            yield f"ledger.json counts {ledger.get(fate, 0)} {fate} and names {len(set(ids))}"
    by_iteration = ledger["trained_by_iteration"]
    if sum(by_iteration.values()) != ledger["trained"]:
        yield f"ledger.json counts {ledger['trained']} trained, and {sum(by_iteration.values())} over its iterations"
    batch = trained_in_iteration(run.config["algorithm"])
    iterations = run.config["iterations"]
    lacking = (str(i) for i in range(iterations) if by_iteration.get(str(i)) != batch)  # it may claim a billion
    off = next(lacking, None)
    if off is not None:
        yield f"iteration {off} trained {by_iteration.get(off, 0)} samples, its batch has {batch}"
    elif len(by_iteration) > iterations:
        yield f"ledger.json has {len(by_iteration)} iterations, config.yaml {iterations}"


def _named(ledger: Mapping[str, Any]) -> dict[str, list[int]]:
    """Samples that ledger.json names, by their fate: those that were not trained."""
    dropped = {f"dropped_{reason}": ids for reason, ids in ledger["dropped_ids"].items()}
    return {"in_flight": ledger["in_flight_ids"], **dropped}


def _of_samples(run: Run) -> Iterator[str]:
    ledger, samples = run.ledger, run.samples.select(["sample_id", "fate", "trained_iteration"]).to_pydict()
    ids = samples["sample_id"]
    if len(ids) != ledger["admitted"] or len(set(ids)) != len(ids):
        yield (
            f"samples.parquet has {len(ids)} rows of {len(set(ids))} samples, the ledger admitted {ledger['admitted']}"
        )
    by_fate: dict[str, set[int]] = {fate: set() for fate in FATES}
    for sample, fate in zip(ids, samples["fate"], strict=True):
        by_fate[fate].add(sample)
    for fate, named in _named(ledger).items():
        if by_fate[fate] != set(named):
            yield f"samples.parquet and the ledger differ in {len(by_fate[fate] ^ set(named))} samples {fate}"
    by_iteration = Counter(str(iteration) for iteration in samples["trained_iteration"] if iteration is not None)
    if dict(by_iteration) != ledger["trained_by_iteration"]:
        yield "samples.parquet and the ledger differ in how many samples each iteration trained"
    if (run.path / _RESPONSES).exists():
        with reading(run.path / _RESPONSES):
            answered = set(read_columns(run.path / _RESPONSES, ["sample_id"]).column(0).to_pylist())
        if answered != by_fate["trained"]:
            yield f"{_RESPONSES} and samples.parquet differ in {len(answered ^ by_fate['trained'])} trained samples"


def _of_metrics(run: Run) -> Iterator[str]:
    """Counts of the ledger after each iteration close, and end where ledger.json ends."""
    for metrics in run.metrics:
        accounted = sum(metrics.get(f"ledger/{fate}", 0) for fate in FATES)
        if accounted != metrics["ledger/admitted"] or metrics["samples"] != metrics["ledger/trained"]:
            yield f"metrics.jsonl does not close in iteration {metrics['iteration']}"
            return
    last = run.metrics[-1]
    for name in FATES:
        counted, listed = last.get(f"ledger/{name}", 0), run.ledger.get(name, 0)
        if name != "in_flight" and (counted > listed or (name == "trained" and last["samples"] != listed)):
            yield f"metrics.jsonl ends with {counted:.0f} {name}, the ledger with {listed}"


def _of_tokens(run: Run) -> Iterator[str]:
    """Tokens that engines say they generated are in samples, each once, or were thrown away as one began again; after
    each iteration no less was generated than trained and discarded. Of a run whose engines are known to its end."""
    told, sampled = run.ledger.get("tokens", {}), sampled_tokens(run.samples)
    if not told:
        return
    accounted = sum(sampled.values()) + told["begun_again"]
    if told["generated"] != accounted:
        yield f"ledger.json has {told['generated']} tokens generated, samples.parquet and what began again {accounted}"
    by_fate = {fate: told[fate] for fate in FATES if told.get(fate)}
    if by_fate and by_fate != {fate: count for fate, count in sampled.items() if count}:
        yield f"ledger.json has the tokens {by_fate}, samples.parquet {sampled}"
    iterations, tokens = (run.samples[name].to_numpy() for name in ("trained_iteration", "response_tokens"))
    consumed = np.cumsum(np.bincount(iterations[iterations >= 0].astype(int), tokens[iterations >= 0]))
    counted = [metrics for metrics in run.metrics if "token_ledger/generated" in metrics]
    for metrics in counted:
        if metrics["token_ledger/consumed"] != consumed[metrics["iteration"]] or metrics["token_ledger/in_flight"] < 0:
            yield f"metrics.jsonl has other tokens than samples.parquet in iteration {metrics['iteration']}"
            return
    for name in ("token_ledger/generated", "token_ledger/discarded"):
        after = [*(metrics[name] for metrics in counted), told["generated"]]
        if any(later < sooner for sooner, later in pairwise(after)):
            yield f"metrics.jsonl has a {name} that falls, or ends above all that was generated"
