"""The simulated table of transfers by host_staged: training rank 0 sends all weights, or every rank its share."""

from collections.abc import Callable
from pathlib import Path

from harness.config import RooflineConfig
from harness.config.compose import DOCS, compose_job
from harness.cost_model.transfer import staged_parts
from harness.metrics.atomic_files import write_text
from harness.metrics.formatting import markdown_table

PAGE = DOCS.parent / "results/reference/simulated/transfers.md"
INTRO = """\
# Weights by host_staged, on paper

Written by `cadence table --of transfers`; nothing here was measured. Bytes in bfloat16 on 8, 64 and 1,024 H100, at the
shares of `experiments/cost/roofline.yaml`. What the columns mean:
[weight_sync.md](../../../docs/weight_sync.md#on-paper).

"""
BYTES = 2  # bfloat16
JOBS = (("7B", 7.62e9, 4, 4), ("72B", 72.7e9, 32, 4), ("1T", 1e12, 512, 16))
"""Model, parameters, training ranks, engines: on 8, 64 and 1,024 devices, half of which train."""

_COLUMNS = (
    *("model", "GB", "training ranks", "engines", "the trainer waits, s: for rank 0 alone", "for all ranks"),
    *("on the way, s: from rank 0 alone", "from all ranks"),
)


def table() -> str:
    """The table on H100s: experiments/device/h100.yaml, experiments/cost/roofline.yaml."""
    config = compose_job(["device=h100", "cost=roofline"])
    assert isinstance(config.cost, RooflineConfig)
    rows = []
    for name, parameters, ranks, engines in JOBS:
        weights = BYTES * parameters
        alone, every = (
            staged_parts(weights, ranks, engines, senders, config.device, config.cost) for senders in (1, ranks)
        )
        seconds = (alone.waiting_s, every.waiting_s, alone.background_s, every.background_s)
        rows.append([name, f"{weights / 1e9:,.0f}", f"{ranks}", f"{engines}", *map(_short, seconds)])
    return markdown_table(_COLUMNS, rows)


def _short(seconds: float) -> str:
    """Two digits."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2f}"


def write_page(progress: Callable[[str], None]) -> Path:
    """Writes PAGE."""
    write_text(PAGE, f"{INTRO}{table()}\n")
    return PAGE
