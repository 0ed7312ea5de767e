"""Expert parallelism: the experts of a layer spread over ranks, and the tokens that each of them is sent.

Neighbouring data-parallel ranks, `training.expert_parallel` of them, hold the same number of experts of each layer. A
token's hidden state goes to the ranks of the experts that its router chose and comes back, by two all-to-alls a layer
forward and two backward (GShard, arXiv 2006.16668, section 3.3); no expert has a capacity, and so no token is dropped.
Ranks that share layers (engines/torch/tensor_parallel.py) see the same tokens: they divide the experts once more, each
computes for its own, and their results are summed.

What a rank holds is a DTensor over those ranks, as all else is; FSDP2 shards it over the `replica` ranks that hold the
same experts, while everything else is sharded over all data-parallel ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from engines.gloo_groups import all_connected, prove
from engines.torch.first_weights import local_part
from engines.torch.model import blocks_of, model_shape
from engines.torch.packing import ROUTES
from harness.rl.diagnostics import ROUTED

_NAME = "cadence_spread"


@dataclass(frozen=True)
class _Place:
    """The place of this rank's experts: of `ranks` x `shares` blocks of neighbours it has (its number in `group`,
    `share`)."""

    group: dist.ProcessGroup | None
    ranks: int
    share: int
    shares: int


def experts_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of transformers that hold the experts of a layer each, in tensors whose first dimension counts
    them."""
    return (module for module in model.modules() if "gate_up_proj" in module._parameters)


def spread_experts(model: Any, world: DeviceMesh | None, ranks: int) -> DeviceMesh | None:
    """Keep this rank's experts of `model`, in place: those of one of `ranks` neighbours of the mesh's dimension `data`,
    divided over its dimension `tensor` where it has one. All of these ranks hold the same weights before, and the
    experts of a layer are a multiple of their number.

    Returns the mesh over which `engines.torch.fsdp.shard` shards them: None where they are as all other parameters are.
    Every rank of the world calls it, and waits for the others as `engines.gloo_groups.all_connected`."""
    if world is None or not any(experts_of(model)):
        return None
    assert world.mesh_dim_names is not None
    spread = None if ranks == 1 else with_replicas(world, ranks)
    mesh = world if spread is None else spread
    over = tuple(name for name in ("expert", "tensor") if name in (mesh.mesh_dim_names or ()))
    if not over:
        return None
    from transformers.integrations.moe import ExpertsInterface

    group = None if spread is None else spread.get_group("expert")
    share, shares = (mesh.get_local_rank("tensor"), mesh["tensor"].size()) if "tensor" in over else (0, 1)
    for experts in experts_of(model):
        experts.place = _Place(group, ranks, share, shares)  # type: ignore[assignment]
        for name, parameter in list(experts.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.data, mesh[over], [Shard(0)] * len(over))
            setattr(experts, name, torch.nn.Parameter(part, requires_grad=parameter.requires_grad))
    ExpertsInterface.register(_NAME, _of_all_ranks)
    model.set_experts_implementation(_NAME)
    return spread


def with_replicas(world: DeviceMesh, ranks: int) -> DeviceMesh:
    """The ranks of `world`, whose dimension `data` becomes two: `replica`, of ranks that hold the same experts, and
    `expert`, of `ranks` neighbours that hold different ones."""
    names = list(world.mesh_dim_names or ())
    at = names.index("data")
    numbers, names[at : at + 1] = world.mesh.unflatten(at, (-1, ranks)), ["replica", "expert"]

    def join() -> DeviceMesh:
        return DeviceMesh(world.device_type, numbers, mesh_dim_names=tuple(names))

    if world.device_type != "cpu":
        return join()

    def join_over_gloo() -> DeviceMesh:
        mesh = join()
        for group in dict.fromkeys(mesh.get_all_groups()):
            if group is not dist.group.WORLD:  # which is there already
                prove(group, store)
        return mesh

    store, everyone = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
    timeout_s = store.timeout.total_seconds()  # type: ignore[attr-defined]
    return all_connected(join_over_gloo, store, "ranks with experts", dist.get_rank(), everyone, timeout_s)


def _of_all_ranks(
    module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, **_: Any
) -> torch.Tensor:
    """sum_k weights_k expert_k(x), [N, H], over the experts of all ranks of this share.

    hidden [N, H]; chosen int64 [N, k], experts of each token; weights [N, k].
    """
    place: _Place = module.place
    up, down = (_averaged(local_part(weight), place.ranks) for weight in (module.gate_up_proj, module.down_proj))
    own, flat = up.shape[0], chosen.flatten()
    order = flat.argsort(stable=True)  # rows by expert, and so by rank
    counts = torch.bincount(flat, minlength=own * place.ranks * place.shares)
    counts = counts.view(place.ranks, place.shares, own)[:, place.share].contiguous()
    if place.shares > 1:
        order = order[flat[order] // own % place.shares == place.share]
    ask = _computed if place.group is None else _sent
    said = ask(module, hidden[order // chosen.shape[1]], up, down, counts)
    each = _put(said, order, len(flat)).view(*chosen.shape, -1)
    return (each * weights[..., None]).sum(1).to(hidden.dtype)


def _averaged(weight: torch.Tensor, ranks: int) -> torch.Tensor:
    """A weight whose gradient, the sum over the tokens of so many ranks, is divided by their number: FSDP2, which makes
    the mean over all data-parallel ranks of other gradients, knows of the other ranks only."""
    if ranks > 1 and weight.requires_grad:
        weight.register_hook(lambda gradient: gradient / ranks)
    return weight


def _sent(module: Any, rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The answers of the experts of all ranks to rows [M, H], sorted by expert. counts: int64 [ranks, own], rows for
    each."""
    group, own = module.place.group, counts.shape[1]
    come = torch.empty_like(counts)
    dist.all_to_all_single(come, counts, group=group)
    there, here = torch.stack([counts.sum(1), come.sum(1)]).tolist()
    expert = torch.arange(own, device=rows.device).repeat(len(come)).repeat_interleave(come.flatten())
    order = expert.argsort(stable=True)
    rows = _Exchange.apply(rows, there, here, group)[order]
    said = _computed(module, rows, up, down, come)
    sent_back: torch.Tensor = _Exchange.apply(_put(said, order, len(order)), here, there, group)
    return sent_back


def _computed(
    module: Any, rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """The answers of this rank's experts to rows [M, H], sorted by expert. counts: int64 [.., own], rows for each."""
    ends = counts.sum(0).cumsum(0, dtype=torch.int32)
    inner = module._apply_gate(F.grouped_mm(rows, up.transpose(1, 2), offs=ends))
    return F.grouped_mm(inner, down.transpose(1, 2), offs=ends)


def _put(rows: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """Rows [M, H] at these places, int64 [M], of `count`; the others are 0."""
    put = rows.new_zeros(count, rows.shape[1])
    put[places] = rows  # for its gradient only the places are kept
    return put


class _Exchange(torch.autograd.Function):
    """Rows [M, H] of all ranks of a group, `there[i]` of them for rank i -> those for this one, `here[i]` of rank i;
    and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, there: list[int], here: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.how = there, here, group
        return _exchanged(rows, there, here, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        there, here, group = ctx.how
        return _exchanged(gradients[0], here, there, group), None, None, None


def _exchanged(rows: torch.Tensor, there: list[int], here: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    come = rows.new_empty(sum(here), rows.shape[1])
    dist.all_to_all_single(come, rows.contiguous(), here, there, group=group)
    return come


class Routed(NamedTuple):
    """A router's pass: logits [N, experts], experts that were chosen, int64 [N, k], and tokens of all ranks that route
    a part of them each."""

    logits: torch.Tensor
    chosen: torch.Tensor
    tokens: int


class Routers:
    """The routers of a model: which experts they choose, and how sure they are, in the passes that are counted, with
    all padding.

    Where layers are called with `ROUTES`, int16 [N, layers, k], tokens go to these experts, weighed by the router's own
    probabilities; where it has -1 the router chooses (rollout routing replay, arXiv 2510.11370, section 3).
    """

    def __init__(
        self,
        routers: Mapping[int, torch.nn.Module],
        said: Callable[[Any, Any, Any], Routed | None],
        experts: tuple[int, int] | None = None,
    ) -> None:
        """routers: by the number of their layer; said: of a router, its inputs and its output, None for a pass that is
        made once more; experts: layers and experts of a token, of those that replay."""
        self._counting, self._said, self.experts = False, said, experts
        self._sums: dict[str, torch.Tensor] = {}
        for layer, router in routers.items():
            if experts is not None:
                router.routes = None  # type: ignore[assignment]
                router.register_forward_hook(self._replay)
            router.register_forward_hook(partial(self._count, layer))

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Return those of a model of transformers; None where it has none."""
        layers: list[Any] = [each for each in blocks_of(model) if hasattr(each.mlp, "experts")]
        if not layers:
            return None
        for layer in layers:
            layer.register_forward_pre_hook(partial(_hand_on, layer.self_attn.layer_idx), with_kwargs=True)
        routers, shape = {each.self_attn.layer_idx: each.mlp.gate for each in layers}, model_shape(model)
        experts = shape["layers"], shape["active_experts"]
        return cls(routers, lambda router, inputs, output: Routed(output[0], output[2], len(output[0])), experts)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while this lasts: a forward pass, and not that of a layer which is computed again."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def _replay(self, router: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        routes, router.routes = router.routes, None
        if routes is None:
            return output
        logits, _, own = output
        chosen = self.chosen(routes, own)
        weights = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

    def chosen(self, routes: torch.Tensor, own: torch.Tensor, *, counts: bool = True) -> torch.Tensor:
        """The experts of each token, int64 [N, k]: those that are given, of `ROUTES`, or the router's own. counts:
        whether this pass does."""
        given = routes.long()
        if self._counting and counts:
            others = (given[:, :, None] != own[:, None, :]).all(-1) & (given >= 0)
            self._add(replayed=(given >= 0).sum(), rerouted=others.sum())
        return torch.where(given < 0, own, given)

    def _count(self, layer: int, *pass_: Any) -> None:
        if not self._counting or (said := self._said(*pass_)) is None:
            return
        likely = said.logits.detach().float().log_softmax(-1)
        entropy = -(likely.exp() * likely).sum() / said.tokens
        share = torch.full_like(entropy, len(likely) / said.tokens)
        counts = torch.bincount(said.chosen.flatten(), minlength=likely.shape[-1])
        self._add(routings=share, router_entropy=entropy, **{f"{ROUTED}{layer}": counts})

    def _add(self, **sums: torch.Tensor) -> None:
        self._sums |= {name: self._sums[name] + value if name in self._sums else value for name, value in sums.items()}

    def sums(self) -> dict[str, float]:
        """The counts since it was last asked: tokens of each expert of a layer, passes through routers, and the mean
        entropies of these, in nats; choices that were given, and those of them that the router would not make."""
        told: dict[str, float] = {}
        for name, value in self._sums.items():
            if value.ndim:
                told |= {f"{name}_{expert}": float(tokens) for expert, tokens in enumerate(value.tolist())}
            else:
                told[name] = float(value)
        self._sums = {}
        return told


def _hand_on(
    number: int, layer: Any, inputs: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the router of this layer, the only one that reads them, its own part of the routes."""
    if (routes := given.pop(ROUTES, None)) is not None:
        layer.mlp.gate.routes = routes[:, number]
    return inputs, given
