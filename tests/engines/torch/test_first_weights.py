"""Weights that are read or drawn in parts are those of the whole model, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import Store

from engines.torch.first_weights import SavedWeights
from engines.torch.fsdp import FSDPEngine
from engines.torch.model import build_model, outline_model, transformers_config
from harness.config import ModelConfig, TrainingConfig
from harness.config.model_folder import model_settings
from tests.support.fsdp_samples import CPU, FREE, SMALL, Tensors, World, train, weights
from tests.support.processes import run_ranks
from tests.support.random_models import random_folder

UNTIED = replace(SMALL, tied_embeddings=False, attention_bias="all")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        UNTIED,
        replace(SMALL, architecture="qwen2", attention_bias="qkv", qk_norm=False),
        replace(SMALL, architecture="qwen3_moe", experts=6, active_experts=2, tied_embeddings=False),
    ],
    ids=["tied", "untied", "qwen2", "experts"],
)
def test_weights_drawn_one_by_one_are_those_that_transformers_draws(config: ModelConfig, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    state = torch.get_rng_state()
    ours = build_model(replace(config, dtype=dtype), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = AutoModelForCausalLM.from_config(transformers_config(config), attn_implementation="sdpa")
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == config.tied_embeddings
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter.to(getattr(torch, dtype))), name
    assert [name for name, _ in ours.named_buffers()] == [name for name, _ in theirs.named_buffers()]
    for name, buffer in theirs.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer) and ours.get_buffer(name).dtype == buffer.dtype, name


@pytest.mark.parametrize("shard_size", ["10GB", "10KB"], ids=["one file", "many files"])
@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_weights_read_from_files_are_those_saved(config: ModelConfig, shard_size: str, tmp_path: Path) -> None:
    before = build_model(config, seed=3)
    before.save_pretrained(tmp_path, max_shard_size=shard_size)
    outline = outline_model(replace(config, checkpoint=str(tmp_path)))
    assert all(parameter.is_meta for parameter in outline.model.parameters())
    after = outline.fill("cpu")
    assert (after.lm_head.weight is after.model.embed_tokens.weight) == config.tied_embeddings
    for name, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], tensor), name


def with_experts(folder: Path) -> ModelConfig:
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return ModelConfig(**model_settings(str(random_folder(folder, "qwen3_moe", **sizes))))


def test_experts_that_files_have_apart_are_read_as_the_model_has_them(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = with_experts(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    outline = outline_model(config)
    assert isinstance(outline.weights, SavedWeights)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for part in ((slice(2, 4), slice(0, 48), slice(0, 32)), (slice(5, 6), slice(20, 30), slice(3, 9))):
        ((_, read),) = outline.weights.parts({name: part})
        assert torch.equal(read, theirs[name][part])
    ours = outline.fill("cpu").state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_folder_whose_embeddings_have_a_row_for_padding_is_read(tmp_path: Path) -> None:
    """Such rows are set to zero by themselves, which no draw of a whole tensor is."""
    folder = random_folder(tmp_path, "qwen2", pad_token_id=3)
    read = build_model(ModelConfig(**model_settings(str(folder))))
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in read.state_dict().items() if name in saved)


ODD = replace(SMALL, ff=66, vocabulary=50)  # no multiple of four ranks' shares


def sharded(store: Store, rank: int, ranks: int, tensor_parallel: int, configs: list[ModelConfig]) -> list[Tensors]:
    """All weights of training ranks that then train a step."""
    found, training = [], TrainingConfig(tensor_parallel=tensor_parallel)
    with World(store, rank, ranks, tensor_parallel) as world:
        for config in configs:
            engine = world.engine(FREE, training, config)
            found.append(weights(engine))
            train(engine, [[rank // tensor_parallel]])
    return found


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel"),
    [(1, 1), (2, 1), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_shards_that_ranks_read_are_those_of_the_whole_model(ranks: int, tensor_parallel: int, tmp_path: Path) -> None:
    build_model(ODD, seed=5).save_pretrained(tmp_path / "tied")
    build_model(UNTIED, seed=6).save_pretrained(tmp_path / "untied", max_shard_size="10KB")
    saved = [replace(ODD, checkpoint=str(tmp_path / "tied")), replace(UNTIED, checkpoint=str(tmp_path / "untied"))]
    saved.append(with_experts(tmp_path / "experts"))
    configs = [SMALL, ODD, UNTIED, *saved, *(replace(config, dtype="bfloat16") for config in saved)]
    if tensor_parallel > 1:
        configs = [config for config in configs if config.ff == SMALL.ff]  # ranks share layers evenly
    of_ranks = run_ranks(sharded, ranks, ranks, tensor_parallel, configs)
    for number, config in enumerate(configs):
        whole = {name: parameter.float() for name, parameter in build_model(config).named_parameters()}
        for found in of_ranks:
            assert found[number].keys() == whole.keys()
            assert all(torch.equal(found[number][name], tensor) for name, tensor in whole.items())


LARGE = ModelConfig("large", 1024, 2, 8, 8, 128, 4096, 8192, False, 64)
"""Of 67 million parameters, an eighth of them the largest."""


def peak(store: Store, rank: int, config: ModelConfig, outlined: bool) -> int:
    """Bytes by which this process grows at most while it makes its part of a training world of four."""
    with World(store, rank, 4) as world:
        world.engine(FREE)  # imports
        before = resident("VmRSS")
        model = outline_model(config) if outlined else build_model(config)
        engine = FSDPEngine(model, FREE, mesh=world.mesh, device=CPU)
        grown = resident("VmHWM") - before
        del engine
    return grown


def resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


@pytest.mark.slow
@pytest.mark.parametrize(("source", "share"), [("drawn", 1 / 2), ("read", 3 / 4)])
def test_no_rank_of_four_ever_holds_the_model(source: str, share: float, tmp_path: Path) -> None:
    """Of files, pages that are mapped count as well: as much again as the rank's part, which the kernel may drop."""
    config = LARGE
    if source == "read":
        build_model(LARGE).save_pretrained(tmp_path)
        config = replace(LARGE, checkpoint=str(tmp_path))
    whole = 4 * sum(parameter.numel() for parameter in outline_model(config).model.parameters())
    grown = {}
    for outlined in (False, True):
        grown[outlined] = max(run_ranks(peak, 4, config, outlined))
    print(
        f"{source}: whole {whole >> 20} MiB; peak of a rank {grown[False] >> 20} MiB, outlined {grown[True] >> 20} MiB"
    )
    assert grown[True] < share * whole < whole < grown[False]
