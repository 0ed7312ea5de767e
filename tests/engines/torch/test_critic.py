"""A model of values in training: one rank, two with shards, and four of which two share layers, against plain torch."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed import Store

from engines.torch.critic import FSDPCritic, value_model
from engines.torch.first_weights import local_part
from engines.torch.model import outline_model
from harness.config import ModelConfig, TrainingConfig
from harness.protocols import ValueBatch
from harness.transfer_queue import Ragged
from tests.support.fsdp_samples import CPU, FREE, SMALL, Tensors, World, assert_close, batch_of, computed, gradients
from tests.support.processes import run_ranks

HEAD = 0.05
CLIPPED = replace(FREE, value_clip=0.1)
UNTIED = replace(SMALL, tied_embeddings=False)
SAMPLES = range(8)


def values_of(samples: Sequence[int]) -> ValueBatch:
    """Of the samples of `batch_of`, each the same in any batch; some tokens are not the policy's."""
    batch = batch_of(samples)
    values, returns, mask = [], [], []
    for number, length in zip(samples, batch.responses.lengths.tolist(), strict=True):
        random = np.random.default_rng(1000 + number)
        values.append(random.normal(0, 0.3, length).astype(np.float32))
        returns.append(random.normal(0.5, 0.3, length).astype(np.float32))
        mask.append(np.arange(length) % 4 != 2)
    ragged = (Ragged.from_rows(rows) for rows in (values, returns, mask))
    return ValueBatch(batch.prompts, batch.responses, *ragged)


def critic(world: World, training: TrainingConfig | None = None, model: ModelConfig = SMALL) -> FSDPCritic:
    """Its head is not 0, so that all of it has a gradient."""
    engine = FSDPCritic(value_model(outline_model(model)), CLIPPED, mesh=world.mesh, device=CPU, training=training)
    with torch.no_grad():
        local_part(engine.masters["score.weight"]).fill_(HEAD)
    return engine


def stepped(engine: FSDPCritic, micro_batches: Sequence[Sequence[int]]) -> Tensors:
    """The gradients of one step."""
    for samples in micro_batches:
        computed(engine.accumulate(values_of(samples)))
    computed(engine.step())
    return gradients(engine)


def by_hand(model: ModelConfig = SMALL) -> tuple[Tensors, Ragged]:
    """The gradients of the token mean, each sample alone, by plain formulas; and the values."""
    net = outline_model(model).fill(CPU)
    head = torch.full((net.config.hidden_size,), HEAD, requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    batch = values_of(SAMPLES)
    columns = (batch.prompts, batch.responses, batch.values, batch.returns, batch.mask)
    loss, values = torch.zeros(()), []
    for prompt, response, old, wanted, kept in zip(*(column.rows() for column in columns), strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, response]))
        hidden = net.model(input_ids=tokens[None]).last_hidden_state[0, len(prompt) - 1 : -1]
        value = hidden @ head + bias
        values.append(value.detach().numpy())
        old, wanted = torch.from_numpy(old), torch.from_numpy(wanted)
        near = old + (value - old).clamp(-0.1, 0.1)
        losses = torch.maximum((value - wanted) ** 2, (near - wanted) ** 2) / 2
        loss = loss + losses[torch.from_numpy(kept)].sum()
    (loss / int(batch.mask.values.sum())).backward()
    found = {f"model.{name}": weight.grad for name, weight in net.model.named_parameters()}
    return {**found, "score.weight": head.grad[None], "score.bias": bias.grad}, Ragged.from_rows(values)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("model", [SMALL, UNTIED], ids=["tied", "untied"])
def test_values_and_gradients_are_those_of_samples_taken_alone(world: World, layout: str, model: ModelConfig) -> None:
    """However the batch is cut."""
    expected, values = by_hand(model)
    batch, training = values_of(SAMPLES), TrainingConfig(layout=layout)  # type: ignore[arg-type]
    by_tokens = replace(training, tokens_per_micro_batch=40)
    for how, parts in ((training, [SAMPLES[:3], SAMPLES[3:4], SAMPLES[4:]]), (by_tokens, [SAMPLES])):
        engine = critic(world, how, model=model)
        found = computed(engine.values(batch.prompts, batch.responses))
        np.testing.assert_allclose(found.values, values.values, rtol=1e-5, atol=1e-6)
        assert_close(stepped(engine, parts), expected, rtol=1e-5)


def rank_of(store: Store, rank: int, ranks: int, tensor: int) -> tuple[Tensors, np.ndarray]:
    with World(store, rank, ranks, tensor) as world:
        engine = critic(world, TrainingConfig(tensor_parallel=tensor))
        share = SAMPLES[rank // tensor :: ranks // tensor]
        batch = values_of(share)
        values = computed(engine.values(batch.prompts, batch.responses)).values
        return stepped(engine, [share]), values


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 2)])
def test_ranks_that_share_a_batch_or_layers_make_the_same_step(ranks: int, tensor: int) -> None:
    expected, values = by_hand()
    found = run_ranks(rank_of, ranks, ranks, tensor)
    for rank, (own, scored) in enumerate(found):
        assert_close(own, expected, rtol=1e-5)
        share = values.take(SAMPLES[rank // tensor :: ranks // tensor])
        np.testing.assert_allclose(scored, share.values, rtol=1e-5, atol=1e-6)
