"""What rollout writes of samples that are done, whichever role plays its part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.protocols import FINISH_REASONS, Completion
from harness.transfer_queue import Column, Ragged


def rollout_columns(completed: Sequence[Completion], engine: int) -> dict[str, Column]:
    """What rollout writes of samples that this engine finished."""
    return {
        "response": Ragged.from_rows([c.tokens for c in completed]),
        "log_probs": Ragged.from_rows([c.log_probs for c in completed]),
        "versions": Ragged.from_rows([c.versions for c in completed]),
        "engine": np.full(len(completed), engine, np.int32),
        "started_at": np.array([c.started_at for c in completed], np.float64),
        "finished_at": np.array([c.finished_at for c in completed], np.float64),
        "loss_mask": Ragged.from_rows([_mask(c) for c in completed]),
        "finish_reason": np.array([FINISH_REASONS.index(c.finish_reason) for c in completed], np.int8),
        "turns": np.array([c.turns for c in completed], np.int32),
        "environment_reward": np.array([c.environment_reward for c in completed], np.float32),
    }


def _mask(completion: Completion) -> np.ndarray:
    """bool [L]: True where the policy sampled."""
    return np.ones(len(completion.tokens), np.bool_) if completion.mask is None else completion.mask
