"""A profile of a GPU, of all layers and of two depths as of a model that it does not hold. No time is asserted."""

from __future__ import annotations

import pytest
import torch

from harness.config import CostConfig, LengthsConfig, ModelConfig, TrainingConfig
from harness.cost_model.profile.fitting import fit_profile
from harness.cost_model.profile.record import Grid, record
from harness.cost_model.profile.rows import PHASES
from harness.cost_model.profile.timing import Stopwatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

QWEN = ModelConfig("qwen0.5b", 896, 24, 14, 2, 64, 4864, 151936, True, 4096, dtype="bfloat16")
GRID = Grid(
    decode=((1, 128), (16, 128), (128, 128), (16, 1024)),
    prefill=((1, 128), (8, 512), (2, 2048)),
    log_prob=((1, 128), (8, 512), (2, 2048)),
    train=((1, 128), (4, 512), (1, 2048)),
    copies=(1 << 22, 1 << 26),
)
BASE = CostConfig(
    **dict.fromkeys(("decode_step_s", "network_bytes_per_s", "host_bytes_per_s"), 1.0),
    **dict.fromkeys(("decode_step_s_per_sample", "prefill_s_per_token", "log_prob_s_per_token"), 0.0),
    **dict.fromkeys(("train_s_per_token", "train_step_s", "weight_bytes", "call_s", "sync_s"), 0.0),
    **dict.fromkeys(("offload_s", "reload_s"), 0.0),
    name="base",
    prompt_tokens=1,
    lengths=LengthsConfig(kind="constant", mean=1.0, cap=1),
)


def test_every_phase_is_timed_and_fitted() -> None:
    device = torch.device("cuda")
    for depths in ((24,), (2, 4)):
        watch = Stopwatch(device, repeats=5)
        found = record(QWEN, TrainingConfig(), device=device, watch=watch, grid=GRID, depths=(depths, depths))
        cost = fit_profile(found, BASE, "gpu").cost

        assert {row.phase for row in found.rows} == set(PHASES)
        assert all(row.layers == 24 for row in found.of("decode", "prefill", "log_prob", "train", "load"))
        assert cost.decode_step_s + cost.decode_weights_s > 0 and cost.train_step_s > 0
        assert cost.log_prob_call_s + cost.log_prob_s_per_token > 0 and cost.train_call_s + cost.train_s_per_token > 0
