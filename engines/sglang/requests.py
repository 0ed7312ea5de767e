"""The requests of running samples to an SGLang server: their bodies, the replies, and those that are under way.

Samples that start at once share one request, which costs a server half the time of one for each. Where an abort ends a
sample early, it goes on in another request from the tokens that it has by then.
"""

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np

from engines.requests import RouteShape, RunningSample
from engines.sglang.client import SGLangClient
from harness.protocols import Clock, Sampling

_WATCH_S = 0.5
_ABORT_AGAIN_S = 0.2


def body_of(sample: RunningSample, *, seed: int, vocabulary: int, routes: bool = False) -> dict[str, Any]:
    """Body of a /generate request: the rest of the sample, with log-probs of the distribution that it is drawn from.
    `together` makes one request of several."""
    sampling = sample.sampling
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": sample.tokens_left,
        "sampling_seed": sampling_seed(seed, sample.sample_id),
        # `ignore_eos` would ignore stop_token_ids too; the model is served without an end-of-sequence token of its own.
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": not sampling.stop_tokens,
    }
    body = {"input_ids": sample.context, "sampling_params": parameters, "return_logprob": True}
    if _restricted(sampling):
        # Plain log-probs are those before the restriction. Its own come with the tokens that it leaves, where top_k
        # says how many these may be.
        parameters |= {"top_p": sampling.top_p, "top_k": vocabulary}
        body["return_sampling_mask"] = True
    if routes:
        body |= {"return_routed_experts": True, "routed_experts_start_len": sample.routed}
    return body


_OF_EACH = "rid", "input_ids", "sampling_params"
"""Fields that a request for several samples has lists of."""


def together(bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One request for all of them, which are alike but for `_OF_EACH`."""
    return bodies[0] | {name: [body[name] for body in bodies] for name in _OF_EACH}


def sampling_seed(seed: int, sample_id: int) -> int:
    """63 bits that (run seed, sample id) determine. The server draws a token by this seed and the token's position: so
    an interrupted sample goes on with the draws that it would have had."""
    return int(np.random.SeedSequence([seed, sample_id]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _restricted(sampling: Sampling) -> bool:
    return sampling.top_p < 1 and sampling.temperature > 0


class Reply:
    """All that the server has said about one sample. Its messages repeat what came before, and may have more than their
    count of tokens says, as it goes on while they wait to be sent; or they leave out what came before."""

    def __init__(self, sampling: Sampling, owner: str) -> None:
        self._sampling, self._owner = sampling, owner
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.finish: dict[str, Any] | None = None
        self.routes = ""
        """int32 [tokens, layers, k] in base64, where experts were asked for; not of an aborted request."""
        self._spans: list[dict[str, Any]] = []

    def add(self, message: dict[str, Any]) -> None:
        """Raises RuntimeError for a message without the log-probs that were asked for; FloatingPointError for such as
        are no numbers."""
        meta = message["meta_info"]
        self.finish = meta["finish_reason"]
        self._spans = meta.get("weight_versions") or self._spans
        self.routes = meta.get("routed_experts") or self.routes
        if meta["completion_tokens"] > len(self.tokens):
            log_probs = self._new(self._log_probs(meta), meta["completion_tokens"])
            if not np.isfinite(log_probs).all():
                raise FloatingPointError(f"{self._owner}: log-probabilities are not finite: {log_probs}")
            self.tokens += self._new(message["output_ids"], meta["completion_tokens"])
            self.log_probs += log_probs
        if not len(self.tokens) == len(self.log_probs) == meta["completion_tokens"]:
            raise RuntimeError(
                f"{self._owner}: the SGLang server counts {meta['completion_tokens']} tokens, and has sent "
                f"{len(self.tokens)} of them with {len(self.log_probs)} log-probs"
            )

    def _new(self, told: list[Any], count: int) -> list[Any]:
        """The end of it that is new, where there are so many tokens by now."""
        here = len(self.tokens)
        return told[here:count] if len(told) >= count else told[here - count :]

    def versions(self, version: int) -> list[int]:
        """The version of each token, as the server reports it; a server that reports none was never updated under a
        request, so it is `version`, which it had at the start."""
        reported = [int(span["version"]) for span in self._spans for _ in range(span["start"], span["end"])]
        return reported if len(reported) == len(self.tokens) else [version] * len(self.tokens)

    def _log_probs(self, meta: dict[str, Any]) -> list[float]:
        if self._sampling.temperature == 0:
            return [0.0] * len(meta["output_token_logprobs"])  # of the only choice
        if not _restricted(self._sampling):
            return [log_prob for log_prob, *_ in meta["output_token_logprobs"]]
        if "output_token_sampling_logprobs" not in meta:
            raise RuntimeError(
                f"{self._owner}: this SGLang server does not tell log-probs under top_p={self._sampling.top_p}; "
                "set algorithm.top_p=1, or use SGLang 0.5.21 or later"
            )
        return list(meta["output_token_sampling_logprobs"])


class SampleRequests:
    """All requests that are under way, and the first failure of one of them, or of the server.

    prepare: awaited before each request; gives the version that the server has. ended: called with a sample when its
    request is over and the sample has its tokens. changed: called when there is a `failure`. require_alive: raises
    RuntimeError if the server is gone. The server may be silent about running samples for the client's timeout_s,
    longer only where `still`. clock: of the run; routes: where it tells experts. Sixteen attributes: eight are these.
    """

    def __init__(
        self,
        client: SGLangClient,
        *,
        prepare: Callable[[], Awaitable[int]],
        ended: Callable[[RunningSample], None],
        changed: Callable[[], None],
        require_alive: Callable[[], None],
        still: Callable[[], bool],
        clock: Clock,
        routes: RouteShape | None = None,
    ) -> None:
        self._routes = routes
        self._client, self._prepare, self._ended, self._changed = client, prepare, ended, changed
        self._require_alive, self._still, self._clock = require_alive, still, clock
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of requests, by sample
        self._beginning: dict[str, tuple[list[tuple[RunningSample, dict[str, Any]]], asyncio.Task[None]]] = {}
        """Samples of requests that begin with the next turn of the event loop, by what their bodies share."""
        self.ending = False
        """All of them."""
        self._names: dict[int, str] = {}  # of requests, as the server knows them, by sample
        self._heard_at = 0.0
        self._watching: asyncio.Task[None] | None = None
        self.failure: Exception | None = None
        self.sampled = 0
        """Tokens that the server told of."""

    def __contains__(self, sample: RunningSample) -> bool:
        return sample.sample_id in self._tasks

    def start(self, sample: RunningSample, body: dict[str, Any]) -> None:
        """Start a sample, in one request with all that start in this turn of the event loop and are alike."""
        self.watch()
        self._heard_at = asyncio.get_running_loop().time()
        self._names[sample.sample_id] = name = uuid4().hex  # the server takes a name for all that begin with it
        alike = repr([(key, value) for key, value in sorted(body.items()) if key not in _OF_EACH])
        if alike not in self._beginning:
            self._beginning[alike] = [], asyncio.create_task(self._go(alike))
        started, self._tasks[sample.sample_id] = self._beginning[alike]
        started.append((sample, body | {"rid": name}))

    async def end(self, samples: Iterable[RunningSample]) -> None:
        """Have the server abort these, as far as it has them; each keeps the tokens that arrived."""
        for sample in samples:
            if sample in self:
                await self._client.post("/abort_request", {"rid": self._names[sample.sample_id]})

    async def end_all(self, go_on: Callable[[], Awaitable[None]]) -> None:
        """Have the server abort them all; each sample keeps the tokens that arrived. Then, or when what is left may be
        waiting for a paused server to accept it, `go_on`.

        Raises RuntimeError where the server does not do so in time, or is gone.
        """
        self.ending = True
        try:
            async with asyncio.timeout(self._client.timeout_s):
                while self._tasks:
                    # A request that is on its way to the server is not ended by this one, but by the next.
                    await self._client.post("/abort_request", {"abort_all": True})
                    if self._tasks:
                        await asyncio.wait({*self._tasks.values()}, timeout=_ABORT_AGAIN_S)
                    await go_on()
                await go_on()
        except TimeoutError as error:
            left = f"{len(self._tasks)} samples within {self._client.timeout_s} s"
            raise RuntimeError(f"{self._client.owner}: its SGLang server did not abort {left}") from error
        finally:
            self.ending = False

    def watch(self) -> None:
        """Start to watch the server, so that its death is noticed."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Cancel all requests and wait until they have ended."""
        tasks = {*self._tasks.values(), *([self._watching] if self._watching else [])}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _go(self, alike: str) -> None:
        """Consumes the server's messages about samples that start at once; ends with the last of them, or with the
        server."""
        started, _ = self._beginning.pop(alike)
        left = {
            number: (sample, Reply(sample.sampling, self._client.owner)) for number, (sample, _) in enumerate(started)
        }
        try:
            version = await self._prepare()
            async for message in self._client.generate(together([body for _, body in started])):
                sample, reply = left[message["index"]]
                told = len(reply.tokens)
                reply.add(message)
                if not (told or sample.versions):
                    sample.first_token_at = self._clock.now()
                self.sampled += len(reply.tokens) - told
                self._heard_at = asyncio.get_running_loop().time()
                if reply.finish is not None:
                    del left[message["index"]]
                    self._end(sample, reply, version)
            for sample, reply in left.values():
                self._require_reason(sample, reply)
        except Exception as error:  # raised in `finished`: this task is not awaited
            self._fail(error)
        finally:
            for sample, _ in left.values():
                self._forget(sample)

    def _end(self, sample: RunningSample, reply: Reply, version: int) -> None:
        """Give the sample what the server has made of it."""
        self._forget(sample)
        self._require_reason(sample, reply)
        sample.context += reply.tokens
        sample.log_probs += reply.log_probs
        sample.versions += reply.versions(version)
        if self._routes is not None and reply.routes:
            sample.add_routes(np.frombuffer(b64decode(reply.routes), np.int32), self._routes)
        if self.failure is None:
            self._ended(sample)

    def _forget(self, sample: RunningSample) -> None:
        del self._tasks[sample.sample_id], self._names[sample.sample_id]

    def _require_reason(self, sample: RunningSample, reply: Reply) -> None:
        finish = reply.finish or {"type": "nothing"}
        if self._routes is not None and finish["type"] in ("stop", "length") and not reply.routes:
            raise RuntimeError(
                f"{self._client.owner}: its SGLang server does not tell which experts it chose; start it with "
                "--enable-return-routed-experts, or set training.routing_replay=false"
            )
        if finish["type"] not in ("stop", "length") and not (self.ending or sample.cut):
            raise RuntimeError(
                f"{self._client.owner}: its SGLang server gave up sample {sample.sample_id}: {finish}; "
                "fewer engine.slots leave more memory for each"
            )

    async def _watch(self) -> None:
        """Ends with the first failure."""
        while self.failure is None:
            await asyncio.sleep(_WATCH_S)
            silent_s = asyncio.get_running_loop().time() - self._heard_at
            try:
                self._require_alive()
                if self._tasks and silent_s > self._client.timeout_s and not self._still():
                    raise RuntimeError(
                        f"{self._client.owner}: its SGLang server said nothing for {silent_s:.0f} s about "
                        f"{len(self._tasks)} running samples"
                    )
            except RuntimeError as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Keep the first failure; where the server is gone, that is the reason for all others."""
        if self.failure is None:
            try:
                self._require_alive()
            except RuntimeError as gone:
                error = gone
            self.failure = error
            self._changed()
