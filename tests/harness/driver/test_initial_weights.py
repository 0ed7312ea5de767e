"""The warm start is made once, whole or not at all, and always the same."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.config import ModelConfig
from harness.config.registries import find
from harness.driver.initial_weights import initial_model
from harness.metrics.atomic_files import Lock
from harness.rl import warm_start as warm_start_module

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

    def short(model: object, task: object, *, progress: Callable[[int, int], None] | None = None) -> None:
        made.append(1)
        real(model, task, steps=3, batch=4, progress=progress)  # type: ignore[arg-type]

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
    from dataclasses import replace

    weights, results = tmp_path / "weights", tmp_path / "results"
    weights.mkdir()
    for name in ("config.json", "model.safetensors"):
        (weights / name).touch()
    for model in (replace(TINY, warm_start=False), replace(TINY, checkpoint=str(weights))):
        assert initial_model(model, REVERSE, results) == model
    assert not few_steps and not results.exists()


def test_other_tasks_and_shapes_have_their_own(tmp_path: Path) -> None:
    from dataclasses import replace

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
