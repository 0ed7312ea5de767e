"""Folders of models: the warm start is made once, whole or not at all, and always the same; of final weights,
transformers loads them and finds what the trainer would."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml  # type: ignore[import-untyped]

from engines.loading import write_model
from engines.torch.model import build_model
from engines.torch.scoring import TorchLogProb
from harness.checks.plugins import engine_reads_files
from harness.config import ModelConfig
from harness.config.compose import compose_job
from harness.config.model_folder import DRAWN, DRAWN_WITH_EXPERTS, model_settings
from harness.config.registries import find
from harness.driver import engine_factories
from harness.driver.engine_factories import RealEngines
from harness.driver.model_folders import initial_model, model_card, write_beside
from harness.metrics.atomic_files import Lock
from harness.rl import warm_start as warm_start_module
from harness.runtime.runtime import RealClock
from harness.tasks import load_tokenizer
from harness.transfer_queue import Ragged
from harness.weight_sync.saving import save_weights, write_policy_config
from tests.support.random_models import random_folder

TINY = ModelConfig(
    name="tiny",
    hidden=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ff=32,
    vocabulary=32,
    tied_embeddings=True,
    max_length=64,
    warm_start=True,
)
REVERSE = find("task", "reverse")()


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The real warm start, cut to three steps; counts how often it was made."""
    made: list[int] = []
    real = warm_start_module.warm_start

    def short(model: object, task: object) -> None:
        made.append(1)
        real(model, task, steps=3, batch=4)  # type: ignore[arg-type]

    monkeypatch.setattr(warm_start_module, "warm_start", short)
    return made


def weights(model: ModelConfig) -> bytes:
    assert model.checkpoint is not None
    return (Path(model.checkpoint) / "model.safetensors").read_bytes()


def test_it_is_made_once_and_the_same_in_every_results_folder(tmp_path: Path, few_steps: list[int]) -> None:
    first, second = initial_model(TINY, REVERSE, tmp_path), initial_model(TINY, REVERSE, tmp_path)
    assert first == second and few_steps == [1]
    assert Path(first.checkpoint or "").parent == tmp_path / "cache"
    one, other = (initial_model(TINY, REVERSE, tmp_path / name) for name in ("one", "other"))
    assert weights(one) == weights(other) and few_steps == [1, 1, 1]


def test_a_model_that_wants_none_or_has_weights_is_left_alone(tmp_path: Path, few_steps: list[int]) -> None:
    weights, results = tmp_path / "weights", tmp_path / "results"
    weights.mkdir()
    for name in ("config.json", "model.safetensors"):
        (weights / name).touch()
    for model in (replace(TINY, warm_start=False), replace(TINY, checkpoint=str(weights))):
        assert initial_model(model, REVERSE, results) == model
    assert not few_steps and not results.exists()


def test_other_tasks_and_shapes_have_their_own(tmp_path: Path) -> None:
    made = {
        initial_model(TINY, REVERSE, tmp_path).checkpoint,
        initial_model(TINY, find("task", "copy")(), tmp_path).checkpoint,
        initial_model(TINY, find("task", "copy")(max_letters=8), tmp_path).checkpoint,
        initial_model(replace(TINY, ff=48), REVERSE, tmp_path).checkpoint,
    }
    assert len(made) == 4


def test_an_interrupt_while_weights_are_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    def interrupt(self: object, folder: Path) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            initial_model(TINY, REVERSE, tmp_path)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert len(weights(initial_model(TINY, REVERSE, tmp_path))) > 4


def test_two_that_ask_at_once_make_it_once(tmp_path: Path, few_steps: list[int]) -> None:
    """The second waits for the lock that the first holds, and finds the weights made."""
    (tmp_path / "cache").mkdir()
    held = Lock(tmp_path / "cache" / ".lock")
    found: list[ModelConfig] = []
    askers = [threading.Thread(target=lambda: found.append(initial_model(TINY, REVERSE, tmp_path))) for _ in range(2)]
    for asker in askers:
        asker.start()
    assert not few_steps, "nobody makes it while another holds the lock"
    held.release()
    for asker in askers:
        asker.join()
    assert found[0] == found[1] and few_steps == [1]


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_drawn_weights_are_one_file_of_a_host_however_many_engines_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, lora_rank: int
) -> None:
    """Nor does a worker hold a copy of them, but of adapters."""
    config = compose_job([f"engine={engine}", "model.warm_start=false", f"training.lora_rank={lora_rank}"])
    model = initial_model(config.model, REVERSE, tmp_path, in_files=engine_reads_files(engine))

    def start(given: Any, *, name: str, **_: object) -> None:
        (tmp_path / name).mkdir()
        write_model(given, tmp_path / name)
        assert all(parameter.is_meta for parameter in given.parameters())

    monkeypatch.setattr(engine_factories, "engine_class", lambda name: start)
    factory = RealEngines(config, model, 0, False, 1, "", {})
    for number in range(3):
        factory.rollout("rollout", number, RealClock.starting_now())
    files = list(tmp_path.rglob("*.safetensors"))
    assert len(files) == 4 and len({file.resolve() for file in files}) == 1


@pytest.mark.parametrize("architecture", [*DRAWN, *DRAWN_WITH_EXPERTS])
def test_weights_that_are_drawn_into_files_are_those_drawn_in_memory(tmp_path: Path, architecture: str) -> None:
    drawn = ModelConfig("it", 16, 2, 2, 1, 8, 32, 32, False, 64, architecture=architecture, dtype="bfloat16")
    if not architecture.startswith("qwen3"):
        drawn = replace(drawn, qk_norm=False, attention_bias="qkv" if architecture == "qwen2" else "none")
    if architecture in DRAWN_WITH_EXPERTS:
        drawn = replace(drawn, experts=4, active_experts=2)
    there = build_model(initial_model(drawn, REVERSE, tmp_path, in_files=True))
    for one, other in zip(there.parameters(), build_model(drawn).parameters(), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


# -- final weights


MANIFEST = {
    **{"schedule": "fully_async", "engine": "torch", "seed": 3, "experiment": "x", "cell": "c", "model": "small"},
    **{"started_at": "2026-01-01", "git": {"commit": "abc", "dirty": True}},
}
ALGORITHM = {"batch_groups": 4, "group_size": 8, "learning_rate": 1e-6, "correction": "tis"}


@pytest.mark.parametrize(("architecture", "most"), [("qwen2", 4096), ("qwen3", 1 << 40), ("llama", 4096)])
async def test_transformers_loads_it_and_finds_the_same_log_probs(architecture: str, most: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = random_folder(tmp_path / "start", architecture, tie_word_embeddings=architecture == "qwen3")
    config = ModelConfig(**model_settings(str(start)))
    trained = build_model(config)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path / "model"
    folder.mkdir()
    write_beside(folder, load_tokenizer(), "card")
    write_policy_config(folder, config, load_tokenizer().stop_tokens, load_tokenizer().pad_token)
    save_weights(folder, dict(trained.named_parameters()), write=True, most=most)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (most == 4096)
    prompt, response = np.array([5, 6, 7, 8]), np.array([9, 1, 2, 3, 4])
    samples = (Ragged.from_rows([prompt]), Ragged.from_rows([response]))
    expected = await TorchLogProb(trained, temperature=1.0, device=torch.device("cpu")).log_probs(*samples)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.from_numpy(np.concatenate([prompt, response]))
    with torch.inference_mode():
        scores = torch.log_softmax(loaded(input_ids=tokens[None]).logits[0, :-1], -1)
    found = scores.gather(1, tokens[1:, None])[len(prompt) - 1 :, 0]
    assert found.tolist() == pytest.approx(expected.values.tolist(), abs=1e-5)
    again = ModelConfig(**model_settings(str(folder)))
    assert replace(again, name=config.name, checkpoint=config.checkpoint) == config
    assert AutoTokenizer.from_pretrained(folder).encode("ab") == load_tokenizer().encode("ab").tolist()
    assert loaded.generation_config.eos_token_id == list(load_tokenizer().stop_tokens)


def test_half_precision_and_the_run_that_made_them_stand_beside_the_weights(tmp_path: Path) -> None:
    config = replace(ModelConfig("small", 32, 2, 4, 2, 8, 64, 32, True, 64), dtype="bfloat16")
    write_policy_config(tmp_path, config, [3], 0)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["dtype"], written["head_dtype"]) == ("bfloat16", "float32")
    assert written["architectures"] == ["Qwen3ForCausalLM"] and written["eos_token_id"] == 3
    settings = {"model": {"checkpoint": "hf:Qwen/Qwen2.5-7B@main"}, "task": {"name": "reverse"}, "iterations": 5}
    settings |= {"algorithm": ALGORITHM}
    card = model_card(MANIFEST, settings, 1e-6)
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "Qwen/Qwen2.5-7B"
    assert "| run | x/c/seed=3 |" in card and "| commit | abc with changes |" in card
    assert "| learning rate | 1e-06 |" in card
    left_open = settings | {"algorithm": ALGORITHM | {"learning_rate": "auto"}}
    assert "| learning rate | 5e-05 (auto) |" in model_card(MANIFEST, left_open, 5e-5)
    assert yaml.safe_load(card.split("```yaml")[1].split("```")[0]) == settings
