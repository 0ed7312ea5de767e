"""vLLM on a GPU: weights by CUDA IPC and vLLM's layerwise reload, and memory given back in sleep."""

import asyncio
import os
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import Qwen3ForCausalLM

from engines.torch.model import build_model
from engines.vllm.options import Options
from engines.vllm.rollout import VLLMRollout
from harness.config import ModelConfig
from harness.metrics.run_files import load_metrics
from harness.protocols import Completion, Request, Sampling
from harness.runtime.runtime import RealClock
from tests.contract.reference import weights_of
from tests.support.real_runs import bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here"),
    pytest.mark.asyncio(loop_scope="module"),
]

GPU = torch.device("cuda")
SMALL = ModelConfig("small", 256, 4, 4, 2, 64, 512, 1024, True, 512, dtype="bfloat16")
TOLERANCE = 0.05  # mean difference of log-probabilities; bfloat16 has 8 bits, other kernels round otherwise
WAIT_S = 300.0


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["0", "1"], ids=["runner_v1", "runner_v2"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[VLLMRollout]:
    sampling, clock = Sampling(max_tokens=64), RealClock.starting_now()
    with mock.patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=request.param):
        started = VLLMRollout(build_model(SMALL), sampling=sampling, slots=16, seed=0, clock=clock, device=GPU)
        assert started._process.llm.vllm_config.use_v2_model_runner == (request.param == "1")
    yield started
    await started.close()


async def generate(engine: VLLMRollout) -> dict[int, tuple[Request, Completion]]:
    random = np.random.default_rng(3)
    work = {i: Request(i, random.integers(0, SMALL.vocabulary, 20)) for i in range(32)}
    engine.submit(list(work.values()))
    done: list[Completion] = []
    async with asyncio.timeout(WAIT_S):
        while len(done) < len(work):
            done += await engine.finished()
    return {completion.sample_id: (work[completion.sample_id], completion) for completion in done}


@torch.no_grad()
def assert_sampled_by(
    model: Qwen3ForCausalLM, samples: dict[int, tuple[Request, Completion]], most: float = TOLERANCE
) -> None:
    differences = []
    for request, completion in samples.values():
        sequence = torch.from_numpy(np.concatenate([request.prompt, completion.tokens])).to(GPU)
        log_probs = torch.log_softmax(model(sequence[None]).logits[0, len(request.prompt) - 1 : -1].float(), -1)
        own = log_probs.gather(-1, sequence[len(request.prompt) :, None])[:, 0].cpu().numpy()
        differences.append(np.abs(own - completion.log_probs).mean())
    assert np.mean(differences) < most


async def test_weights_that_came_by_ipc_are_the_ones_it_samples_from(engine: VLLMRollout) -> None:
    for _ in range(2):
        version = engine.version + 1
        model = build_model(SMALL, seed=version, device=GPU)
        await engine.load_weights(version, weights_of(model))
        assert_sampled_by(model, await generate(engine))


async def test_weights_of_8_bits_are_made_anew_also_in_sleep() -> None:
    """Off by more than bfloat16, and by far less than other weights."""
    sampling, clock = Sampling(max_tokens=64), RealClock.starting_now()
    how: dict[str, Any] = {"sampling": sampling, "slots": 16, "seed": 0, "clock": clock, "device": GPU}
    engine = VLLMRollout(build_model(SMALL), **how, options=Options(quantization="fp8"))
    try:
        for version, asleep in ((1, False), (2, True)):
            if asleep:
                await engine.sleep(keep_weights=False)
            model = build_model(SMALL, seed=version, device=GPU)
            await engine.load_weights(version, weights_of(model))
            if asleep:
                await engine.wake()
            assert_sampled_by(model, await generate(engine), 2 * TOLERANCE)
    finally:
        await engine.close()


async def test_draws_follow_from_the_runs_seed(engine: VLLMRollout) -> None:
    first, again = [await generate(engine) for _ in range(2)]
    assert all(first[sample][1].tokens.tolist() == again[sample][1].tokens.tolist() for sample in first)


@pytest.mark.parametrize("keep_weights", [True, False])
async def test_sleep_gives_memory_back_and_weights_may_come_in_it(engine: VLLMRollout, keep_weights: bool) -> None:
    free, _ = torch.cuda.mem_get_info()
    await engine.sleep(keep_weights=keep_weights)
    asleep, _ = torch.cuda.mem_get_info()
    assert asleep > free
    version = engine.version + 1
    model = build_model(SMALL, seed=version, device=GPU)
    await engine.load_weights(version, weights_of(model))
    await engine.wake()
    assert_sampled_by(model, await generate(engine))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="an engine of two devices needs two")
async def test_an_engine_of_two_gpus_takes_turns_with_the_trainers_there(tmp_path: Path) -> None:
    job = "backend=real smoke=true iterations=3 engine=vllm engine.tensor_parallel=2 schedule=colocate_sync"
    job += " model=qwen0.5b model.checkpoint=null cluster.devices=2 algorithm.recompute_log_probs=true"
    folder = await asyncio.to_thread(bench, tmp_path, "two_gpus", *job.split())
    assert max(line["policy/mismatch_kl"] for line in load_metrics(folder)) < TOLERANCE
