"""Adapters: that they are trained right, and that nothing else moves, travels or is saved."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed import Store

from engines.loading import write_model
from engines.torch.first_weights import local_part, part_of_tensor
from engines.torch.fsdp import FSDPEngine
from engines.torch.lora import base_of, with_adapters
from engines.torch.model import build_model, outline_model
from engines.torch.rollout import TorchRollout
from engines.torch.scoring import TorchLogProb
from harness.config import ModelConfig, TrainingConfig
from harness.cost_model.shape import adapter_parameters, parameters
from harness.protocols import Request, Sampling
from harness.runtime.runtime import RealClock
from harness.transfer_queue import Ragged
from harness.weight_sync.endpoints import SendingWorker
from harness.weight_sync.transports import LocalReceiver
from harness.workers.training import RememberingRole
from tests.support.fsdp_samples import (
    CPU,
    FREE,
    SAMPLES,
    SMALL,
    Tensors,
    World,
    assert_close,
    batch_of,
    computed,
    full,
    gradients,
    plain_gradients,
    same_bits,
    save,
    scores,
    train,
    weights,
)
from tests.support.processes import run_ranks
from tests.support.weight_ends import carried, meet, offer_of, open_rendezvous

ALL = range(SAMPLES)
BFLOAT16 = replace(SMALL, dtype="bfloat16")
LORA = TrainingConfig(lora_rank=3, lora_alpha=6.0)  # which two ranks share unevenly
SCALE = 2.0


def moved(world: World, training: TrainingConfig = LORA, model: ModelConfig = SMALL) -> FSDPEngine:
    """With adapters none of which is 0."""
    engine = world.engine(FREE, training, model)
    with torch.no_grad():
        for number, parameter in enumerate(engine.masters.values()):
            draw = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            local_part(parameter).copy_(draw[part_of_tensor(parameter)])
    return engine


def merged(adapters: Tensors) -> torch.nn.Module:
    """The base with adapters added to its weights."""
    model = build_model(SMALL)
    with torch.no_grad():
        for name, down in adapters.items():
            if ".lora_A." in name:
                layer = model.get_submodule(name.removesuffix(".lora_A.weight"))
                layer.weight += SCALE * adapters[name.replace("lora_A", "lora_B")] @ down
    return model


def expected_gradients(adapters: Tensors) -> Tensors:
    """By the chain rule, of those of the merged weights W + s B A: s B^T G of A, s G A^T of B."""
    of_merged = plain_gradients(ALL, FREE, model=merged(adapters))
    found = {}
    for name in adapters:
        layer, _, which = name.removesuffix(".weight").rpartition(".")
        gradient = of_merged[f"{layer}.weight"]
        other = adapters[f"{layer}.{'lora_B' if which == 'lora_A' else 'lora_A'}.weight"]
        found[name] = SCALE * (other.T @ gradient if which == "lora_A" else gradient @ other.T)
    return found


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_gradients_of_adapters_follow_from_those_of_the_weights_that_they_add_up_to(world: World, layout: str) -> None:
    engine = moved(world, replace(LORA, layout=layout))
    before = weights(engine)
    train(engine, [ALL[:8], ALL[8:]])
    assert_close(gradients(engine), expected_gradients(before), rtol=1e-5)


def of_a_rank(store: Store, rank: int, folder: Path) -> tuple[Tensors, Tensors, bool]:
    with World(store, rank, 2) as world:
        engine = moved(world, replace(LORA, optimizer_offload="between_phases"))
        base = {name: full(one) for name, one in engine._scorer.model.named_parameters() if not one.requires_grad}
        before = weights(engine)
        train(engine, [ALL[rank::2][:4], ALL[rank::2][4:]])
        learnt = gradients(engine)
        save(engine, folder)
        scored = [scores(one, ALL) for one in (engine.base_scorer(), world.reference())]
        still = all(torch.equal(base[name], full(engine._scorer.model.get_parameter(name))) for name in base)
        half = moved(world, LORA, BFLOAT16)
        norm = train(half, [ALL[rank::2]])
        return before, learnt, still and bool((scored[0] == scored[1]).all()) and 0 < norm < 100


def test_two_ranks_share_base_and_adapters_and_one_goes_on_with_what_they_saved(world: World, tmp_path: Path) -> None:
    for before, learnt, fine in run_ranks(of_a_rank, 2, tmp_path):
        assert fine
        assert_close(learnt, expected_gradients(before), rtol=1e-5)
    alone, expected = world.engine(FREE, LORA), moved(world)
    train(expected, [ALL])
    computed(alone.load(tmp_path))
    assert_close(weights(alone), weights(expected), rtol=1e-2)
    with safe_open(tmp_path / "rank-00000.safetensors", "pt") as file:
        assert all(".lora_" in name or name in ("training.steps", "random.0") for name in file.keys())


@pytest.mark.parametrize("model", [SMALL, BFLOAT16])
def test_the_first_policy_is_the_base_to_the_bit_which_stays_a_reference(world: World, model: ModelConfig) -> None:
    engine = world.engine(FREE, LORA, model)
    base = scores(world.reference(model), ALL)
    assert (scores(engine.scorer(), ALL) == base).all()
    train(engine, [ALL])
    assert (scores(engine.scorer(), ALL) != base).any()
    assert (scores(engine.base_scorer(), ALL) == base).all()


@pytest.mark.parametrize("model", [SMALL, BFLOAT16])
def test_an_engine_and_a_scorer_that_got_adapters_say_what_the_trainer_says(world: World, model: ModelConfig) -> None:
    """To the bit where it scores; where it samples, as near as without adapters."""
    trainer = moved(world, model=model)
    sent = {name: full(tensor) for name, tensor in trainer.named_parameters().items()}
    adapted = [with_adapters(outline_model(model), LORA, seed=7).fill("cpu") for _ in range(2)]
    scorer = TorchLogProb(adapted[0], temperature=1.0, device=CPU)
    engine = TorchRollout(adapted[1], sampling=Sampling(8), slots=4, seed=0, clock=RealClock.starting_now())
    for one in (scorer, engine):
        computed(one.load_weights(1, sent.items()))
    assert (scores(trainer.scorer(), ALL) == scores(scorer, ALL)).all()
    prompt = batch_of(ALL).prompts.row(0)
    engine.submit([Request(0, prompt)])
    while not engine._done:
        engine.step()
    (done,) = engine._done
    said = computed(scorer.log_probs(Ragged.from_rows([prompt]), Ragged.from_rows([done.tokens])))
    np.testing.assert_allclose(said.values, done.log_probs, atol=1e-5 if model is SMALL else 0.1)


@pytest.mark.parametrize("transport", ["collective", "ipc", "host_staged", "local"])
async def test_adapters_travel_and_nothing_else(world: World, transport: str) -> None:
    training = replace(LORA, lora_targets=["q_proj", "down_proj"])
    engine = moved(world, training)
    worker = SendingWorker()
    worker.engine = engine
    plan = await worker.plan(1 << 20)
    sent = sum(spec.bytes for bucket in plan.buckets for spec in bucket.tensors)
    assert sent == 4 * adapter_parameters(SMALL, training) < 4 * parameters(SMALL) / 4
    if transport == "local":
        arrived = dict(LocalReceiver(engine).receive(1))
    else:
        rendezvous, store = open_rendezvous("127.0.0.1", 1, 60)
        sender, receiver = meet(offer_of(transport, plan, rendezvous), store)
        arrived = await carried(sender, receiver, 1, dict(engine.named_parameters()))
    assert same_bits(arrived, weights(engine))


async def test_adapters_are_saved_as_peft_reads_them(world: World, tmp_path: Path) -> None:
    training = replace(LORA, lora_targets=["v_proj", "up_proj"])
    role = RememberingRole()
    role.engine, role.rank = moved(world, training), 0
    await role.save_policy(str(tmp_path), replace(SMALL, checkpoint="the/base"), training, (3,), 0)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "the/base" and config["target_modules"] == ["up_proj", "v_proj"]
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6.0)
    saved, expected = load_file(tmp_path / "adapter_model.safetensors"), weights(role.engine)
    assert saved["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"].shape == (3, SMALL.hidden)
    assert same_bits({name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}, expected)


def test_a_base_of_files_is_given_whole_with_adapters_added(tmp_path: Path) -> None:
    """As engines that compute with whole weights get it, each version by itself."""
    model = with_adapters(outline_model(SMALL), LORA, seed=0).fill("cpu")
    write_model(model, tmp_path)
    base = base_of(model, tmp_path)
    assert base is not None and base_of(build_model(SMALL), tmp_path) is None
    for version in (1, 2):
        generator = torch.Generator().manual_seed(version)
        adapters = {
            name: torch.randn(one.shape, generator=generator)
            for name, one in model.named_parameters()
            if one.requires_grad
        }
        got, expected = dict(base.merged(adapters.items(), CPU)), dict(merged(adapters).named_parameters())
        assert_close(got, {name: tensor.detach() for name, tensor in expected.items()}, rtol=1e-6)


def test_what_is_drawn_depends_on_the_runs_seed_alone(world: World) -> None:
    one, same, other = (with_adapters(outline_model(SMALL), LORA, seed).fill("cpu") for seed in (1, 1, 2))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        assert torch.equal(parameter, other.get_parameter(name)) == (".lora_A." not in name)
        assert parameter.requires_grad == (".lora_" in name)
