import pytest
import torch

from harness.rl import log_probs
from harness.rl.log_probs import token_log_probs


def case(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, 11, generator=random).mul(3).to(dtype), torch.randint(11, (3, 5), generator=random)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_log_probs_and_their_gradient_are_those_of_log_softmax(temperature: float) -> None:
    logits, tokens = case()
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = (plain / temperature).log_softmax(-1).gather(2, tokens[..., None]).squeeze(2)
    found = token_log_probs(ours, tokens, temperature)
    torch.testing.assert_close(found, expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_the_gradient_agrees_with_finite_differences() -> None:
    logits, tokens = case()
    logits = logits[:1, :2].clone().requires_grad_()
    weights = torch.tensor([[1.0, -2.0]])
    (token_log_probs(logits, tokens[:1, :2], 0.7) * weights).sum().backward()
    step = 1e-2
    for place in [(0, 0, 3), (0, 1, int(tokens[0, 1]))]:
        up, down = logits.detach().clone(), logits.detach().clone()
        up[place] += step
        down[place] -= step
        difference = token_log_probs(up, tokens[:1, :2], 0.7) - token_log_probs(down, tokens[:1, :2], 0.7)
        slope = (difference * weights).sum() / (2 * step)
        torch.testing.assert_close(logits.grad[place], slope, atol=1e-3, rtol=1e-3)


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits, tokens = case(torch.bfloat16)
    found = token_log_probs(logits.requires_grad_(), tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits.float().log_softmax(-1).gather(2, tokens[..., None]).squeeze(2))
    found.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_working_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens = case()
    whole, parts = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    one = token_log_probs(whole, tokens, 0.9)
    one.sum().backward()
    monkeypatch.setattr(log_probs, "CHUNK_ELEMENTS", 23)
    other = token_log_probs(parts, tokens, 0.9)
    other.sum().backward()
    assert torch.equal(one, other) and torch.equal(whole.grad, parts.grad)


def test_a_slice_of_a_wider_tensor_is_fine() -> None:
    logits, tokens = case()
    logits.requires_grad_()
    token_log_probs(logits[:, :-1], tokens[:, 1:]).sum().backward()
    assert logits.grad[:, -1].eq(0).all() and logits.grad[:, :-1].ne(0).any()


def test_a_temperature_of_zero_is_refused() -> None:
    logits, tokens = case()
    with pytest.raises(ValueError, match="temperature must be above 0, not 0"):
        token_log_probs(logits, tokens, 0.0)
