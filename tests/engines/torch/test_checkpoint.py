"""What training has saved is read by slices: by other numbers of ranks than wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engines.torch.checkpoint import SavedState, TrainingState, load_training, training_state

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
