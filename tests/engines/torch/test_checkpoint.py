"""What training has saved is read by slices: by other numbers of ranks than wrote it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import Store

from engines.torch.checkpoint import SavedState, TrainingState, load_training, training_state
from engines.torch.fsdp import FSDPEngine
from harness.config import OptimizerOffload, TrainingConfig
from tests.support.fsdp_samples import FREE, SAMPLES, SMALL, World, computed, gradients, save, train, weights
from tests.support.processes import run_ranks

CUTS = (slice(0, 3), slice(3, 5))
"""Of five rows, what each of two ranks has."""


def trained(steps: int, seed: int = 0) -> tuple[nn.Linear, torch.optim.AdamW, torch.Tensor]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, torch.tensor(steps)


def whole(model: nn.Linear, optimizer: torch.optim.AdamW, step: torch.Tensor) -> TrainingState:
    return training_state(dict(model.named_parameters()), optimizer, step, rank=0, ranks=1)


def halves(state: TrainingState) -> list[TrainingState]:
    """As two ranks have it that share the rows; what has none is on both."""
    found = []
    for rank, cut in enumerate(CUTS):
        tensors, places = {}, {}
        for name, tensor in state.tensors.items():
            place = state.places[name]
            if tensor.ndim and not name.startswith("random"):
                tensors[name] = tensor[cut].contiguous()
                places[name] = type(place)(place.shape, (cut.start, *place.start[1:]))
            else:
                name = f"random.{rank}" if name.startswith("random") else name
                tensors[name], places[name] = tensor.clone(), place
        found.append(TrainingState(rank, len(CUTS), tensors, places))
    return found


def test_one_rank_goes_on_bit_for_bit_from_what_two_have_saved(tmp_path: Path) -> None:
    state = whole(*trained(3))
    for half in halves(state):
        half.write(tmp_path)
    model, optimizer, step = trained(0, seed=1)
    load_training(tmp_path, dict(model.named_parameters()), optimizer, step, rank=0, ranks=1)
    assert step == 3
    read = whole(model, optimizer, step)
    assert read.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(read.tensors[name], state.tensors[name]) for name in state.tensors if "random" not in name)


def test_two_ranks_read_their_parts_of_what_one_has_saved(tmp_path: Path) -> None:
    state = whole(*trained(3))
    state.write(tmp_path)
    with SavedState(tmp_path) as saved:
        for half in halves(state):
            for name, tensor in half.tensors.items():
                if "random" not in name:
                    place, into = half.places[name], torch.full_like(tensor, -1)
                    ends = zip(place.start, tensor.shape, strict=True)
                    saved.read(name, place.shape, tuple(slice(at, at + size) for at, size in ends), into)
                    assert torch.equal(into, tensor), name


def test_a_part_that_no_file_has_is_named(tmp_path: Path) -> None:
    for half in halves(whole(*trained(1))):
        tensors = {name: tensor for name, tensor in half.tensors.items() if half.rank == 0 or name != "weight.weight"}
        TrainingState(half.rank, half.ranks, tensors, {name: half.places[name] for name in tensors}).write(tmp_path)
    model, optimizer, step = trained(0)
    with pytest.raises(ValueError, match="lacks a part of weight.weight: 12 of 20 numbers are there"):
        load_training(tmp_path, dict(model.named_parameters()), optimizer, step, rank=0, ranks=1)


ADAMW = replace(FREE, betas=(0.9, 0.95), weight_decay=0.1, grad_clip=0.5)
ODD = replace(SMALL, ff=66, vocabulary=50)
OFFLOADS: list[OptimizerOffload] = ["between_phases", "always"]


def steps(engine: FSDPEngine, rank: int) -> list[torch.Tensor]:
    """Weights and moments after three steps."""
    for first in (0, 4, 8):
        train(engine, [range(first + 2 * rank, first + 2 * rank + 2)])
    return [*weights(engine).values(), *gradients(engine).values()]


def of_a_rank(store: Store, rank: int, ranks: int, tensor_parallel: int, folder: Path) -> bool:
    told, config = [], SMALL if tensor_parallel > 1 else ODD  # which ranks share unevenly
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


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(1, 1), (2, 1), (4, 2)])
def test_moments_that_rest_on_the_host_change_no_bit(ranks: int, tensor_parallel: int, tmp_path: Path) -> None:
    assert all(run_ranks(of_a_rank, ranks, ranks, tensor_parallel, tmp_path))


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
