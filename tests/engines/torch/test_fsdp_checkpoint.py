from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engines.torch.fsdp import FSDPEngine
from tests.support.fsdp_samples import FREE, SAMPLES, SMALL, World, batch_of, computed, gradients, train, weights

ADAMW = replace(FREE, betas=(0.9, 0.95), weight_decay=0.1, grad_clip=0.5)
FIRST, SECOND, THIRD = (range(start, start + 5) for start in (0, 5, 10))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World() as world:
        yield world


def same_bits(one: FSDPEngine, other: FSDPEngine) -> bool:
    ours, theirs = ([*weights(engine).values(), *gradients(engine).values()] for engine in (one, other))
    return all(map(torch.equal, ours, theirs))


def test_training_goes_on_bit_for_bit_where_it_was_saved(world: World, tmp_path: Path) -> None:
    engine, resumed, fresh = (world.engine(ADAMW) for _ in range(3))
    train(engine, [FIRST, SECOND])
    computed(engine.save(tmp_path / "step_1"))
    norm = train(engine, [THIRD])
    computed(resumed.load(tmp_path / "step_1"))
    assert train(resumed, [THIRD]) == norm and same_bits(engine, resumed)
    train(fresh, [THIRD])
    assert not same_bits(engine, fresh)


def test_loading_replaces_what_was_trained_meanwhile(world: World, tmp_path: Path) -> None:
    engine = world.engine(ADAMW)
    train(engine, [FIRST])
    computed(engine.save(tmp_path / "there"))
    norms = []
    for _ in range(2):
        computed(engine.load(tmp_path / "there"))
        norms.append((train(engine, [SECOND]), train(engine, [THIRD])))
    assert norms[0] == norms[1]


def test_a_state_before_the_first_step_can_be_saved(world: World, tmp_path: Path) -> None:
    engine, resumed = world.engine(ADAMW), world.engine(ADAMW)
    computed(engine.save(tmp_path / "start"))
    train(resumed, [FIRST])
    computed(resumed.load(tmp_path / "start"))
    assert train(engine, [SECOND]) == train(resumed, [SECOND]) and same_bits(engine, resumed)


def test_a_bfloat16_model_is_saved_in_float32(world: World, tmp_path: Path) -> None:
    model = replace(SMALL, dtype="bfloat16")
    engine, resumed = (world.engine(replace(ADAMW, learning_rate=1e-6), model=model) for _ in range(2))
    train(engine, [FIRST])
    computed(engine.save(tmp_path / "there"))
    computed(resumed.load(tmp_path / "there"))
    assert same_bits(engine, resumed)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights(resumed).values())


def test_a_step_that_has_begun_is_not_saved(world: World, tmp_path: Path) -> None:
    engine = world.engine(ADAMW)
    computed(engine.accumulate(batch_of(range(SAMPLES))))
    with pytest.raises(RuntimeError, match="gradients of .* tokens would be lost; save after a step"):
        computed(engine.save(tmp_path / "there"))


def test_a_checkpoint_is_not_overwritten_and_an_unfinished_one_is_not_read(world: World, tmp_path: Path) -> None:
    engine = world.engine(ADAMW)
    with pytest.raises(FileNotFoundError, match="holds no finished checkpoint"):
        computed(engine.load(tmp_path))
    computed(engine.save(tmp_path))
    with pytest.raises(FileExistsError, match="holds a checkpoint already; save into a new folder"):
        computed(engine.save(tmp_path))


def test_another_models_checkpoint_is_refused(world: World, tmp_path: Path) -> None:
    computed(world.engine(ADAMW).save(tmp_path / "there"))
    wider = world.engine(ADAMW, model=replace(SMALL, ff=96))
    with pytest.raises(RuntimeError, match="loading .*there failed on rank 0: Size mismatch .*gate_proj"):
        computed(wider.load(tmp_path / "there"))
