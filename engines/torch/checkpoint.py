"""What training has to remember: weights and AdamW's moments, written and read by torch.distributed.checkpoint.

Every rank writes its own shards and reads those that it needs, whichever rank wrote them: another number of ranks, or
another mesh, may go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

State = dict[str, dict[str, torch.Tensor]]


def save_training(
    folder: Path, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.AdamW, step: torch.Tensor
) -> None:
    """Into a new folder; every rank calls it. What lacks `.metadata` was not finished.

    Raises FileExistsError where the folder holds a checkpoint: a crash would leave neither the old one nor the new;
    RuntimeError, the same on every rank, where any of them could not write.
    """
    if (folder / ".metadata").exists():
        raise FileExistsError(f"{folder} holds a checkpoint already; save into a new folder")
    with _errors_of_ranks(f"saving into {folder}"):
        dcp.save(_state(parameters, optimizer, step), checkpoint_id=folder)


def load_training(
    folder: Path, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.AdamW, step: torch.Tensor
) -> None:
    """Replace weights, moments and the number of steps so far (int64 []) by those of `folder`, in place; every rank
    calls it.

    Raises FileNotFoundError where there is no finished checkpoint, and RuntimeError, the same on every rank, where it
    is another model's.
    """
    if not (folder / ".metadata").exists():
        raise FileNotFoundError(f"{folder} holds no finished checkpoint")
    with _errors_of_ranks(f"loading {folder}"):
        dcp.load(_state(parameters, optimizer, step), checkpoint_id=folder)


@contextmanager
def _errors_of_ranks(what: str) -> Iterator[None]:
    """Torch collects them in a BaseException, which no one would expect."""
    try:
        yield
    except CheckpointException as error:
        ranks = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise RuntimeError(f"{what} failed on {ranks}") from error


@torch.no_grad()
def _state(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.AdamW, step: torch.Tensor
) -> dict[str, State]:
    """The very tensors, by names; moments that AdamW would make at its first step are made now."""
    for parameter in parameters.values():
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    weights = {name: {"weight": parameter.detach()} for name, parameter in parameters.items()}
    moments = {name: optimizer.state[parameter] for name, parameter in parameters.items()}
    return {"weights": weights, "moments": moments, "run": {"training": {"step": step}}}
