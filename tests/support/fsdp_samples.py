"""A small training batch, and the reference that FSDP is held against: samples one by one, plain torch, no padding."""

from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import HashStore, Store, barrier, destroy_process_group
from torch.distributed.tensor import DTensor

from engines.torch.fsdp import FSDPEngine, init_world, sharded_reference
from engines.torch.lora import with_adapters
from engines.torch.model import build_model, outline_model
from harness.config import AlgorithmConfig, ModelConfig, TrainingConfig
from harness.protocols import Scorer, TrainBatch
from harness.rl.losses import policy_loss
from harness.transfer_queue import Ragged
from harness.weight_sync.plan import pack, plan_transfer, unpack

SMALL = ModelConfig("small", 32, 2, 4, 2, 8, 64, 32, True, 64)
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
SAMPLES = 16
SCORED = range(3, 9)
FREE = AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, betas=(0.0, 0.95), grad_clip=1e9, kl_coef=0.1)
"""betas[0] = 0 leaves the gradient itself in AdamW's first moment; the clip is out of the way."""
BOUNDS = {
    "decoupled": {"cap": 1.2},
    "decoupled_tis": {"cap": 1.2},
    "tis": {"cap": 1.2},
    "tis_normalised": {"cap": 1.2},
    "mis": {"low": 0.8, "high": 1.2},
}
"""Options of losses: some of the tokens below are outside of these."""


def free(correction: str, options: Mapping[str, float] | None = None, **settings: Any) -> AlgorithmConfig:
    """`FREE` with another loss, its bounds, and these options of it."""
    return replace(FREE, correction=correction, options={**BOUNDS.get(correction, {}), **(options or {})}, **settings)


def batch_of(samples: Sequence[int]) -> TrainBatch:
    """Samples of different lengths by their numbers; the same number is the same sample in any batch."""
    columns, advantages = defaultdict[str, list[np.ndarray]](list), []
    for number in samples:
        rng = np.random.default_rng(number)
        prompt, length = rng.integers(1, SMALL.vocabulary, rng.integers(1, 9)), int(rng.integers(1, 12))
        columns["prompt"].append(prompt)
        columns["response"].append(rng.integers(1, SMALL.vocabulary, length))
        columns["behaviour"].append((-3.4 + 0.2 * rng.standard_normal(length)).astype(np.float32))
        columns["reference"].append((-3.4 + 0.2 * rng.standard_normal(length)).astype(np.float32))
        advantages.append(rng.standard_normal())
        columns["proximal"].append((-3.4 + 0.2 * rng.standard_normal(length)).astype(np.float32))
    ragged = {name: Ragged.from_rows(rows) for name, rows in columns.items()}
    return TrainBatch(
        prompts=ragged["prompt"],
        responses=ragged["response"],
        behaviour_log_probs=ragged["behaviour"],
        versions=Ragged(np.zeros(len(ragged["response"].values), np.int32), ragged["response"].lengths),
        advantages=np.array(advantages, np.float32),
        ref_log_probs=ragged["reference"],
        old_log_probs=ragged["proximal"],
    )


def token_count(samples: Sequence[int]) -> int:
    return len(batch_of(samples).responses.values)


class World:
    """A training world of this process alone, or this process's rank in a larger one; on one thread, as roles are,
    since how many there are decides in which order kernels add up."""

    def __init__(self, store: Store | None = None, rank: int = 0, world: int = 1, tensor_parallel: int = 1) -> None:
        self._threads = torch.get_num_threads()
        self.mesh = init_world(store or HashStore(), rank, world, CPU, 60, tensor_parallel)

    def __enter__(self) -> "World":
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)
        destroy_process_group()

    def engine(self, algorithm: AlgorithmConfig, training: Any = None, model: ModelConfig = SMALL) -> FSDPEngine:
        outline = with_adapters(outline_model(model), training or TrainingConfig(), seed=0)
        return FSDPEngine(outline, algorithm, mesh=self.mesh, device=CPU, training=training)

    def reference(self, model: ModelConfig = SMALL, training: TrainingConfig | None = None, seed: int = 0) -> Scorer:
        outline = outline_model(model, seed=seed)
        return sharded_reference(outline, mesh=self.mesh, device=CPU, temperature=1.0, training=training)


def computed(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that never waits, as those of engines that compute."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something, and so gives its process to others in the middle of a computation")


def train(engine: FSDPEngine, micro_batches: Sequence[Sequence[int] | TrainBatch]) -> float:
    """One step; the norm of its gradient."""
    for samples in micro_batches:
        computed(engine.accumulate(samples if isinstance(samples, TrainBatch) else batch_of(samples)))
    return computed(engine.step())["grad_norm"]


def scores(scorer: Scorer, samples: Sequence[int] = SCORED) -> np.ndarray:
    """Log-probabilities of all response tokens in a row, float32."""
    batch = batch_of(samples)
    found = computed(scorer.log_probs(batch.prompts, batch.responses))
    assert found.lengths.tolist() == batch.responses.lengths.tolist() and found.values.dtype == np.float32
    return found.values


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: in a world of one, `full_tensor` is the shard itself."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """The float32 weights that training works on."""
    return {name: full(parameter) for name, parameter in engine.masters.items()}


def gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """The gradients of the first step, after clipping, of an engine with betas[0] = 0."""
    with engine._moments.on_device():
        state = engine._optimizer.state
        return {name: full(state[parameter]["exp_avg"]) for name, parameter in engine.masters.items()}


def received(parameters: Mapping[str, torch.Tensor], rank: int, world: int) -> Tensors:
    """The parameters as their transfer plan gathers them, on each rank of the world in turn."""
    found = {}
    for bucket in plan_transfer(parameters.items(), 4096).buckets:
        for owner in range(world):
            buffer = torch.empty(bucket.bytes, dtype=torch.uint8) if rank == owner else None
            pack(bucket, parameters, buffer, owner)
            if buffer is not None:
                found |= {name: tensor.clone() for name, tensor in unpack(bucket, buffer)}
    return found


def same_bits(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], rtol: float) -> None:
    """Within rtol of the largest element of each tensor: small elements carry the rounding of large ones."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        atol = rtol * float(tensor.abs().max())
        torch.testing.assert_close(ours[name], tensor.to(ours[name].dtype), rtol=0, atol=atol)


def plain_gradients(*arguments: Any, **options: Any) -> Tensors:
    """The gradients of `plain_backward`."""
    named = plain_backward(*arguments, **options).named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def plain_backward(
    samples: Sequence[int],
    algorithm: AlgorithmConfig,
    dtype: torch.dtype = torch.float32,
    config: ModelConfig = SMALL,
    mask: np.ndarray | None = None,
    model: torch.nn.Module | None = None,
) -> torch.nn.Module:
    """The model with the gradients of the token mean; each sample alone, by plain formulas. mask: bool, of all response
    tokens in a row, those that count; None is all. model: to take over, else one is made."""
    model = (model or build_model(config)).to(dtype).train()
    if config.experts:
        model.set_experts_implementation("eager")  # one by one; float64, too
    batch = batch_of(samples)
    loss = torch.zeros((), dtype=dtype)
    correction = policy_loss(algorithm)
    every = np.ones(len(batch.responses.values), np.bool_) if mask is None else mask
    counts = Ragged(every, batch.responses.lengths)
    for i, (prompt, response) in enumerate(zip(batch.prompts.rows(), batch.responses.rows(), strict=True)):
        sequence = torch.from_numpy(np.concatenate([prompt, response]))
        logits = model(sequence[None]).logits[0, len(prompt) - 1 : -1] / algorithm.temperature
        log_probs = torch.log_softmax(logits, -1).gather(-1, sequence[len(prompt) :, None])[:, 0]
        if not counts.row(i).any():
            continue
        here = torch.from_numpy(counts.row(i))
        log_probs = log_probs[here]  # the others were read, and that is all
        behaviour = torch.from_numpy(batch.behaviour_log_probs.row(i)).to(dtype)[here]
        advantage = torch.full_like(behaviour, float(batch.advantages[i]))
        inputs = (log_probs, behaviour, advantage, torch.ones(len(log_probs), dtype=torch.bool))
        more = {}
        if algorithm.train_on_old_log_probs and batch.old_log_probs is not None:
            more["proximal_log_probs"] = torch.from_numpy(batch.old_log_probs.row(i)).to(dtype)[here]
        losses = correction(*inputs, lengths=torch.tensor([len(log_probs)]), **more)
        if algorithm.kl_coef and batch.ref_log_probs is not None:
            difference = torch.from_numpy(batch.ref_log_probs.row(i)).to(dtype)[here] - log_probs
            losses = losses + algorithm.kl_coef * (difference.exp() - difference - 1)
        everything = torch.log_softmax(logits, -1)
        losses = losses + algorithm.entropy_coef * (everything.exp() * everything).sum(-1)[here]
        loss = loss + (losses.mean() if algorithm.aggregation == "sequence_mean_token_mean" else losses.sum())
    responses = sum(bool(row.any()) for row in counts.rows())
    loss = loss / {"token_mean": int(every.sum()), "token_sum": 1}.get(algorithm.aggregation, responses)
    loss.backward()
    return model


def save(engine: FSDPEngine, folder: Path) -> None:
    """This rank's state into a folder, which is made; returns when all ranks' is there."""
    state = computed(engine.state())
    folder.mkdir(parents=True, exist_ok=True)
    state.write(folder)
    if state.ranks > 1:
        barrier()
