"""Every loss, and with them every aggregation, on two ranks of unlike shares: the gradient of samples alone.

On one rank tests/engines/torch/test_fsdp_engine holds each loss and each aggregation against it, and
tests/harness/rl/test_losses every pair of them without an engine.
"""

from itertools import cycle

import pytest
from torch.distributed import Store

from harness.config import AlgorithmConfig
from harness.config.registries import AGGREGATIONS
from tests.support.fsdp_samples import SAMPLES, Tensors, World, assert_close, free, gradients, plain_gradients, train
from tests.support.losses import CUTTABLE
from tests.support.processes import run_ranks

pytestmark = pytest.mark.slow

AGGREGATION_OF = dict(zip(CUTTABLE, cycle(AGGREGATIONS), strict=False))
"""Ranks' sums are divided alike, whatever the loss."""
BY_RANK = [[range(5), range(9, 11)], [range(5, 9), range(11, SAMPLES)]]
"""Micro-batches of unlike sizes; every rank has as many, but not as many samples."""


def settings(loss: str) -> AlgorithmConfig:
    wide = {"low": 0.1, "high": 0.1} if loss == "gspo" else {}  # its own bounds cut off nearly all that there is here
    return free(loss, aggregation=AGGREGATION_OF[loss], options=wide)


def one_rank_of_two(store: Store, rank: int) -> dict[str, Tensors]:
    """The gradients of each loss."""
    found = {}
    with World(store, rank, 2) as world:
        for loss in CUTTABLE:
            engine = world.engine(settings(loss))
            train(engine, BY_RANK[rank])
            found[loss] = gradients(engine)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Tensors]:
    return run_ranks(one_rank_of_two, 2, timeout_s=400)[0]


@pytest.mark.parametrize("loss", CUTTABLE)
def test_the_gradient_of_a_batch_does_not_depend_on_how_ranks_share_it(found: dict[str, Tensors], loss: str) -> None:
    assert_close(found[loss], plain_gradients(range(SAMPLES), settings(loss)), rtol=1e-5)
