"""The vLLM rollout engine: `AsyncLLM` in the process of its rollout worker, vLLM's own processes behind it.

vLLM schedules what runs; what waits for a slot waits here, so that a pause knows both. vLLM counts versions: it is told
each at the end of its update, and says with every sample which of its tokens are whose. Prefixes are shared only among
samples that start under the same version. A sample's draws are keyed by the run's seed, its id and, where it goes on
from a partial, the length of that: so it goes on with draws of its own, but not with those it would have had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from engines.device_memory import pass_to_engine
from engines.requests import RouteShape, RunningSample, Served, SlotEngine
from engines.vllm.options import DEFAULTS, Options
from engines.vllm.process import VLLMProcess
from engines.vllm.weights import VLLMWeightSender
from harness.protocols import Clock, Completion, FinishReason, FromTrainer, Request, Sampling, StopMode, TransferOffer

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.output_processor import RequestOutputCollector


class VLLMRollout(SlotEngine):
    """`harness.protocols.RolloutEngine` over vLLM. Starting it blocks; it starts at version 0.

    device: of this process; tensor_parallel: devices that share each layer, that one and those after it.

    `model` gives the weights to start with and is not kept. Nineteen attributes: most say what is under way between
    this process and vLLM's.
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
        options: Options = DEFAULTS,
        tensor_parallel: int = 1,
        routes: bool = False,
    ) -> None:
        """routes: whether completions are to have them."""
        device = torch.device(device)
        super().__init__(model, name=name, slots=slots, sampling=sampling, clock=clock)
        self._seed, self._drain_timeout_s, self._device = seed, options.drain_timeout_s, device
        self._process = VLLMProcess(Served(model, slots, device, tensor_parallel, routes), name, options)
        self._sender = VLLMWeightSender(self._process, model, device, name, options)
        self._workers = tensor_parallel
        self._routes = RouteShape.of(model) if routes else None
        self._numbers: dict[int, str] = {}  # of running samples, as vLLM knows them
        self._starting = asyncio.Lock()  # held while samples are handed to vLLM, and while vLLM is paused
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_task: asyncio.Task[None] | None = None
        self._handed_over = 0
        self._failure: BaseException | None = None
        self._stale = False  # the cache is to be dropped before anything goes on
        self._asleep: list[str] = []
        self._forgot = False  # its weights, when it slept

    @property
    def process_ids(self) -> list[int]:
        """vLLM's processes, the one that all others depend on first."""
        return self._process.process_ids

    @property
    def sampled(self) -> int:
        return self._process.sampled

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests)
        self._go_on()

    async def finished(self) -> list[Completion]:
        """Raises RuntimeError where the engine died or was closed, or has work but incomplete weights, or sleeps."""
        while not self._done:
            if self._failure is not None:
                raise self._failure
            if self._closed or (self._waiting and not self._paused):
                self._require_ready()
            self._changed.clear()
            await self._process.outlast(self._changed.wait())
        return self._take_done()

    async def pause(self, mode: StopMode) -> None:
        """Raises RuntimeError where the engine died, TimeoutError where it did not stop in time."""
        self._admitting = False
        async with self._starting:
            if mode == "wait":
                await self._drain()
            await self._process.pause("abort" if mode == "abort" else "keep")
            if mode == "abort":
                await self._process.ask("return its samples", self._emptied())
                self._abort_all()
        self._paused = True
        self._changed.set()

    def drop_cache(self) -> None:
        self._stale = True

    async def resume(self) -> None:
        """Raises RuntimeError where the engine died or is closed, asleep, or holds incomplete weights."""
        self._require_ready()
        await self._unpause()
        self._admitting = True
        self._go_on()

    async def cut(self, sample_ids: Collection[int]) -> None:
        """Let samples end with their next token. A sample that vLLM aborts before its first is requested again, for one
        token. Raises as `pause`."""
        named = self._cut(sample_ids)
        numbers = [self._numbers[sample.sample_id] for sample in named if sample.sample_id in self._numbers]
        if numbers:
            await self._process.abort(numbers)

    @property
    def ends(self) -> int:
        return self._workers

    async def join(self, offer: TransferOffer, number: int) -> None:
        """Raises EngineDied where the engine died, else as `harness.protocols.ReceivingEngine`."""
        await self._sender.join(offer, number)

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError as `VLLMWeightSender.load`; RuntimeError where the engine is neither paused nor idle, or
        died. Where some weights are there when anything is raised, it refuses to generate until a complete set is.

        A sleeping engine takes its weights back for it, and no more.
        """
        self._require_still("load_weights")
        async with self._starting:
            if "weights" in self._asleep:
                await self._wake("weights")
            if isinstance(weights, FromTrainer):
                await self._sender.receive(version)
            else:
                await self._sender.load(version, weights)
            self.version, self._forgot = version, False
        self._go_on()

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Give back what the device holds: the cache, and the weights to the host; on a CPU that is one place, and vLLM
        keeps both. Running samples stay, to be recomputed.

        Level 2, where weights need not be kept, copies nothing to the host, and takes no memory there.
        """
        self._require_still("sleep")
        if self._asleep:
            return
        await self._process.forget_cache()
        await self._process.tell_worker("sleep", level=1 if keep_weights else 2)
        self._asleep, self._forgot = ["weights", "kv_cache"], not keep_weights

    async def wake(self) -> None:
        for part in tuple(self._asleep):
            await self._wake(part)
        self._go_on()

    async def close(self) -> None:
        """Forget all samples and end vLLM's processes; who waits in `finished` gets a RuntimeError."""
        if self._closed:
            return
        self._closed = True
        self._changed.set()
        for task in self._tasks:
            task.cancel()
        self._forget_all()
        await self._process.close()

    def _go_on(self) -> None:
        """Start what may start. `finished` looks again whether there is anything that cannot."""
        self._changed.set()
        if self._waiting and (self._start_task is None or self._start_task.done()):  # one looks at all that waits
            self._start_task = self._keep(self._start())

    def _keep(self, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `loop` beside the others; if it fails, the engine has failed."""
        task = asyncio.create_task(loop)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._changed.set()

    async def _start(self) -> None:
        """Consumes what waits, in the order of submission; produces requests of vLLM. Ends when no slot is free,
        nothing waits, or nothing may start; what changes that starts it again."""
        async with self._starting:
            while self._refusal() is None and (sample := self._next_to_start()) is not None:
                self._handed_over += 1
                number = f"{sample.sample_id}-{self._handed_over}"
                collector = await self._process.generate(
                    number, sample.context, self.version, parameters(sample, self._seed)
                )
                self._numbers[sample.sample_id] = number
                self._keep(self._follow(sample, collector))

    async def _follow(self, sample: RunningSample, collector: RequestOutputCollector) -> None:
        """Consumes the one output of a sample, produces its completion. Unblocked by vLLM, or by its death."""
        began = self._clock.now()
        output = await self._process.outlast(collector.get())
        (generated,) = output.outputs
        if not sample.versions and output.metrics is not None:
            sample.first_token_at = began + output.metrics.first_token_latency
        ended = extend(sample, generated, greedy=sample.sampling.temperature == 0, routes=self._routes)
        reason = sample.finish_reason() if sample.cut else ended
        del self._numbers[sample.sample_id]
        if reason is None:
            self._running.remove(sample)
            self._waiting.appendleft(sample)
        else:
            self._finish(sample, reason)
        self._go_on()

    async def _drain(self) -> None:
        """Let all that vLLM has run to its end. Its own pause of this kind would keep what it has not begun."""
        if self._paused and self._running:
            self._require_ready()
            await self._unpause()
        await self._process.ask("finish its running samples", self._emptied(), self._drain_timeout_s)

    async def _unpause(self) -> None:
        if self._stale:
            await self._process.forget_cache()
            self._stale = False
        await self._process.resume()
        self._paused = False

    async def _emptied(self) -> None:
        """Returns when no sample runs; raises what keeps one from its end."""
        while self._running:
            if self._failure is not None:
                raise self._failure
            await self._change()

    async def _wake(self, part: str) -> None:
        """Raises MemoryError where other processes leave too little of the device."""
        what = f"{part.replace('_', ' ')} of engine {self.name}"
        pass_to_engine(self._device, self._process.holds[part], what, self._workers - 1)
        await self._process.tell_worker("wake_up", tags=[part])
        self._asleep.remove(part)

    def _refusal(self) -> str | None:
        """The reason why it cannot generate."""
        if self._closed:
            return f"engine {self.name} is closed"
        if self._forgot:
            return f"engine {self.name} forgot its weights when it slept; load a complete set of weights"
        return f"engine {self.name} is asleep; call wake() first" if self._asleep else self._sender.incomplete

    def _require_ready(self) -> None:
        self._process.require_alive()
        if refusal := self._refusal():
            raise RuntimeError(refusal)


FIRST_LABEL = "default"
"""vLLM's name of the weights that it was started with."""


def parameters(sample: RunningSample, seed: int) -> SamplingParams:
    """Sampling parameters for the rest of `sample`. vLLM's generator starts anew with each request: so the length of
    what is there is part of its key, or a sample that goes on would repeat its first draws."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling, drawn = sample.sampling, len(sample.log_probs)
    key = np.random.SeedSequence([seed, sample.sample_id, drawn]).generate_state(1, np.uint64)[0]
    return SamplingParams(
        max_tokens=sample.tokens_left,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop_token_ids=list(sampling.stop_tokens),
        seed=int(key >> np.uint64(1)),
        logprobs=0,
        routed_experts_prompt_start=sample.routed,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def extend(
    sample: RunningSample, generated: CompletionOutput, *, greedy: bool, routes: RouteShape | None = None
) -> FinishReason:
    """Add what vLLM made of a sample to it; returns why it ended. A greedy token is certain, where vLLM gives the
    model's log-probability. routes: where it tells experts.

    Raises FloatingPointError where log-probabilities are not finite.
    """
    tokens = list(generated.token_ids)
    choices = zip(tokens, generated.logprobs or (), strict=True)
    log_probs = [0.0 if greedy else of_tokens[token].logprob for token, of_tokens in choices]
    versions = versions_of(generated)
    if not np.isfinite(log_probs).all():
        raise FloatingPointError(
            f"sample {sample.sample_id}: log-probabilities under version {versions[-1]} are not finite"
        )
    sample.context += tokens
    sample.log_probs += log_probs
    sample.versions += versions
    if routes is not None and generated.routed_experts is not None:
        sample.add_routes(generated.routed_experts, routes)
    return cast(FinishReason, generated.finish_reason)


def versions_of(generated: CompletionOutput) -> list[int]:
    """The version of each token, as vLLM counted it."""
    versions = []
    for span in generated.weight_versions or ():
        versions += [0 if span.version == FIRST_LABEL else int(span.version)] * (span.end - span.start)
    return versions
