"""Filters of the groups that are trained: `algorithm.filter` names one function, and the places of the groups that it
refuses are dealt other prompts.

A filter takes rewards [groups, n] as the task gave them, float64 (the user's own float32), and, where it has such
keyword-only parameters, `exact_match` (bool [groups, n]), `lengths` (the sampled tokens of each response, int64
[groups, n]) and `truncated` (bool [groups, n], whether the limit on tokens ended it). It returns bool [groups]: whether
to keep each. It is asked for one group at a time, so that a group's fate does not depend on when it was generated, and
beside which others. Samples that could not be scored are not shown to it: of n, a group may have fewer; one that has
none is refused.
"""

import inspect
from collections.abc import Callable

import torch

from harness.config import AlgorithmConfig
from harness.config.plugins import is_path, keywords, named_by
from harness.config.registries import find_function
from harness.rl.groups import one_by_one

Filter = Callable[..., torch.Tensor]
"""Rewards float64 [groups, n], and by name of `GIVEN` what the filter reads -> bool [groups]."""


def zero_variance(rewards: torch.Tensor) -> torch.Tensor:
    """Keep groups whose rewards are not all equal: others have no advantage, and no gradient.

    Dynamic sampling, DAPO (arXiv 2503.14476), equation 11: 0 < |correct responses| < n.
    """
    return rewards.amax(dim=1) != rewards.amin(dim=1)


def every_group(rewards: torch.Tensor) -> torch.Tensor:
    """Keep all: `algorithm.filter=none`, for which no role runs."""
    return torch.ones(len(rewards), dtype=torch.bool)


GIVEN = {"exact_match": "exact_match", "lengths": "loss_mask", "truncated": "finish_reason"}
"""Keyword arguments that a filter that has them is given, and the column of the queue that each is made of."""


def filter_of(algorithm: AlgorithmConfig) -> Filter | None:
    """The filter that the settings name, with its options, group by group; None where they name nothing. Raises
    ConfigError for an option that it lacks, and for a function of the user's that cannot be called as such."""
    if not algorithm.filters:
        return None
    function = find_function("algorithm.filter", algorithm.filter)
    own = named_by(function, algorithm.options)
    options = keywords(function, own, "algorithm.options", algorithm.filter, given=GIVEN)

    def keep(rewards: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        kept = function(rewards.float() if is_path(algorithm.filter) else rewards, **given, **options)
        if kept.shape != rewards.shape[:1] or kept.dtype != torch.bool:
            raise ValueError(
                f"algorithm.filter={algorithm.filter} must return bool [groups] = [{len(rewards)}], "
                f"not {str(kept.dtype).removeprefix('torch.')} {list(kept.shape)}"
            )
        return kept

    return one_by_one(keep)


def given_to_filter(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Names of `GIVEN` that the filter reads."""
    wanted = inspect.signature(find_function("algorithm.filter", algorithm.filter)).parameters
    return tuple(name for name in GIVEN if name in wanted)
