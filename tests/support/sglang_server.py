"""An SGLang server without SGLang: its protocol over real HTTP, in both dialects, and tokens that follow from nothing
but seed and position. Runs in a thread of its own, so that a test may block as an engine's start does."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

WAIT_S = 60.0
TOKEN = "sesame"


def token_at(seed: int, position: int, vocabulary: int) -> int:
    return (seed * 31 + position * 17) % vocabulary


@dataclass
class Generation:
    """One sample on its way. `spans`: (version, number of tokens)."""

    seed: int
    position: int
    left: int
    tokens: list[int] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    finish: dict[str, Any] | None = None


class SGLangServer:
    """brackets: the dialect of 0.5.21 and later, which also tells versions. Requests stop at `stop_at` tokens until it
    is None; `refuse` names paths that fail; `cut` lets generations end without a word."""

    def __init__(self, *, brackets: bool, vocabulary: int) -> None:
        self.brackets, self.vocabulary = brackets, vocabulary
        self.version = "0"
        self.weights: dict[str, torch.Tensor] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.connections: list[Any] = []
        """The caller's end of the connection of each call."""
        self.stop_at: int | None = None
        self.refuse: set[str] = set()
        self.give_up = self.cut = self.tells_top_p = False
        self.paused = self.updating = False
        self.running: list[Generation] = []
        self._changed = threading.Condition()
        self._group: dist.ProcessGroup | None = None

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls if path != "/generate"]

    def change(self, **settings: Any) -> None:
        with self._changed:
            for name, value in settings.items():
                setattr(self, name, value)
            self._changed.notify_all()

    async def until(self, true: Callable[[], bool]) -> None:
        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(true, WAIT_S)

        assert await asyncio.to_thread(wait), "the fake server did not come that far"

    async def handle(self, request: Request) -> Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return Response(status_code=401)
        path, body = request.url.path, json.loads(await request.body() or b"{}")
        if path == "/model_info":
            return JSONResponse({})
        known = {"/begin_weight_update", "/end_weight_update"} if self.brackets else set()
        if path not in known | {f"/{name}" for name in _COMMON}:
            return Response(status_code=404)
        with self._changed:
            self.calls.append((path, body))
            self.connections.append(request.client)
            self._changed.notify_all()
        if path in self.refuse:
            return Response("because the test says so", status_code=400)
        if path == "/generate":
            return StreamingResponse(self._generate(body))
        answer = await asyncio.to_thread(getattr(self, path[1:]), body)
        return JSONResponse({"success": answer is None, "message": answer}, status_code=400 if answer else 200)

    async def _generate(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        generations = [
            Generation(wanted["sampling_seed"], len(tokens), wanted["max_new_tokens"])
            for tokens, wanted in zip(body["input_ids"], body["sampling_params"], strict=True)
        ]
        with self._changed:
            self.running += generations
        left = dict(enumerate(generations))
        while left:
            for index, generation in [*left.items()]:
                await asyncio.to_thread(self._advance, generation)
                if self.cut:
                    raise ConnectionAbortedError("the test cuts the connection")
                message = self._message(generation) | {"index": index}
                yield b"data: " + json.dumps(message).encode() + b"\n\n"
                if generation.finish is not None:
                    del left[index]
        yield b"data: [DONE]\n\n"

    def _advance(self, generation: Generation) -> None:
        """Waits until there is a token to sample, or an end."""

        def can_go_on() -> bool:
            stopped = self.paused or (self.stop_at is not None and len(generation.tokens) >= self.stop_at)
            return generation.finish is not None or self.cut or self.give_up or not stopped

        with self._changed:
            assert self._changed.wait_for(can_go_on, WAIT_S)
            if self.give_up:
                generation.finish = {"type": "abort", "message": "out of memory"}
            if generation.finish is None and not self.cut:
                position = generation.position + len(generation.tokens)
                generation.tokens.append(token_at(generation.seed, position, self.vocabulary))
                if not generation.spans or generation.spans[-1][0] != self.version:
                    generation.spans.append([self.version, 0])
                generation.spans[-1][1] += 1
                if len(generation.tokens) == generation.left:
                    generation.finish = {"type": "length"}
            if generation.finish is not None:
                self.running.remove(generation)
            self._changed.notify_all()

    def _message(self, generation: Generation) -> dict[str, Any]:
        rows = [[-float(token), token, None] for token in generation.tokens]
        meta = {"finish_reason": generation.finish, "completion_tokens": len(rows), "output_token_logprobs": rows}
        meta["weight_version"] = self.version
        if self.brackets and generation.finish is not None:
            ends = [sum(count for _, count in generation.spans[: n + 1]) for n in range(len(generation.spans))]
            meta["weight_versions"] = [
                {"version": version, "start": end - count, "end": end}
                for (version, count), end in zip(generation.spans, ends, strict=True)
            ]
        return {"output_ids": generation.tokens, "meta_info": meta}

    # --- what it is told; an answer is why not ---------------------------------------------------------------------

    def pause_generation(self, body: dict[str, Any]) -> str | None:
        self.change(paused=True)
        return None

    def continue_generation(self, body: dict[str, Any]) -> str | None:
        self.change(paused=False)
        return None

    def abort_request(self, body: dict[str, Any]) -> str | None:
        with self._changed:
            for generation in self.running:
                generation.finish = {"type": "abort", "message": "asked for"}
            self._changed.notify_all()
        return None

    def flush_cache(self, body: dict[str, Any]) -> str | None:
        return "requests are running" if self.running and not self.paused else None

    def release_memory_occupation(self, body: dict[str, Any]) -> str | None:
        return None

    def resume_memory_occupation(self, body: dict[str, Any]) -> str | None:
        return None

    def begin_weight_update(self, body: dict[str, Any]) -> str | None:
        already, self.updating = self.updating, True
        return "an update is open" if already else None

    def end_weight_update(self, body: dict[str, Any]) -> str | None:
        open_, self.updating = self.updating, False
        return None if open_ else "no update is open"

    def init_weights_update_group(self, body: dict[str, Any]) -> str | None:
        timeout = timedelta(seconds=WAIT_S)
        store = dist.TCPStore(body["master_address"], body["master_port"], 2, False, timeout, wait_for_workers=False)
        name = body["group_name"]
        prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self._group = dist.ProcessGroupGloo(prefixed, body["rank_offset"], body["world_size"], timeout)
        return None

    def update_weights_from_distributed(self, body: dict[str, Any]) -> str | None:
        if self.brackets and not self.updating:
            return "no update is open"
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            self.weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([self.weights[name]], options).wait()
        self.version = body.get("weight_version", self.version)
        return None


_COMMON = (
    "abort_request continue_generation flush_cache generate init_weights_update_group pause_generation "
    "release_memory_occupation resume_memory_occupation update_weights_from_distributed"
).split()


@contextmanager
def serving(server: SGLangServer) -> Iterator[str]:
    """The URL at which it answers, for as long as the block lasts."""
    app = Starlette(routes=[Route("/{path:path}", server.handle, methods=["GET", "POST"])])
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", ws="none", lifespan="off", timeout_graceful_shutdown=1)
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.change(cut=True)  # nothing stays in a wait
        http.should_exit = True
        thread.join(WAIT_S)
        listening.close()
