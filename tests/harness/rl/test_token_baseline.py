"""A baseline for each token of a group; verl's function is held against it in tests/oracle."""

import pytest
import torch

from harness.config import AlgorithmConfig, ConfigError
from harness.config.compose import compose_job
from harness.rl.token_advantages import optimal_token_baseline, token_advantages_of

LENGTHS = torch.tensor([2, 4, 1, 1])
SQUARES = torch.tensor([1.0, 3.0, 0.5, 9.0, 1.5, 1.0, 0.3, 0.1])
MASK = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
"""Of the second response, of three tokens, the environment wrote one."""
REWARDS = torch.tensor([[2.0, 1.0], [0.5, 0.5]])
FIRST = (2 * 1.0 + 1 * 0.5) / 1.5
SECOND = (2 * 4.0 + 1 * 2.0) / 6.0


def test_rewards_are_less_their_mean_weighted_by_what_responses_have_gathered() -> None:
    found = optimal_token_baseline(REWARDS, SQUARES, MASK, LENGTHS)
    expected = [2 - FIRST, 2 - SECOND, 1 - FIRST, 0.0, 1 - SECOND, 1.0, 0.0, 0.0]
    torch.testing.assert_close(found, torch.tensor(expected))
    assert found[6:].eq(0).all(), "rewards that are all equal teach nothing, to the bit"
    found = optimal_token_baseline(REWARDS, SQUARES, MASK, LENGTHS, zero_tail=False)
    torch.testing.assert_close(found[5], torch.tensor(0.0))
    assert torch.equal(found[:5], optimal_token_baseline(REWARDS, SQUARES, MASK, LENGTHS)[:5])
    # Not even where it has no number.
    odd = SQUARES.masked_fill(~MASK, torch.nan)
    one, other = (optimal_token_baseline(REWARDS, squares, MASK, LENGTHS) for squares in (odd, SQUARES))
    assert torch.equal(one.masked_fill(~MASK, 0.0), other)
    settings = {"advantage": "optimal_token_baseline", "options": {"zero_tail": "no"}}
    with pytest.raises(ConfigError, match=r"algorithm\.options\.zero_tail=no is neither true nor false"):
        token_advantages_of(AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, **settings))  # type: ignore[arg-type]


def test_no_bit_depends_on_the_groups_beside_a_group() -> None:
    random = torch.Generator().manual_seed(0)
    rewards, lengths = torch.rand(5, 3, generator=random), torch.randint(1, 40, (5, 3), generator=random)
    squares = torch.rand(int(lengths.sum()), generator=random)
    mask = torch.rand(len(squares), generator=random) < 0.8
    together = optimal_token_baseline(rewards, squares, mask, lengths.flatten())
    ends = lengths.sum(1).cumsum(0).tolist()
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        here = slice(start, end)
        alone = optimal_token_baseline(rewards[group : group + 1], squares[here], mask[here], lengths[group])
        assert torch.equal(alone, together[here])


@pytest.mark.parametrize("zero_tail", [True, False])
def test_a_response_beside_ones_without_tokens_has_no_baseline(zero_tail: bool) -> None:
    mask = torch.tensor([False, True, True])
    found = optimal_token_baseline(
        torch.tensor([[3.0, 1.0]]), torch.ones(3), mask, torch.tensor([1, 2]), zero_tail=zero_tail
    )
    assert found.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["gae", "optimal_token_baseline"])
def test_what_could_not_be_scored_has_no_part_in_the_baselines_of_tokens(name: str) -> None:
    algorithm = "ppo" if name == "gae" else "grpo"
    settings = compose_job([f"algorithm={algorithm}", f"algorithm.advantage={name}", "algorithm.normalise_std=true"])
    estimate = token_advantages_of(settings.algorithm)
    assert estimate is not None
    lengths, tokens = torch.tensor([2, 3, 1, 2, 1, 1]), torch.rand(10, generator=torch.Generator().manual_seed(0))
    mask, missing = torch.ones(10, dtype=torch.bool), torch.tensor([[0.2, torch.nan, 1.0], [torch.nan, 0.4, torch.nan]])
    found = estimate.columns(missing, tokens, mask, lengths)["advantage"]
    kept = torch.tensor([True, False, True, False, name == "gae", False])  # nothing to compare is left in the second
    at = kept.repeat_interleave(lengths)
    rewards = missing.flatten()[kept][None]
    expected = estimate.columns(rewards, tokens[at], mask[at], lengths[kept])["advantage"]
    assert torch.equal(found[at], expected) and expected.any() and not found[~at].any()
