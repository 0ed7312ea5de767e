"""LoRA (Hu et al., arXiv 2106.09685): adapters of low rank beside frozen linear layers, which are all that is trained,
sent and saved. Parameters are named as PEFT names them, less its prefix.

An adapted layer computes W x + alpha / rank * B (A x), in training, in scoring and in the embedded engine alike: never
with a sum of W and B A, whose rounding would be another one. B begins as 0, so that the first policy is the base.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from engines.merging import Base
from engines.torch.first_weights import FirstWeights, Outline, Part
from engines.torch.model import blocks_of
from harness.config import TrainingConfig

_DOWN = "lora_A"


class AdaptedLinear(torch.nn.Linear):
    """A linear layer, which it takes over and freezes, and the adapter beside it. `adapts`: whether that is read."""

    adapts = True

    def __init__(self, base: torch.nn.Linear, rank: int, scale: float) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = base.in_features, base.out_features, scale
        self.weight, self.bias = base.weight, base.bias
        device, dtype = base.weight.device, base.weight.dtype
        self.lora_A = torch.nn.Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_B = torch.nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both: [..., in] -> [..., out]."""
        base = super().forward(x)
        return base.add_(self.lora_B(self.lora_A(x)), alpha=self.scale) if self.adapts else base


def with_adapters(outline: Outline, training: TrainingConfig, seed: int) -> Outline:
    """The outline, which it takes over, with all its parameters frozen and adapters in its blocks, as the settings say;
    where these say none, the outline itself. seed: that A is drawn from."""
    if not training.lora_rank:
        return outline
    model, targets = outline.model.requires_grad_(False), training.lora_targets
    for block in blocks_of(model):
        for name, layer in list(block.named_modules()):
            if isinstance(layer, torch.nn.Linear) and (not targets or name.rpartition(".")[2] in targets):
                scale = training.lora_alpha / training.lora_rank
                block.set_submodule(name, AdaptedLinear(layer, training.lora_rank, scale))
    return replace(outline, weights=_WithAdapters(outline.weights, model, seed))


def base_of(model: torch.nn.Module, folder: Path) -> Base | None:
    """The base of a model's adapters, which `engines.loading.write_model` wrote there; None where it has none."""
    scales = {module.scale for module in model.modules() if isinstance(module, AdaptedLinear)}
    return Base(str(folder), scales.pop()) if scales else None


@contextmanager
def base_alone(model: torch.nn.Module) -> Iterator[None]:
    """Compute without adapters, where there are any."""
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for module in adapted:
        module.adapts = False
    try:
        yield
    finally:
        for module in adapted:
            module.adapts = True


class _WithAdapters:
    """A base's first weights, and those of adapters: A uniform within 1 / sqrt(in), as PEFT draws it, each from a
    stream of its own; B 0."""

    def __init__(self, base: FirstWeights, model: torch.nn.Module, seed: int) -> None:
        self._base, self._seed = base, seed
        self._shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}

    @property
    def in_files(self) -> bool:
        """Whether those of the base are."""
        return getattr(self._base, "in_files", False)

    def parts(self, wanted: Mapping[str, Part]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in wanted.keys() & self._shapes.keys():
            whole = torch.zeros(self._shapes[name])
            if f".{_DOWN}." in name:
                bound = 1 / math.sqrt(whole.shape[1])
                key = zlib.crc32(f"{self._seed} {name}".encode())
                whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(key))
            yield name, whole[wanted[name]]
        yield from self._base.parts({name: part for name, part in wanted.items() if name not in self._shapes})
