"""Every loss under every aggregation, however a batch is cut, on one rank and on two: the gradient of samples alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
from torch.distributed import TCPStore

from harness.config import AlgorithmConfig
from harness.config.registries import AGGREGATIONS
from tests.support.fsdp_samples import SAMPLES, World, assert_close, free, gradients, plain_gradients, train
from tests.support.losses import CUTTABLE
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.slow

PAIRS = list(product(CUTTABLE, AGGREGATIONS))
PARTS = [range(3), range(3, 8), range(8, SAMPLES)]
BY_RANK = [[range(5), range(9, 12)], [range(5, 9), range(12, SAMPLES)]]
"""Micro-batches of unlike sizes; every rank has as many, but not as many samples."""

Tensors = dict[str, torch.Tensor]


def settings(loss: str, aggregation: str) -> AlgorithmConfig:
    wide = {"low": 0.1, "high": 0.1} if loss == "gspo" else {}  # its own bounds cut off nearly all that there is here
    return free(loss, aggregation=aggregation, options=wide)


def of_all_pairs(world: World, micro_batches: Sequence[Sequence[int]]) -> list[Tensors]:
    found = []
    for pair in PAIRS:
        engine = world.engine(settings(*pair))
        train(engine, micro_batches)
        found.append(gradients(engine))
    return found


def one_rank_of_two(rank: int, port: int) -> list[Tensors]:
    with World(TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False), rank, 2) as world:
        return of_all_pairs(world, BY_RANK[rank])


@pytest.fixture(scope="module", params=["one rank", "two ranks"])
def found(request: pytest.FixtureRequest) -> Iterator[list[Tensors]]:
    if request.param == "one rank":
        with World() as world:
            yield of_all_pairs(world, PARTS)
    else:
        store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        ranks = run_in_processes(one_rank_of_two, [(rank, store.port) for rank in range(2)], timeout_s=400)
        yield ranks[0]


@pytest.mark.parametrize("pair", PAIRS, ids=", ".join)
def test_the_gradient_of_a_batch_does_not_depend_on_how_it_is_cut(found: list[Tensors], pair: tuple[str, str]) -> None:
    model, _ = plain_gradients(range(SAMPLES), settings(*pair))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_close(found[PAIRS.index(pair)], expected, rtol=1e-5)
