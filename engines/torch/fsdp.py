"""Training: FSDP2 (torch's `fully_shard`) over torch.distributed; NCCL between GPUs, Gloo between CPUs. And scoring by
parameters that are sharded over the training world: the trainer's own, and those of a reference.

One rank alone keeps float32 parameters whole: there is nothing to shard, and on a small model FSDP2's hooks are 30 % of
a micro-batch and 65 % of a step. Half precision is sharded always, for FSDP2's mixed precision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engines.gloo_groups import all_connected, prove
from engines.torch.checkpoint import TrainingState, load_training, training_state
from engines.torch.experts import experts_of, spread_experts
from engines.torch.first_weights import Outline, local_part
from engines.torch.lora import base_alone
from engines.torch.model import blocks_of
from engines.torch.moments import Moments
from engines.torch.pipeline import Pipeline, cut_stage, name_of_shared
from engines.torch.policy_loss import PolicyLoss
from engines.torch.scoring import AtTokens, Scores, ScoringModel, TokenScorer, TorchScorer, score_parts
from engines.torch.tensor_parallel import share_layers
from harness.config import AlgorithmConfig, TrainingConfig
from harness.protocols import Scorer, TrainBatch, ValueBatch
from harness.rl.aggregation import LossSum
from harness.rl.diagnostics import add_diagnostics
from harness.rl.learning_rate import learning_rate, peak_rate
from harness.rl.micro_batches import part_of, passes_over
from harness.transfer_queue import Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def init_world(
    store: dist.Store,
    rank: int,
    world: int,
    device: torch.device,
    timeout_s: float,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> DeviceMesh:
    """Join the training world and return its mesh; collective waits end after `timeout_s` with torch's own error. Over
    Gloo so does the wait for ranks that do not connect, which the error names (`all_connected`).

    The mesh has a dimension `data`; where the others are above 1 also `stage` and `tensor`: neighbours in these have
    parts of the layers, and must be given the same micro-batches.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    together = {"stage": pipeline_parallel, "tensor": tensor_parallel}
    shape = {"data": world // math.prod(together.values())} | {name: n for name, n in together.items() if n > 1}

    def join() -> DeviceMesh:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))

    def join_over_gloo() -> DeviceMesh:
        mesh = join()
        for group in dict.fromkeys([dist.group.WORLD, *mesh.get_all_groups()]):
            prove(group, store)
        return mesh

    if backend == "nccl":  # which connects at the first collective, by its own timeout
        return join()
    return all_connected(join_over_gloo, store, "training world", rank, range(world), timeout_s)


Scorers = TypeVar("Scorers", bound=ScoringModel)
TrainedBatch = TypeVar("TrainedBatch", TrainBatch, ValueBatch)


class TrainedModel(ABC, Generic[Scorers, TrainedBatch]):
    """A model in training: one rank's shards, gradients and AdamW state.

    Parameters are kept in float32; a bfloat16 model computes in bfloat16, reduces gradients in float32 and is sent to
    engines in bfloat16. Frozen ones (engines/torch/lora.py) stay as they are, and are neither saved nor sent. mesh: of
    `init_world`, or None for one rank of float32 without a process group.

    Twenty attributes: eleven are what it was made with and where it stands among the ranks, which every pass and every
    step reads.
    """

    def __init__(
        self,
        model: PreTrainedModel | Outline,
        algorithm: AlgorithmConfig,
        *,
        mesh: DeviceMesh | None,
        device: torch.device,
        training: TrainingConfig | None = None,
        steps: int = 1,
        horizon: int = 1,
    ) -> None:
        """model: an outline gets no more than this rank's part of its weights, after it is cut; a model comes to the
        device whole. steps: of the run, to whose end the learning rate decays; horizon: tokens that a response may
        have, by which one aggregation divides. ValueError where `mesh` is None and the model is not float32."""
        self._training = training = training or TrainingConfig()
        outline = None
        if isinstance(model, Outline):
            outline, model = model, model.model
        else:
            model = model.to(device)
        self._dtype = next(model.parameters()).dtype
        for parameter in model.train().parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        if training.recompute_activations:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        group = share_layers(model, mesh) if mesh is not None and training.tensor_parallel > 1 else None
        spread = spread_experts(model, mesh, training.expert_parallel)
        self._parameters = sum(parameter.numel() for parameter in model.parameters())  # DTensors count whole
        self._whole = {
            name: parameter.detach().to("meta")
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        shared = name_of_shared(model)
        self._pipeline = staged(model, mesh, self._dtype, device)
        ends = self._pipeline.stages > 1 and (self._pipeline.is_first or self._pipeline.is_last)
        self._at_both_ends = shared if ends else None
        self._scorer = scorer = self._around(model, algorithm, training, group)
        self.mesh, self._mesh = mesh, None if mesh is None else mesh["data"]
        if self._dtype != torch.float32:
            if self._mesh is None:
                raise ValueError(f"a model in {self._dtype} is trained in mixed precision, which needs a mesh")
            shard(scorer, self._mesh, spread, mp_policy=MixedPrecisionPolicy(self._dtype, torch.float32))
        elif self._mesh is not None and (self._mesh.size() > 1 or group is not None):
            shard(scorer, self._mesh, spread)
        if outline is not None:
            fill_shards(scorer, outline, device)
        self._device, self._algorithm = device, algorithm
        self._aggregated = LossSum(algorithm, horizon)  # of the micro-batches since the last step
        self.masters: dict[str, torch.Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self._step, self._steps = torch.zeros((), dtype=torch.int64), steps
        self._optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters in by_mesh(self.masters.values())],
            lr=peak_rate(algorithm, self._parameters),
            betas=algorithm.betas,
            weight_decay=algorithm.weight_decay,
        )
        self._holders = holders_of(self._pipeline, mesh, self.masters)
        self._moments = Moments(self._optimizer, training.optimizer_offload, device)
        self._unfinished = False

    async def accumulate(self, batch: TrainedBatch) -> dict[str, float]:
        """Back-propagates the SUM of weighted token losses: what it is divided by is not known before the batch's last
        micro-batch.

        With `training.tokens_per_micro_batch` part by part, in as many parts on every rank as on that which needs most:
        each pass gathers shards, and so is a collective.
        """
        sums, parts = dict[str, float](), list(self._parts(batch))
        laid = [self._scorer.lay_out(part.prompts, part.responses, getattr(part, "routes", None)) for part in parts]
        routers = self._scorer.routers

        def forward(number: int, received: torch.Tensor | None) -> torch.Tensor:
            nonlocal sums
            with routers.counted() if routers else nullcontext():
                found = self._scorer(laid[number], received)
            if not self._pipeline.is_last:
                return found
            loss, told = self._loss(found, parts[number])
            sums = add_diagnostics(sums, told)
            return loss

        self._unfinished = True
        self._pipeline.train([each.shape for each in laid], forward)
        sums, self._aggregated.divisor = self._pipeline.from_last((sums, self._aggregated.divisor))
        for routed in self._pipeline.from_all(routers.sums()) if routers else ():
            sums = add_diagnostics(sums, routed)
        return sums

    def rank_tokens(self, batch: TrainedBatch) -> list[int]:
        return [len(batch.prompts.values) + len(batch.responses.values)]

    def _parts(self, batch: TrainedBatch) -> Iterable[TrainedBatch]:
        if self._training.tokens_per_micro_batch is None:
            return [batch]
        return (
            part_of(batch, part) for part in passes_over(batch.prompts, batch.responses, self._training, self._most)
        )

    def _most(self, passes: int) -> int:
        return over_ranks(passes, dist.ReduceOp.MAX, self._mesh, self._device)

    @abstractmethod
    def _around(
        self,
        model: PreTrainedModel,
        algorithm: AlgorithmConfig,
        training: TrainingConfig,
        group: dist.ProcessGroup | None,
    ) -> Scorers:
        """The object that computes with the model; group: the ranks that share its layers."""

    @abstractmethod
    def _loss(self, found: Any, batch: TrainedBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of one part, by `_aggregated`, and its sums by name. found: what the scorer says of it."""

    async def step(self) -> dict[str, float]:
        """One update with all ranks' losses since the last one, aggregated as the settings say.

        FSDP has averaged the gradients over ranks; times the world's size over all ranks' divisors makes that the
        gradient of the batch's loss (harness/rl/aggregation.py).
        A gradient that is not finite updates nothing: its norm is that of all ranks' gradients, so that all ranks skip
        the step, or none.
        """
        ranks = 1 if self._mesh is None else self._mesh.size()
        scale = ranks / max(1, over_ranks(self._aggregated.divisor, dist.ReduceOp.SUM, self._mesh, self._device))
        gradients = [_local(parameter.grad) for parameter in self.masters.values()]
        if self._at_both_ends is not None:
            self._pipeline.add_of_ends(_local(self.masters[self._at_both_ends].grad))
        torch._foreach_mul_(gradients, scale)
        total = self._norm()
        torch._foreach_mul_(gradients, (self._algorithm.grad_clip / (total + 1e-6)).clamp(max=1.0).float())
        norm = float(total)
        rate = learning_rate(self._algorithm, self._parameters, int(self._step), self._steps)
        finite = math.isfinite(norm)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._moments.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        self._aggregated.divisor, self._unfinished = 0, False
        return {"grad_norm": norm, "learning_rate": rate, "skipped": float(not finite)}

    def _norm(self) -> torch.Tensor:
        """The norm of all gradients, float64 []. Squares are summed tensor by tensor over the ranks of a stage, then in
        the order of the whole model's parameters: so stages leave its bits as they are."""
        counted = {
            name: parameter.grad
            for name, parameter in self.masters.items()
            if self._pipeline.is_first or name != self._at_both_ends
        }
        local = torch.stack(torch._foreach_norm([_local(gradient) for gradient in counted.values()])).double().square()
        ranks = 1 if self._mesh is None else dist.get_world_size() // self._pipeline.stages
        copies = [ranks / parts_of(gradient) for gradient in counted.values()]
        squares = dict.fromkeys(self._whole, local.new_zeros(()))
        squares |= zip(counted, local / local.new_tensor(copies), strict=True)
        each = torch.stack(list(squares.values()))
        for name in ("tensor", "data") if ranks > 1 else ():
            if (mesh := submesh(self.mesh, name)) is not None:
                dist.all_reduce(each, group=mesh.get_group())
        self._pipeline.sum(each)
        return each.sum().sqrt()

    async def state(self) -> TrainingState:
        """A copy of this rank's weights and optimizer state, to be written while training goes on."""
        if self._unfinished:
            raise RuntimeError("gradients of micro-batches would be lost; save after a step")
        with self._moments.on_device():
            return training_state(self.masters, self._optimizer, self._step, **self._rank_of_ranks())

    async def load(self, folder: Path) -> None:
        """Go on from what all ranks wrote there, on any number of ranks; before the first micro-batch of a step."""
        with self._moments.on_device():
            load_training(folder, self.masters, self._optimizer, self._step, **self._rank_of_ranks())

    def _rank_of_ranks(self) -> dict[str, int]:
        if self.mesh is None:
            return {"rank": 0, "ranks": 1}
        return {"rank": dist.get_rank(), "ranks": dist.get_world_size()}

    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        masters = self._whole | self.masters  # in the dtype of engines, so that what is gathered is cast already
        return ByName(lambda name: masters[name].detach().to(self._dtype), masters)

    def holders(self) -> Mapping[str, tuple[int, ...]]:
        return self._holders

    def _there(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


class FSDPEngine(TrainedModel[TokenScorer, TrainBatch]):
    """`harness.protocols.TrainEngine`: the policy."""

    def _around(
        self,
        model: PreTrainedModel,
        algorithm: AlgorithmConfig,
        training: TrainingConfig,
        group: dist.ProcessGroup | None,
    ) -> TokenScorer:
        self._policy_loss = PolicyLoss(algorithm)
        return TokenScorer(model, algorithm.temperature, training, group)

    def _loss(self, found: Scores, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, float]]:
        # The view has none of the hooks with which FSDP begins a backward pass.
        found = found._replace(log_probs=found.log_probs.view_as(found.log_probs))
        return self._policy_loss(found, batch, self._aggregated)

    def scorer(self) -> Scorer:
        """Scores with these parameters as they are when it is asked, in the arithmetic of training; it may be asked
        between any two calls of this engine. Every rank asks it as often, as it makes all other calls."""
        return ShardedScorer(self._scorer, self._training, self._most, self._pipeline)

    def base_scorer(self) -> Scorer:
        """The same without adapters: a reference that takes no memory."""
        return BaseScorer(self._scorer, self._training, self._most, self._pipeline)


class ShardedScorer(TorchScorer):
    """Scorer by parameters that may be sharded, or of several stages. most, pipeline: as `scored`."""

    def __init__(
        self, scorer: TokenScorer, training: TrainingConfig, most: Callable[[int], int], pipeline: Pipeline
    ) -> None:
        super().__init__(scorer, training)
        self._most, self._pipeline = most, pipeline

    def _scored(self, at_tokens: AtTokens, prompts: Ragged, responses: Ragged, routes: Ragged | None) -> list[Ragged]:
        how = (self._training, self._most, self._pipeline, routes)
        return scored(self._scorer, at_tokens, prompts, responses, *how)


class BaseScorer(ShardedScorer):
    """Scorer by the frozen parameters alone, which adapters stand beside."""

    def _scored(self, at_tokens: AtTokens, prompts: Ragged, responses: Ragged, routes: Ragged | None) -> list[Ragged]:
        with base_alone(self._scorer):
            return super()._scored(at_tokens, prompts, responses, routes)


def scored(
    scorer: ScoringModel,
    at_tokens: AtTokens,
    prompts: Ragged,
    responses: Ragged,
    training: TrainingConfig,
    most: Callable[[int], int],
    pipeline: Pipeline,
    routes: Ragged | None = None,
) -> list[Ragged]:
    """Results of `at_tokens` for each response token, without gradients, by parameters that may be sharded: then each
    pass is a collective of all that hold shards, and every rank makes as many as that which needs most. most: the
    largest of the numbers that all these ranks call it with; pipeline: the scorer's place in it; routes: as of
    `TrainBatch`."""
    parts = passes_over(prompts, responses, training, most)
    with torch.no_grad():  # inference tensors could not be resharded
        found = score_parts(scorer, at_tokens, prompts, responses, parts, pipeline, routes)
    if isinstance(scorer, FSDPModule):
        _forget_forward(scorer)
    return found


def sharded_reference(
    outline: Outline,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    temperature: float,
    training: TrainingConfig | None = None,
) -> Scorer:
    """A policy that stays as it is, in the dtype that it has, sharded over the training world; it takes over `outline`,
    and reads of its weights this rank's part. With `training.reference_offload` the shards stay on the host, and each
    layer comes to the device while it computes; a CPU has no other place, so that there it does nothing."""
    training = training or TrainingConfig()
    offload = training.reference_offload and device.type != "cpu"
    model = outline.model.requires_grad_(False)
    group = share_layers(model, mesh) if training.tensor_parallel > 1 else None
    spread = spread_experts(model, mesh, training.expert_parallel)
    pipeline = staged(model, mesh, outline.dtype, device)
    scorer = TokenScorer(model, temperature, training, group)
    if offload:
        shard(scorer, mesh["data"], spread, offload_policy=CPUOffloadPolicy())
    elif mesh["data"].size() > 1:
        shard(scorer, mesh["data"], spread)
    fill_shards(scorer, outline, device, rest_on="cpu" if offload else device)
    most = partial(over_ranks, what=dist.ReduceOp.MAX, mesh=mesh["data"], device=device)
    return ShardedScorer(scorer, training, most, pipeline)


def holders_of(
    pipeline: Pipeline, mesh: DeviceMesh | None, parameters: Mapping[str, torch.Tensor]
) -> dict[str, tuple[int, ...]]:
    """Ranks of the first stage that has it, by each parameter's name; none where there are no stages."""
    if mesh is None or pipeline.stages == 1:
        return {}
    assert mesh.mesh_dim_names is not None, "a mesh of `init_world` has names"
    ranks_of = mesh.mesh.unbind(mesh.mesh_dim_names.index("stage"))
    found = dict[str, tuple[int, ...]]()
    for ranks, names in zip(ranks_of, pipeline.from_all(list(parameters)), strict=True):
        found = dict.fromkeys(names, tuple(sorted(ranks.flatten().tolist()))) | found
    return found


def staged(model: PreTrainedModel, mesh: DeviceMesh | None, dtype: torch.dtype, device: torch.device) -> Pipeline:
    """The place of this rank in the pipeline, for whose stage `model` is cut, in place. dtype: that it computes in."""
    stages = submesh(mesh, "stage")
    pipeline = Pipeline(None if stages is None else stages.get_group(), model.config.hidden_size, dtype, device)
    if pipeline.stages > 1:
        cut_stage(model, pipeline.number, pipeline.stages)
    return pipeline


def submesh(mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    """The dimension of `init_world`'s mesh with this name, where it has one."""
    return mesh[name] if mesh is not None and name in (mesh.mesh_dim_names or ()) else None


def over_ranks(number: int, what: dist.ReduceOp.RedOpType, mesh: DeviceMesh | None, device: torch.device) -> int:
    """The sum or the largest of the numbers of all data-parallel ranks."""
    if mesh is None or mesh.size() == 1:
        return number
    shared = torch.tensor([number], dtype=torch.int64, device=device)
    dist.all_reduce(shared, what, group=mesh.get_group())
    return int(shared.item())


def fill_shards(
    scorer: ScoringModel, outline: Outline, device: torch.device, rest_on: torch.device | str | None = None
) -> None:
    """Give the parameters of `scorer`, cut from the outline's model, their values, and all else its place.

    rest_on: where shards are between two uses, where that is not the device.
    """
    outline.fill(rest_on or device)
    for module in scorer.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    if isinstance(scorer, FSDPModule):
        scorer._apply(lambda tensor: tensor)  # FSDP2 takes note of parameters that are other ones


def shard(scorer: ScoringModel, mesh: DeviceMesh, spread: DeviceMesh | None, **options: Any) -> None:
    """Spread the parameters over `mesh`, in place: those of each layer are gathered together, and all others. spread:
    of `spread_experts`, whose experts are sharded over the ranks that hold the same ones."""
    for layer in blocks_of(scorer.model):
        if spread is not None:
            for experts in experts_of(layer):
                fully_shard(experts, mesh=spread["replica"], **options)
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(scorer, mesh=mesh, **options)


def _forget_forward(scorer: FSDPModule) -> None:
    """Leave no trace of a forward pass that no backward pass will follow.

    After it the outermost parameters are still gathered (`FSDPState._lazy_init`), and an optimizer's step would not
    reach them; and the order of layers is noted for prefetching, which only a backward pass clears.
    """
    scorer.reshard()
    state = scorer._get_fsdp_state()
    state._comm_ctx.post_forward_order.clear()
    for part in state._state_ctx.all_states:
        if (group := part._fsdp_param_group) is not None:  # in torch 2.11 too; later ones can have several
            group._post_forward_indices.clear()


class ByName(Mapping[str, torch.Tensor]):
    """Tensors by names that are known, each made when it is asked for: a second copy of all of them never exists."""

    def __init__(self, make: Callable[[str], torch.Tensor], names: Mapping[str, Any]) -> None:
        self._make, self._names = make, names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def parts_of(tensor: torch.Tensor | None) -> int:
    """Parts that a tensor is cut into; each is on as many ranks as any other."""
    if not isinstance(tensor, DTensor):
        return 1
    cuts = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in cuts if not placement.is_replicate())


def by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The same parameters, together those that are spread over the same ranks: no operation takes others together."""
    found: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        found.setdefault(mesh, []).append(parameter)
    return list(found.values())


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a parameter without a gradient; did every rank see a micro-batch?"
    return local_part(tensor)
