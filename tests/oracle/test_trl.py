"""Losses against those of TRL's GRPO trainer, which verl has otherwise or not at all: value and gradient.

TRL's losses are a method of its trainer, so it is called on a stand-in that has what the method reads, and returns the
log-probs of a batch in place of a forward pass. In float64: the formulas are compared, not their rounding.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.rl.kl import loss_kl_of
from harness.rl.losses import policy_loss
from harness.rl.losses.ratios import MAX_LOG_RATIO
from tests.support.policy_batches import NUMBERS, Case, aggregated, algorithm

trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="needs TRL: make test-oracle").GRPOTrainer

pytestmark = pytest.mark.oracle

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
TOKENS, SEQUENCES, LONGEST = "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"
LOSSES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "clip, grpo": (
        {"correction": "clip", "options": {"clip_high": 0.28}}, SEQUENCES, {"loss_type": "grpo", "epsilon_high": 0.28},
    ),
    "clip, bnpo": ({"correction": "clip"}, TOKENS, {"loss_type": "bnpo"}),
    "clip, dapo": ({"correction": "clip"}, TOKENS, {"loss_type": "dapo"}),
    "clip, dr_grpo": ({"correction": "clip"}, LONGEST, {"loss_type": "dr_grpo"}),
    "dual_clip": ({"correction": "dual_clip"}, TOKENS, {"loss_type": "bnpo", "delta": 3.0}),
    "cispo": (
        {"correction": "cispo", "options": {"low": 1.0, "high": 4.0}}, TOKENS,
        {"loss_type": "cispo", "epsilon_high": 5.0},
    ),
    "sapo": ({"correction": "sapo"}, SEQUENCES, {"loss_type": "sapo"}),
    "gspo": (
        {"correction": "gspo"}, SEQUENCES,
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "vespo": ({"correction": "vespo"}, TOKENS, {"loss_type": "vespo"}),
    "top_entropy": ({"correction": "top_entropy"}, TOKENS, {"loss_type": "bnpo", "top_entropy_quantile": 0.2}),
    "opsm": (
        {"correction": "opsm", "options": {"most_kl": 0.05}}, TOKENS,
        {"loss_type": "bnpo", "off_policy_mask_threshold": 0.05},
    ),
}  # fmt: skip
"""Here: settings and aggregation; there: settings. TRL's two-sided clip of the ratio at delta is dual-clip PPO's; its
epsilon_high of cispo is the bound itself, not its distance from 1."""


VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}  # TRL's defaults


def bounded(number: int) -> Case:
    """In float64, and with log-ratios that are not cut off here: TRL cuts none off."""
    case = Case(number)
    case.behaviour, case.advantages = case.behaviour.double(), case.advantages.double()
    away = (case.log_probs.double() - case.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    case.log_probs = case.behaviour + away
    return case


def theirs(case: Case, log_probs: torch.Tensor, old: torch.Tensor, more: dict[str, Any], **settings: Any) -> Any:
    """The loss of `GRPOTrainer._compute_loss`. more: of its inputs."""
    mask = case.padded(case.mask.double())
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda of: of, reduce=lambda of, reduction: of, pad_across_processes=lambda of, **_: of
    )
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (case.padded(log_probs), case.padded(case.entropies), None),
        get_off_policy_mask=trainer.get_off_policy_mask,
        get_gamma_weights=trainer.get_gamma_weights,
        get_high_entropy_mask=lambda *given: trainer.get_high_entropy_mask(
            SimpleNamespace(accelerator=accelerator), *given
        ),
        loss_type=settings["loss_type"],
        importance_sampling_level=settings.get("level", "token"),
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        beta=settings.get("beta", 0.0),
        args=SimpleNamespace(
            delta=settings.get("delta"),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
            steps_per_generation=1,
            **{f"vespo_{name}": value for name, value in VESPO.items()},
        ),
        use_vllm="importance_sampling_ratio" in more,
        vllm_importance_sampling_correction=True,
        top_entropy_quantile=settings.get("top_entropy_quantile", 1.0),
        aux_loss_enabled=False,
        max_completion_length=mask.shape[1],
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": case.padded(case.advantages)[:, 0],
        "old_per_token_logps": case.padded(old),
        "num_items_in_batch": mask.sum(),
        **more,
    }
    return trainer._compute_loss(stand_in, None, inputs)


def assert_same(
    case: Case,
    losses: Any,
    aggregation: str,
    log_probs: torch.Tensor,
    expected: torch.Tensor,
    *,
    count_empty: bool = False,
) -> None:
    found = aggregated(case, losses, aggregation, log_probs, count_empty=count_empty)
    torch.testing.assert_close(found[0], expected.detach(), **TOLERANCE)
    torch.testing.assert_close(found[1], torch.autograd.grad(expected, log_probs)[0], **TOLERANCE)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_trl_in_value_and_gradient(name: str) -> None:
    settings, aggregation, there = LOSSES[name]
    loss = policy_loss(algorithm(**settings))
    for number in NUMBERS:
        case = bounded(number)
        log_probs = case.log_probs.clone().requires_grad_()
        given = {"lengths": case.lengths, "entropies": case.entropies}
        losses = loss(log_probs, case.behaviour, case.advantages, case.mask, **given)
        assert_same(case, losses, aggregation, log_probs, theirs(case, log_probs, case.behaviour, {}, **there))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["decoupled", "decoupled_tis"])
def test_a_clip_on_a_recomputed_policy_has_the_weight_of_trls_importance_sampling(correction: str, level: str) -> None:
    """Which TRL has for engines that compute otherwise than the trainer: its "old" policy is the proximal one. Weights
    are masked or truncated, as `GRPOTrainer._generate_and_score_completions` makes them."""
    low = {"low": 0.25} if correction == "decoupled" else {}
    loss = policy_loss(algorithm(correction=correction, options={"cap": 2.0, "level": level, **low}))
    bounded_weights = 0
    for number in NUMBERS:
        case = bounded(number)
        log_probs = case.log_probs.clone().requires_grad_()
        proximal = (case.behaviour + case.log_probs) / 2
        away = case.padded((proximal - case.behaviour).masked_fill(~case.mask, 0.0))
        ratios = (away if level == "token" else away.sum(1, keepdim=True).expand_as(away)).clamp(-20, 20).exp()
        outside = (ratios > 2.0) | (ratios < 0.25)
        weights = ratios.clamp(max=2.0) if correction == "decoupled_tis" else ratios.masked_fill(outside, 0.0)
        bounded_weights += int((weights != ratios).sum())
        expected = theirs(case, log_probs, proximal, {"importance_sampling_ratio": weights}, loss_type="bnpo")
        given = {"proximal_log_probs": proximal, "lengths": case.lengths}
        losses = loss(log_probs, case.behaviour, case.advantages, case.mask, **given)
        assert_same(case, losses, TOKENS, log_probs, expected)
    assert bounded_weights


@pytest.mark.parametrize("unbiased", [True, False])
def test_a_loss_with_a_kl_to_the_reference_is_that_of_trl(unbiased: bool) -> None:
    """TRL's default is the unbiased one."""
    settings = algorithm(correction="clip", kl_coef=0.1, kl_unbiased=unbiased)
    loss, kl = policy_loss(settings), loss_kl_of(settings)
    for number in NUMBERS:
        case = bounded(number)
        log_probs = case.log_probs.clone().requires_grad_()
        reference = (case.behaviour + case.log_probs) / 2
        losses = loss(log_probs, case.behaviour, case.advantages, case.mask)
        losses = losses + kl(log_probs, case.behaviour, reference, case.mask)
        more = {"ref_per_token_logps": case.padded(reference)}
        there = {"loss_type": "bnpo", "beta": 0.1, "use_bias_correction_kl": unbiased}
        assert_same(case, losses, TOKENS, log_probs, theirs(case, log_probs, case.behaviour, more, **there))


@pytest.mark.parametrize("there", ["grpo", "dr_grpo", "luspo"])
def test_means_over_responses_count_those_without_a_token_as_trls_do(there: str) -> None:
    kind = {"grpo": SEQUENCES, "dr_grpo": LONGEST, "luspo": "sequence_mean_token_sum"}[there]
    loss = policy_loss(algorithm(correction="clip"))
    for number in NUMBERS:
        case = bounded(number)
        for place in list(case.sequences())[::2]:
            case.mask[place] = False
        log_probs = case.log_probs.clone().requires_grad_()
        losses = loss(log_probs, case.behaviour, case.advantages, case.mask)
        expected = theirs(case, log_probs, case.behaviour, {}, loss_type=there)
        assert_same(case, losses, kind, log_probs, expected, count_empty=True)
