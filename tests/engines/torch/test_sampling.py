import math
import random

import numpy as np
import pytest
import torch

from engines.torch.rollout import Parking
from engines.torch.sampling import draw, uniforms
from harness.protocols import Sampling

PLAIN = Sampling(max_tokens=1)
PINNED = [0.30931491118583454, 0.3569562367935075]


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def draw_one(logits: torch.Tensor, uniform: float, sampling: Sampling = PLAIN) -> tuple[int, float]:
    tokens, log_probs = draw(logits, torch.tensor([uniform], dtype=torch.float64), sampling)
    return int(tokens), float(log_probs)


def test_a_longer_stream_of_a_sample_begins_with_the_shorter_one() -> None:
    assert np.array_equal(uniforms(7, 3, 100)[:33], uniforms(7, 3, 33))


def test_streams_differ_between_samples_and_between_seeds() -> None:
    streams = [uniforms(seed, sample, 8) for seed in range(5) for sample in range(5)]
    assert len({tuple(stream) for stream in streams}) == 25


def test_a_stream_is_uniform() -> None:
    numbers = np.concatenate([uniforms(0, sample, 100) for sample in range(1000)])
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_squared = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_squared < 43.8  # 19 degrees of freedom, p = .001; the numbers are fixed, so this never flakes


def test_the_stream_of_a_sample_is_pinned() -> None:
    assert uniforms(1, 2, 2) == pytest.approx(PINNED, abs=0)


def test_the_uniform_is_inverted_in_vocabulary_order() -> None:
    logits = logits_of(0.25, 0.5, 0.25)
    assert [draw_one(logits, u)[0] for u in (0.0, 0.2, 0.3, 0.7, 0.8, 1 - 2**-53)] == [0, 0, 1, 1, 2, 2]


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = logits_of(0.0, 0.5, 0.0, 0.5, 0.0)
    assert [draw_one(logits, u)[0] for u in (0.0, 0.5, 1 - 2**-53)] == [1, 3, 3]


def test_temperature_scales_the_logits_and_the_log_probability() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    token, log_prob = draw_one(logits, 0.5, Sampling(max_tokens=1, temperature=0.5))
    assert token == 2
    assert log_prob == pytest.approx(float(torch.log_softmax(logits * 2, -1)[0, 2]), abs=1e-6)


def test_temperature_zero_takes_the_most_likely_token_as_certain() -> None:
    assert draw_one(torch.tensor([[1.0, 3.0, 2.0]]), 0.01, Sampling(max_tokens=1, temperature=0)) == (1, 0.0)


def test_top_p_draws_from_the_smallest_set_that_holds_it_renormalised() -> None:
    logits = logits_of(0.1, 0.4, 0.2, 0.3)
    sampling = Sampling(max_tokens=1, top_p=0.6)
    drawn = {draw_one(logits, u, sampling) for u in np.linspace(0, 0.999, 50)}
    assert {token for token, _ in drawn} == {1, 3}
    for token, log_prob in drawn:
        assert log_prob == pytest.approx(math.log({1: 4 / 7, 3: 3 / 7}[token]), abs=1e-6)


def test_top_p_keeps_one_token_however_small_it_is() -> None:
    assert draw_one(logits_of(0.1, 0.6, 0.3), 0.99, Sampling(max_tokens=1, top_p=1e-9))[0] == 1


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_frequencies_follow_the_distribution(top_p: float) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)).expand(20_000, -1)
    points = torch.from_numpy(uniforms(0, 0, 20_000))
    tokens, log_probs = draw(logits, points, Sampling(max_tokens=1, top_p=top_p))
    for token in tokens.unique():
        of_token = tokens == token
        assert float(of_token.double().mean()) == pytest.approx(float(log_probs[of_token][0].exp()), abs=0.012)


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(max_tokens=1, temperature=0.7, top_p=0.9)])
def test_a_row_draws_the_same_alone_and_among_others(sampling: Sampling) -> None:
    logits = torch.randn(65, 33, generator=torch.Generator().manual_seed(1))
    points = torch.from_numpy(uniforms(0, 1, 65))
    tokens, log_probs = draw(logits, points, sampling)
    for row in range(65):
        token, log_prob = draw(logits[row : row + 1], points[row : row + 1], sampling)
        assert token == tokens[row] and torch.equal(log_prob, log_probs[row : row + 1])


class Named:
    """Slots that hold names."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: list[int | None] = [None] * slots

    def move(self, source: int, target: int) -> None:
        self.held[target] = self.held[source]

    def swap(self, one: int, other: int) -> None:
        self.held[one], self.held[other] = self.held[other], self.held[one]


def test_whoever_is_said_to_be_there_is_there_and_running_samples_keep_their_slots() -> None:
    rng, slots = random.Random(0), Named(6)
    parking, running, found = Parking(slots), list[int](), 0
    tokens = {sample: [sample, 7] for sample in range(12)}
    for _ in range(3000):
        idle = [sample for sample in tokens if sample not in running]
        if len(running) < slots.slots and idle and rng.random() < 0.5:
            sample = rng.choice(idle)
            if rng.random() < 0.1:
                tokens[sample] = [sample, rng.randrange(100)]  # it begins again, by other tokens
            kept = parking.bring(sample, [*tokens[sample], 1, 2], len(running))
            assert kept in (0, len(tokens[sample]) - 1)
            assert not kept or slots.held[len(running)] == hash(tuple(tokens[sample]))
            found += bool(kept)
            running.append(sample)
            tokens[sample] = [*tokens[sample], 1, 2][:20]
            slots.held[len(running) - 1] = hash(tuple(tokens[sample]))
        elif running:
            row = rng.randrange(len(running))
            sample, last = running[row], running.pop()
            if row < len(running):
                slots.swap(len(running), row)
                running[row] = last
            parking.park(sample, tokens[sample], len(running))
        assert [slots.held[row] for row in range(len(running))] == [hash(tuple(tokens[sample])) for sample in running]
    assert found > 300
    parking.clear()
    assert parking.bring(99, [1, 2], 0) == 0
