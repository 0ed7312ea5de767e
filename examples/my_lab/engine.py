"""The simplest engine that keeps the contract: a forward over all tokens for each new one, and no cache
(docs/adding_an_engine.md)."""

import asyncio
from collections.abc import Iterable

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

from engines.loading import ModelWeights
from engines.requests import SlotEngine
from engines.torch.sampling import draw_each, uniforms
from harness.protocols import Clock, Completion, Sampling, StopMode


class MyEngine(SlotEngine):
    """`harness.protocols.RolloutEngine`; it computes while someone waits in `finished`. Its base knows which samples
    wait, which have a slot, and which are done."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        *,
        sampling: Sampling,
        slots: int,
        seed: int,
        clock: Clock,
        device: torch.device | str = "cpu",
        name: str = "0",
    ) -> None:
        super().__init__(model, name=name, slots=slots, sampling=sampling, clock=clock)
        self._model, self._device, self._seed = model.to(device).eval(), device, seed
        self._weights = ModelWeights(model, f"engine {name}")
        self.sampled, self._asleep = 0, False

    async def finished(self) -> list[Completion]:
        while not self._done:
            if self._closed:
                raise RuntimeError(f"engine {self.name} is closed")
            if not self._paused and (self._running or self._waiting):
                self._fill_slots()
                self._step()
                await asyncio.sleep(0)
            else:
                await self._change()
        return self._take_done()

    async def pause(self, mode: StopMode) -> None:
        self._paused = True
        while mode == "wait" and self._running:
            self._step()
            await asyncio.sleep(0)
        if mode == "abort":
            self._abort_all()
        self._changed.set()

    def drop_cache(self) -> None:
        """There is none: each token is computed from all tokens before it, by the weights of that moment."""

    async def resume(self) -> None:
        self._require_ready()
        self._paused = False
        self._changed.set()

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._require_still("load_weights")
        self._weights.load(version, weights)  # in place: one that breaks off leaves them incomplete
        self.version = version

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self._require_still("sleep")
        self._model.to("cpu")
        self._asleep = True

    async def wake(self) -> None:
        self._model.to(self._device)
        self._asleep = False

    async def close(self) -> None:
        self._closed = True
        self._forget_all()
        self._changed.set()

    def _fill_slots(self) -> None:
        while (sample := self._next_to_start()) is not None:
            sample.uniforms = uniforms(self._seed, sample.sample_id, sample.sampling.max_tokens).tolist()

    @torch.inference_mode()
    def _step(self) -> None:
        """One token for each running sample."""
        self._require_ready()
        ends = [len(sample.context) - 1 for sample in self._running]
        # Padded on the right, where causal attention does not look.
        contexts = pad_sequence([torch.tensor(sample.context) for sample in self._running], batch_first=True)
        hidden = self._model.model(contexts.to(self._device), use_cache=False).last_hidden_state
        logits = self._model.lm_head(hidden[range(len(ends)), ends])
        uniform = torch.tensor([sample.uniforms[len(sample.log_probs)] for sample in self._running])
        samplings = [sample.sampling for sample in self._running]
        tokens, log_probs = draw_each(logits, uniform.double().to(self._device), samplings)
        for sample, token, log_prob in zip(self._running, tokens.tolist(), log_probs.tolist(), strict=True):
            if not sample.log_probs:
                sample.first_token_at = self._clock.now()
            sample.context.append(token)
            sample.log_probs.append(log_prob)
            sample.versions.append(self.version)
        self.sampled += len(self._running)
        for sample in [*self._running]:
            if (reason := sample.finish_reason()) is not None:
                self._finish(sample, reason)

    def _require_ready(self) -> None:
        if self._closed or self._asleep:
            raise RuntimeError(f"engine {self.name} is {'closed' if self._closed else 'asleep; call wake() first'}")
        self._weights.require_complete()
