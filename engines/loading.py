"""Replacing the weights of a model: all of them or none."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class ModelWeights:
    """The weights of a model, always one version's from end to end. `owner` begins every message.

    A new set is collected beside the one in use and takes its place at once: while it arrives, the weights need their
    memory a second time.
    """

    def __init__(self, model: torch.nn.Module, owner: str) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._required = {name for name, _ in model.named_parameters()}
        self._owner = owner

    @torch.no_grad()
    def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all parameters by (name, full tensor) pairs. Whatever is raised, the model keeps what it had.

        The iterable is read to its end even where a tensor does not fit, so that a collective behind it completes.

        Raises:
            ValueError: names are unknown or missing, or shapes are wrong: all of them in one message. A parameter that
                is tied to another one may be missing.
        """
        arrived: dict[str, torch.Tensor] = {}
        came, wrong = set(), []
        for name, tensor in weights:
            parameter = self._parameters.get(name)
            if parameter is None:
                wrong.append(f"{name} is unknown")
            elif parameter.shape != tensor.shape:
                wrong.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
            else:
                arrived[name] = torch.empty_like(parameter).copy_(tensor)
            came.add(name)
        wrong += [f"{name} is missing" for name in sorted(self._required - came)]
        if wrong:
            raise ValueError(f"{self._owner}: the weights of version {version} do not fit: {'; '.join(wrong)}")
        for name, tensor in arrived.items():
            self._parameters[name].data = tensor
