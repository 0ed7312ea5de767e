"""Texts of the page and its Markdown twin: headings, captions, checks, and how the runs were made."""

import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.comparison.comparison import Comparison
from harness.comparison.correction_matrix import has_matrix, row_of
from harness.comparison.curves import LEARNING, PerformanceProfile, StalenessHistogram
from harness.comparison.fairness import run_key, setting_text
from harness.comparison.runs import Cell
from harness.metrics.formatting import number, plural
from harness.metrics.manifest import HOW_TIMED
from harness.report.plots import share_label

SAMPLE_KINDS = {
    "worst": "lowest rewards",
    "best": "highest rewards",
    "dropped": "not trained",
    "held": "held out, lowest rewards",
}


def results_text(comparison: Comparison) -> str:
    """Words for what the figures are, and when a difference is significant."""
    if comparison.of_one_seed:
        return (
            "Of one seed, and what each cell is against the baseline: nothing has an interval, and nothing is judged."
        )
    return (
        "Means over seeds, 95 % intervals below them, and what each cell is against the baseline, paired by seed. A "
        "difference is significant only where its interval and Holm's correction for several cells and measures both "
        "exclude no effect."
    )


def _asked(comparison: Comparison) -> str:
    """Words for what differs on purpose; of a matrix not every setting that its corrections are made of."""
    if not has_matrix(comparison):
        return " or ".join(comparison.axes)
    return "correction" if len({row_of(cell) for cell in comparison.cells}) == 1 else "schedule or correction"


class Headings:
    """The page's names of the comparison."""

    def __init__(self, comparison: Comparison) -> None:
        first = comparison.cells[0].runs[0]
        identity, config = first.identity, first.config
        self.how = "simulated" if comparison.simulated else identity.backend
        self.how_word = HOW_TIMED[identity.backend]
        what = _asked(comparison)
        cells = comparison.cells
        names = ", ".join(cell.label for cell in cells)
        self.on = f"{identity.model}, task {config['task']['name']}"
        self.heading = f"Which {what}? {plural(len(cells), 'cell')} on {self.on}"
        if len(cells) == 1:
            self.heading = f"{cells[0].label} on {self.on}"
        self.title = f"{names} · {identity.model} · {self.how_word}"
        self.curves_title = "Learning" if any(c.key in LEARNING for c in comparison.curves) else "Response length"
        seeds = sorted({seed for cell in cells for seed in cell.seeds})
        devices = "simulated devices" if comparison.simulated else "devices"
        algorithm = config["algorithm"]
        self.facts = {
            "experiment": identity.experiment,
            "seeds": ", ".join(map(str, seeds)),
            "iterations": f"{len(first.metrics):,}",
            "samples per run": f"{first.metrics[-1]['samples']:,}",
            "batch": f"{algorithm['batch_groups']:,} prompts x {algorithm['group_size']:,} responses",
            devices: _devices(config, comparison.simulated),
            "engine": "simulated" if identity.backend != "real" else identity.engine,
            "times are": self.how_word,
        }
        if len(cells) > 1:
            self.facts["baseline"] = cells[comparison.baseline].label
        if comparison.left_out:
            self.facts["left out"] = ", ".join(f"{label} ({why})" for label, why in comparison.left_out.items())


def _devices(config: Mapping[str, Any], simulated: bool) -> str:
    """How many, and of which type where a data sheet says what they cost."""
    by_data_sheet = simulated and config["cost"]["kind"] == "roofline"
    return f"{config['cluster']['devices']:,}" + (f" x {config['device']['name']}" if by_data_sheet else "")


def measures_caption(comparison: Comparison) -> str:
    """How to read the tables of measures."""
    if comparison.of_one_seed:
        return "Of one seed: there are no intervals."
    text = "Dots are seeds, the band is the 95 % interval of their mean (the line)."
    if len(comparison.cells) > 1:
        base = comparison.cells[comparison.baseline].label
        text += (
            f" “Against the baseline” is the mean ratio to, or difference from, {base}, paired by seed, with its "
            "interval. P(better) is the probability that a run is better than one of the baseline."
        )
    return text


def histogram_text(staleness: StalenessHistogram) -> str:
    """The histogram in words."""
    shares, names = staleness.grouped()
    lags = ", ".join(
        f"lag {name}: {share_label(share)}" for share, name in zip(shares, names, strict=True) if share > 0
    )
    return f"Share of trained samples by worst lag: {lags}"


def lag_text(cell: Cell) -> str:
    """A sentence on where the lag grew, and what was dropped for it."""
    flight, queue = (_over_iterations(cell, f"staleness/{part}_mean") for part in ("in_flight", "in_queue"))
    dropped = sum(run.ledger["dropped_stale"] for run in cell.runs)
    admitted = sum(run.ledger["admitted"] for run in cell.runs)
    drops = f"{dropped:,} of {admitted:,} samples dropped as stale" if dropped else "no sample dropped as stale"
    if flight + queue == 0:
        return f"No sample has any lag; {drops}."
    return (
        f"Mean worst lag {number(flight + queue, 2)} iterations: {number(flight, 2)} grew in flight, "
        f"{number(queue, 2)} in the queue; {drops}."
    )


def _over_iterations(cell: Cell, key: str) -> float:
    return float(np.mean([iteration[key] for run in cell.runs for iteration in run.metrics]))


def profile_text(profile: PerformanceProfile) -> str:
    """The profile in words: the scores that all, half and none of the seeds end above."""
    parts = []
    for share, name in ((1.0, "all"), (0.5, "half"), (1e-9, "some")):
        above = profile.taus[profile.shares >= share]
        parts.append(f"{name} of the seeds end above {above[-1]:.3g}" if above.size else f"not {name} above 0")
    return ", ".join(parts)


def checks(comparison: Comparison) -> list[tuple[str, bool | None, list[str]]]:
    """(name, whether it passed, lines) of the equivalence gate and the ledgers; None where it has not run."""
    gate, ledgers = comparison.gate, comparison.conservation
    not_run = "no real run is in this comparison" if comparison.simulated else "the gate has not run for these runs"
    return [
        ("Equivalence gate", gate.passed if gate else None, gate.summary() if gate else [not_run]),
        ("Ledgers", ledgers.passed, [ledgers.summary(), *ledgers.problems]),
    ]


def equal_settings(comparison: Comparison) -> dict[str, str]:
    """The fairness key, which all cells share, by path of setting."""
    cell = comparison.cells[0]
    key = run_key(cell.runs[0], cell.seeds, comparison.axes)
    return {name: setting_text(value) for name, value in key.items()}


def made_with(comparison: Comparison) -> dict[str, list[str]]:
    """Facts of the manifests, each with every value that occurs: code, Python, packages, machine."""
    manifests = [run.manifest for cell in comparison.cells for run in cell.runs]
    facts: dict[str, list[Any]] = {
        "code": [_commit(manifest["git"]) for manifest in manifests],
        "python": [manifest["python"] for manifest in manifests],
        "processor": [_processor(manifest["hardware"]) for manifest in manifests],
        "accelerators": [", ".join(manifest["hardware"]["gpus"]) or "none" for manifest in manifests],
        "platform": [manifest["hardware"]["platform"] for manifest in manifests],
    }
    for package in sorted({name for manifest in manifests for name in manifest["packages"]}):
        versions = [manifest["packages"].get(package) for manifest in manifests]
        if any(versions):
            facts[package] = [version or "not installed" for version in versions]
    return {name: list(dict.fromkeys(values)) for name, values in facts.items()}


def commands(comparison: Comparison) -> list[tuple[str, int, str, str, str]]:
    """(cell, seed, when it began, its folder, its command) of every run."""
    return [
        (
            cell.label,
            run.identity.seed,
            run.manifest["started_at"],
            "/".join(run.path.parts[-3:]),
            _command(run.manifest["command"]),
        )
        for cell in comparison.cells
        for run in cell.runs
    ]


def _command(words: list[str]) -> str:
    """The command as it is typed."""
    program = ["python", "-m", "harness"] if words[0] == "__main__.py" else words[:1]
    return shlex.join([*program, *words[1:]])


def _commit(git: Mapping[str, Any] | None) -> str:
    if git is None:
        return "not tracked by git"
    return f"{git['commit'][:12]}{', with changes' if git['dirty'] else ''}"


def _processor(hardware: Mapping[str, Any]) -> str:
    memory = hardware["memory_bytes"] / 2**30
    return f"{hardware['cpu']}, {hardware['cores']} cores, {memory:.0f} GiB"
