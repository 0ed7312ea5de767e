"""The service over HTTP: the verbs of AsyncFlow's service interface (arXiv 2507.01663, section 5), for one job.

    CADENCE_TOKEN=... cadence serve --port 8767

Every request carries the token (`Authorization: Bearer ...`). Tensors travel as safetensors, all else as JSON;
docs/service.md has a trainer and an engine that use nothing else.

    POST /init_engines              columns, tasks, engines, batches, staleness: the job; the same again changes nothing
    POST /load_prompt_data          the prompts of the next batch
    POST /admit                     which groups engines may be given
    POST /recv_experience_data      rows of a task that have all that it reads
    POST /send_experience_data      what a reader made of rows that it got
    POST /sync_actor_model          the trainer's new weights
    GET  /weights/{version}         what an engine loads
    POST /engines/{name}/version    it loaded them
    GET  /versions                  the trainer's, and each engine's; waits for a newer one
    POST /close                     no more prompts
    GET  /ledger, /metrics, /health what became of the samples; for Prometheus; whether it is there
    GET  /openapi.json              all of that for programs"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, Response
from starlette.requests import ClientDisconnect

from harness.rpc.http_server import authenticated_app
from harness.service.job import Conflict, Replaced, ServedJob, Unknown
from harness.service.metrics import CONTENT_TYPE, prometheus_text
from harness.service.requests import AdmitRequest, JobRequest, ReceiveRequest, Seconds, Version, VersionReport
from harness.service.tensors import decode, encode
from harness.transfer_queue.control.controller import QueueClosed
from harness.transfer_queue.control.leases import LeaseExpired

T = TypeVar("T")

_TENSORS = "application/octet-stream"
_LARGEST_JSON, _LARGEST_COLUMNS, _LARGEST_WEIGHTS = 4 << 20, 1 << 30, 1 << 40  # bytes; the last go into a file
_CONTENT = {"content": {_TENSORS: {"schema": {"type": "string", "format": "binary"}}}}
_BODY = {"requestBody": {"required": True, **_CONTENT}}
"""The request's body in the service's description: FastAPI does not see one that is read as it comes."""
_ROWS: dict[int | str, dict[str, Any]] = {
    200: {
        **_CONTENT,
        "headers": {"X-Lease": {"schema": {"type": "string"}}, "X-Partition": {"schema": {"type": "string"}}},
    },
    204: {"description": "Not in this time, or there are newer weights than this engine's."},
    410: {"description": "Nothing more; of the trainer, until the next version."},
}
_WEIGHTS: dict[int | str, dict[str, Any]] = {200: _CONTENT, 410: {"description": "Newer ones have replaced them."}}


def service_app(token: str, folder: Path, now: Callable[[], float] = time.monotonic) -> FastAPI:
    """An application that serves one job to who has the token. folder: of the weights; now: seconds, for leases."""
    refusals = {Conflict: 409, LeaseExpired: 409, QueueClosed: 409, Replaced: 410, Unknown: 404, ValueError: 400}
    columns = dict.fromkeys(("/load_prompt_data", "/send_experience_data"), _LARGEST_COLUMNS)
    larger = columns | {"/sync_actor_model": _LARGEST_WEIGHTS}
    app = authenticated_app("Cadence", token, refusals, largest_body=_LARGEST_JSON, larger=larger)
    state: list[ServedJob] = []
    begun = asyncio.Event()

    def job() -> ServedJob:
        if not state:
            raise Conflict("there is no job yet: POST /init_engines first")
        return state[0]

    @app.post("/init_engines")
    async def init_engines(request: JobRequest) -> dict[str, Any]:
        if state and state[0].request != request:
            raise Conflict("another job is being served; a second one is a second service")
        if not state:
            state.append(ServedJob(request, folder, now))
            begun.set()
        return {"batch_rows": request.batch_rows, "worst_lag": state[0].worst_lag}

    @app.post("/load_prompt_data", openapi_extra=_BODY)
    async def load_prompt_data(request: Request) -> dict[str, int]:
        rows, columns = decode(await request.body())
        if rows is not None:
            raise ValueError("rows of a new batch are numbered by the service: leave `rows` out")
        return {"batch": await job().load(columns)}

    @app.post("/admit")
    async def admit(request: AdmitRequest) -> dict[str, int]:
        await job().admit(request.below)
        return {"below": job().admitted}

    @app.post("/recv_experience_data", response_class=Response, responses=_ROWS)
    async def recv_experience_data(asked: ReceiveRequest, request: Request) -> Response:
        try:
            batch = await _unless_gone(request, job().receive(asked, request.is_disconnected))
        except TimeoutError:
            return Response(status_code=204)
        if batch is None:
            return Response(status_code=410)
        headers = {"X-Lease": f"{batch.lease}", "X-Partition": batch.partition}
        return Response(encode(batch.rows, batch.columns), media_type=_TENSORS, headers=headers)

    @app.post("/send_experience_data", openapi_extra=_BODY)
    async def send_experience_data(request: Request, lease: Annotated[int, Query(ge=0)]) -> dict[str, int]:
        rows, columns = decode(await request.body())
        if rows is None:
            raise ValueError("`rows`, int64 [k], is missing: which rows are these?")
        return {"left": await job().send(lease, rows, columns)}

    @app.post("/sync_actor_model", openapi_extra=_BODY)
    async def sync_actor_model(request: Request, version: Version) -> dict[str, int]:
        await job().sync(version, request.stream())
        return {"version": version}

    @app.get("/weights/{version}", response_class=FileResponse, responses=_WEIGHTS)
    async def weights(version: Version) -> FileResponse:
        path = job().weights.path(version)
        if not path.is_file():
            newest = job().version
            kind = Replaced if newest is not None and version < newest else Unknown
            raise kind(f"weights of version {version} are not here; the newest are {newest}")
        return FileResponse(path, media_type=_TENSORS)

    @app.post("/engines/{name}/version")
    async def engine_version(name: str, report: VersionReport) -> dict[str, int]:
        await job().loaded_by(name, report.version)
        return {"version": report.version}

    @app.get("/versions")
    async def versions(
        request: Request, newer_than: Annotated[int, Query(ge=-1, le=1 << 40)] = -1, timeout_s: Seconds = 0.0
    ) -> dict[str, Any]:
        """Answered at once where the trainer's is newer than that, else as soon as it is, or after so long."""

        async def newest() -> dict[str, Any]:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await begun.wait()
                    await job().wait_for_newer(newer_than)
            return {"trainer": state[0].version, "engines": state[0].engines} if state else {"trainer": None}

        return await _unless_gone(request, newest())

    @app.post("/close")
    async def close() -> dict[str, int]:
        """Engines get 410 once nothing is left for them."""
        await job().close()
        return {"batches": job().loaded // job().request.batch_rows}

    @app.get("/ledger")
    async def ledger() -> dict[str, Any]:
        return job().ledger() | {"lags": dict(sorted(job().lags.items())), "worst_lag": job().worst_lag}

    @app.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE: {}}}})
    async def metrics() -> Response:
        return Response(prometheus_text(job()), media_type=CONTENT_TYPE)

    @app.get("/openapi.json", include_in_schema=False)
    async def description() -> dict[str, Any]:
        return app.openapi()

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"job": bool(state), "waiting": state[0].queue.waiting_now() if state else []}

    return app


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Cancelled once the client is gone, so that nothing is handed to nobody: ClientDisconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await gone  # which raises what was wrong with the body, if that is why
            raise ClientDisconnect
        return await task
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    """Return once the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
