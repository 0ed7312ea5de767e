"""The requests of running samples: a leg is one of them, from the tokens that a sample has to wherever it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from engines.running_sample import RunningSample
from engines.sglang.client import SGLangClient
from engines.sglang.requests import Reply
from harness.protocols import Sampling

_WATCH_S = 0.5
_ABORT_AGAIN_S = 0.2


class Legs:
    """All legs that are under way, and the first thing that went wrong with one of them, or with the server.

    prepare: awaited before each request; gives the version that the server has. ended: called with a sample when its
    leg is over and its tokens are in it. changed: called when there is a `failure`. require_alive: raises RuntimeError
    if the server is gone. timeout_s: the longest silence while samples run, unless `still`.
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
    ) -> None:
        self._client, self._prepare, self._ended, self._changed = client, prepare, ended, changed
        self._require_alive, self._still = require_alive, still
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ending = False
        self._heard_at = 0.0
        self._watching: asyncio.Task[None] | None = None
        self.failure: Exception | None = None

    def __contains__(self, sample: RunningSample) -> bool:
        return sample.sample_id in self._tasks

    def start(self, sample: RunningSample, sampling: Sampling, body: dict[str, Any]) -> None:
        """Needs a running event loop."""
        self.watch()
        self._heard_at = asyncio.get_running_loop().time()
        self._tasks[sample.sample_id] = asyncio.create_task(self._go(sample, sampling, body))

    async def end_all(self, go_on: Callable[[], Awaitable[None]]) -> None:
        """Have the server end them all; each sample comes back with the tokens that it was told. Then, or when what is
        left may be waiting at the door of a paused server, `go_on`.

        Raises RuntimeError where the server does not do so in time, or is gone.
        """
        self._ending = True
        try:
            async with asyncio.timeout(self._client.timeout_s):
                while self._tasks:
                    # A request that is on its way to the server is not ended by this one, but by the next.
                    await self._client.post("/abort_request", {"abort_all": True})
                    if self._tasks:
                        await asyncio.wait(list(self._tasks.values()), timeout=_ABORT_AGAIN_S)
                    await go_on()
                await go_on()
        except TimeoutError as error:
            left = f"{len(self._tasks)} samples within {self._client.timeout_s} s"
            raise RuntimeError(f"{self._client.owner}: its SGLang server did not abort {left}") from error
        finally:
            self._ending = False

    def watch(self) -> None:
        """See to it that somebody notices when the server is gone."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _go(self, sample: RunningSample, sampling: Sampling, body: dict[str, Any]) -> None:
        """Consumes the server's messages about one sample; ends with the last of them, or with the server."""
        reply = Reply(sampling, self._client.owner)
        try:
            version = await self._prepare()
            async for message in self._client.generate(body):
                reply.add(message)
                self._heard_at = asyncio.get_running_loop().time()
            self._require_reason(sample, reply)
        except Exception as error:  # for those who wait in `finished`: nobody waits for this task
            self._fail(error)
        else:
            sample.context += reply.tokens
            sample.log_probs += reply.log_probs
            sample.versions += reply.versions(version)
        finally:
            del self._tasks[sample.sample_id]
        if self.failure is None:
            self._ended(sample)

    def _require_reason(self, sample: RunningSample, reply: Reply) -> None:
        finish = reply.finish or {"type": "nothing"}
        if finish["type"] not in ("stop", "length") and not self._ending:
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
