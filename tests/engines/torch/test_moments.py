"""Moments that rest on the host: no bit of training knows, and between steps the device holds none."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from engines.torch.fsdp import FSDPEngine
from harness.config import OptimizerOffload, TrainingConfig
from tests.support.fsdp_samples import FREE, SAMPLES, SMALL, World, computed, gradients, save, train, weights
from tests.support.processes import run_in_processes

ADAMW = replace(FREE, betas=(0.9, 0.95), weight_decay=0.1, grad_clip=0.5)
ODD = replace(SMALL, ff=66, vocabulary=50)
OFFLOADS: list[OptimizerOffload] = ["between_phases", "always"]


def steps(engine: FSDPEngine, rank: int) -> list[torch.Tensor]:
    """Weights and moments after three steps."""
    for first in (0, 4, 8):
        train(engine, [range(first + 2 * rank, first + 2 * rank + 2)])
    return [*weights(engine).values(), *gradients(engine).values()]


def of_a_rank(rank: int, ranks: int, tensor_parallel: int, port: int, folder: Path) -> bool:
    store, told = TCPStore("127.0.0.1", port, ranks, False, wait_for_workers=False), []
    config = SMALL if tensor_parallel > 1 else ODD  # which ranks share unevenly
    with World(store, rank, ranks, tensor_parallel) as world:

        def engine(offload: OptimizerOffload) -> FSDPEngine:
            return world.engine(
                ADAMW, TrainingConfig(optimizer_offload=offload, tensor_parallel=tensor_parallel), config
            )

        there = steps(engine("none"), rank // tensor_parallel)
        for offload in OFFLOADS:
            offloading = engine(offload)
            told.append(all(map(torch.equal, there, steps(offloading, rank // tensor_parallel))))
            save(offloading, folder / offload)
            resumed = engine(offload)
            computed(resumed.load(folder / offload))
            norms = [train(one, [[rank // tensor_parallel]]) for one in (offloading, resumed)]
            told.append(norms[0] == norms[1])
            told += map(torch.equal, weights(offloading).values(), weights(resumed).values())
    return all(told)


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(1, 1), (2, 1), (4, 2)])
def test_moments_that_rest_on_the_host_change_no_bit(ranks: int, tensor_parallel: int, tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, ranks, True, wait_for_workers=False)
    arguments = [(rank, ranks, tensor_parallel, store.port, tmp_path) for rank in range(ranks)]
    assert all(run_in_processes(of_a_rank, arguments, timeout_s=200))


@pytest.mark.parametrize("offload", ["none", *OFFLOADS])
def test_between_steps_no_moments_are_on_the_device_and_in_one_no_more_than_asked(
    offload: OptimizerOffload, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World() as world:
        engine = world.engine(ADAMW, TrainingConfig(optimizer_offload=offload))
        train(engine, [range(SAMPLES)])
        here, most = moments_of(engine), []
        step = torch.optim.AdamW.step
        monkeypatch.setattr(torch.optim.AdamW, "step", lambda *args: (step(*args), most.append(moments_of(engine)))[0])
        train(engine, [range(SAMPLES)])
    parameters = list(engine.masters.values())
    everything, largest = 2 * sum(p.numel() for p in parameters), 2 * max(p.numel() for p in parameters)
    assert here == (everything if offload == "none" else 0)
    assert max(most) == (largest if offload == "always" else everything)


def moments_of(engine: FSDPEngine) -> int:
    """Numbers in the moments that the optimizer holds."""
    states = engine._optimizer.state.values()
    return sum(state[name].numel() for state in states for name in ("exp_avg", "exp_avg_sq") if name in state)
