"""A state of training goes on in the engine that did not write it, and engines tell the same of routers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store

from harness.config import TrainingConfig
from harness.config.registries import find
from harness.protocols import TrainEngine, TrainingSetting
from harness.rl.diagnostics import ROUTED
from tests.support.fsdp_samples import CPU, assert_close, batch_of, computed, same_bits, save
from tests.support.processes import run_in_processes, run_ranks
from tests.training_contract.under_test import ALGORITHM, MODELS, SAMPLES, routes_of, train_once


def policy_of(engine: str, model: str, store: Store | None = None, rank: int = 0, **how: Any) -> TrainEngine:
    training = TrainingConfig(**{"engine": engine, "layout": "packed", **how})
    world = store or HashStore(), rank, training.tensor_parallel
    setting = TrainingSetting(MODELS[model], ALGORITHM, training, *world, CPU, 60.0, steps=60)
    return find("training.engine", engine)(setting).policy


def weights(policy: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_parameters().items()}


def moved(writer: str, reader: str, model: str, folder: Path) -> None:
    first, samples = policy_of(writer, model), range(SAMPLES)
    train_once(first, samples)
    save(first, folder)
    saved = weights(first)
    train_once(first, samples)
    expected = weights(first)
    dist.destroy_process_group()
    second = policy_of(reader, model)
    computed(second.load(folder))
    assert same_bits(weights(second), saved)
    train_once(second, samples)
    found = weights(second)
    moved_by = {name: expected[name] - saved[name] for name in saved}
    assert_close({name: found[name] - saved[name] for name in saved}, moved_by, rtol=1e-2)
    dist.destroy_process_group()


@pytest.mark.megatron
@pytest.mark.parametrize("model", ["tied", "experts"])
@pytest.mark.parametrize(("writer", "reader"), [("torch", "megatron"), ("megatron", "torch")])
def test_a_state_goes_on_in_another_engine(writer: str, reader: str, model: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    run_in_processes(moved, [(writer, reader, model, tmp_path / "state")], timeout_s=120)


def of_routers(store: Store, rank: int, layout: str) -> None:
    told = []
    for engine, recompute, ranks in (("torch", False, 1), ("megatron", False, 1), ("megatron", True, 2)):
        world = (store, rank) if ranks == 2 else ()
        how = {"layout": layout, "recompute_activations": recompute, "tensor_parallel": ranks}
        policy = policy_of(engine, "experts", *world, **how)
        routes = routes_of(range(SAMPLES), MODELS["experts"])
        sums = computed(policy.accumulate(batch_of(range(SAMPLES))))
        replayed = computed(policy.accumulate(replace(batch_of(range(SAMPLES)), routes=routes)))
        told.append({name: value for name, value in sums.items() if name.startswith((ROUTED, "rout"))})
        told[-1] |= {name: replayed[name] for name in ("replayed", "rerouted")}
        told[-1]["grad_norm"] = computed(policy.step())["grad_norm"]
        dist.destroy_process_group()
    assert told[0]["routings"] == MODELS["experts"].layers
    assert told[2] == pytest.approx(told[0]) == told[1]


@pytest.mark.megatron
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_engines_count_the_same_of_routers(layout: str) -> None:
    pytest.importorskip("megatron.core")
    run_ranks(of_routers, 2, layout)
