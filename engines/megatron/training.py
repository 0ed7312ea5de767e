"""Training by megatron-core: its model, its pipeline schedule, its DistributedDataParallel, its distributed optimizer.

What is learnt is the project's own: losses, the head with its log-probabilities, packed attention, learning rates, the
first weights. So are names: what is saved and sent is called as Hugging Face does (engines/megatron/names.py), and any
training engine goes on from it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad, scaled_dot_product_attention, silu

with warnings.catch_warnings():  # of what is not installed and not needed
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from engines.megatron.cpu import answers

from engines.megatron.names import Held, Place, held_by
from engines.megatron.routers import StageRouters
from engines.torch import checkpoint
from engines.torch.experts import with_replicas
from engines.torch.first_weights import Outline
from engines.torch.fsdp import ByName, holders_of, init_world, over_ranks, submesh
from engines.torch.model import float32_head, outline_model
from engines.torch.packing import Boundaries, PackedBatch, packed_attention
from engines.torch.pipeline import Pipeline
from engines.torch.policy_loss import PolicyLoss
from engines.torch.scoring import LAYOUTS, Head, LaidOut, Scores, in_order, lay_out_parts
from harness.config import AlgorithmConfig
from harness.protocols import CriticEngine, TrainBatch, TrainingSetting
from harness.rl.aggregation import LossSum
from harness.rl.diagnostics import add_diagnostics
from harness.rl.learning_rate import learning_rate, peak_rate
from harness.rl.micro_batches import part_of, passes_over
from harness.transfer_queue import Ragged

if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 reads the name where Transformer Engine was not imported, too
    moe_utils.te_general_gemm = None

_KINDS = "weight", "exp_avg", "exp_avg_sq"


class Order(str):
    """An order of ranks with stages where ours are. Where experts are spread, megatron-core 0.16.1 asserts that it ends
    with stages, though the groups that it makes of another order are as right (its next assertion compares them)."""

    def endswith(self, *_: Any) -> bool:
        """Answer what is asserted."""
        return True


class MegatronWorld:
    """`harness.protocols.TrainingWorld`."""

    def __init__(self, setting: TrainingSetting) -> None:
        self._setting = setting
        training = setting.training
        together = training.tensor_parallel, training.pipeline_parallel
        self._mesh = init_world(
            setting.store, setting.rank, setting.world, setting.device, setting.timeout_s, *together
        )
        if parallel_state.model_parallel_is_initialized():  # of a world that this process has left
            parallel_state.destroy_model_parallel()
        with answers(setting.device), torch.random.fork_rng(devices=[]):
            parallel_state.initialize_model_parallel(
                *together,
                expert_model_parallel_size=training.expert_parallel,
                expert_tensor_parallel_size=training.tensor_parallel,
                order=Order("tp-cp-pp-ep-dp"),  # as the ranks of our mesh stand; it begins with neighbours
                distributed_timeout_minutes=setting.timeout_s / 60,
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(1)  # of dropout, of which there is none

    @cached_property
    def policy(self) -> MegatronPolicy:
        """The rank of the policy. Every rank asks for it, when all others do."""
        return MegatronPolicy(self._model(), self._setting)

    def scorer(self) -> MegatronModel:
        return self.policy.model

    def reference(self) -> MegatronModel:
        return self._model()

    def critic(self, algorithm: AlgorithmConfig) -> CriticEngine:
        raise NotImplementedError("training.engine=megatron has no critics; options.py refuses them")

    def _model(self) -> MegatronModel:
        return MegatronModel(outline_model(self._setting.model, seed=0), self._mesh, self._setting)


@dataclass
class Packed(PackedSeqParams):
    """Samples in one row. boundaries: of them, as our attention asks for them."""

    boundaries: Boundaries | None = None


class Attention(torch.nn.Module):
    """The attention in place of megatron-core's, which refuses packed rows: these by `engines.torch.packing`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        packed_seq_params: Packed | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[T, heads, D] of a row, or [T, rows, heads, D], and as many heads of keys and values as there are."""
        if packed_seq_params is None:
            q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])
            return attended.permute(2, 0, 1, 3).flatten(2)
        q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
        assert packed_seq_params.boundaries is not None, "made by `_inputs`"
        how = {"scaling": query.shape[-1] ** -0.5, "boundaries": packed_seq_params.boundaries}
        return packed_attention(self, q, k, v, None, **how)[0][0].flatten(1)


class Norm(torch.nn.RMSNorm):
    """The norm in place of megatron-core's, which refuses slices of a sequence: gradients of its weight are of these,
    and summed over the ranks that have one each."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class HiddenStates(GPTModel):
    """A model that ends with hidden states, [T, rows, H], on every rank of its last stage; or a stage before, where
    ranks that share layers have a slice of T each."""

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if not (self.post_process and self.config.sequence_parallel):
            return hidden_states
        # What follows is computed on each rank, and so is its gradient.
        whole: torch.Tensor = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        return whole


class MegatronModel:
    """A rank's part of a model, with its first weights, and the passes through it: `harness.protocols.Scorer`.

    Twelve attributes: most say what this rank has of the model, by megatron-core's names and by Hugging Face's.
    """

    def __init__(self, outline: Outline, mesh: DeviceMesh, setting: TrainingSetting) -> None:
        """Takes over the outline, and reads of its weights this rank's part. Raises ValueError for a checkpoint whose
        layers are none of megatron-core's."""
        _require_plain(outline)
        self._setting, self.mesh, self.dtype = setting, mesh, outline.dtype
        self.shapes = {name: tuple(parameter.shape) for name, parameter in outline.model.named_parameters()}
        training, stages = setting.training, submesh(mesh, "stage")
        group = None if stages is None else stages.get_group()
        self.pipeline = Pipeline(group, setting.model.hidden, outline.dtype, setting.device)
        tensors, shares = submesh(mesh, "tensor"), training.tensor_parallel
        share = 0 if tensors is None else tensors.get_local_rank()
        self.place = Place(
            self.pipeline.number,
            self.pipeline.stages,
            share,
            shares,
            mesh["data"].get_local_rank() % training.expert_parallel * shares + share,
            training.expert_parallel * shares,
        )
        self.held = held_by(self.place, setting.model, self.shapes)
        self._head = Head(
            setting.algorithm.temperature,
            None if tensors is None else tensors.get_group(),
            float32_head(outline.model),
            training.logit_bytes,
        )
        self.config = _transformer_config(setting, outline.dtype)
        with answers(setting.device), torch.random.fork_rng(devices=[]):
            self.module = _made(self.config, setting, self.pipeline)
        self.routers = StageRouters(self.module, self._head.group, training.recompute_activations)
        self.named: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        for held in self.held.values():
            for name in held.sources:  # what it would note where it drew weights itself, and counts norms by
                self.named[name].tensor_model_parallel = held.cut is not None  # type: ignore[attr-defined]
        with torch.no_grad():
            for name, part in outline.parts({name: held.part for name, held in self.held.items()}):
                self.held[name].write(part, self.named.__getitem__)

    async def log_probs(self, prompts: Ragged, responses: Ragged, routes: Ragged | None = None) -> Ragged:
        return self._scored(prompts, responses, routes, gradient_squares=False)[0]

    async def gradient_squares(
        self, prompts: Ragged, responses: Ragged, routes: Ragged | None = None
    ) -> tuple[Ragged, Ragged]:
        log_probs, _, squares = self._scored(prompts, responses, routes, gradient_squares=True)
        return log_probs, squares

    def _scored(
        self, prompts: Ragged, responses: Ragged, routes: Ragged | None, gradient_squares: bool
    ) -> list[Ragged]:
        parts = self.passes(prompts, responses)
        laid = lay_out_parts(self.lay_out, parts, prompts, responses, routes)

        def said(number: int, hidden: torch.Tensor, non_loss_data: bool) -> Scores:
            return self.scores(laid[number], hidden, gradient_squares)

        with torch.no_grad():
            found = self.run(self.module, laid, said, forward_only=True, collect_non_loss_data=True)
        return in_order(found, responses, parts, self.pipeline)

    def passes(self, prompts: Ragged, responses: Ragged) -> list[np.ndarray]:
        """Samples of each pass, of which every rank makes as many: experts are spread over them."""
        return passes_over(prompts, responses, self._setting.training, self._most)

    def lay_out(self, prompts: Ragged, responses: Ragged, routes: Ragged | None = None) -> LaidOut:
        """Samples as they go through the model."""
        laid = LAYOUTS[self._setting.training.layout](prompts, responses, self._setting.device)
        model = self._setting.model
        return laid if routes is None else laid.with_routes(routes, (model.layers, model.active_experts))

    def run(self, module: torch.nn.Module, laid: Sequence[LaidOut], said: Callable[..., Any], **how: Any) -> list[Any]:
        """Return what the last stage says of each pass, by megatron-core's schedule; nothing on other stages. module:
        this model, or what wraps it; said: by the number of a pass and its hidden states."""

        def forward(numbers: Iterator[int], module: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
            number = next(numbers)
            self.routers.begin(laid[number])
            return module(**_inputs(laid[number], self.place.tensors)), partial(said, number)

        with answers(self._setting.device):
            found: list[Any] = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(range(len(laid))),
                model=module,
                num_microbatches=len(laid),
                seq_length=1,  # shapes travel before what has them
                micro_batch_size=1,
                **how,
            )
        self.routers.end()
        return found

    def scores(self, laid: LaidOut, hidden: torch.Tensor, gradient_squares: bool = False) -> Scores:
        """Scores by the last stage's hidden states, [T, rows, H], of samples and of what fills them up."""
        tied = self.module.share_embeddings_and_output_weights
        weight = self.module.shared_embedding_or_output_weight() if tied else self.module.output_layer.weight
        return self._head(laid, hidden[: laid.shape[1]].transpose(0, 1), weight, gradient_squares)

    def _most(self, passes: int) -> int:
        return over_ranks(passes, dist.ReduceOp.MAX, self.mesh["data"], self._setting.device)


class MegatronPolicy:
    """`harness.protocols.TrainEngine`. Its attributes are what it was made with, what megatron-core makes of that, and
    the counts of a step."""

    def __init__(self, model: MegatronModel, setting: TrainingSetting) -> None:
        self.model, self._setting, self._device = model, setting, setting.device
        algorithm = setting.algorithm
        self._loss, self._aggregated = PolicyLoss(algorithm), LossSum(algorithm, setting.horizon)
        self._parameters = sum(math.prod(shape) for shape in model.shapes.values())
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        how = OptimizerConfig(
            lr=peak_rate(algorithm, self._parameters),
            weight_decay=algorithm.weight_decay,
            adam_beta1=algorithm.betas[0],
            adam_beta2=algorithm.betas[1],
            clip_grad=algorithm.grad_clip,
            bf16=model.dtype == torch.bfloat16,
            params_dtype=model.dtype,
            use_distributed_optimizer=True,
        )
        with answers(self._device):
            self._wrapped = DistributedDataParallel(model.config, buffers, model.module)
            # Without overrides, or norms' weights would not decay.
            self._optimizer = get_megatron_optimizer(how, [self._wrapped], {}, use_gloo_process_groups=False)
        self._shards = {name: self._shard(parameter) for name, parameter in model.named.items()}
        self._step, self._unfinished = torch.zeros((), dtype=torch.int64), False
        self._updates = torch.zeros(())  # as AdamW counts: without steps that were skipped
        self._forget()
        shared, spread = model.place.tensors > 1, setting.training.expert_parallel > 1
        self._over_experts = self._over_tensors = model.mesh["data", "tensor"] if shared else None
        if spread:
            experts = with_replicas(model.mesh, setting.training.expert_parallel)
            self._over_experts = experts["replica", "expert", "tensor"] if shared else experts["replica", "expert"]
        self._holders = holders_of(model.pipeline, model.mesh, dict.fromkeys(model.held, self._step))

    async def accumulate(self, batch: TrainBatch) -> dict[str, float]:
        sums, model = dict[str, float](), self.model
        parts = [part_of(batch, part) for part in model.passes(batch.prompts, batch.responses)]
        laid = [model.lay_out(part.prompts, part.responses, part.routes) for part in parts]

        def said(number: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
            nonlocal sums
            loss, told = self._loss(model.scores(laid[number], hidden), parts[number], self._aggregated)
            sums = add_diagnostics(sums, told)
            return loss, torch.zeros((), dtype=torch.int), None  # tokens, of which the divisor has its own idea

        self._unfinished = True
        with model.routers.counted():
            model.run(self._wrapped, laid, said, forward_only=False)
        sums, self._aggregated.divisor = model.pipeline.from_last((sums, self._aggregated.divisor))
        for routed in model.pipeline.from_all(model.routers.sums()):
            sums = add_diagnostics(sums, routed)
        return sums

    def rank_tokens(self, batch: TrainBatch) -> list[int]:
        return [len(batch.prompts.values) + len(batch.responses.values)]

    async def step(self) -> dict[str, float]:
        algorithm, data = self._setting.algorithm, self.model.mesh["data"]
        divisor = over_ranks(self._aggregated.divisor, dist.ReduceOp.SUM, data, self._device)
        rate = learning_rate(algorithm, self._parameters, int(self._step), self._setting.steps)
        with answers(self._device), torch.no_grad():
            finalize_model_grads([self._wrapped])
            self._wrapped.scale_gradients(1 / max(1, divisor))
            self._optimizer.prepare_grads()
            norm = float(self._optimizer.get_grad_norm())
            finite = math.isfinite(norm)
            if finite:
                for part in self._optimizer.chained_optimizers:
                    clip_grad_by_total_norm_fp32(part.get_parameters(), algorithm.grad_clip, norm)
                for group in self._optimizer.param_groups:
                    group["lr"] = rate
                self._optimizer.step_with_ready_grads()
                self._updates += 1
        self._forget()
        self._step += 1
        return {"grad_norm": norm, "learning_rate": rate, "skipped": float(not finite)}

    def _forget(self) -> None:
        """Leave no gradients."""
        self._wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._aggregated.divisor, self._unfinished = 0, False

    # -- state, by Hugging Face's names

    async def state(self) -> checkpoint.TrainingState:
        if self._unfinished:
            raise RuntimeError("gradients of micro-batches would be lost; save after a step")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        random = torch.get_rng_state()
        tensors = {"training.steps": self._step.clone(), f"random.{rank}": random}
        places = {name: checkpoint.Place(tuple(each.shape), (0,) * each.dim()) for name, each in tensors.items()}
        for kind in _KINDS:
            for number, (sources, pieces) in enumerate(_by_source(self.model.held)):
                whole = {name: self._gathered(kind, name) for name in sources}
                group = self._sharing(sources[0])
                if number % group.size() != group.rank():  # another of those that have it writes it
                    continue
                for name, held in pieces:
                    tensors[f"{kind}.{name}"] = held.read(whole.__getitem__).to("cpu", copy=True).contiguous()
                    start = tuple(each.start for each in held.part)
                    places[f"{kind}.{name}"] = checkpoint.Place(held.whole, start)
        for name in self.model.held:
            tensors[f"step.{name}"], places[f"step.{name}"] = self._updates.clone(), checkpoint.Place((), ())
        return checkpoint.TrainingState(rank, ranks, tensors, places)

    async def load(self, folder: Path) -> None:
        with checkpoint.SavedState(folder) as saved:
            for kind in _KINDS:
                for sources, pieces in _by_source(self.model.held):
                    whole = {name: torch.empty_like(self.model.named[name], dtype=torch.float32) for name in sources}
                    for name, held in pieces:
                        part = torch.empty(held.shape)
                        saved.read(f"{kind}.{name}", held.whole, held.part, part)
                        held.write(part, whole.__getitem__)
                    for name, tensor in whole.items():
                        self._put(kind, name, tensor)
            saved.read(f"step.{next(iter(self.model.held))}", (), (), self._updates)
            saved.read("training.steps", (), (), self._step)
            if saved.ranks == dist.get_world_size():
                torch.set_rng_state(saved.whole(f"random.{dist.get_rank()}"))
        for part in self._optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                state["step"].copy_(self._updates)

    def _shard(self, parameter: torch.Tensor) -> tuple[slice, Mapping[str, torch.Tensor]] | None:
        """Return what this rank's optimizer has of a parameter: a span of its numbers, and of these the weights in
        float32 and AdamW's moments, which are made now. None where it has nothing of it."""
        for part in self._optimizer.chained_optimizers:
            if parameter in part.model_param_gbuf_map:
                group, place = part.model_param_group_index_map[parameter]
                main = part.optimizer.param_groups[group]["params"][place]
                state = part.optimizer.state[main] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(main),
                    "exp_avg_sq": torch.zeros_like(main),
                }
                span = part._get_model_param_range_map(parameter)["param"]
                return slice(span.start, span.end), {"weight": main.detach(), **state}
        return None

    def _sharing(self, name: str) -> dist.ProcessGroup:
        """The ranks over which the optimizer shards a parameter of Megatron's."""
        if ".local_experts." in name:
            return parallel_state.get_expert_data_parallel_group()
        return parallel_state.get_data_parallel_group()

    def _gathered(self, kind: str, name: str) -> torch.Tensor:
        """Weights in float32, or a moment, of one of Megatron's parameters. A collective of those that share it."""
        parameter, group, shard = self.model.named[name], self._sharing(name), self._shards[name]
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        if shard is not None:
            whole[shard[0]] = shard[1][kind].view(-1)
        if group.size() > 1:
            dist.all_reduce(whole, group=group)
        return whole.view_as(parameter)

    @torch.no_grad()
    def _put(self, kind: str, name: str, whole: torch.Tensor) -> None:
        if kind == "weight":
            self.model.named[name].copy_(whole)
        if (shard := self._shards[name]) is not None:
            shard[1][kind].view(-1).copy_(whole.view(-1)[shard[0]])

    # -- weights for engines

    def named_parameters(self) -> Mapping[str, torch.Tensor]:
        return ByName(self._sent, self.model.shapes)

    def holders(self) -> Mapping[str, tuple[int, ...]]:
        return self._holders

    def _sent(self, name: str) -> torch.Tensor:
        """A parameter, of which others may have shards; unfused when it is asked for."""
        held = self.model.held.get(name)
        if held is None:
            return torch.empty(self.model.shapes[name], dtype=self.model.dtype, device="meta")
        part = held.read(self.model.named.__getitem__).detach()
        mesh = self._over_experts if ".experts." in name else self._over_tensors
        if mesh is None or held.cut is None:
            return part
        return DTensor.from_local(part, mesh, [Replicate(), *[Shard(held.cut)] * (mesh.ndim - 1)], run_check=False)


def _by_source(held: Mapping[str, Held]) -> Iterator[tuple[tuple[str, ...], list[tuple[str, Held]]]]:
    """Parameters that are parts of the same ones of Megatron's, which stand together."""
    for sources, pieces in groupby(held.items(), key=lambda item: item[1].sources):
        yield sources, list(pieces)


def _inputs(laid: LaidOut, slices: int) -> dict[str, Any]:
    """Arguments of a model: tokens, int64 [rows, T], and where samples begin in a packed row. T is a multiple of
    `slices`: on the right there are tokens that no other sees, in a packed row a sample of their own."""
    filled = -laid.shape[1] % slices
    if not isinstance(laid, PackedBatch):
        tokens = pad(laid.inputs, (0, filled))  # type: ignore[attr-defined]
        return {"input_ids": tokens, "position_ids": None, "attention_mask": None}
    bounds = laid.boundaries
    if filled:
        bounds = Boundaries([*bounds.lengths, filled], torch.cat([bounds.offsets, bounds.offsets[-1:] + filled]))
    longest = max(bounds.lengths)
    packed = Packed("thd", bounds.offsets, bounds.offsets, max_seqlen_q=longest, max_seqlen_kv=longest)
    packed.boundaries = bounds
    given = {"input_ids": pad(laid.tokens, (0, filled))[None], "position_ids": None}
    return given | {"attention_mask": None, "packed_seq_params": packed}


def _require_plain(outline: Outline) -> None:
    """Raises ValueError where a checkpoint's config.json asks for what is not built here."""
    found = outline.model.config
    plain: dict[str, tuple[Any, ...]] = {
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
        "hidden_act": ("silu",),
    }
    has = {name: getattr(found, name, values[0]) for name, values in plain.items()}
    plain["rope_type"], has["rope_type"] = ("default",), found.rope_parameters["rope_type"]
    for name, values in plain.items():
        if has[name] not in values:
            raise ValueError(
                f"{found.name_or_path} has {name}={has[name]}, which training.engine=megatron does not build; use "
                "training.engine=torch"
            )


def _transformer_config(setting: TrainingSetting, dtype: torch.dtype) -> TransformerConfig:
    model, training = setting.model, setting.training
    how: dict[str, Any] = {}
    if model.experts:
        how |= {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.active_experts,
            "moe_ffn_hidden_size": model.ff,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            # Experts stay whole, as megatron-core's guide advises: larger products, and fewer tokens travel.
            "expert_model_parallel_size": training.expert_parallel * training.tensor_parallel,
            "expert_tensor_parallel_size": 1,
        }
    if training.recompute_activations:
        how |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ff,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,  # weights come from the outline
        use_cpu_initialization=setting.device.type == "cpu",
        tensor_model_parallel_size=training.tensor_parallel,
        sequence_parallel=training.tensor_parallel > 1,
        pipeline_model_parallel_size=training.pipeline_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the one for variable lengths, for dense models too
        calculate_per_token_loss=True,  # gradients are sums over ranks, and stay so
        # Kernels of apex and Transformer Engine.
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **how,
    )


def _made(config: TransformerConfig, setting: TrainingSetting, pipeline: Pipeline) -> HiddenStates:
    model = setting.model
    layer = get_gpt_layer_local_spec(num_experts=model.experts or None, qk_layernorm=True, normalization="RMSNorm")
    inside, attention = layer.submodules, layer.submodules.self_attention.submodules
    attention.core_attention = Attention
    inside.input_layernorm = inside.pre_mlp_layernorm = attention.q_layernorm = attention.k_layernorm = Norm
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.ep, groups.expt_tp = groups.tp_ep, groups.cp  # experts are spread over all of these, and not cut
    with warnings.catch_warnings(action="ignore"):  # of experts, which have no slices
        made: HiddenStates = HiddenStates(
            config,
            TransformerBlockSubmodules([layer] * (model.layers // pipeline.stages), layer_norm=Norm),
            model.vocabulary,
            model.max_length,
            pre_process=pipeline.is_first,
            post_process=pipeline.is_last,
            share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=int(model.rope_theta),
            pg_collection=groups,
        )
    return made.to(setting.device).train()
