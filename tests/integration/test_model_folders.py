"""A folder of a model through a run, out as the final folder, and into vLLM or SGLang: everyone finds the same
log-probabilities."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.torch.model import build_model
from engines.torch.scoring import TorchLogProb
from harness.config import ModelConfig
from harness.config.model_folder import model_settings
from harness.metrics.done import MODEL
from harness.metrics.run_files import load_metrics
from harness.transfer_queue import Ragged
from tests.support.forked_drivers import Drivers
from tests.support.invariants import MISMATCH_KL
from tests.support.random_models import random_folder
from tests.support.real_runs import FIRST_TIMEOUT_S, SMALL

ARCHITECTURES = {
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
SHORT = (
    "iterations=2 warmup_iterations=0 algorithm.batch_groups=4 algorithm.micro_batch_groups=2 "
    "algorithm.learning_rate=0.01 task.pay_truncated=true"
)


def trained(drivers: Drivers, folder: Path, architecture: str, *settings: str) -> Path:
    """The final folder of a run that began from a random model of this architecture."""
    start = random_folder(folder / "start", architecture, **ARCHITECTURES[architecture])
    run = drivers.bench(folder / "results", "x", f"model={start}", *SMALL.split(), *SHORT.split(), *settings)
    moved = build_model(ModelConfig(**model_settings(str(run / MODEL)))).state_dict()
    before = build_model(ModelConfig(**model_settings(str(start)))).state_dict()
    assert any(not torch.equal(weights, before[name]) for name, weights in moved.items())
    return run / MODEL


async def log_probs(folder: Path, prompt: list[int], response: list[int]) -> list[float]:
    """By the scorer of training."""
    scorer = TorchLogProb(
        build_model(ModelConfig(**model_settings(str(folder)))), temperature=1.0, device=torch.device("cpu")
    )
    samples = (Ragged.from_rows([np.array(tokens)]) for tokens in (prompt, response))
    return list((await scorer.log_probs(*samples)).values.tolist())


@pytest.mark.slow
@pytest.mark.timeout(FIRST_TIMEOUT_S)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
async def test_transformers_and_runs_load_the_final_folder(architecture: str, tmp_path: Path, drivers: Drivers) -> None:
    from transformers import AutoModelForCausalLM

    folder = trained(drivers, tmp_path, architecture, "schedule=fully_async")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        scores = torch.log_softmax(model(input_ids=torch.arange(3, 15)[None]).logits[0, :-1], -1)
    expected = scores.gather(1, torch.arange(4, 15)[:, None])[3:, 0].tolist()
    assert await log_probs(folder, [3, 4, 5, 6], list(range(7, 15))) == pytest.approx(expected, abs=1e-5)
    drivers.bench(tmp_path / "again", "x", f"model={folder}", *SMALL.split(), *SHORT.split())


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; make test-vllm")
@pytest.mark.timeout(FIRST_TIMEOUT_S)
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])  # whose layers have what no other has
def test_what_vllm_samples_of_a_folder_before_and_after_an_update_has_its_trainers_log_probs(
    architecture: str, tmp_path: Path, drivers: Drivers
) -> None:
    folder = trained(
        drivers, tmp_path, architecture, "schedule=separated_sync", "engine=vllm", "algorithm.recompute_log_probs=true"
    )
    mismatches = [line["policy/mismatch_kl"] for line in load_metrics(folder.parent)]
    assert len(mismatches) == 2 and max(map(abs, mismatches)) < MISMATCH_KL


@pytest.mark.sglang
@pytest.mark.timeout(FIRST_TIMEOUT_S)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_folder_goes_through_a_run_on_sglang(
    architecture: str, tmp_path: Path, drivers: Drivers, request: pytest.FixtureRequest
) -> None:
    if "sglang" not in request.config.getoption("-m"):
        pytest.skip("make test-sglang runs these")
    trained(drivers, tmp_path, architecture, "schedule=separated_sync", "engine=sglang")
