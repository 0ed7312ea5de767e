"""A baseline for each token of a group: what rewards are by then, weighted by how much each response's gradients vary.

Arrays of tokens are [R], one response after the other, of `lengths` int64 [k]; `mask` is bool [R], False where nothing
was sampled. The t-th token of a response is the t-th that was sampled: what an environment wrote is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from harness.config.fields import Switch

_EPS = 1e-8


def optimal_token_baseline(
    rewards: torch.Tensor,
    gradient_squares: torch.Tensor,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    *,
    zero_tail: Switch = True,
) -> torch.Tensor:
    """Advantages, float32 [R]; 0 where mask is False. For rewards [groups, n] and, of every token, the square w of its
    log-probability's gradient by the logits (harness/rl/log_probs.py):

        W_jt = sum of w_js over s <= t,    B_t = sum_j r_j W_jt / (sum_j W_jt + 1e-8),    A_jt = r_j - B_t

    j are the responses of the group that have a t-th token. zero_tail: tokens that the longest response alone has are
    given no baseline, which would be their own reward. Where rewards are all equal, all others get exactly 0. Each
    group is computed by itself, so that no bit depends on how many come together.

    Li et al., "The optimal token baseline" (ICML 2026, PMLR 306), as verl's `tir_optimal_token_baseline` has it without
    weights of importance; without tokens of an environment that is its `optimal_token_baseline`.
    """
    columns = (column.split(lengths.tolist()) for column in (gradient_squares, mask))
    kept = [part[own].double() for part, own in zip(*columns, strict=True)]
    n, found = rewards.shape[1], list[torch.Tensor]()
    for group, own in enumerate(rewards.double()):
        found += _of_group(own, kept[group * n : (group + 1) * n], zero_tail)
    advantages = torch.zeros_like(gradient_squares)
    advantages[mask] = torch.cat(found).float()
    return advantages


def _of_group(rewards: torch.Tensor, squares: Sequence[torch.Tensor], zero_tail: bool) -> list[torch.Tensor]:
    """rewards float64 [n]; squares: float64 of the tokens of each response -> its advantages."""
    paths = pad_sequence([part.cumsum(0) for part in squares], batch_first=True)  # [n, T]: 0 after a response's end
    baseline = (rewards[:, None] * paths).sum(0) / (paths.sum(0) + _EPS)
    if rewards.amax() == rewards.amin():
        baseline.fill_(rewards[0])
    second = sorted(map(len, squares))[-2]
    if zero_tail or second == 0:  # one response alone has nothing to compare with
        baseline[second:] = 0.0
    return [reward - baseline[: len(part)] for reward, part in zip(rewards, squares, strict=True)]
