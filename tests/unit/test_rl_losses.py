from collections.abc import Callable

import pytest
import torch

from harness.rl.losses import CORRECTIONS, clip, k3, no_correction, policy_ratio, truncated_importance

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case(rows: int = 6, columns: int = 7) -> Case:
    """log_probs (a leaf), behaviour_log_probs, advantages, mask; ratios from about 0.3 to 3."""
    random = torch.Generator().manual_seed(0)
    behaviour = -torch.rand(rows, columns, generator=random) * 3
    log_probs = behaviour + torch.randn(rows, columns, generator=random) * 0.4
    advantages = torch.randn(rows, 1, generator=random).expand(rows, columns)
    return log_probs.requires_grad_(), behaviour, advantages, torch.rand(rows, columns, generator=random) < 0.7


def gradient(loss: Callable[..., torch.Tensor], inputs: Case, **options: float) -> torch.Tensor:
    log_probs = inputs[0].detach().clone().requires_grad_()
    loss(log_probs, *inputs[1:], **options).sum().backward()
    assert log_probs.grad is not None
    return log_probs.grad


def test_the_plain_policy_gradient_by_hand() -> None:
    inputs = case()
    _, _, advantages, mask = inputs
    torch.testing.assert_close(gradient(no_correction, inputs), torch.where(mask, -advantages, 0.0))


def test_the_clipped_gradient_by_hand() -> None:
    inputs = case()
    log_probs, behaviour, advantages, mask = inputs
    ratio = (log_probs - behaviour).exp().detach()
    cut_off = ((advantages > 0) & (ratio > 1.3)) | ((advantages < 0) & (ratio < 0.9))
    assert (cut_off & mask).any() and (~cut_off & mask).any()
    expected = torch.where(mask & ~cut_off, -ratio * advantages, 0.0)
    torch.testing.assert_close(gradient(clip, inputs, clip_low=0.1, clip_high=0.3), expected)


def test_the_truncated_weight_is_a_constant_to_the_gradient() -> None:
    inputs = case()
    log_probs, behaviour, advantages, mask = inputs
    weight = (log_probs - behaviour).exp().clamp(max=1.2).detach()
    assert (weight[mask] == 1.2).any()
    torch.testing.assert_close(
        gradient(truncated_importance, inputs, cap=1.2), torch.where(mask, -weight * advantages, 0.0)
    )


def test_without_a_cap_truncated_importance_is_importance_weighting() -> None:
    inputs = case()

    def importance(
        log_probs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        return -((log_probs - behaviour).exp() * advantages)[mask]

    torch.testing.assert_close(gradient(truncated_importance, inputs, cap=float("inf")), gradient(importance, inputs))


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_on_policy_every_correction_is_the_plain_policy_gradient(name: str) -> None:
    log_probs, _, advantages, mask = case()
    inputs = (log_probs, log_probs.detach().clone(), advantages, mask)
    assert torch.equal(gradient(CORRECTIONS[name], inputs), gradient(no_correction, inputs))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [*sorted(CORRECTIONS), "k3"])
def test_padding_has_exactly_no_loss_and_no_gradient_whatever_it_holds(name: str, value: float) -> None:
    log_probs, behaviour, advantages, mask = case()
    inputs = tuple(tensor.detach().masked_fill(~mask, value) for tensor in (log_probs, behaviour, advantages))

    def loss(log_probs: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if name == "k3":
            return k3(log_probs, rest[0], mask)
        return CORRECTIONS[name](log_probs, *rest)

    assert loss(*inputs, mask)[~mask].eq(0).all()
    found = gradient(loss, (*inputs, mask))
    assert found[~mask].eq(0).all()
    assert found[mask].isfinite().all() and found[mask].ne(0).any()


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_micro_batches_add_up_to_the_token_mean_of_the_batch(name: str) -> None:
    inputs = case()
    whole = gradient(CORRECTIONS[name], inputs) / inputs[3].sum()
    weights = torch.ones(7, requires_grad=True)  # a parameter that every row shares

    def run(rows: slice) -> None:
        log_probs, behaviour, advantages, mask = (tensor[rows] for tensor in inputs)
        shared = log_probs.detach() * weights
        CORRECTIONS[name](shared, behaviour, advantages, mask).sum().backward()

    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        run(rows)
    accumulated = weights.grad / inputs[3].sum()
    torch.testing.assert_close(accumulated, (whole * inputs[0].detach()).sum(0))


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    log_probs, other, _, mask = case()
    assert k3(log_probs, log_probs, mask).eq(0).all()
    assert k3(log_probs, other, mask)[mask].gt(0).all()


def test_k3_is_unbiased_over_the_policys_own_tokens() -> None:
    policy, other = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.2, 0.6]).log()
    expected = (policy.exp() * (policy - other)).sum()
    estimates = k3(policy, other, torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close((policy.exp() * estimates).sum(), expected)


def test_a_ratio_never_overflows() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert policy_ratio(torch.tensor([[0.0, -500.0]]), torch.tensor([[-500.0, 0.0]]), mask).isfinite().all()
