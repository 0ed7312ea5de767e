"""Parameters of Qwen3 by Hugging Face's names, as a rank has them in megatron-core's, and the way in and out.

Megatron fuses. Of each group of heads that share keys and values, `linear_qkv` has the queries, the key and the value,
group after group; `linear_fc1` has this rank's rows of the gate and then those of the other projection. Experts are
matrices of their own, which Hugging Face has in one tensor of a layer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from harness.config import ModelConfig

View = Callable[[torch.Tensor], torch.Tensor]
"""The part of one of Megatron's parameters that one of Hugging Face's is: a view, of as many numbers, in their
order."""


@dataclass(frozen=True)
class Place:
    """The place of a rank: its stage of so many, its share of each layer, and which experts it has."""

    stage: int
    stages: int
    tensor: int
    tensors: int
    expert: int
    experts: int


@dataclass(frozen=True)
class Held:
    """One of Hugging Face's parameters, as a rank has it. sources: Megatron's names; of experts several, each of which
    is one of the tensor's first dimension. cut: the dimension of which it has its share; None: it has all of it."""

    sources: tuple[str, ...]
    view: View
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    cut: int | None
    number: int
    parts: int

    @property
    def part(self) -> tuple[slice, ...]:
        """Slices of the whole tensor that this rank has."""
        starts = [self.number * size if place == self.cut else 0 for place, size in enumerate(self.shape)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def read(self, of: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return this rank's part, from tensors by Megatron's names, that have the shapes of its parameters."""
        views = [self.view(of(name)) for name in self.sources]
        return (views[0] if len(self.shape) < 3 else torch.stack(views)).reshape(self.shape)

    def write(self, part: torch.Tensor, of: Callable[[str], torch.Tensor]) -> None:
        """Put this rank's part into such tensors."""
        for name, each in zip(self.sources, part if len(self.shape) == 3 else [part], strict=True):
            view = self.view(of(name))
            view.copy_(each.reshape(view.shape))


def held_by(place: Place, model: ModelConfig, whole: Mapping[str, tuple[int, ...]]) -> dict[str, Held]:
    """Parameters that a rank has something of, by Hugging Face's names and in their order. whole: shapes of all."""
    found = {}
    for name, (sources, view, cut) in _of_stage(place, model).items():
        if name not in whole:
            continue
        number, parts = (place.expert, place.experts) if ".experts." in name else (place.tensor, place.tensors)
        shape = tuple(size // parts if at == cut else size for at, size in enumerate(whole[name]))
        found[name] = Held(sources, view, shape, whole[name], cut, number, parts)
    return {name: found[name] for name in whole if name in found}


Source = tuple[tuple[str, ...], View, int | None]


def _of_stage(place: Place, model: ModelConfig) -> Mapping[str, Source]:
    found: dict[str, Source] = {}
    if place.stage == 0:
        found["model.embed_tokens.weight"] = ("embedding.word_embeddings.weight",), _all, 0
    if place.stage == place.stages - 1:
        found["model.norm.weight"] = ("decoder.final_layernorm.weight",), _all, None
        if not model.tied_embeddings:
            found["lm_head.weight"] = ("output_layer.weight",), _all, 0
        elif place.stages > 1:  # a copy, which Megatron keeps equal
            found["model.embed_tokens.weight"] = ("output_layer.weight",), _all, 0
    layers = model.layers // place.stages
    for number in range(layers):
        for name, (sources, view, cut) in _of_layer(place, model):
            here = tuple(f"decoder.layers.{number}.{source}" for source in sources)
            found[f"model.layers.{place.stage * layers + number}.{name}"] = here, view, cut
    return found


def _of_layer(place: Place, model: ModelConfig) -> Iterator[tuple[str, Source]]:
    queries = model.heads // model.kv_heads
    attention = "self_attention.linear_qkv.weight"
    for name, heads in {
        "q": slice(0, queries),
        "k": slice(queries, queries + 1),
        "v": slice(queries + 1, None),
    }.items():
        yield f"self_attn.{name}_proj.weight", ((attention,), _Heads(queries + 2, model.head_dim, heads), 0)
    yield "self_attn.o_proj.weight", (("self_attention.linear_proj.weight",), _all, 1)
    yield "self_attn.q_norm.weight", (("self_attention.q_layernorm.weight",), _all, None)
    yield "self_attn.k_norm.weight", (("self_attention.k_layernorm.weight",), _all, None)
    yield "input_layernorm.weight", (("input_layernorm.weight",), _all, None)
    yield "post_attention_layernorm.weight", (("pre_mlp_layernorm.weight",), _all, None)
    if not model.experts:
        yield "mlp.gate_proj.weight", (("mlp.linear_fc1.weight",), _Half(0), 0)
        yield "mlp.up_proj.weight", (("mlp.linear_fc1.weight",), _Half(1), 0)
        yield "mlp.down_proj.weight", (("mlp.linear_fc2.weight",), _all, 1)
        return
    yield "mlp.gate.weight", (("mlp.router.weight",), _all, None)
    own = range(model.experts // place.experts)
    for name, theirs in {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}.items():
        yield f"mlp.experts.{name}", (tuple(f"mlp.experts.local_experts.{i}.{theirs}.weight" for i in own), _all, 0)


def _all(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class _Heads:
    """Some of the heads of each group."""

    group: int
    width: int
    heads: slice

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1, self.group, self.width, tensor.shape[-1])[:, self.heads]


@dataclass(frozen=True)
class _Half:
    """The first half of the rows, or the second."""

    number: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(2)[self.number]
