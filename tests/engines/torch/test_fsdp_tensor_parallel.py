"""FSDP2 x tensor parallelism: four processes, two that share layers in each of two that share the data."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from harness.config import ModelConfig, TrainingConfig
from harness.transfer_queue import GetRequest
from harness.workers.readers import FifoReader, RankQueue, group_of_neighbours
from tests.support.fsdp_samples import (
    FREE,
    SAMPLES,
    SMALL,
    Tensors,
    World,
    assert_close,
    computed,
    gradients,
    plain_gradients,
    received,
    same_bits,
    save,
    train,
    weights,
)
from tests.support.processes import run_in_processes

WORLD, TENSOR = 4, 2
PARALLEL = TrainingConfig(tensor_parallel=TENSOR)
MODELS = {
    "tied": SMALL,
    "untied": replace(SMALL, tied_embeddings=False),
    "llama": replace(SMALL, architecture="llama", qk_norm=False, attention_bias="all"),
    "qwen2": replace(SMALL, architecture="qwen2", qk_norm=False, attention_bias="qkv", tied_embeddings=False),
}
HALVES = (range(0, SAMPLES, 2), range(1, SAMPLES, 2))


@dataclass
class Told:
    """What one rank saw: first gradients and their norm, weights, and weights as their transfer plan delivers them."""

    gradients: Tensors
    norm: float
    weights: Tensors
    sent: Tensors
    held: int
    resumed: Tensors
    read: list[int | None]
    scored: list[tuple[int, int]]


class NumberQueue:
    """Gives each data-parallel rank numbers for batches, and keeps what is written."""

    def __init__(self) -> None:
        self.given, self.written = 0, list[int]()

    async def get_batch(self, request: GetRequest) -> Any:
        self.given += 1
        return 10 * request.rank + self.given if self.given < 3 else None

    async def put(self, partition: str, rows: Any, columns: Any) -> None:
        self.written += rows


def read_together(rank: int) -> list[int | None]:
    """What a rank is given where the queue hands 1 and 2 to the first pair, and 11 and 12 to the second."""
    queue = RankQueue(NumberQueue(), rank=rank // TENSOR, group=group_of_neighbours(TENSOR, 60.0))
    batches = FifoReader(queue, rank=rank // TENSOR, rows=2).read(0, ())

    async def read() -> list[Any]:
        return [await anext(batches, None) for _ in range(3)]

    return asyncio.run(read())


def score_together(rank: int) -> list[tuple[int, int]]:
    """What a stage beside the actor is given, and how often its rank's queue was then written to."""
    numbers = NumberQueue()
    queue = RankQueue(numbers, rank=rank // TENSOR, group=group_of_neighbours(TENSOR, 60.0))

    async def work() -> list[tuple[int, int]]:
        seen = []
        while (batch := await queue.get("reference", 2)) is not None:
            await queue.put("train_0", [batch], {})
            seen.append((batch, len(numbers.written)))
        return seen

    return asyncio.run(work())


def one_rank(rank: int, port: int, folder: Path) -> dict[str, Told]:
    store = TCPStore("127.0.0.1", port, WORLD, False, wait_for_workers=False)
    told = {}
    with World(store, rank, WORLD, TENSOR) as world:
        read, scored = read_together(rank), score_together(rank)
        for name, model in MODELS.items():
            engine = world.engine(FREE, PARALLEL, model)
            half = HALVES[rank // TENSOR]
            norm = train(engine, [half[:4], half[4:]])
            save(engine, folder / name)
            first, stepped = gradients(engine), weights(engine)
            held = sum(parameter.to_local().numel() for parameter in engine.masters.values())
            sent = received(engine.named_parameters(), rank, WORLD)
            train(engine, [half[:2]])
            told[name] = Told(first, norm, stepped, sent, held, weights(engine), read, scored)
    return told


@dataclass
class Run:
    ranks: list[Told]
    model: ModelConfig
    folder: Path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("checkpoints")
    store = TCPStore("127.0.0.1", 0, WORLD, True, wait_for_workers=False)
    ranks = run_in_processes(one_rank, [(rank, store.port, folder) for rank in range(WORLD)], timeout_s=200)
    return {name: Run([told[name] for told in ranks], model, folder / name) for name, model in MODELS.items()}


@pytest.fixture(params=list(MODELS))
def run(request: pytest.FixtureRequest, both: dict[str, Run]) -> Run:
    return both[request.param]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World() as world:
        yield world


def test_gradients_are_those_of_samples_taken_alone(run: Run) -> None:
    model, _loss = plain_gradients(range(SAMPLES), FREE, config=run.model)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for told in run.ranks:
        assert_close(told.gradients, expected, rtol=1e-5)
        assert told.norm == pytest.approx(float(torch.nn.utils.get_total_norm(expected.values())), rel=1e-5)


def test_all_ranks_agree_on_the_weights_bit_for_bit(run: Run) -> None:
    assert all(same_bits(run.ranks[0].weights, told.weights) for told in run.ranks)
    assert len({told.norm for told in run.ranks}) == 1


def test_each_rank_holds_its_share_and_what_is_added_once_is_held_twice(run: Run) -> None:
    everything = sum(tensor.numel() for tensor in run.ranks[0].weights.values())
    twice = ("norm.weight", "layernorm.weight", "o_proj.bias")  # the last is added to a sum over ranks, once
    whole = sum(tensor.numel() for name, tensor in run.ranks[0].weights.items() if name.endswith(twice))
    assert sum(told.held for told in run.ranks) == everything + whole * (TENSOR - 1)


def test_buckets_gather_whole_tensors_on_every_rank(run: Run) -> None:
    assert all(same_bits(told.sent, told.weights) for told in run.ranks)


def test_ranks_that_share_layers_read_the_same_micro_batches(run: Run) -> None:
    assert [told.read for told in run.ranks] == [[1, 2, None]] * TENSOR + [[11, 12, None]] * TENSOR


def test_of_ranks_that_share_layers_the_first_reads_and_writes_what_all_have_scored(run: Run) -> None:
    assert [told.scored for told in run.ranks] == [
        [(1, 1), (2, 2)],
        [(1, 0), (2, 0)],
        [(11, 1), (12, 2)],
        [(11, 0), (12, 0)],
    ]


def test_one_rank_alone_goes_on_from_what_four_have_saved(run: Run, world: World) -> None:
    engine = world.engine(FREE, model=run.model)
    computed(engine.load(run.folder))
    assert same_bits(weights(engine), run.ranks[0].weights)
    assert same_bits(gradients(engine), run.ranks[0].gradients)
    train(engine, [[*HALVES[0][:2], *HALVES[1][:2]]])
    before, after = run.ranks[0].weights, run.ranks[0].resumed
    moved = {name: after[name] - before[name] for name in after}
    assert_close({name: tensor - before[name] for name, tensor in weights(engine).items()}, moved, rtol=1e-2)
