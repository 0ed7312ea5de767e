"""The SGLang rollout engine: a server of its own, which this end starts, watches, feeds over HTTP and stops.

Every running sample is one streaming request; what else was submitted waits here. An abort ends requests early, and
continuation requests go on from the tokens of their samples with the draws that they would have had, because the server
draws by seed and position.

A server that brackets weight updates (0.5.21 and later) holds requests still while weights change, and says which
version sampled which token. Older ones cannot: for them a pause that keeps samples aborts their requests, and `resume`
starts continuation requests. So none outlives an update, and this end knows the version of every token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from engines.device_memory import pass_to_engine
from engines.requests import RouteShape, RunningSample, Served, SlotEngine
from engines.sglang.client import ServerControl, SGLangClient
from engines.sglang.options import DEFAULTS, Options
from engines.sglang.requests import SampleRequests, body_of
from engines.sglang.server import open_server
from engines.sglang.weights import CudaLink, GlooLink, SGLangWeightSender
from harness.protocols import Clock, Completion, EngineDied, FromTrainer, Request, Sampling, StopMode, TransferOffer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SGLangRollout(SlotEngine):
    """`harness.protocols.RolloutEngine` over HTTP. Blocks until the server is there; starts at version 0, with the
    weights of `model`, on `device`; tensor_parallel: devices that share each layer, that one and those after it.

    Raises what `open_server` raises; RuntimeError or TimeoutError where the server does not start.

    Seventeen attributes: six are parts that speak to the server, and six what it was last asked for.
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
        super().__init__(model, name=name, slots=slots, sampling=sampling, clock=clock)
        self._owner, self._seed = f"engine {name}", seed
        self._routes = RouteShape.of(model) if routes else None
        served = Served(model, slots, torch.device(device), tensor_parallel, routes)
        self._server = open_server(served, name, self._owner, options)
        client = SGLangClient(self._server.url, self._server.token, owner=self._owner, timeout_s=options.timeout_s)
        try:
            client.wait_until_ready(options.start_timeout_s, self._server.require_alive)
            self._server.has_started()
            self._holds_still = client.brackets_updates()
        except BaseException:
            self._server.stop()
            raise
        self._client, self._control = client, ServerControl(client, partial(self._make_room, torch.device(device)))
        own_gpu = self._server.receivers and torch.device(device).type == "cuda"
        link = (
            CudaLink(client, torch.device(device), options.weight_bucket_bytes)
            if own_gpu
            else GlooLink(client, tensor_parallel, options.weight_bucket_bytes)
        )
        self._sender = SGLangWeightSender(model, client, link, brackets=self._holds_still, base=self._server.base)
        self._initial = None if self._server.has_initial_weights else dict(model.named_parameters())
        self._preparing = asyncio.Lock()
        self._requests = SampleRequests(
            client,
            prepare=self._prepare,
            ended=self._request_ended,
            changed=self._changed.set,
            require_alive=self._server.require_alive,
            still=lambda: self._control.paused,
            clock=clock,
            routes=self._routes,
        )
        self._held = False  # running samples stay as they are: what ended all the same is returned when they go on
        self._loading = False

    @property
    def sampled(self) -> int:
        return self._requests.sampled

    @property
    def process_ids(self) -> Sequence[int]:
        """The server's processes, the one that answers first; none where it was not started here."""
        return self._server.process_ids

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests)
        self._start()

    async def finished(self) -> list[Completion]:
        """Raises RuntimeError: the server is gone, or silent; there is work and no pause, but weights are asleep, or
        incomplete and not on their way; or the engine was closed."""
        self._requests.watch()
        while not self._done:
            if not (self._paused or self._loading) and (self._running or (self._admitting and self._waiting)):
                self._require_ready()
            else:
                self._require_alive()
            await self._change()
        return self._take_done()

    async def pause(self, mode: StopMode) -> None:
        self._require_alive()
        self._admitting = False
        if mode == "keep":
            await self._hold()
        elif mode == "wait":
            if self._running:
                self._require_ready()
            await self._go_on()
            await self._drained()
        else:
            await self._abort()
        self._paused = True
        self._changed.set()

    def drop_cache(self) -> None:
        """Raises RuntimeError where the engine is neither paused nor idle."""
        self._require_still("drop_cache")
        self._control.drop_cache()

    async def resume(self) -> None:
        """Raises RuntimeError where `finished` would."""
        self._require_ready()
        await self._go_on()
        self._admitting, self._paused = True, False
        self._start()
        self._changed.set()

    async def cut(self, sample_ids: Collection[int]) -> None:
        """Let samples end with their next token. A sample that the server aborts before its first is requested again,
        for one token. Raises RuntimeError where the server is gone, or does not answer."""
        self._require_alive()
        await self._requests.end(self._cut(sample_ids))

    @property
    def ends(self) -> int:
        return self._server.receivers

    async def join(self, offer: TransferOffer, number: int) -> None:
        """Raises EngineDied where the server died, else as `harness.protocols.ReceivingEngine`."""
        self._require_alive()
        held = self._control.paused
        await self._control.hold()  # or the server would let all requests end first
        await self._sender.join(offer, number)
        if not held:
            await self._control.go_on()

    async def load_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises what `SGLangWeightSender.load` or `receive` raises; RuntimeError where the engine is neither paused
        nor idle. Where the server had a part of the weights by then, the engine refuses to generate until it has all.
        """
        self._require_alive()
        self._require_still("load_weights")
        await self._control.make_room_for_weights()
        self._loading = True
        try:
            if isinstance(weights, FromTrainer):
                await self._sender.receive(version)
            else:
                await self._sender.load(version, weights)
        finally:
            self._loading = False
            self._changed.set()
        self.version, self._initial = version, None
        self._start()

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Release the server's memory: on a GPU that of its cache and weights; running samples keep their tokens.
        Weights are kept on the host, as the server was told when it started."""
        self._require_alive()
        self._require_still("sleep")
        await self._control.sleep()

    async def wake(self) -> None:
        self._require_alive()
        await self._control.wake()
        self._start()

    async def close(self) -> None:
        """Kill the server and forget all samples; who waits in `finished` gets a RuntimeError."""
        self._closed = True
        await self._requests.close()
        await self._client.close()
        self._server.stop()
        self._forget_all()
        self._changed.set()

    def _make_room(self, device: torch.device, part: str) -> None:
        """Raises MemoryError where other processes leave too little of the device."""
        what, others = f"{part.replace('_', ' ')} of {self._owner}", max(0, self._server.receivers - 1)
        pass_to_engine(device, self._server.holds.get(part, 0.0), what, others)

    def _start(self) -> None:
        """Give free slots to waiting samples, in the order of submission."""
        ready = (
            not self._loading
            and self._sender.incomplete is None
            and not self._control.asleep
            and self._requests.failure is None
        )
        while ready and (sample := self._next_to_start()) is not None:
            self._start_request(sample)

    def _start_request(self, sample: RunningSample) -> None:
        routes = self._routes is not None
        body = body_of(sample, seed=self._seed, vocabulary=self._vocabulary, routes=routes)
        self._requests.start(sample, body)

    async def _prepare(self) -> int:
        """Make the server ready for a request. One that was not started here has the weights that it was started
        with."""
        async with self._preparing:
            if self._initial is not None:
                await self._sender.load(0, self._initial.items())
                self._initial = None
            await self._control.before_a_request()
        return self.version

    def _request_ended(self, sample: RunningSample) -> None:
        """A sample that was aborted keeps its slot: the caller of the abort decides what becomes of it."""
        if not self._held:
            self._return([sample])
            if sample.cut and sample in self._running and not self._requests.ending:
                self._start_request(sample)
        self._changed.set()

    def _return(self, samples: Iterable[RunningSample]) -> None:
        """Finish the samples that are done; their slots become free."""
        for sample in samples:
            if (reason := sample.finish_reason()) is not None:
                self._finish(sample, reason)
        self._start()

    async def _hold(self) -> None:
        if not self._held and self._running:
            if self._holds_still:
                self._held = True
                await self._control.hold()
            else:
                await self._requests.end_all(self._control.go_on)
        self._held = True

    async def _go_on(self) -> None:
        """Undo `_hold`."""
        await self._control.go_on()
        self._held = False
        self._return([*self._running])
        for sample in self._running:
            if sample not in self._requests:
                self._start_request(sample)

    async def _drained(self) -> None:
        while self._running:
            self._require_ready()
            await self._change()

    async def _abort(self) -> None:
        if self._control.paused:
            await self._control.empty_slots()  # so that no token is sampled to end them
        await self._requests.end_all(self._control.go_on)
        self._require_alive()
        self._held = False
        self._return([*self._running])
        self._abort_all()

    def _require_alive(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self._owner} is closed")
        if self._requests.failure is not None:
            how = EngineDied if isinstance(self._requests.failure, EngineDied) else RuntimeError
            raise how(f"{self._owner} cannot go on: {self._requests.failure}") from self._requests.failure
        self._server.require_alive()

    def _require_ready(self) -> None:
        self._require_alive()
        if self._sender.incomplete is not None:
            raise RuntimeError(self._sender.incomplete)
        if self._control.asleep:
            raise RuntimeError(f"{self._owner} is asleep; call wake() first")
