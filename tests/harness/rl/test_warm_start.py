from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from harness.config import TrainingConfig
from harness.config.compose import compose_job
from harness.config.registries import find
from harness.cost_model.shape import parameters
from harness.rl import warm_start as module
from harness.rl.learning_rate import learning_rate, peak_rate, policy_settings
from harness.rl.warm_start import add_noise, demonstrations, noise_level, warm_start
from harness.tasks import load_tokenizer


def tiny(hidden: int = 16) -> Qwen3ForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=32, hidden_size=hidden, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                head_dim=8, intermediate_size=32, tie_word_embeddings=True, max_position_embeddings=64,
            )
        ).eval()  # fmt: skip


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def answer_loss(model: Qwen3ForCausalLM) -> float:
    tokens, present, answers = demonstrations(find("task", "reverse")(), 99, 0, 64, 0.0)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=present.long()).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits[answers[:, 1:]], tokens[:, 1:][answers[:, 1:]]).item()


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(models))  # the global generator must not matter
        models.append(tiny())
        warm_start(models[-1], find("task", "reverse")(), seed=seed, steps=4, batch=8)
    first, again, other = map(weights, models)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_it_leaves_generators_threads_and_gradients_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, torch_state, numpy_state = torch.get_num_threads(), torch.get_rng_state(), np.random.get_state()[1]
    model = tiny()
    warm_start(model, find("task", "copy")(), steps=2, batch=8)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with pytest.raises(RuntimeError, match="no such step"):
        with module.one_thread():
            raise RuntimeError("no such step")
    assert counts == [1, 7]


def test_it_reports_every_step() -> None:
    heard: list[int] = []
    warm_start(tiny(), find("task", "expand")(), steps=3, batch=4, progress=lambda *done: heard.extend(done))
    assert heard == [1, 3, 2, 3, 3, 3]


def test_it_learns_to_read_the_prompt_and_the_answer_only() -> None:
    model = tiny(hidden=32)
    warm_start(model, find("task", "reverse")(), steps=150, batch=32, lr=1e-2)
    lengths_and_letters_alone = 2.74  # nats a token: 1 stop in 5.5 tokens, 16 letters alike
    assert answer_loss(model) < lengths_and_letters_alone - 0.3
    task = find("task", "reverse")()
    tokens, present, answers = demonstrations(task, 0, 0, 16, 0.0)
    for row in range(16):
        prompt = task.decode(tokens[row][present[row] & ~answers[row]].numpy())
        answer = task.decode(tokens[row][answers[row]].numpy())
        assert prompt.endswith("=") and answer == prompt[-2::-1] + "."
    assert tokens[~present].eq(task.pad_token).all()


def test_noise_comes_at_its_rates_after_clean_demonstrations() -> None:
    encode = load_tokenizer().encode
    clean = np.append(np.tile(encode("ab"), 5000), encode("."))
    random = np.random.default_rng(0)
    replaced = add_noise(clean, encode("c"), 1.0, random)
    assert replaced[-1] == encode(".")[0]
    assert np.mean(replaced[:-1] == encode("c")[0]) == pytest.approx(module.REPLACED, abs=0.02)
    lengths = [len(add_noise(encode("a."), encode("a"), 1.0, random)) for _ in range(5000)]
    assert np.mean(np.array(lengths) == 1) == pytest.approx(module.DROPPED, abs=0.01)
    assert np.mean(np.array(lengths) == 3) == pytest.approx(module.STUTTERED, abs=0.01)
    assert np.array_equal(add_noise(clean, encode("c"), 0.0, random), clean)
    levels = [noise_level(step, 100) for step in range(100)]
    assert levels[:50] == [0.0] * 50
    assert levels[90:] == [1.0] * 10
    assert levels == sorted(levels)


JOB = compose_job([])
STEPS = 20


def rates(*settings: str) -> list[float]:
    algorithm = compose_job([f"algorithm.{setting}" for setting in settings]).algorithm
    return [learning_rate(algorithm, 1, step, STEPS) for step in range(STEPS)]


@pytest.mark.parametrize(("model", "rate"), [("tiny", 5e-4), ("qwen0.5b", 1e-6), ("qwen7b", 1e-6)])
def test_auto_goes_by_the_size_of_the_model(model: str, rate: float) -> None:
    assert peak_rate(JOB.algorithm, parameters(compose_job([f"model={model}"]).model)) == rate


def test_a_rate_that_is_given_stays_without_warm_up_rises_with_it_and_need_not_decay() -> None:
    assert peak_rate(replace(JOB.algorithm, learning_rate=0.01), 10**9) == 0.01
    adapters = TrainingConfig(lora_rank=8)
    assert policy_settings(JOB.algorithm, adapters, 10**9).learning_rate == pytest.approx(1e-5)
    assert policy_settings(replace(JOB.algorithm, learning_rate=0.01), adapters, 10**9).learning_rate == 0.01
    assert set(rates("learning_rate=5e-4")) == {5e-4}
    found = rates("learning_rate=1.0", "warmup_steps=4")
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0] and found[-1] == 1.0
    algorithm = replace(JOB.algorithm, learning_rate=1.0, warmup_steps=30, decay="linear")
    assert [learning_rate(algorithm, 1, step, STEPS) for step in (0, 19)] == [1 / 30, 20 / 30]


@pytest.mark.parametrize(("decay", "half"), [("linear", 0.55), ("cosine", 0.55)])
def test_it_falls_to_its_share_at_the_last_step_and_is_half_way_half_way(decay: str, half: float) -> None:
    found = rates("learning_rate=1.0", "warmup_steps=3", f"decay={decay}", "decay_to=0.1")
    assert found[3] == 1.0 and found[-1] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in pairwise(found[3:]))
    assert found[11] == pytest.approx(half)
