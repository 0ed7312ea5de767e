"""Simulated forward and training passes: how long they last."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.simulated.passes import SimulatedLogProb, SimulatedTrainer, scoring_s, training_s
from harness.config import RecurringCost, TrainingConfig
from harness.protocols import LogProbEngine, TrainBatch, TrainEngine
from harness.runtime.virtual_runtime import VirtualClock, run_virtual
from harness.transfer_queue import Ragged
from tests.support.simulated_setting import COST, now


def ragged(*rows: list[int]) -> Ragged:
    return Ragged.from_rows([np.array(row, np.int64) for row in rows], np.int64)


PROMPTS = ragged([10], [20], [30], [40])
RESPONSES = ragged([5], [1, 4], [10], [3, 3, 4])


def train_batch() -> TrainBatch:
    zeros = Ragged(np.zeros(7, np.float32), RESPONSES.lengths)
    return TrainBatch(PROMPTS, RESPONSES, zeros, zeros, np.zeros(4, np.float32))


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 130), (2, 65), (3, 50), (4, 50), (9, 50)])
def test_a_pass_lasts_as_long_as_the_largest_share_of_its_tokens(ranks: int, tokens: int) -> None:
    async def main() -> tuple[float, float, float]:
        clock = VirtualClock(asyncio.get_running_loop())
        scorer = SimulatedLogProb(COST, clock, ranks=ranks, load_s=2.0)
        trainer = SimulatedTrainer(COST, clock, ranks=ranks)
        _: tuple[LogProbEngine, TrainEngine] = (scorer, trainer)
        log_probs = await scorer.log_probs(PROMPTS, RESPONSES)
        assert log_probs.values.dtype == np.float32 and log_probs.lengths.tolist() == [1, 2, 1, 3]
        scored = now()
        assert await trainer.accumulate(train_batch()) == {}
        trained = now()
        assert await trainer.step() == {}
        assert trainer.named_parameters() == {}
        return scored, trained - scored, now() - trained

    assert run_virtual(main()) == (3.0 + 0.5 * tokens, 3.0 + 2.0 * tokens, 7.0)


@pytest.mark.parametrize(("ranks", "limit", "calls"), [(1, 200, 1), (1, 60, 3), (2, 65, 1), (2, 50, 2), (4, 50, 1)])
def test_a_micro_batch_that_is_cut_by_tokens_makes_a_call_for_each_part(ranks: int, limit: int, calls: int) -> None:
    """Samples of 15, 25, 40 and 50 tokens."""
    training = TrainingConfig(layout="packed", tokens_per_micro_batch=limit)

    async def main() -> float:
        clock = VirtualClock(asyncio.get_running_loop())
        await SimulatedTrainer(COST, clock, ranks=ranks, training=training).accumulate(train_batch())
        whole = now()
        await SimulatedTrainer(COST, clock, ranks=ranks).accumulate(train_batch())
        trained = now()
        await SimulatedLogProb(COST, clock, ranks=ranks, training=training).log_probs(PROMPTS, RESPONSES)
        scored = now()
        await SimulatedLogProb(COST, clock, ranks=ranks).log_probs(PROMPTS, RESPONSES)
        assert (scored - trained) - (now() - scored) == whole - (trained - whole)
        return whole - (trained - whole)

    assert run_virtual(main()) == 3.0 * (calls - 1)


@pytest.mark.parametrize(
    ("setting", "tokens", "pairs", "calls"),
    [
        ({"dealing": "in_order"}, 40 + 50, 40**2 + 50**2, 1),  # 15, 25 | 40, 50
        ({"padding": True, "layout": "padded"}, 2 * 50, 2 * 50**2, 1),  # 15, 50 | 25, 40
        ({"padding": True, "layout": "packed"}, 25 + 40, 15**2 + 50**2, 1),
        ({"padding": True, "layout": "padded", "tokens_per_micro_batch": 50}, 15 + 50, 15**2 + 50**2, 2),
    ],
)
def test_others_deal_in_order_and_compute_padding(setting: dict[str, Any], tokens: int, pairs: int, calls: int) -> None:
    """Two ranks. The slowest of both sums decides."""
    of_cost = {name: value for name, value in setting.items() if name in ("dealing", "padding")}
    training = TrainingConfig(**{name: value for name, value in setting.items() if name not in of_cost})
    lengths, cost = np.array([15, 25, 40, 50]), replace(COST, train_s_per_pair=2.0, log_prob_s_per_pair=0.5, **of_cost)
    assert training_s(cost, lengths, 2, 1, training) == 3.0 * calls + 2.0 * (tokens + pairs)
    assert scoring_s(cost, lengths, 2, 1, training) == 3.0 * calls + 0.5 * (tokens + pairs)


def test_the_slowest_share_need_not_have_the_most_tokens() -> None:
    """Attention: four samples of 5 tokens against one of 12 and three of 2."""
    cost = replace(COST, log_prob_s_per_pair=0.25, train_s_per_pair=1.0, log_prob_call_s=1.5, train_call_s=2.5)
    prompts, responses = ragged([3], [3], [3], [3], [3], [1], [1], [1]), ragged(*[[2], [1, 1]] * 2, [9], *[[1]] * 3)

    async def main() -> tuple[float, float]:
        clock = VirtualClock(asyncio.get_running_loop())
        await SimulatedLogProb(cost, clock, ranks=2).log_probs(prompts, responses)
        scored = now()
        zeros = Ragged(np.zeros(len(responses.values), np.float32), responses.lengths)
        batch = TrainBatch(prompts, responses, zeros, zeros, np.zeros(8, np.float32))
        await SimulatedTrainer(cost, clock, ranks=2).accumulate(batch)
        return scored, now() - scored

    tokens, pairs = 12 + 3 * 2, 12**2 + 3 * 2**2
    assert run_virtual(main()) == (3.0 + 1.5 + 0.5 * tokens + 0.25 * pairs, 3.0 + 2.5 + 2.0 * tokens + pairs)


def test_a_checkpoint_is_copied_behind_the_last_step_of_every_so_many_versions() -> None:
    cost = replace(COST, checkpoint=RecurringCost(20.0, every=2))

    async def main() -> list[float]:
        trainer = SimulatedTrainer(cost, VirtualClock(asyncio.get_running_loop()), steps_per_version=2)
        ends = []
        for _ in range(8):
            await trainer.step()
            ends.append(now())
        return ends

    assert np.diff(run_virtual(main())).tolist() == [7, 7, 27, 7, 7, 7, 27]


def test_a_scorer_takes_its_weights_in_their_time() -> None:
    async def main() -> tuple[int, float]:
        clock = VirtualClock(asyncio.get_running_loop())
        scorer = SimulatedLogProb(COST, clock, load_s=2.0)
        await scorer.load_weights(3, iter(()))
        return scorer.version, now()

    assert run_virtual(main()) == (3, 2.0)
