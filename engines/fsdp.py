"""Training: FSDP2 (torch's `fully_shard`) over torch.distributed; NCCL between GPUs, Gloo between CPUs."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engines.padding import pad_batch
from harness.config import AlgorithmConfig
from harness.protocols import TrainBatch
from harness.rl.diagnostics import diagnostics
from harness.rl.log_probs import token_entropies, token_log_probs
from harness.rl.losses import CORRECTIONS, k3

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

CORRECTION_OPTIONS = {"none": (), "clip": ("clip_low", "clip_high"), "tis": ("cap",)}


def init_world(store: dist.Store, rank: int, world: int, device: torch.device, timeout_s: float) -> DeviceMesh:
    """Join the training world and return its mesh; collective waits end after `timeout_s` with torch's own error."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    return init_device_mesh(device.type, (world,))


class FSDPEngine:
    """`harness.protocols.TrainEngine`: one rank's shards, gradients and AdamW state.

    Parameters are kept in float32; a bfloat16 model computes in bfloat16 and reduces gradients in float32.
    """

    def __init__(
        self, model: Qwen3ForCausalLM, algorithm: AlgorithmConfig, *, mesh: DeviceMesh, device: torch.device
    ) -> None:
        compute = next(model.parameters()).dtype
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        model = model.to(device).float().train()
        if compute == torch.float32:
            policy = MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self._model, self._mesh, self._device, self._algorithm = model, mesh, device, algorithm
        options = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high, "cap": algorithm.tis_cap}
        wanted = {name: options[name] for name in CORRECTION_OPTIONS[algorithm.correction]}
        self._policy_loss = partial(CORRECTIONS[algorithm.correction], **wanted)
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=algorithm.learning_rate,
            betas=algorithm.betas,
            weight_decay=algorithm.weight_decay,
        )
        self._tokens = 0

    async def accumulate(self, batch: TrainBatch) -> dict[str, float]:
        """Back-propagates the SUM of token losses: the batch's token count is not known before its last micro-batch."""
        algorithm = self._algorithm
        padded = pad_batch(batch.prompts, batch.responses, self._device)
        mask = padded.mask
        logits = self._model(input_ids=padded.inputs, use_cache=False).logits
        log_probs = token_log_probs(logits, padded.targets, algorithm.temperature)
        behaviour = padded.spread(batch.behaviour_log_probs)
        advantages = torch.from_numpy(batch.advantages).to(self._device)[:, None].expand(mask.shape)
        loss = self._policy_loss(log_probs, behaviour, advantages, mask).sum()
        reference = None if batch.ref_log_probs is None else padded.spread(batch.ref_log_probs)
        if algorithm.kl_coef > 0 and reference is not None:
            loss = loss + algorithm.kl_coef * k3(log_probs, reference, mask).sum()
        loss.backward()
        self._tokens += len(batch.responses.values)
        same_version = old = None
        if batch.old_log_probs is not None and batch.old_versions is not None:
            old = padded.spread(batch.old_log_probs)
            old_version = torch.from_numpy(batch.old_versions).to(self._device)[:, None]
            same_version = padded.spread(batch.versions) == old_version
        return diagnostics(
            log_probs.detach(),
            behaviour,
            advantages,
            mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            entropies=token_entropies(logits.detach(), algorithm.temperature),
            reference_log_probs=reference,
            old_log_probs=old,
            same_version=same_version,
        )

    async def step(self) -> dict[str, float]:
        """One update with the mean over all ranks' tokens since the last one.

        FSDP has averaged the gradients over ranks; times the world's size over all tokens makes that the token mean.
        """
        tokens = torch.tensor([self._tokens], dtype=torch.int64, device=self._device)
        if self._mesh.size() > 1:
            dist.all_reduce(tokens, group=self._mesh.get_group())
        scale = self._mesh.size() / tokens.item()
        torch._foreach_mul_([_local(parameter.grad) for parameter in self._parameters], scale)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._algorithm.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._tokens = 0
        return {"grad_norm": float(norm.full_tensor() if isinstance(norm, DTensor) else norm)}

    def named_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._model.named_parameters())


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a parameter without a gradient; did every rank see a micro-batch?"
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
