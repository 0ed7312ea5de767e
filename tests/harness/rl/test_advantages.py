from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.config import AlgorithmConfig, ConfigError
from harness.config.compose import compose_job
from harness.config.registries import ADVANTAGES, find
from harness.rl.advantages import advantages_of, group_advantages
from harness.rl.token_advantages import gae, gae_of, optimal_token_baseline, token_advantages_of
from harness.rl.value_loss import value_losses, value_metrics, value_sums

ALL = {name: find("algorithm.advantage", name) for name in ADVANTAGES}
OF_BATCHES = [name for name in ALL if hasattr(ALL[name], "whole_batch")]
OF_GROUPS = [name for name in ALL if name not in (*OF_BATCHES, "gae", "optimal_token_baseline")]


def test_advantages_of_a_group_are_those_by_hand() -> None:
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    advantages = group_advantages(rewards)
    torch.testing.assert_close(advantages.mean(1), torch.zeros(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages.std(1), torch.ones(5), atol=1e-4, rtol=0)
    rewards, ahead = torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([[3.0, -1.0, -1.0, -1.0]])
    torch.testing.assert_close(group_advantages(rewards), ahead / 2, rtol=1e-5, atol=0)
    torch.testing.assert_close(group_advantages(rewards, unbiased=False), ahead / 3**0.5, rtol=1e-5, atol=0)
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), divide_by_std=False)
    assert advantages.tolist() == [[0.75, -0.25, -0.25, -0.25]]
    rewards = torch.tensor([[0.5, 1.0, 0.0, 0.5], [0.0, 0.0, 0.0, 1.0]])
    assert ALL["remax"](rewards).tolist() == [[0.0, 0.5, -0.5, 0.0], [0.0, 0.0, 0.0, 1.0]]


NAMED = [*OF_GROUPS, "tests.support.advantages:touchy"]
COMPARED = [*({"advantage": name} for name in NAMED), {"options": {"unbiased": False}}]


@pytest.mark.parametrize("settings", COMPARED, ids=str)
@pytest.mark.parametrize("n", [2, 4])
def test_what_a_group_gets_is_bit_for_bit_its_own(settings: dict[str, Any], n: int) -> None:
    random, shape = torch.Generator().manual_seed(1), (1000, n)
    # fractions, as rewards are: alone, torch.std rounds one of these groups of 4 otherwise, and 47 of those of 2
    rewards = torch.randint(0, 6, shape, generator=random) / torch.randint(1, 9, shape, generator=random)
    lengths = torch.randint(1, 30, shape, generator=random)
    advantages = advantages_of(AlgorithmConfig("test", 4, n, 1, learning_rate=1e-3, **settings))
    for groups in (1, 250):
        cut = zip(rewards.split(groups), lengths.split(groups), strict=True)
        assert torch.equal(advantages(rewards, lengths), torch.cat([advantages(*part) for part in cut]))


@pytest.mark.parametrize("shape", [(4, 1), (4,), (2, 2, 2)])
def test_rewards_that_are_not_groups_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="n >= 2"):
        group_advantages(torch.zeros(shape))


@pytest.mark.parametrize("name", OF_GROUPS)
def test_every_way_to_compare_says_nothing_of_a_group_of_equal_rewards(name: str) -> None:
    rewards = torch.tensor([0.1, 1 / 3, 0.0, -2.0, 0.7, 1e-30]).repeat_interleave(7).view(6, 7)
    # the float32 mean of seven times 0.1 is not 0.1
    given = {"lengths": torch.arange(1, 43).view(6, 7)} if name == "opo" else {}
    assert ALL[name](rewards, **given).eq(0).all()


def test_baselines_leave_one_out_weigh_by_length_or_by_how_seldom_a_prompt_is_solved() -> None:
    assert ALL["rloo"](torch.tensor([[1.0, 0.0, 0.5]])).tolist() == [[0.75, -0.75, 0.0]]
    advantages = ALL["opo"](torch.tensor([[1.0, 0.0]]), lengths=torch.tensor([[3, 1]]))
    assert advantages.tolist() == [[0.25, -0.75]]
    seldom, often = ALL["max_rl"](torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]))
    assert seldom.tolist() == [3.0, -1.0, -1.0, -1.0] and often[0] == pytest.approx(1 / 3)


def test_rewards_of_a_batch_are_whitened_over_its_tokens_and_equal_ones_teach_nothing() -> None:
    random = torch.Generator().manual_seed(0)
    rewards, lengths = torch.rand(6, 4, generator=random), torch.randint(1, 30, (6, 4), generator=random)
    plain, baseline = ALL["reinforce_plus_plus"], ALL["reinforce_plus_plus_baseline"]
    for compare in (plain, baseline):
        tokens = compare(rewards, lengths=lengths).flatten().repeat_interleave(lengths.flatten())
        torch.testing.assert_close(tokens.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
        torch.testing.assert_close(tokens.var(), torch.tensor(1.0), atol=1e-5, rtol=0)
    rewards, lengths = torch.tensor([[0.1, 0.1], [0.1, 0.1]]), torch.ones(2, 2, dtype=torch.int64)
    assert plain(rewards, lengths=lengths).eq(0).all()
    assert baseline(rewards + torch.tensor([[0.0], [1.0]]), lengths=lengths).eq(0).all()
    right, wrong = plain(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), lengths=lengths)
    assert right.tolist() == [-value for value in wrong.tolist()] and right[0] > 0
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    assert ALL["gpg"](rewards).tolist() == [[2.0, -2.0], *[[0.0, 0.0]] * 3]


SOME_MISSING = torch.tensor(
    [[0.1, 0.7, torch.nan, 0.4], [0.2, torch.nan, torch.nan, torch.nan], [torch.nan, 0.3, 0.9, 0.1], [torch.nan] * 4],
    dtype=torch.float64,  # as the queue has them
)
"""One sample, all but one, the first, and all of a group could not be scored."""


@pytest.mark.parametrize("name", OF_GROUPS)
def test_what_could_not_be_scored_is_in_no_comparison_of_its_group(name: str) -> None:
    lengths = torch.arange(1, 17).view(4, 4)
    compare = advantages_of(replace(compose_job([]).algorithm, advantage=name))
    found = compare(SOME_MISSING, lengths).float()
    expected = torch.zeros(4, 4)
    expected[0, [0, 1, 3]] = compare(SOME_MISSING[:1, [0, 1, 3]], lengths[:1, [0, 1, 3]])[0]
    if name != "remax":  # whose first sample all others are compared with
        expected[2, 1:] = compare(SOME_MISSING[2:3, 1:], lengths[2:3, 1:])[0]
    assert torch.equal(found, expected) and found[0].any()


@pytest.mark.parametrize("name", [*OF_BATCHES, "tests.support.advantages:over_the_batch"])
def test_what_could_not_be_scored_is_in_no_comparison_of_its_batch(name: str) -> None:
    whole, lengths = torch.tensor([[0.5, 0.1, 0.8, 0.3]], dtype=torch.float64), torch.arange(1, 21).view(5, 4)
    options = {"parts": {"right": 1.0}} if name == "gdpo" else {}
    compare_ = advantages_of(replace(compose_job([]).algorithm, advantage=name, options=options))

    def compare(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return compare_(rewards, lengths, **({"extras": rewards[:, :, None]} if options else {})).float()

    found = compare(torch.cat([SOME_MISSING, whole]), lengths)
    assert found.isfinite().all() and found[-1].all() and not found[:4][SOME_MISSING.isnan()].any()
    if name.startswith("tests") or options:  # knows nothing of NaN, and is given groups that are whole
        assert torch.equal(found[-1:], compare(whole, lengths[-1:])) and not found[:4].any()
    elif name.startswith("reinforce"):
        assert abs((found * lengths).sum()) < 1e-4  # the mean over tokens of what is there
    else:  # three of five groups differ
        every = torch.cat([SOME_MISSING, whole])
        factor = 5 / 3 if name == "gpg" else 1 / (every[~every.isnan()].std() + 1e-6)
        assert torch.allclose(found[-1].double(), (whole - whole.mean())[0] * factor, rtol=1e-5)
    assert not compare(torch.full((2, 4), torch.nan), lengths[:2]).any()


LENGTHS = torch.tensor([3, 4, 1])
MASK = torch.tensor([1, 1, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
REWARDS = torch.tensor([1.0, 0.5, 0.0])
VALUES = torch.tensor([0.1, 0.2, 0.3, 0.4, 9.0, 0.6, 9.0, 0.2])


def algorithm(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, advantage="gae", **settings)  # type: ignore[arg-type]


def test_an_advantage_is_reward_less_value_or_the_error_of_one_step() -> None:
    advantages, returns = gae(REWARDS, VALUES, MASK, LENGTHS)
    torch.testing.assert_close(advantages, torch.tensor([0.9, 0.8, 0.7, 0.1, 0.0, -0.1, 0.0, -0.2]))
    torch.testing.assert_close(returns, torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0, 0.5, 0.0, 0.0]))
    advantages, _ = gae(REWARDS, VALUES, MASK, LENGTHS, gamma=0.5, lam=0.0)
    expected = [0.5 * 0.2 - 0.1, 0.5 * 0.3 - 0.2, 1.0 - 0.3, 0.5 * 0.6 - 0.4, 0.0, 0.5 - 0.6, 0.0, -0.2]
    torch.testing.assert_close(advantages, torch.tensor(expected))


def test_costs_are_taken_off_and_what_an_environment_wrote_changes_nothing() -> None:
    costs = torch.tensor([0.1, 0.2, 0.3, 0.0, 5.0, 0.4, 5.0, 0.5])
    advantages, _ = gae(REWARDS, VALUES, MASK, LENGTHS, costs, gamma=0.5, lam=0.0)
    expected, _ = gae(REWARDS, VALUES, MASK, LENGTHS, gamma=0.5, lam=0.0)
    torch.testing.assert_close(advantages, (expected - costs).masked_fill(~MASK, 0.0))
    together, _ = gae(REWARDS, VALUES, MASK, LENGTHS, costs)
    whole = torch.tensor([0.6, 0.4, 0.5])
    first = REWARDS - whole  # without discount
    torch.testing.assert_close(together[[0, 3, 7]], first - VALUES[[0, 3, 7]])
    # Not even where its values are no numbers.
    odd = VALUES.masked_fill(~MASK, torch.nan)
    found = [gae(REWARDS, values, MASK, LENGTHS, lam=0.9) for values in (odd, VALUES)]
    assert all(map(torch.equal, *found))


def test_advantages_are_whitened_over_sampled_tokens_alone_and_do_not_depend_on_others() -> None:
    together, _ = gae(REWARDS, VALUES, MASK, LENGTHS, gamma=0.9, lam=0.8)
    alone, _ = gae(REWARDS[1:2], VALUES[3:7], MASK[3:7], LENGTHS[1:2], gamma=0.9, lam=0.8)
    assert torch.equal(together[3:7], alone)
    advantages, returns = gae_of(algorithm())(REWARDS, VALUES, MASK, LENGTHS)
    plain, expected = gae_of(algorithm(normalise_std=False))(REWARDS, VALUES, MASK, LENGTHS)
    torch.testing.assert_close(advantages[MASK].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages[MASK].std(), torch.tensor(1.0))
    assert advantages[~MASK].eq(0).all() and torch.equal(returns, expected) and not torch.equal(plain, advantages)
    with pytest.raises(ConfigError, match=r"algorithm\.options\.lam"):
        gae_of(algorithm(options={"lam": 1.5}))


def test_values_clip_their_gradient_and_sum_to_metrics() -> None:
    predictions = torch.tensor([0.0, 2.0, 0.1], requires_grad=True)
    values, returns = torch.zeros(3), torch.tensor([1.0, 1.0, 1.0])
    losses = value_losses(predictions, values, returns, torch.tensor([True, True, False]), clip=0.5)
    torch.testing.assert_close(losses.detach(), torch.tensor([0.5, 0.5, 0.0]))
    moved = torch.tensor([0.8], requires_grad=True)  # on the way to its return, beyond the clip
    (gradient,) = torch.autograd.grad(value_losses(moved, values[:1], returns[:1], MASK[:1], clip=0.5).sum(), moved)
    assert gradient == 0.0
    (gradient,) = torch.autograd.grad(value_losses(moved, values[:1], returns[:1], MASK[:1], clip=None).sum(), moved)
    torch.testing.assert_close(gradient, torch.tensor([-0.2]))
    returns = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0, 0.5, 0.0, 0.0])
    sums = value_sums(VALUES, VALUES, returns, MASK, clip=0.5) | {"samples": 3.0, "lag": 6.0, "lag_max": 4.0}
    metrics = value_metrics(sums)
    kept = returns[MASK]
    explained = float(1 - (kept - VALUES[MASK]).var() / kept.var())
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-6)
    assert metrics["critic/loss"] == pytest.approx(float((kept - VALUES[MASK]).square().mean() / 2))
    assert metrics["critic/lag"] == 2.0 and metrics["critic/clip_fraction"] == 0.0


RESPONSES = torch.tensor([2, 4, 1, 1])
SQUARES = torch.tensor([1.0, 3.0, 0.5, 9.0, 1.5, 1.0, 0.3, 0.1])
SAMPLED = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
"""Of the second response, of three tokens, the environment wrote one."""
OF_TWO_GROUPS = torch.tensor([[2.0, 1.0], [0.5, 0.5]])
FIRST = (2 * 1.0 + 1 * 0.5) / 1.5
SECOND = (2 * 4.0 + 1 * 2.0) / 6.0


def test_rewards_are_less_their_mean_weighted_by_what_responses_have_gathered() -> None:
    found = optimal_token_baseline(OF_TWO_GROUPS, SQUARES, SAMPLED, RESPONSES)
    expected = [2 - FIRST, 2 - SECOND, 1 - FIRST, 0.0, 1 - SECOND, 1.0, 0.0, 0.0]
    torch.testing.assert_close(found, torch.tensor(expected))
    assert found[6:].eq(0).all(), "rewards that are all equal teach nothing, to the bit"
    found = optimal_token_baseline(OF_TWO_GROUPS, SQUARES, SAMPLED, RESPONSES, zero_tail=False)
    torch.testing.assert_close(found[5], torch.tensor(0.0))
    assert torch.equal(found[:5], optimal_token_baseline(OF_TWO_GROUPS, SQUARES, SAMPLED, RESPONSES)[:5])
    # Not even where it has no number.
    odd = SQUARES.masked_fill(~SAMPLED, torch.nan)
    one, other = (optimal_token_baseline(OF_TWO_GROUPS, squares, SAMPLED, RESPONSES) for squares in (odd, SQUARES))
    assert torch.equal(one.masked_fill(~SAMPLED, 0.0), other)
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
    told = (torch.tensor([[3.0, 1.0]]), torch.ones(3), torch.tensor([False, True, True]), torch.tensor([1, 2]))
    found = optimal_token_baseline(*told, zero_tail=zero_tail)
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
