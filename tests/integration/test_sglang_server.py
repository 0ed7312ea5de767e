"""A real SGLang server on the CPU, beyond the contract of rollout engines (tests/contract): how it is found, how it
ends, and whole runs. `make setup-sglang` installs it, `make test-sglang` runs this."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3ForCausalLM

from engines.loading import ModelWeights
from engines.requests import Served
from engines.sglang.options import TOKEN, URL, Options
from engines.sglang.rollout import SGLangRollout
from engines.sglang.server import LocalServer
from engines.torch.lora import with_adapters
from engines.torch.model import build_model, outline_model
from harness.cli.forked_runs import ForkedRuns
from harness.comparison.promises import read_finished
from harness.config import ModelConfig, TrainingConfig
from harness.protocols import Completion, Request, Sampling
from harness.runtime.runtime import RealClock
from tests.support.forked_drivers import Drivers
from tests.support.invariants import check_run, check_turns
from tests.support.project import ROOT
from tests.support.real_runs import FIRST_TIMEOUT_S, SEVERAL_TURNS, SMALL
from tests.support.trainer_end import LONG, TrainerEnd

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(FIRST_TIMEOUT_S)]

MODEL = ModelConfig("tiny", 64, 2, 4, 2, 16, 256, 32, True, 128)
LONG_MODEL = replace(MODEL, vocabulary=LONG)
GONE_TIMEOUT_S = 60.0
PROMPT = np.array([3, 1, 4, 1, 5])


@pytest.fixture(scope="module", autouse=True)
def asked_for(request: pytest.FixtureRequest) -> None:
    """Minutes of a server's starts are for those who ask for them."""
    if "sglang" not in request.config.getoption("-m"):
        pytest.skip("make test-sglang runs these")


def make_engine(model: Qwen3ForCausalLM, sampling: Sampling) -> SGLangRollout:
    return SGLangRollout(model, sampling=sampling, slots=4, seed=0, clock=RealClock.starting_now())


async def one(engine: SGLangRollout) -> Completion:
    engine.submit([Request(0, PROMPT)])
    (completion,) = await engine.finished()
    return completion


def greedy(model: Qwen3ForCausalLM, tokens: int) -> list[int]:
    prompt = torch.from_numpy(PROMPT)[None]
    done = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
    return done[0, len(PROMPT) :].tolist()


async def samples(engine: SGLangRollout) -> list[tuple[list[int], list[float], set[int]]]:
    """Tokens, log-probabilities and versions of three samples, one after the other: sums do not depend on company."""
    found = []
    for number in range(3):
        engine.submit([Request(number, PROMPT)])
        (sample,) = await engine.finished()
        found.append((sample.tokens.tolist(), sample.log_probs.tolist(), set(sample.versions.tolist())))
    return found


@torch.no_grad()
def weights(seed: int) -> dict[str, torch.Tensor]:
    """Of `LONG_MODEL`: every weight, norms too, away from what it began as."""
    generator = torch.Generator().manual_seed(seed)
    model = build_model(LONG_MODEL, seed=seed)
    return {name: p + 0.2 * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


async def test_schedulers_of_two_devices_receive_the_trainers_weights_and_a_dead_one_is_noticed() -> None:
    engine = SGLangRollout(
        build_model(LONG_MODEL),
        sampling=Sampling(max_tokens=6),
        slots=4,
        seed=0,
        clock=RealClock.starting_now(),
        tensor_parallel=2,
    )
    try:
        assert engine.ends == 2
        for version, transport in ((1, "collective"), (3, "ipc")):
            trainer = await TrainerEnd.connected(transport, engine, weights(1))
            await trainer.bring(version, weights(1))
            received = await samples(engine)
            assert [seen for *_, seen in received] == [{version}] * 3
            await engine.load_weights(version + 1, weights(1).items())
            assert [its[:2] for its in await samples(engine)] == [its[:2] for its in received], "the same bits"
        trainer = await TrainerEnd.connected("collective", engine, weights(2))
        with pytest.raises(BaseExceptionGroup):
            await trainer.bring(5, dict(list(weights(2).items())[:-1]))
        with pytest.raises(RuntimeError, match="version 5 was put in place in part only"):
            await engine.resume()
        trainer = await TrainerEnd.connected("collective", engine, weights(2))
        await trainer.bring(6, weights(2))
        healed = await samples(engine)
        assert [seen for *_, seen in healed] == [{6}] * 3
        assert [its[:1] for its in healed] != [its[:1] for its in received]
        for child in psutil.Process(engine.process_ids[0]).children(recursive=True):
            if "scheduler_TP1" in f"{child.name()} {' '.join(child.cmdline())}":
                child.kill()
        with pytest.raises(RuntimeError, match="engine 0"):
            await engine.finished()
    finally:
        await engine.close()


async def test_adapters_travel_and_sglang_samples_from_what_they_make_of_the_base() -> None:
    """Received by its scheduler, and handed over by the adapter."""
    model = with_adapters(outline_model(MODEL), TrainingConfig(lora_rank=3), seed=0).fill("cpu")
    first = {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}
    engine = make_engine(model, Sampling(max_tokens=20, temperature=0))
    try:
        assert (await one(engine)).tokens.tolist() == greedy(model, 20)
        trainer = await TrainerEnd.connected("collective", engine, first)
        for version in (1, 2, 3):
            generator = torch.Generator().manual_seed(version)
            arriving = {name: torch.randn(each.shape, generator=generator) / 4 for name, each in first.items()}
            ModelWeights(model, "the test").load(version, arriving.items())
            if version == 2:
                await engine.load_weights(version, arriving.items())
            else:
                await trainer.bring(version, arriving)
            sampled = await one(engine)
            assert sampled.tokens.tolist() == greedy(model, 20) and set(sampled.versions) == {version}
    finally:
        await engine.close()


_AN_ENGINE_AND_NO_MORE = f"""
import sys, time
from engines.torch.model import build_model
from engines.sglang.rollout import SGLangRollout
from harness.config import ModelConfig
from harness.protocols import Sampling
from harness.runtime.runtime import RealClock
engine = SGLangRollout(build_model({MODEL!r}), sampling=Sampling(4), slots=4, seed=0, clock=RealClock.starting_now())
print(*engine.process_ids, flush=True)
sys.stdin.read()
"""


def test_a_server_dies_with_the_process_of_its_engine() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _AN_ENGINE_AND_NO_MORE],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        processes = [psutil.Process(int(number)) for number in owner.stdout.readline().split()]
        os.kill(owner.pid, signal.SIGKILL)
    assert len(processes) > 1
    _, alive = psutil.wait_procs(processes, timeout=GONE_TIMEOUT_S)
    assert not alive


async def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENCE_SGLANG_PYTHON", sys.executable)  # which has no sglang
    with pytest.raises(RuntimeError, match=r"(?s)engine 0.*exit code 1.*sglang"):
        make_engine(build_model(MODEL), Sampling(max_tokens=4))


SMALLER = (
    f"{SMALL} engine=sglang engine.slots=16 iterations=3 algorithm.batch_groups=4 algorithm.group_size=4 "
    "algorithm.micro_batch_groups=2"
)


@pytest.mark.parametrize("settings", ["schedule=colocate_sync cluster.devices=1", "schedule=lending"])
def test_engines_that_sleep_and_several_start_servers_of_their_own(
    results: Path, drivers: Drivers, settings: str
) -> None:
    experiment = f"sglang_{settings.split()[0].partition('=')[2]}"
    check_run(read_finished(drivers.bench(results, experiment, *SMALLER.split(), *settings.split())))


@pytest.mark.slow
def test_a_run_whose_engine_has_two_devices_beside_ranks_keeps_its_promises(results: Path, drivers: Drivers) -> None:
    job = f"{SMALLER} schedule=colocate_sync engine.tensor_parallel=2 cluster.devices=2"
    check_run(read_finished(drivers.bench(results, "sglang_two_devices", *job.split())))


async def test_a_server_that_was_there_gets_the_weights_of_each_run_and_stays(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, also of runs: one that loads in mid-response, with samples of several turns; one by way of
    host memory; and one that cuts samples off."""
    server = LocalServer(Served(build_model(MODEL, seed=1), 16, torch.device("cpu")), "the test", Options())
    try:
        monkeypatch.setenv(URL, server.url)
        monkeypatch.setenv(TOKEN, server.token)
        for seed in (2, 3):
            engine = make_engine(build_model(MODEL, seed=seed), Sampling(max_tokens=20, temperature=0))
            assert (await one(engine)).tokens.tolist() == greedy(build_model(MODEL, seed=seed), 20)
            await engine.close()
            server.require_alive()
        jobs = {"fully_async": SEVERAL_TURNS, "delayed_update": "", "partial_rollout_sync": "cluster.devices=1"}
        settings = {f"shared_{name}": f"{SMALLER} schedule={name} {more}" for name, more in jobs.items()}
        with ForkedRuns() as forked:  # which sees the server that is there
            runs = await asyncio.to_thread(Drivers(forked).bench_all, results, settings)
        server.require_alive()
    finally:
        server.stop()
    for run in runs.values():
        check_run(read_finished(run))
    check_turns(runs["shared_fully_async"])
