from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.cost_model.training_memory import HeadRows
from harness.rl.log_probs import head_log_probs

ROWS, WIDTH, VOCABULARY = 15, 8, 11

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def case(rows: int = ROWS, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float32) -> Case:
    """Hidden states, weight, tokens."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=random) for n in (rows, vocabulary))
    tokens = torch.randint(vocabulary, (rows,), generator=random)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), tokens


def plain(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """What the formula says, over all logits at once; entropies second."""
    logits = (hidden @ weight.T).float() / temperature
    log_probs = logits.log_softmax(-1)
    return torch.stack([log_probs.gather(1, tokens[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)])


def gradients(log_probs: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(len(log_probs), generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((log_probs * weights).sum(), [hidden, weight])


@pytest.mark.parametrize("logit_bytes", [1 << 27, 12 * VOCABULARY, 1], ids=["whole", "chunks", "row_by_row"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("of_both", [False, True], ids=["log_probs", "entropies_too"])
def test_values_and_gradients_of_a_head_are_exact(of_both: bool, temperature: float, logit_bytes: int) -> None:
    hidden, weight, tokens = case()
    found, entropies = head_log_probs(hidden, weight, tokens, temperature, logit_bytes=logit_bytes)
    expected, surprise = plain(hidden, weight, tokens, temperature)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropies, surprise)
    if of_both:
        found, expected = found + entropies, expected + surprise
    torch.testing.assert_close(gradients(found, hidden, weight), gradients(expected, hidden, weight))


@pytest.mark.parametrize("logit_bytes", [1 << 27, 12 * VOCABULARY], ids=["whole", "chunks"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_squares_of_gradients_are_those_by_the_logits(temperature: float, logit_bytes: int) -> None:
    hidden, weight, tokens = case()
    given = (hidden, weight, tokens, temperature)
    *scores, squares = head_log_probs(*given, logit_bytes=logit_bytes, gradient_squares=True)
    expected = head_log_probs(*given, logit_bytes=logit_bytes)
    assert all(map(torch.equal, scores, expected))
    assert all(map(torch.equal, *(gradients(sum(each), hidden, weight) for each in (scores, expected))))
    scaled = (hidden @ weight.T / temperature).detach().requires_grad_()
    chosen = scaled.log_softmax(-1).gather(1, tokens[:, None])
    (by_logits,) = torch.autograd.grad(chosen.sum(), scaled)
    torch.testing.assert_close(squares, by_logits.square().sum(-1))
    assert not squares.requires_grad


def test_a_head_is_exact_by_finite_differences_and_for_nearly_certain_tokens() -> None:
    """1 - 2 p + the sum of p^2 in float32 would be 0, or less."""
    weight = torch.tensor([[12.0], [0.0], [0.0]])
    *_, squares = head_log_probs(torch.ones(1, 1), weight, torch.tensor([0]), gradient_squares=True)
    p = weight[:, 0].double().softmax(0)
    expected = (1 - p[0]) ** 2 + p[1:].square().sum()
    assert squares.item() == pytest.approx(expected.item(), rel=5e-2)
    hidden, weight, tokens = (tensor[:3].detach() for tensor in case())
    arguments = [tensor.double().requires_grad_() for tensor in (hidden, weight)]

    def log_probs(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return head_log_probs(hidden, weight, tokens % 3, 0.7)[0]

    torch.autograd.gradcheck(log_probs, arguments, eps=1e-2, atol=1e-3, rtol=1e-2)


def test_a_head_adds_up_in_float32_by_products_as_by_one() -> None:
    hidden, weight, tokens = case(rows=4096, dtype=torch.bfloat16)
    log_probs, _ = head_log_probs(hidden, weight, tokens, logit_bytes=4 * VOCABULARY)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, plain(hidden, weight, tokens, 1.0)[0])
    found = torch.autograd.grad(log_probs.sum(), [weight])[0]
    exact = torch.autograd.grad(plain(hidden.double(), weight.double(), tokens, 1.0)[0].sum(), [weight])[0]
    assert found.dtype == torch.bfloat16
    error = (found - exact).abs().max() / exact.abs().max()
    assert error < 2**-7, "4096 rows added up in bfloat16 would be wrong by more"
    # In three; and in one where a sum of several would take the bytes that all rows need.
    given = case(600, 1000)
    whole = gradients(head_log_probs(*given)[0], *given[:2])
    assert HeadRows(1000, WIDTH, 4, 200_000).product(600) == 200 and HeadRows(1000, 400, 4, 200_000).product(600) == 600
    torch.testing.assert_close(gradients(head_log_probs(*given, logit_bytes=200_000)[0], *given[:2]), whole)


def test_entropy_is_log_n_or_zero_and_a_temperature_of_zero_is_refused() -> None:
    weight = torch.zeros(8, 2)
    weight[3, 1] = torch.finfo(torch.float32).max
    equal, certain = head_log_probs(torch.eye(2), weight, torch.tensor([0, 3]))[1]
    torch.testing.assert_close(equal, torch.tensor(8.0).log())
    assert certain == 0
    weight = torch.zeros(8, 1)
    weight[5:] = -torch.inf
    _, entropies = head_log_probs(torch.ones(1, 1), weight, torch.tensor([0]))
    torch.testing.assert_close(entropies, torch.tensor([5.0]).log())
    with pytest.raises(ValueError, match="temperature must be above 0, not 0"):
        head_log_probs(*case(), 0.0)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *made, 0)
        return result


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "plain"])
def test_forward_and_backward_never_hold_more_than_a_chunk_of_logits(chunked: bool) -> None:
    """Nor of their gradients than four."""
    rows, vocabulary, limit = 600, 1000, 100_000
    hidden, weight, tokens = case(rows, vocabulary)
    with LargestTensor() as largest:
        if chunked:
            log_probs = head_log_probs(hidden, weight, tokens, logit_bytes=limit)[0]
            assert largest.elements == limit // 4
        else:
            log_probs = plain(hidden, weight, tokens, 1.0)[0]
        gradients(log_probs, hidden, weight)
    assert largest.elements == (limit if chunked else rows * vocabulary)
