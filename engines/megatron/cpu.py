"""Answers of the CPU to what megatron-core asks of CUDA by name. Where training is on GPUs none of them is active."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random

CPU = torch.device("cpu")


class _Done:
    """A stream, or an event: on a CPU all that it waits for has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Self]:
        return lambda *_, **__: self


def _itself(found: Any, *_: Any, **__: Any) -> Any:
    return found


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _here(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes tensors, where `device="cuda"` is the CPU."""

    @wraps(make)
    def made(*given: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return make(*given, device=CPU if device == "cuda" else device, **options)

    return made


def _all_to_all(output: torch.Tensor, given: torch.Tensor, come: Any = None, sent: Any = None, **options: Any) -> Any:
    """Sizes are lists for Gloo; the dispatcher of experts leaves them tensors, having no device to copy them from."""
    come = options.pop("output_split_sizes", come)
    sent = options.pop("input_split_sizes", sent)
    there, here = (each.tolist() if isinstance(each, torch.Tensor) else each for each in (come, sent))
    return _ALL_TO_ALL(output, given, there, here, **options)


def _type(tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
    """The distributed optimizer knows `torch.cuda.FloatTensor` and its like only."""
    found = _TYPE(tensor, *given, **options)
    return found if given or options else f"torch.cuda.{found.rpartition('.')[2]}"


_ALL_TO_ALL, _TYPE = dist.all_to_all_single, torch.Tensor.type
_ANSWERS: list[tuple[Any, str, Any]] = [
    # Everything is made on the current device, or on "cuda".
    (torch.cuda, "current_device", lambda: CPU),
    (torch, "zeros", _here(torch.zeros)),
    (torch, "ones", _here(torch.ones)),
    (torch, "tensor", _here(torch.tensor)),
    (torch.Tensor, "cuda", _itself),
    (torch.nn.Module, "cuda", _itself),
    (torch.Tensor, "type", _type),
    # Streams on which copies and collectives overlap, and what waits for them.
    (torch.cuda, "synchronize", _nothing),
    (torch.cuda, "Stream", _Done),
    (torch.cuda, "Event", _Done),
    (torch.cuda, "stream", lambda _: nullcontext()),
    (torch.cuda, "current_stream", _Done),
    (torch.cuda, "default_stream", _Done),
    (dist, "all_to_all_single", _all_to_all),
    # Random states by rank, for dropout, and around layers that are computed again.
    (torch.cuda, "manual_seed", torch.manual_seed),
    (torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
    (torch.cuda, "set_rng_state", lambda state, *_: torch.set_rng_state(state)),
    (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
    (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
]


@contextmanager
def answers(device: torch.device) -> Iterator[None]:
    """Answer for CUDA while the context lasts, where `device` is a CPU. Contexts may stand in one another."""
    if device.type != "cpu":
        yield
        return
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _ANSWERS]
    try:
        for owner, name, answer in _ANSWERS:
            setattr(owner, name, answer)
        yield
    finally:
        for owner, name, found in before:
            setattr(owner, name, found)
