"""A model for an engine that reads a folder, and replacing the weights of one: all of them or none."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engines.experts import apart

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ExpectedWeights:
    """What a complete set of a model's weights is made of. Does not keep the model. `owner` begins every message."""

    def __init__(self, model: torch.nn.Module, owner: str) -> None:
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        self._required = {name for name, _ in model.named_parameters()}
        self._owner = owner

    def checked(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The (name, full tensor) pairs that fit, as they come.

        The iterable is read to its end even where a tensor does not fit, so that a collective behind it completes.

        Raises:
            ValueError: at the end; names are unknown or missing, or shapes are wrong: all of them in one message. A
                parameter that is tied to another one may be missing.
        """
        came, wrong = set(), []
        for name, tensor in weights:
            came.add(name)
            shape = self._shapes.get(name)
            if shape is None:
                wrong.append(f"{name} is unknown")
            elif shape != tuple(tensor.shape):
                wrong.append(f"{name} has shape {tuple(tensor.shape)}, not {shape}")
            else:
                yield name, tensor
        wrong += [f"{name} is missing" for name in sorted(self._required - came)]
        if wrong:
            raise ValueError(f"{self._owner}: the weights of version {version} do not fit: {'; '.join(wrong)}")


class ModelWeights:
    """The weights of a model, always one version's from end to end. `owner` begins every message.

    A new set is collected beside the one in use and takes its place at once: while it arrives, the weights need their
    memory a second time.
    """

    def __init__(self, model: torch.nn.Module, owner: str) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._expected = ExpectedWeights(model, owner)

    @torch.no_grad()
    def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all parameters by (name, full tensor) pairs. Whatever is raised, the model keeps what it had. Raises
        ValueError as `ExpectedWeights.checked`, which reads them."""
        arrived = {}
        for name, tensor in self._expected.checked(version, weights):
            old = self._parameters[name]
            arrived[name] = torch.empty_like(old, pin_memory=old.is_pinned()).copy_(tensor)
        for name, tensor in arrived.items():
            self._parameters[name].data = tensor


@torch.no_grad()
def rest_on_host(model: torch.nn.Module) -> None:
    """Move its weights from a GPU to host memory that is pinned: they go there and back at the speed of the link, and
    what is loaded meanwhile arrives in such memory too. What is on the host already stays as it is."""
    for parameter in model.parameters():
        if parameter.is_cuda:
            host = torch.empty_like(parameter, device="cpu", pin_memory=True)
            parameter.data = host.copy_(parameter.data)


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Its config.json and weights, tied ones once, whichever rank of a training world this process is: transformers'
    own `save_pretrained` writes on the first one only.

    Without an end-of-sequence token: what ends a sample is for its sampling parameters to say, and a server would add
    the model's own.
    """
    from safetensors.torch import save_file

    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.eos_token_id = None
    config.save_pretrained(folder)
    whole = ((name, parameter.detach().cpu().contiguous()) for name, parameter in model.named_parameters())
    # In a file no two tensors share memory, as experts do.
    weights = {
        name: tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        for name, tensor in apart(whole)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
