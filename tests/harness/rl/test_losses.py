import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.config import AlgorithmConfig, ConfigError
from harness.config.registries import AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, REGISTRIES, find
from harness.rl.aggregation import aggregation_of
from harness.rl.kl import estimator_of, k3
from harness.rl.losses import policy_loss
from harness.rl.losses.clipped import clip, decoupled
from harness.rl.losses.importance import masked_importance, no_correction, truncated_importance
from harness.rl.losses.ratios import policy_ratio, within
from harness.rl.micro_batches import cut_by_tokens, cut_further
from harness.rl.rejection import rejection_of
from tests.support.losses import CUTTABLE, WHOLE_BATCH
from tests.support.policy_batches import algorithm

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
ROWS, COLUMNS = 6, 7
"""Losses that do not look at a whole batch."""


def case(rows: int = ROWS, columns: int = COLUMNS) -> Case:
    """log_probs (a leaf), behaviour_log_probs, advantages, mask; ratios from about 0.3 to 3."""
    random = torch.Generator().manual_seed(0)
    behaviour = -torch.rand(rows, columns, generator=random) * 3
    log_probs = behaviour + torch.randn(rows, columns, generator=random) * 0.4
    advantages = torch.randn(rows, 1, generator=random).expand(rows, columns)
    return log_probs.requires_grad_(), behaviour, advantages, torch.rand(rows, columns, generator=random) < 0.7


def loss_of(name: str) -> Callable[..., torch.Tensor]:
    """As training makes it."""
    wide = {"low": 0.5, "high": 0.5} if name == "gspo" else {}  # its own bounds are of ratios of whole sequences
    return policy_loss(AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, correction=name, options=wide))


def by_name(name: str) -> Callable[..., torch.Tensor]:
    """A loss as training calls it: of rows that lie one after the other, whose lengths it is told."""
    loss = loss_of(name)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        rows, columns = tensors[0].shape
        given = {"lengths": torch.full((rows,), columns), "entropies": torch.linspace(0.0, 1.0, rows * columns)}
        return loss(*(tensor.flatten() for tensor in tensors), **given).view(rows, columns)

    return call


def gradient(loss: Callable[..., torch.Tensor], inputs: Case, **options: Any) -> torch.Tensor:
    log_probs = inputs[0].detach().clone().requires_grad_()
    loss(log_probs, *inputs[1:], **options).sum().backward()
    assert log_probs.grad is not None
    return log_probs.grad


def test_plain_and_clipped_gradients_by_hand() -> None:
    inputs = case()
    _, _, advantages, mask = inputs
    torch.testing.assert_close(gradient(no_correction, inputs), torch.where(mask, -advantages, 0.0))
    inputs = case()
    log_probs, behaviour, advantages, mask = inputs
    ratio = (log_probs - behaviour).exp().detach()
    cut_off = ((advantages > 0) & (ratio > 1.3)) | ((advantages < 0) & (ratio < 0.9))
    assert (cut_off & mask).any() and (~cut_off & mask).any()
    expected = torch.where(mask & ~cut_off, -ratio * advantages, 0.0)
    torch.testing.assert_close(gradient(clip, inputs, clip_low=0.1, clip_high=0.3), expected)


def test_a_truncated_weight_is_a_constant_and_without_a_cap_importance_weighting() -> None:
    inputs = case()
    log_probs, behaviour, advantages, mask = inputs
    weight = (log_probs - behaviour).exp().clamp(max=1.2).detach()
    assert (weight[mask] == 1.2).any()
    found = gradient(truncated_importance, inputs, cap=1.2)
    torch.testing.assert_close(found, torch.where(mask, -weight * advantages, 0.0))
    inputs = case()

    def importance(log_probs: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        behaviour, advantages, mask = rest
        return -((log_probs - behaviour).exp() * advantages)[mask]

    torch.testing.assert_close(gradient(truncated_importance, inputs, cap=float("inf")), gradient(importance, inputs))
    inputs, proximal = proximal_case()
    for loss, options in ((truncated_importance, {}), (decoupled, {"proximal_log_probs": proximal})):
        weights = [gradient(loss, inputs, cap=cap, **options).abs() for cap in (1.1, 1.5, 3.0)]
        assert all((less <= more).all() for less, more in zip(weights, weights[1:], strict=False))


def proximal_case() -> tuple[Case, torch.Tensor]:
    """A case, and log-probs of a policy between the one that sampled and the one in training."""
    inputs = case()
    noise = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)) * 0.2
    return inputs, (inputs[0].detach() + inputs[1]) / 2 + noise


def test_the_decoupled_gradient_by_hand_and_at_either_end() -> None:
    inputs, proximal = proximal_case()
    log_probs, behaviour, advantages, mask = inputs
    ratio, weight = (log_probs.detach() - proximal).exp(), (proximal - behaviour).exp()
    cut_off = ((advantages > 0) & (ratio > 1.3)) | ((advantages < 0) & (ratio < 0.9))
    left_out = weight > 1.5
    assert (cut_off & mask).any() and (left_out & mask).any() and (~cut_off & ~left_out & mask).any()
    expected = torch.where(mask & ~cut_off & ~left_out, -weight * ratio * advantages, 0.0)
    found = gradient(decoupled, inputs, proximal_log_probs=proximal, clip_low=0.1, clip_high=0.3, cap=1.5)
    torch.testing.assert_close(found, expected)
    inputs = case()
    found = gradient(decoupled, inputs, proximal_log_probs=inputs[1].clone())
    assert torch.equal(found, gradient(clip, inputs))
    inputs = case()
    plain = gradient(decoupled, inputs, cap=1.5)
    assert torch.equal(plain, gradient(decoupled, inputs, proximal_log_probs=inputs[0].detach().clone(), cap=1.5))
    torch.testing.assert_close(plain, gradient(masked_importance, inputs, low=0.0, high=1.5))
    uncapped = gradient(truncated_importance, inputs, cap=float("inf"))
    torch.testing.assert_close(gradient(decoupled, inputs, cap=None), uncapped)


def test_masked_importance_leaves_out_what_is_outside_of_its_own_bounds() -> None:
    inputs = case()
    log_probs, behaviour, advantages, mask = inputs
    ratio = (log_probs - behaviour).exp().detach()
    inside = (ratio >= 0.8) & (ratio <= 1.25)
    assert (inside & mask).any() and ((ratio < 0.8) & mask).any() and ((ratio > 1.25) & mask).any()
    losses = masked_importance(*inputs, low=0.8, high=1.25)
    found = gradient(masked_importance, inputs, low=0.8, high=1.25)
    assert losses[~(inside & mask)].eq(0).all() and found[~(inside & mask)].eq(0).all()
    torch.testing.assert_close(found, torch.where(inside & mask, -ratio * advantages, 0.0))
    behaviour, mask = torch.tensor([[-2.0, -1.0, -1.0]]), torch.ones(1, 3, dtype=torch.bool)
    ratios = torch.tensor([[2.0, 0.5, 1.0]])
    inputs = (behaviour + ratios.log(), behaviour, torch.ones(1, 3), mask)
    high, low, _ = policy_ratio(*inputs[:2], mask)[0].tolist()
    assert gradient(masked_importance, inputs, low=low, high=high).ne(0).all()
    found = gradient(masked_importance, inputs, low=low * 1.001, high=high * 0.999)
    assert found.ne(0).tolist() == [[False, False, True]]
    inputs = case()
    bounds = [(0.95, 1.05), (0.8, 1.25), (0.5, 2.0), (0.0, float("inf"))]
    kept = [gradient(masked_importance, inputs, low=low, high=high).ne(0) for low, high in bounds]
    assert all((narrow <= wide).all() for narrow, wide in zip(kept, kept[1:], strict=False))
    uncapped = gradient(truncated_importance, inputs, cap=float("inf"))
    torch.testing.assert_close(gradient(masked_importance, inputs, low=0.0, high=float("inf")), uncapped)


def test_settings_reach_the_correction_that_they_name() -> None:
    inputs, proximal = proximal_case()
    wanted = {
        "none": {},
        "clip": {"clip_low": 0.1, "clip_high": 0.3},
        "decoupled": {"clip_low": 0.1, "clip_high": 0.3, "cap": 1.5},
        "tis": {"cap": 1.2},
        "mis": {"low": 0.8, "high": 1.25},
    }
    for name, own in wanted.items():
        algorithm = AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, correction=name, options=own)
        more = {"proximal_log_probs": proximal} if name == "decoupled" else {}
        expected = gradient(find("algorithm.correction", name), inputs, **own, **more)
        assert torch.equal(gradient(policy_loss(algorithm), inputs, **more), expected)
        assert not torch.equal(expected, gradient(find("algorithm.correction", name), inputs, **more)) or name == "none"


@pytest.mark.parametrize("name", sorted(CORRECTIONS.keys() - {"geo_mean", "clip_cov", "top_entropy"}))
def test_on_policy_every_correction_is_the_plain_policy_gradient(name: str) -> None:
    """But for one that takes a mean over each sequence, and those that leave tokens out by chance or by entropy."""
    log_probs, _, advantages, mask = case()
    inputs = (log_probs, log_probs.detach().clone(), advantages, mask)
    found, expected = gradient(by_name(name), inputs), gradient(no_correction, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-6 if name == "sapo" else 0.0, atol=0.0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [*sorted(CORRECTIONS), *KL_ESTIMATORS])
def test_padding_has_exactly_no_loss_and_no_gradient_whatever_it_holds(name: str, value: float) -> None:
    log_probs, behaviour, advantages, mask = case()
    inputs = tuple(tensor.detach().masked_fill(~mask, value) for tensor in (log_probs, behaviour, advantages))

    def loss(log_probs: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if name in KL_ESTIMATORS:
            return estimator_of(name)(log_probs, rest[0], mask)
        return by_name(name)(log_probs, *rest)

    assert loss(*inputs, mask)[~mask].eq(0).all()
    found = gradient(loss, (*inputs, mask))
    assert found[~mask].eq(0).all()
    assert found[mask].isfinite().all() and found[mask].ne(0).any()


def cut_gradient(name: str, kind: str, parts: list[slice]) -> torch.Tensor:
    """By each log-prob of one batch of responses of unlike lengths, back-propagated in these parts."""
    log_probs, behaviour, advantages, mask = (tensor.flatten() for tensor in case())
    lengths = torch.tensor([7, 1, 14, 3, 12, 5])
    mask = mask.clone()
    mask[7] = False  # a response with nothing sampled in it
    leaf, ends, divided = log_probs.detach().clone().requires_grad_(), [0, *lengths.cumsum(0).tolist()], 0
    loss, entropies = loss_of(name), torch.linspace(0.0, 1.0, len(mask))
    aggregation = aggregation_of(algorithm(aggregation=kind))
    for part in parts:
        rows, of = slice(ends[part.start], ends[part.stop]), lengths[part]
        inputs = (leaf[rows], behaviour[rows], advantages[rows], mask[rows])
        losses = loss(*inputs, lengths=of, entropies=entropies[rows])
        weights, divisor = aggregation(mask[rows], of, 14)
        (losses if weights is None else losses * weights).sum().backward()
        divided += divisor
    assert leaf.grad is not None
    return leaf.grad / max(1, divided)


WHOLE, CUT = [slice(0, 6)], [slice(4, 6), slice(0, 1), slice(1, 4)]


@pytest.mark.parametrize("kind", AGGREGATIONS)
@pytest.mark.parametrize("name", CUTTABLE)
def test_a_batch_has_the_same_gradient_in_whatever_micro_batches_it_comes(name: str, kind: str) -> None:
    whole = cut_gradient(name, kind, WHOLE)
    assert whole.ne(0).any()
    torch.testing.assert_close(cut_gradient(name, kind, CUT), whole)


@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_a_loss_that_looks_at_a_whole_batch_would_be_another_one_of_its_parts(name: str) -> None:
    """Which is why a job that would cut it is refused."""
    whole, cut = (cut_gradient(name, "token_mean", parts) for parts in (WHOLE, CUT))
    assert (cut - whole).abs().max() > 1e-3 * whole.abs().max()


def test_k3_is_unbiased_zero_for_equal_policies_and_no_ratio_overflows() -> None:
    log_probs, other, _, mask = case()
    assert k3(log_probs, log_probs, mask).eq(0).all()
    assert k3(log_probs, other, mask)[mask].gt(0).all()
    policy, other = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.2, 0.6]).log()
    expected = (policy.exp() * (policy - other)).sum()
    estimates = k3(policy, other, torch.ones(3, dtype=torch.bool))
    torch.testing.assert_close((policy.exp() * estimates).sum(), expected)
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert policy_ratio(torch.tensor([[0.0, -500.0]]), torch.tensor([[-500.0, 0.0]]), mask).isfinite().all()


@pytest.mark.parametrize("high", [1.5, None])
def test_a_weight_that_is_no_number_is_outside_of_every_bound(high: float | None) -> None:
    weight = torch.tensor([0.4, 0.5, 1.0, 1.5, 1.6, torch.nan])
    kept = [0.0, 0.5, 1.0, 1.5, 0.0 if high else 1.6, 0.0]
    torch.testing.assert_close(within(weight, 0.5, high), torch.tensor(kept))


LENGTHS = torch.tensor([2, 3])
MASK = torch.tensor([True, True, True, False, True])
RATIOS = torch.tensor([2.0, 0.5, 4.0, 100.0, 1.0])


Bounds = tuple[float | None, float | None]


def left(ratios: torch.Tensor = RATIOS, **rejection: Bounds) -> list[int]:
    """The tokens that are left."""
    algorithm = AlgorithmConfig("test", 4, 4, 1, learning_rate=1e-3, rejection=rejection)
    rejected = rejection_of(algorithm)
    assert rejected is not None
    return rejected(ratios.log(), torch.zeros(5), MASK, LENGTHS).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("measure", "bounds", "kept"),
    [
        ("token_ratio", (0.6, 3.0), [0, 4]),
        ("token_ratio", (None, 3.0), [0, 1, 4]),
        ("token_ratio", (0.6, None), [0, 2, 4]),
        ("sequence_ratio", (0.9, 3.0), [0, 1]),
        ("sequence_ratio", (1.1, 5.0), [2, 4]),
        ("geometric_ratio", (1.1, 2.1), [2, 4]),
        ("token_k1", (-0.1, 1.0), [1, 4]),
        ("max_k2", (None, 0.3), [0, 1]),
    ],
)
def test_what_is_within_bounds_is_left(measure: str, bounds: Bounds, kept: list[int]) -> None:
    assert left(**{measure: bounds}) == kept


def test_what_any_measure_leaves_out_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(token_ratio=(0.6, None), geometric_ratio=(None, 1.1)) == [0]
    assert 0 not in left(torch.tensor([torch.nan, 1.0, 1.0, 1.0, 1.0]), token_ratio=(None, None))
    (tmp_path / "own_rejection.py").write_text("def size(log_ratio, mask, lengths):\n    return log_ratio.abs()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert left(**{"own_rejection:size": (None, 0.7)}) == [0, 1, 4]
    with pytest.raises(ConfigError, match=r"algorithm.rejection.token_ratio=\[2.0,0.5\] leaves nothing"):
        left(token_ratio=(2.0, 0.5))


DOCUMENT = Path(__file__).parents[3] / "docs" / "held_to.csv"
KINDS = {kind: set(REGISTRIES[f"algorithm.{kind}"]) for kind in ("advantage", "rejection", "aggregation", "shaping")}
KINDS |= {"loss": set(CORRECTIONS), "KL": set(KL_ESTIMATORS), "filter": set(REGISTRIES["algorithm.filter"]) - {"none"}}


def test_every_function_that_can_be_named_stands_in_the_table_of_what_it_is_held_to() -> None:
    rows = list(csv.DictReader(DOCUMENT.read_text(encoding="utf-8").splitlines()))
    assert all(row["held to"] for row in rows)
    told = {kind: [name for row in rows if row["kind"] == kind for name in row["names"].split()] for kind in KINDS}
    assert {kind: sorted(names) for kind, names in told.items()} == {kind: sorted(of) for kind, of in KINDS.items()}


SAMPLE_LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@given(SAMPLE_LENGTHS, st.integers(1, 200), st.sampled_from(["padded", "packed"]), st.integers(0, 20))
def test_every_sample_is_in_one_part_within_the_limit(lengths: list[int], limit: int, layout: str, more: int) -> None:
    parts = cut_by_tokens(lengths, limit, layout)
    count = min(len(lengths), len(parts) + more)
    for cut in (parts, cut_further(parts, count)):
        assert sorted(np.concatenate(cut).tolist()) == list(range(len(lengths)))
        for part in cut:
            taken = [lengths[sample] for sample in part]
            tokens = max(taken) * len(taken) if layout == "padded" else sum(taken)
            assert tokens <= limit or len(taken) == 1
    assert len(cut_further(parts, count)) == count


def test_padded_parts_hold_like_lengths_and_there_are_no_more_than_samples() -> None:
    parts = cut_by_tokens([10, 1, 10, 1, 1], 20, "padded")
    assert [sorted(part.tolist()) for part in parts] == [[0, 2], [1, 3, 4]]
    with pytest.raises(ValueError, match="cannot be cut into 3 parts"):
        cut_further(cut_by_tokens([1, 1], 10, "packed"), 3)
