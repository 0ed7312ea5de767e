"""The embedded rollout engine: a decoder of transformers, continuous batching over slots, one process, no server.

Between two events of the loop it takes one `step`: samples that wait get the free slots and their prompts are
prefilled, then every running sample gets one token. Pauses and weight updates land between steps, never inside one.
What a sample draws depends on the weights, the run's seed, its id and its prompt only; its neighbours, its slot and the
time it started cannot reach it (see `kv_slots` for what that rests on, `sampling` for the draw).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from engines.device_memory import pass_to_engine
from engines.loading import ModelWeights, rest_on_host
from engines.requests import SlotEngine
from engines.torch.kv_slots import SlotModel
from engines.torch.sampling import draw_each, uniforms
from harness.protocols import Clock, Completion, Request, Sampling, StopMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Parking:
    """Running samples have the slots 0 to n - 1; of those from n on this says who is parked where.

    A slot holds the keys and values of all tokens of its sample but the last. The sample gets them back where it goes
    on by the very same tokens.
    """

    def __init__(self, cache: SlotModel) -> None:
        self._cache = cache
        self._slot_of: dict[int, int] = {}  # by sample, the longest parked one first
        self._tokens: dict[int, list[int]] = {}

    def park(self, sample: int, tokens: Sequence[int], slot: int) -> None:
        """Note that a sample runs no longer; its slot is the first that no running sample has."""
        self.forget(sample)
        self._slot_of[sample], self._tokens[sample] = slot, list(tokens)

    def bring(self, sample: int, tokens: Sequence[int], slot: int) -> int:
        """Make `slot` the sample's own: the first that no running sample has. Returns for how many of its tokens keys
        and values are there, 0 for one that is not parked. Who is parked there goes to a free slot; where none is free
        the one that is parked longest makes room."""
        known = self._tokens.get(sample, [])
        if known != list(tokens[: len(known)]):
            self.forget(sample)
        if (own := self._slot_of.get(sample)) is not None:
            self._exchange(own, slot)
            self.forget(sample)
            return len(known) - 1
        self._vacate(slot)
        return 0

    def forget(self, sample: int) -> None:
        """Forget a sample, if it is parked."""
        self._slot_of.pop(sample, None)
        self._tokens.pop(sample, None)

    def clear(self) -> None:
        """Forget all samples: what is in the slots holds no longer."""
        self._slot_of.clear()
        self._tokens.clear()

    def _exchange(self, own: int, slot: int) -> None:
        if own == slot:
            return
        if (there := self._parked_at(slot)) is None:
            self._cache.move(own, slot)
        else:
            self._cache.swap(own, slot)
            self._slot_of[there] = own

    def _vacate(self, slot: int) -> None:
        if (there := self._parked_at(slot)) is None:
            return
        free = next(iter(set(range(slot + 1, self._cache.slots)) - set(self._slot_of.values())), None)
        if free is None:
            longest = next(iter(self._slot_of))
            free = self._slot_of[longest]
            self.forget(longest)
        if there in self._slot_of:
            self._cache.move(slot, free)
            self._slot_of[there] = free

    def _parked_at(self, slot: int) -> int | None:
        return next((sample for sample, at in self._slot_of.items() if at == slot), None)


class TorchRollout(SlotEngine):
    """`harness.protocols.RolloutEngine` in process. It owns `model` and moves it to `device`; it starts at version 0.

    A sample that goes on from a partial keeps the partial's start time. Running samples of a paused engine go on with
    the keys and values of the old weights after an update, unless `drop_cache` is called: then with those of the new.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sampling: Sampling,
        slots: int,
        seed: int,
        clock: Clock,
        device: torch.device | str = "cpu",
        name: str = "0",
        routes: bool = False,
    ) -> None:
        """routes: whether completions are to have them."""
        super().__init__(model, name=name, slots=slots, sampling=sampling, clock=clock)
        self.sampled = 0
        self._seed = seed
        self._device = torch.device(device)
        self._model = model.to(self._device).eval()
        self._weights = ModelWeights(model, f"engine {name}")
        self._cache = SlotModel(model, slots, routes=routes)
        self._parking = Parking(self._cache)
        self._turns = False  # whether samples come back for another turn

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests)
        self._turns = self._turns or any(
            request.partial is not None and request.partial.finish_reason == "stop" for request in requests
        )

    async def finished(self) -> list[Completion]:
        """Takes steps while there is something to do, else waits for `submit`, `resume`, `pause` or `close`; the event
        loop gets a turn after every step.

        Raises:
            RuntimeError: there is work, but the engine is asleep, or its weights are incomplete; or it was closed.
        """
        while not self._done:
            if self._closed:
                raise RuntimeError(f"engine {self.name} is closed: nothing more will be finished")
            if not self._paused and (self._running or (self._admitting and self._waiting)):
                self.step()
                await asyncio.sleep(0)
            else:
                await self._change()
        return self._take_done()

    @torch.inference_mode()
    def step(self) -> None:
        """Start what waits and has a slot, then sample one token for each running sample."""
        self._require_ready()
        self._start()
        if not self._running:
            return
        self._fill_cache()
        logits = self._cache.decode(
            [sample.context[-1] for sample in self._running], [len(sample.context) - 1 for sample in self._running]
        )
        uniform = [sample.uniforms[len(sample.log_probs)] for sample in self._running]
        samplings = [sample.sampling for sample in self._running]
        tokens, log_probs = draw_each(
            logits, torch.tensor(uniform, dtype=torch.float64, device=self._device), samplings
        )
        if not torch.isfinite(log_probs).all():
            raise FloatingPointError(
                f"engine {self.name}: log-probabilities under version {self.version} are not finite"
            )
        if (routes := self._cache.routes) is not None:
            for row, sample in enumerate(self._running):  # of tokens that were read for the first time
                sample.keep_routes(routes.of[row, sample.routed : len(sample.context)].copy())
        for sample, token, log_prob in zip(self._running, tokens.tolist(), log_probs.tolist(), strict=True):
            sample.context.append(token)
            sample.log_probs.append(log_prob)
            sample.versions.append(self.version)
            if len(sample.versions) == 1:
                sample.first_token_at = self._clock.now()
        self.sampled += len(self._running)
        self._retire()

    async def pause(self, mode: StopMode) -> None:
        self._admitting = False
        if mode == "wait":
            # Whoever is in `finished` steps too; a step is whole, so it does not matter whose it is.
            while self._running:
                self.step()
                await asyncio.sleep(0)
        if mode == "abort":
            self._abort_all()
        self._paused = True
        self._changed.set()

    def drop_cache(self) -> None:
        self._cache.clear()
        self._forget_cached()

    async def resume(self) -> None:
        """Raises RuntimeError where `finished` would: asleep, closed."""
        self._require_ready()
        self._admitting, self._paused = True, False
        self._changed.set()

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError as `ModelWeights.load`; RuntimeError where the engine is neither paused nor idle. Where the
        weights do not come whole, it takes no step before another set has."""
        self._require_still("load_weights")
        self._parking.clear()
        self._weights.load(version, weights)
        self.version = version

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Give the cache's memory back, and move the weights to the host; running samples stay, to be recomputed."""
        self._require_still("sleep")
        self._forget_cached()
        self._cache.release()
        rest_on_host(self._model)

    async def wake(self) -> None:
        """Undo `sleep`: weights on the device again, and an empty cache. Nothing happens to an engine that is awake.

        Raises MemoryError where too little of the device is free.
        """
        if self._cache.released:
            # Without it weights and cache would lie in the corners of what a trainer left.
            weights = sum(parameter.nbytes for parameter in self._model.parameters())
            pass_to_engine(self._device, weights + self._cache.bytes, f"weights and cache of engine {self.name}")
            self._model.to(self._device)
            self._cache.allocate()

    async def close(self) -> None:
        """Forget all samples and release the cache; who waits in `finished` gets a RuntimeError."""
        self._forget_all()
        self._cache.release()
        self._closed = True
        self._changed.set()

    def _forget_cached(self) -> None:
        self._parking.clear()
        for sample in self._running:
            sample.cached = False

    def _start(self) -> None:
        """Give free slots to waiting samples, in the order of submission."""
        while (sample := self._next_to_start()) is not None:
            sample.uniforms = uniforms(self._seed, sample.sample_id, sample.sampling.max_tokens).tolist()
            sample.kept = self._parking.bring(sample.sample_id, sample.context, len(self._running) - 1)

    def _fill_cache(self) -> None:
        """Prefill what started, or lost its cache, up to the last token: that one is decoded with everyone's. Of what
        its slot holds from its last turn nothing is computed again."""
        whole, rest = [], []
        for row, sample in enumerate(self._running):
            if not sample.cached and len(sample.context) > 1:
                context = sample.context[:-1]
                if not sample.kept or not self._cache.can_extend(sample.kept, len(context)):
                    whole.append((row, context))
                elif sample.kept < len(context):
                    rest.append((row, context, sample.kept))
            sample.cached, sample.kept = True, 0
        self._cache.prefill(whole)
        self._cache.extend(rest)

    def _retire(self) -> None:
        """Take finished samples out of their slots; the last running one moves into the gap: rows stay dense."""
        now = self._clock.now()
        for row in reversed(range(len(self._running))):
            if (reason := self._running[row].finish_reason()) is None:
                continue
            sample = self._running[row]
            self._done.append(sample.completion(reason, now))
            parks = self._turns and reason == "stop"
            last = self._running.pop()
            if row < len(self._running):
                exchange = self._cache.swap if parks else self._cache.move
                exchange(len(self._running), row)
                self._running[row] = last
            if parks:
                self._parking.park(sample.sample_id, sample.context, len(self._running))
        if self._done:
            self._changed.set()

    def _require_ready(self) -> None:
        if self._closed:
            raise RuntimeError(f"engine {self.name} is closed")
        if self._cache.released:
            raise RuntimeError(f"engine {self.name} is asleep; call wake() first")
        self._weights.require_complete()
