"""Times the embedded engine on one device: rollout, scoring, training, copies to the host's memory and back. Each is
the median of several times, after some that do not count."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed import HashStore, destroy_process_group
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from engines.torch.fsdp import FSDPEngine, init_world
from engines.torch.kv_slots import SlotModel
from engines.torch.rollout import TorchRollout
from engines.torch.scoring import TorchLogProb
from harness.calibration.profile.rows import TimingRow
from harness.config import AlgorithmConfig, TrainingConfig
from harness.protocols import Request, Sampling, TrainBatch
from harness.runtime.runtime import RealClock
from harness.transfer_queue import Ragged

Sizes = tuple[tuple[int, int], ...]  # (samples, tokens of each)
_FEWEST = 3  # timings behind a median
_MORE_UNTIL_S = 0.1  # what is short is timed more often
_TIMEOUT_S = 60.0

_ALGORITHM = AlgorithmConfig("profile", batch_groups=1, group_size=2, micro_batch_groups=1, learning_rate=1e-6)


@dataclass(frozen=True)
class Stopwatch:
    """Takes `repeats` timings: fewer (but three) once they took `at_most_s` together, four times as many where they are
    so short that a neighbour's turn shows. Warm-up calls are not timed."""

    device: torch.device
    repeats: int = 7
    warmup: int = 2
    at_most_s: float = 3.0

    def time(self, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> tuple[float, float]:
        """Seconds of `work`, from one idle device to the next, and their spread. before: called each time, untimed."""
        for _ in range(self.warmup):
            before()
            work()
        taken: list[float] = []
        while self._go_on(len(taken), sum(taken)):
            before()
            wait_for(self.device)
            start = time.perf_counter()
            work()
            wait_for(self.device)
            taken.append(time.perf_counter() - start)
        low, median, high = np.percentile(taken, (25, 50, 75)).tolist()
        return median, (high - low) / median

    @property
    def calls(self) -> int:
        """How often work is done at most."""
        return self.warmup + max(_FEWEST, 4 * self.repeats)

    def _go_on(self, timings: int, seconds: float) -> bool:
        if timings < self.repeats:
            return timings < _FEWEST or seconds < self.at_most_s
        return timings < 4 * self.repeats and seconds < _MORE_UNTIL_S


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_decode(model: PreTrainedModel, sizes: Sizes, watch: Stopwatch) -> Iterator[TimingRow]:
    """Steps of an engine that is full of samples with so many tokens each; sampling included."""
    for samples, length in sizes:
        steps = watch.calls + 1
        engine = _engine(model, samples, length + steps, steps, watch.device)
        prompts = _tokens(model, samples, length)
        engine.submit([Request(number, prompt) for number, prompt in enumerate(prompts)])
        engine.step()  # prefills
        seconds, spread = watch.time(engine.step)
        yield TimingRow("decode", model.config.num_hidden_layers, samples, length + steps // 2, 0, seconds, spread)
        asyncio.run(engine.close())


def time_prefill(model: PreTrainedModel, sizes: Sizes, watch: Stopwatch) -> Iterator[TimingRow]:
    """Filling the slots of so many samples with so many tokens each."""
    for samples, length in sizes:
        model.config.max_position_embeddings = length
        cache = SlotModel(model, samples)
        contexts = [(slot, prompt.tolist()) for slot, prompt in enumerate(_tokens(model, samples, length))]
        seconds, spread = watch.time(lambda cache=cache, contexts=contexts: cache.prefill(contexts))  # type: ignore[misc]
        yield TimingRow("prefill", model.config.num_hidden_layers, samples, length, 0, seconds, spread)


def time_weights(model: PreTrainedModel, watch: Stopwatch) -> Iterator[TimingRow]:
    """New weights from the host's memory into an idle engine; and the engine's weights to the host, and back."""
    engine = _engine(model, 1, 32, 1, watch.device)
    there = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    size = sum(tensor.nbytes for tensor in there.values())
    with asyncio.Runner() as loop:
        calls = {
            "load": (lambda: loop.run(engine.load_weights(1, there.items())), lambda: None),
            "sleep": (lambda: loop.run(engine.sleep()), lambda: loop.run(engine.wake())),
            "wake": (lambda: loop.run(engine.wake()), lambda: loop.run(engine.sleep())),
        }
        for phase, (work, before) in calls.items():
            seconds, spread = watch.time(work, before)
            yield TimingRow(phase, model.config.num_hidden_layers, 0, 0, size, seconds, spread)  # type: ignore[arg-type]
        loop.run(engine.close())


def _engine(model: PreTrainedModel, slots: int, length: int, max_tokens: int, device: torch.device) -> TorchRollout:
    """An engine whose cache holds `length` tokens of each slot, and no more."""
    model.config.max_position_embeddings = length
    sampling = Sampling(max_tokens)
    return TorchRollout(model, sampling=sampling, slots=slots, seed=0, clock=RealClock.starting_now(), device=device)


def _tokens(model: PreTrainedModel, samples: int, length: int) -> np.ndarray:
    """int64 [samples, length]."""
    return np.random.default_rng(0).integers(0, model.config.vocab_size, (samples, length))


def time_log_probs(
    model: PreTrainedModel, sizes: Sizes, watch: Stopwatch, training: TrainingConfig
) -> Iterator[TimingRow]:
    """Micro-batches of so many samples with so many tokens each, half of them the prompt's."""
    layers, vocabulary = model.config.num_hidden_layers, model.config.vocab_size
    engine = TorchLogProb(model, temperature=1.0, device=watch.device, training=training)
    with asyncio.Runner() as loop:
        for samples, length in sizes:
            batch = batch_of(samples, length, vocabulary)
            seconds, spread = watch.time(lambda batch=batch: loop.run(engine.log_probs(batch.prompts, batch.responses)))  # type: ignore[misc]
            yield TimingRow("log_prob", layers, samples, length, 0, seconds, spread)


def time_training(
    model: PreTrainedModel, sizes: Sizes, watch: Stopwatch, training: TrainingConfig
) -> Iterator[TimingRow]:
    """Micro-batches as of `time_log_probs`, on a training world of this process alone; then optimizer steps."""
    layers, vocabulary = model.config.num_hidden_layers, model.config.vocab_size
    with asyncio.Runner() as loop, world_of_one(watch.device) as mesh:
        engine = FSDPEngine(model, _ALGORITHM, mesh=mesh, device=watch.device, training=training)
        for samples, length in sizes:
            batch = batch_of(samples, length, vocabulary)
            seconds, spread = watch.time(lambda batch=batch: loop.run(engine.accumulate(batch)))  # type: ignore[misc]
            yield TimingRow("train", layers, samples, length, 0, seconds, spread)
        least = batch_of(*sizes[0], vocabulary)
        seconds, spread = watch.time(lambda: loop.run(engine.step()), before=lambda: loop.run(engine.accumulate(least)))
        yield TimingRow("optimizer", layers, 0, 0, 0, seconds, spread)


@contextmanager
def world_of_one(device: torch.device) -> Iterator[DeviceMesh]:
    """A training world of one rank; no other process is asked for."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_world(HashStore(), 0, 1, device, _TIMEOUT_S)
    try:
        yield mesh
    finally:
        destroy_process_group()


def batch_of(samples: int, length: int, vocabulary: int) -> TrainBatch:
    """Random tokens; half of each sample is its prompt."""
    rng = np.random.default_rng(0)
    prompt, response = length // 2, length - length // 2

    def column(values: np.ndarray) -> Ragged:
        return Ragged.from_rows(list(values.reshape(samples, -1)))

    return TrainBatch(
        prompts=column(rng.integers(0, vocabulary, samples * prompt)),
        responses=column(rng.integers(0, vocabulary, samples * response)),
        behaviour_log_probs=column(np.full(samples * response, -np.log(vocabulary), np.float32)),
        versions=column(np.zeros(samples * response, np.int32)),
        advantages=rng.standard_normal(samples).astype(np.float32),
    )


def time_copies(sizes: tuple[int, ...], watch: Stopwatch) -> Iterator[TimingRow]:
    """Copies of so many bytes, each way. The host's memory is pinned where the device is a GPU."""
    for size in sizes:
        here = torch.zeros(size, dtype=torch.uint8, pin_memory=watch.device.type == "cuda")
        there = torch.zeros(size, dtype=torch.uint8, device=watch.device)
        seconds, spread = watch.time(lambda here=here, there=there: here.copy_(there))  # type: ignore[misc]
        yield TimingRow("copy_to_host", 0, 0, 0, size, seconds, spread)
        seconds, spread = watch.time(lambda here=here, there=there: there.copy_(here))  # type: ignore[misc]
        yield TimingRow("copy_to_device", 0, 0, 0, size, seconds, spread)
