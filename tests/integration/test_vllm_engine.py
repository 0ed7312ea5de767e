"""What only vLLM does, against vLLM itself. What every engine has to do is in tests/contract."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

from engines.loading import ModelWeights
from engines.torch.lora import with_adapters
from engines.torch.model import build_model, outline_model
from engines.vllm import weights
from engines.vllm.options import Options
from engines.vllm.rollout import VLLMRollout
from harness.comparison.promises import read_finished
from harness.config import ModelConfig, TrainingConfig
from harness.metrics.run_files import load_metrics
from harness.protocols import Completion, Request, Sampling, TransferError
from harness.report.summary import RunSummary
from harness.runtime.runtime import RealClock
from tests.contract.reference import assert_greedy, log_probs_of, weights_of
from tests.support.forked_drivers import Drivers
from tests.support.invariants import check_run, check_turns
from tests.support.real_runs import FIRST_TIMEOUT_S, SEVERAL_TURNS, SMALL
from tests.support.trainer_end import LONG, TrainerEnd

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; make test-vllm"),
    pytest.mark.timeout(FIRST_TIMEOUT_S),
]

TINY = ModelConfig("tiny", 64, 2, 4, 2, 16, 256, 32, True, 128)
"""Its heads are smaller than those that vLLM's CPU kernels know."""
WAIT_S = 120.0


def model_folder_is_there(engine: VLLMRollout) -> bool:
    return Path(engine._process._folder.name).exists()


def left_in(folder: Path) -> list[Path]:
    """Sockets and files of the engine's own; vLLM's and torch's caches stay."""
    return [file for file in folder.rglob("*") if file.is_socket() or file.name.startswith("cadence-")]


@asynccontextmanager
async def running(model: Qwen3ForCausalLM, **settings: Any) -> AsyncIterator[VLLMRollout]:
    sampling = Sampling(max_tokens=40, temperature=0)
    clock = RealClock.starting_now()
    with tempfile.TemporaryDirectory() as files, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", files)
        patch.setenv("TMPDIR", files)  # of its processes
        engine = VLLMRollout(model, sampling=sampling, slots=4, seed=0, clock=clock, name="here", **settings)
        processes = [psutil.Process(number) for number in engine.process_ids]
        assert model_folder_is_there(engine), "vLLM's core may not have read all of it"
        try:
            async with asyncio.timeout(WAIT_S):
                yield engine
        finally:
            await engine.close()
            assert not left_in(Path(files)) and not [process for process in processes if process.is_running()]


def spread(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Every weight, norms too, away from what it began as; and logits far enough apart to choose one."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def off_by(model: Qwen3ForCausalLM, samples: Sequence[tuple[Request, Completion]]) -> float:
    """Mean difference of the samples' log-probs from the model's."""
    found = [log_probs_of(model, request.prompt, done.tokens) - done.log_probs for request, done in samples]
    return float(np.mean([np.abs(off).mean() for off in found]))


def requests(number: int) -> list[Request]:
    random = np.random.default_rng(3)
    return [Request(i, random.integers(0, TINY.vocabulary, 1 + 5 * i)) for i in range(number)]


async def generate(engine: VLLMRollout, work: list[Request]) -> dict[int, Completion]:
    engine.submit(work)
    done: dict[int, Completion] = {}
    while len(done) < len(work):
        done |= {completion.sample_id: completion for completion in await engine.finished()}
    return done


def assert_all_greedy(model: Qwen3ForCausalLM, work: list[Request], done: dict[int, Completion], version: int) -> None:
    """What `model`, as this version, says to each."""
    for request in work:
        assert set(done[request.sample_id].versions) == {version}
        assert_greedy(model, request.prompt, done[request.sample_id])


async def test_small_heads_and_weights_in_many_buckets_give_the_tokens_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(TINY, tied_embeddings=False)
    old, new = build_model(config, seed=0), spread(build_model(config, seed=1))
    sizes = []

    def small_buckets(weights, device, limit):
        for bucket in buckets(weights, device, limit=20_000):
            sizes.append(bucket.size)
            yield bucket

    buckets = weights.buckets
    monkeypatch.setattr(weights, "buckets", small_buckets)
    async with running(spread(old)) as engine:
        work = requests(6)
        for version, model in enumerate((old, new)):
            if version:
                await engine.load_weights(version, weights_of(model))
            assert_all_greedy(model, work, await generate(engine, work), version)
        assert not model_folder_is_there(engine), "not for as long as it lives: it is as large as a model"
    assert len(sizes) > 10


async def checksums(engine: VLLMRollout) -> list[dict[str, str]]:
    return await engine._process.ask("add up its weights", engine._process.llm.compute_weight_checksums())


async def test_workers_of_two_devices_hold_the_trainers_bits_by_every_way_and_a_dead_one_is_named() -> None:
    first, second, third = (spread(build_model(TINY, seed=seed)) for seed in range(3))
    async with running(first, tensor_parallel=2) as engine:
        assert engine.ends == 2 and len(engine.process_ids) == 3, "vLLM's core and its two workers"
        work = requests(6)
        assert_all_greedy(first, work, await generate(engine, work), 0)
        for version, transport in ((1, "collective"), (4, "ipc")):
            trainer = await TrainerEnd.connected(transport, engine, dict(weights_of(first)))
            await trainer.bring(version, dict(weights_of(second)))
            given = await checksums(engine)
            assert_all_greedy(second, work, await generate(engine, work), version)
            await engine.load_weights(version + 1, weights_of(third))
            assert await checksums(engine) != given
            assert_all_greedy(third, work, await generate(engine, work), version + 1)
            await engine.load_weights(version + 2, weights_of(second))
            assert await checksums(engine) == given
        os.kill(engine.process_ids[-1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="engine here died"):
            await engine.finished()


async def test_adapters_travel_and_vllm_samples_from_what_they_make_of_the_base() -> None:
    """Received by its workers, and handed over by the adapter."""
    model = with_adapters(outline_model(TINY), TrainingConfig(lora_rank=3), seed=0).fill("cpu")
    learnt = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    async with running(model) as engine:
        work, first = requests(3), {name: tensor.detach().clone() for name, tensor in learnt.items()}
        assert_all_greedy(model, work, await generate(engine, work), 0)
        trainer = await TrainerEnd.connected("collective", engine, first)
        for version in (1, 2, 3):
            arriving = first
            if version < 3:
                generator = torch.Generator().manual_seed(version)
                arriving = {name: torch.randn(one.shape, generator=generator) / 4 for name, one in first.items()}
            ModelWeights(model, "the test").load(version, arriving.items())
            if version == 2:
                await engine.load_weights(version, arriving.items())
            else:
                await trainer.bring(version, arriving)
            assert_all_greedy(model, work, await generate(engine, work), version)


async def test_weights_that_arrive_are_quantised_anew() -> None:
    """By either way, twice: those of the version before would be off by hundreds of times as much. bfloat16 is off by
    .002, 8 bits by .02."""
    models = [build_model(replace(TINY, hidden=256, dtype="bfloat16"), seed=seed) for seed in range(3)]
    async with running(models[0], options=Options(quantization="fp8")) as engine:
        engine.sampling = Sampling(max_tokens=40)
        trainer = await TrainerEnd.connected("collective", engine, dict(weights_of(models[0])))
        for version, number in enumerate((0, 1, 2, 0, 1)):
            if version in (1, 2):
                await trainer.bring(version, dict(weights_of(models[number])))
            elif version:
                await engine.load_weights(version, weights_of(models[number]))
            work = requests(6)
            done = await generate(engine, work)
            samples = [(request, done[request.sample_id]) for request in work]
            found = [off_by(each, samples) for each in models]
            assert FP8[0] < found.pop(number) < FP8[1] < min(found)


FP8 = (0.003, 0.1)


async def test_late_answers_a_transfer_that_breaks_off_and_a_death_in_another_are_named() -> None:
    """vLLM refuses until it has a whole version."""

    def deadly(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        yield next(weights)
        os.kill(engine.process_ids[0], signal.SIGKILL)
        yield from weights

    old, new = (spread(build_model(replace(TINY, vocabulary=LONG), seed=seed)) for seed in range(2))
    async with running(old) as engine:
        with pytest.raises(TimeoutError, match="engine here did not say why within 0.01 s"):
            await engine._process.ask("say why", asyncio.Event().wait(), timeout_s=0.01)
        trainer = await TrainerEnd.connected("collective", engine, dict(weights_of(old)))
        missing = dict(list(weights_of(new))[:-1])
        with pytest.raises(BaseExceptionGroup) as caught, torch.no_grad():
            await trainer.bring(1, missing)
        assert {type(error) for error in caught.value.exceptions} <= {KeyError, TransferError}
        with pytest.raises(RuntimeError, match="version 1 was put in place in part only"):
            await engine.resume()
        assert engine.version == 0
        again = await TrainerEnd.connected("collective", engine, dict(weights_of(old)))
        await again.bring(2, dict(weights_of(new)))
        work = requests(2)
        assert_all_greedy(new, work, await generate(engine, work), 2)
        with pytest.raises(RuntimeError, match="engine here died"):
            await engine.load_weights(3, deadly(weights_of(old)))
        assert engine.version == 2


SCHEDULES = {"colocate_sync": "cluster.devices=1", "delayed_update": "", "fully_async": SEVERAL_TURNS}
"""Beside the trainer in turn; by way of host memory, between batches; in mid-response, of samples of several turns."""


@pytest.fixture(scope="module")
def runs(results: Path, drivers: Drivers) -> dict[str, Path]:
    """Short ones."""
    short = f"{SMALL} engine=vllm iterations=3 algorithm.batch_groups=4 algorithm.group_size=4"
    short += " algorithm.micro_batch_groups=2"
    return drivers.bench_all(
        results, {f"vllm_{name}": f"{short} schedule={name} {more}" for name, more in SCHEDULES.items()}
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_runs_on_vllm_and_keeps_what_it_promises(runs: dict[str, Path], name: str) -> None:
    folder = runs[f"vllm_{name}"]
    check_run(read_finished(folder))
    if name == "colocate_sync":
        assert RunSummary(folder).lag_worst == 0


def test_samples_of_several_turns_are_on_vllm_what_their_trainer_reads(runs: dict[str, Path]) -> None:
    check_turns(runs["vllm_fully_async"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "devices"), [("fully_async", "3 schedule.split.rollout=2"), ("colocate_sync", "2")]
)
def test_a_run_whose_engines_have_two_devices_each_keeps_what_it_promises(
    results: Path, drivers: Drivers, schedule: str, devices: str
) -> None:
    """Also beside training ranks, of which every second has its engine in another worker."""
    job = f"{SMALL} engine=vllm iterations=3 algorithm.batch_groups=4 algorithm.group_size=4 engine.tensor_parallel=2"
    job += f" algorithm.micro_batch_groups=1 schedule={schedule} cluster.devices={devices}"
    job += " algorithm.recompute_log_probs=true"
    folder = drivers.bench(results, f"vllm_two_devices_{schedule}", *job.split())
    check_run(read_finished(folder))
    assert schedule != "colocate_sync" or max(line["policy/mismatch_kl"] for line in load_metrics(folder)) < 1e-10
