"""Replacing the weights of a model, whole sets only."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class ModelWeights:
    """The weights of a model, and whether they are one version's from end to end. `owner` begins every message."""

    def __init__(self, model: torch.nn.Module, owner: str) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._required = {name for name, _ in model.named_parameters()}
        self._owner = owner
        self._torn: int | None = None

    @torch.no_grad()
    def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all parameters by (name, full tensor) pairs. Until a set is complete, `require_complete` refuses.

        The iterable is read to its end even where a tensor does not fit, so that a collective behind it completes.

        Raises:
            ValueError: names are unknown or missing, or shapes are wrong: all of them in one message. A parameter that
                is tied to another one may be missing.
        """
        self._torn = version
        loaded, wrong = set(), []
        for name, tensor in weights:
            parameter = self._parameters.get(name)
            if parameter is None:
                wrong.append(f"{name} is unknown")
            elif parameter.shape != tensor.shape:
                wrong.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
            else:
                parameter.copy_(tensor)
            loaded.add(name)
        wrong += [f"{name} is missing" for name in sorted(self._required - loaded)]
        if wrong:
            raise ValueError(f"{self._owner}: the weights of version {version} do not fit: {'; '.join(wrong)}")
        self._torn = None

    def require_complete(self) -> None:
        """Raises RuntimeError after a load that broke off, until a complete one."""
        if self._torn is not None:
            raise RuntimeError(
                f"{self._owner}: version {self._torn} was loaded in part only; load a complete set of weights"
            )
