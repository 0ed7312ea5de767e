"""The equivalence gate's own small jobs."""

import pytest

from harness.campaigns.cells import CellRequest, resolve_cell
from harness.campaigns.gate import gate_job
from harness.config.machine import Machine

CORES = Machine(cores=8, gpus=0, gpu_bytes=0)


@pytest.mark.parametrize(
    "settings",
    [
        ("algorithm.mini_batches=4", "algorithm.micro_batch_groups=4", "algorithm.epochs=2"),
        ("algorithm.mini_batches=3", "algorithm.batch_groups=24", "algorithm.micro_batch_groups=8"),
        ("algorithm.correction=m2po", "algorithm.micro_batch_groups=16"),
        ("algorithm.correction=decoupled",),
        ("algorithm.advantage=optimal_token_baseline",),
        ("algorithm.advantage=remax",),
    ],
)
def test_the_gate_of_any_algorithm_can_run(settings: tuple[str, ...]) -> None:
    cell = resolve_cell(CellRequest("one", ("backend=real", "cluster.kind=cpu", *settings)), CORES)
    for request in gate_job(cell, settings).cells:
        assert resolve_cell(request, CORES).config.algorithm.correction == cell.config.algorithm.correction
