"""The service over HTTP: what each verb answers, and what it refuses."""

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from harness.rpc.http_server import serving
from harness.service.app import service_app
from harness.service.job import Conflict, ServedJob
from harness.service.requests import JobRequest, ReceiveRequest
from harness.transfer_queue.rows.columns import Ragged
from tests.support.served_jobs import COLUMNS, TASKS

TOKEN = "a token"
JOB = {"columns": COLUMNS, "tasks": TASKS, "engines": ["a"], "batch_groups": 2, "group_size": 2, "max_staleness": 1}


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with served(tmp_path) as http:
        yield http


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        serving(service_app(TOKEN, folder, lambda: 0.0)) as url,
        httpx2.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=60.0) as http,
    ):
        yield http


async def begun(http: httpx2.AsyncClient, job: Mapping[str, object] = JOB) -> httpx2.AsyncClient:
    """With a job whose first batch may be generated, by version 0."""
    assert (await http.post("/init_engines", json=job)).json() == {"batch_rows": 4, "worst_lag": 1}
    assert (await put(http, "/sync_actor_model?version=0", {"w": np.arange(3.0)})).status_code == 200
    assert (await put(http, "/load_prompt_data", {"prompt": np.arange(10, 14)})).json() == {"batch": 0}
    assert (await http.post("/engines/a/version", json={"version": 0})).status_code == 200
    assert (await http.post("/admit", json={"below": 2})).json() == {"below": 2}
    return http


async def put(http: httpx2.AsyncClient, path: str, tensors: Mapping[str, np.ndarray]) -> httpx2.Response:
    return await http.post(path, content=save(dict(tensors)))


async def receive(http: httpx2.AsyncClient, task: str, reader: str, count: int = 4) -> httpx2.Response:
    asked = {"task": task, "reader": reader, "count": count, "minimum": 1, "timeout_s": 0}
    return await http.post("/recv_experience_data", json=asked)


async def test_a_batch_goes_from_its_prompts_to_new_weights(http: httpx2.AsyncClient) -> None:
    await begun(http)
    weights = load((await http.get("/weights/0")).content)
    assert weights["w"].tolist() == [0, 1, 2]
    given = await receive(http, "rollout", "a")
    rows = load(given.content)
    assert rows["prompt"].tolist() == [10, 11, 12, 13] and given.headers["X-Partition"] == "train_0"
    response = {"response": np.arange(6), "response.lengths": np.array([1, 2, 0, 3])}
    sent = await put(http, f"/send_experience_data?lease={given.headers['X-Lease']}", {"rows": rows["rows"]} | response)
    assert sent.json() == {"left": 0}
    batch = load((await receive(http, "train", "trainer")).content)
    assert {name: column.tolist() for name, column in batch.items()} == {
        "rows": [0, 1, 2, 3],
        "prompt": [10, 11, 12, 13],
        "response": [0, 1, 2, 3, 4, 5],
        "response.lengths": [1, 2, 0, 3],
    }
    assert (await receive(http, "train", "trainer")).status_code == 410
    assert (await put(http, "/sync_actor_model?version=1", {"w": np.ones(3)})).status_code == 200
    assert (await http.get("/versions?newer_than=0&timeout_s=30")).json() == {"trainer": 1, "engines": {"a": 0}}
    assert (await receive(http, "rollout", "a")).status_code == 204
    ledger = (await http.get("/ledger")).json()
    assert ledger["loaded"] == ledger["trained"] == 4 and ledger["lags"] == {"0": 4}
    metrics = (await http.get("/metrics")).text
    for line in (
        'cadence_rows_total{state="trained"} 4.0',
        'cadence_version{role="trainer"} 1.0',
        'cadence_lag_versions_bucket{le="0.0"} 4.0',
        "cadence_lag_versions_count 4.0",
    ):
        assert line in metrics.splitlines()


async def test_every_route_wants_the_token(http: httpx2.AsyncClient) -> None:
    await begun(http)
    described = (await http.get("/openapi.json")).json()["paths"]
    assert "/sync_actor_model" in described
    async with httpx2.AsyncClient(base_url=http.base_url, trust_env=False) as stranger:
        for path, verbs in {**described, "/openapi.json": {"get": {}}}.items():
            for verb in verbs:
                assert (await stranger.request(verb, path)).status_code == 401, path
    assert (await http.get("/ledger")).json()["loaded"] == 4


NO_TRAIN = {"rollout": TASKS["rollout"], "score": {"reads": ["prompt"]}}
UNSAMPLED = TASKS | {"train": {"reads": ["prompt"]}}
UNKNOWN_COLUMN = TASKS | {"score": {"reads": ["answer"]}}
ROWS_AS_COLUMN = COLUMNS | {"rows": {"dtype": "int64"}}
WRITTEN_TWICE = TASKS | {"score": {"reads": ["prompt"], "writes": ["response"]}}
UNKNOWN_TASK = {"task": "score", "reader": "x", "count": 1}

REFUSED = {
    "another job": ("/init_engines", JOB | {"batch_groups": 3}, 409, "another job is being served"),
    "no train": ("/init_engines", JOB | {"tasks": NO_TRAIN}, 422, "tasks has no"),
    "nothing sampled": ("/init_engines", JOB | {"tasks": UNSAMPLED}, 422, "reads nothing that 'rollout' writes"),
    "an unknown column": ("/init_engines", JOB | {"tasks": UNKNOWN_COLUMN}, 422, "unknown columns"),
    "two writers": ("/init_engines", JOB | {"tasks": WRITTEN_TWICE}, 422, "['response'] are written twice"),
    "an engine as the trainer": ("/init_engines", JOB | {"engines": ["trainer"]}, 422, "that is the trainer's"),
    "a reserved name": ("/init_engines", JOB | {"columns": ROWS_AS_COLUMN}, 422, "may not be called"),
    "no number": ("/admit", {"below": "NaN"}, 422, "below"),
    "an unknown engine": ("/engines/b/version", {"version": 0}, 404, "engine 'b' is unknown; there are ['a']"),
    "no such version": ("/engines/a/version", {"version": 1}, 409, "there is no version 1 yet; the newest is 0"),
    "an unknown task": ("/recv_experience_data", UNKNOWN_TASK, 400, "task 'score' is unknown"),
}


@pytest.mark.parametrize(("path", "fields", "status", "said"), REFUSED.values(), ids=REFUSED)
async def test_what_makes_no_sense_is_refused_in_words(
    http: httpx2.AsyncClient, path: str, fields: dict[str, object], status: int, said: str
) -> None:
    await begun(http)
    refused = await http.post(path, json=fields)
    assert refused.status_code == status and said in str(refused.json()["detail"])


async def test_weights_that_were_replaced_are_gone_and_later_ones_unknown(http: httpx2.AsyncClient) -> None:
    await begun(http)
    for version in range(1, 3):
        lease = (await receive(http, "rollout", "a")).headers["X-Lease"]
        response = {"response": np.arange(4), "response.lengths": np.ones(4, np.int64)}
        rows = {"rows": np.arange(4 * (version - 1), 4 * version)}
        await put(http, f"/send_experience_data?lease={lease}", rows | response)
        await receive(http, "train", "trainer")
        assert (await put(http, f"/sync_actor_model?version={version}", {"w": np.ones(3)})).status_code == 200
        assert (await put(http, "/load_prompt_data", {"prompt": np.arange(4)})).status_code == 200
        await http.post("/engines/a/version", json={"version": version})
        await http.post("/admit", json={"below": 2 * (version + 1)})
    found = [(await http.get(f"/weights/{version}")).status_code for version in range(4)]
    assert found == [410, 200, 200, 404]


async def test_tensors_that_do_not_fit_are_refused_in_words(http: httpx2.AsyncClient) -> None:
    await begun(http)
    lease = (await receive(http, "rollout", "a")).headers["X-Lease"]
    rows, one = np.arange(4), np.ones(4, np.int64)
    response = {"response": rows, "response.lengths": one}
    path = f"/send_experience_data?lease={lease}"
    for tensors, status, said in (
        (response, 400, "`rows`, int64 [k], is missing"),
        (
            {"rows": rows, **response, "reward": one},
            400,
            "task rollout writes ['response'], not ['response', 'reward']",
        ),
        ({"rows": rows + 1, **response}, 409, "row 4 was not given under lease"),
        ({"rows": rows, "response": rows, "response.lengths": one * 2}, 400, "lengths sum to 8"),
        ({"rows": rows, "response": rows.astype(np.int32), "response.lengths": one}, 400, "holds int64, not int32"),
    ):
        refused = await put(http, path, tensors)
        assert (refused.status_code, said in refused.json()["detail"]) == (status, True), refused.text
    torn = await http.post(path, content=save({"rows": rows})[:-3])
    assert torn.status_code == 400 and "the body is no safetensors" in torn.json()["detail"]
    assert (await put(http, path, {"rows": rows, **response})).json() == {"left": 0}


async def test_prompts_with_what_a_task_writes_are_refused_and_change_nothing(http: httpx2.AsyncClient) -> None:
    await begun(http)
    prompts = {"prompt": np.arange(4)}
    refused = await put(
        http, "/load_prompt_data", prompts | {"response": np.arange(4), "response.lengths": np.ones(4, np.int64)}
    )
    assert refused.status_code == 400
    assert refused.json()["detail"] == "columns ['response'] are written by tasks: prompts come without them"
    assert (await put(http, "/load_prompt_data", prompts)).json() == {"batch": 1}


async def begin(http: httpx2.AsyncClient, request: str, body: bytes, *, length: int) -> asyncio.StreamWriter:
    """A connection with this request, whose body is `length` bytes long, or would be."""
    headers = f"Host: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\nContent-Length: {length}"
    _, asking = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    asking.write(f"{request} HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body)
    return asking


async def leave_while_waiting(http: httpx2.AsyncClient, task: str) -> None:
    """Ask for rows that are not there, and be gone before they come."""
    body = json.dumps({"task": task, "reader": "a", "count": 4, "timeout_s": 30.0}).encode()
    asking = await begin(http, "POST /recv_experience_data", body, length=len(body))
    async with asyncio.timeout(30.0):
        while not (await http.get("/health")).json()["waiting"]:
            pass
    asking.transport.abort()


@pytest.mark.parametrize("task", ["rollout", "train"])
async def test_rows_whose_reader_is_gone_are_kept_for_the_next(http: httpx2.AsyncClient, task: str) -> None:
    for_good = {"reads": ["prompt"], "writes": ["response"]}  # without a lease no row goes out twice
    await begun(http, JOB | {"tasks": TASKS | {"rollout": for_good}})
    if task == "train":
        lease = (await receive(http, "rollout", "a")).headers["X-Lease"]
        await leave_while_waiting(http, task)
        response = {"response": np.arange(4), "response.lengths": np.ones(4, np.int64)}
        await put(http, f"/send_experience_data?lease={lease}", {"rows": np.arange(4)} | response)
    else:
        assert (await receive(http, "rollout", "a")).status_code == 200
        await leave_while_waiting(http, task)
        await put(http, "/load_prompt_data", {"prompt": np.arange(4)})
        assert (await http.post("/admit", json={"below": 4})).status_code == 200
    again = await receive(http, task, "a")
    assert again.status_code == 200 and len(load(again.content)["rows"]) == 4


async def test_a_client_that_goes_in_the_middle_is_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with served(tmp_path) as http:
        await begun(http)
        await leave_while_waiting(http, "train")
        sending = await begin(http, "POST /load_prompt_data", b"half", length=8)
        assert (await http.get("/health")).status_code == 200
        sending.transport.abort()
    assert capfd.readouterr().err == ""


async def test_a_body_is_no_longer_than_its_route_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, largest in (("JSON", 500), ("COLUMNS", 1000), ("WEIGHTS", 2000)):
        monkeypatch.setattr(f"harness.service.app._LARGEST_{name}", largest)
    json_routes = ["/init_engines", "/admit", "/recv_experience_data", "/engines/a/version", "/close"]
    async with served(tmp_path) as http:
        await begun(http)
        for path, largest in (
            *dict.fromkeys(json_routes, 500).items(),
            *dict.fromkeys(("/load_prompt_data", "/send_experience_data?lease=0"), 1000).items(),
            ("/sync_actor_model?version=1", 2000),
        ):
            refused = await http.post(path, content=bytes(largest + 1))
            assert refused.status_code == 413
            assert refused.json() == {"detail": f"a body has at most {largest} bytes here"}
            assert (await http.post(path, content=bytes(largest))).status_code != 413


async def test_without_a_job_nothing_is_done(http: httpx2.AsyncClient) -> None:
    refused = await http.get("/ledger")
    assert refused.status_code == 409 and "POST /init_engines first" in refused.json()["detail"]
    assert (await http.get("/health")).json() == {"job": False, "waiting": []}


async def test_a_version_of_more_digits_than_a_file_may_have_in_its_name_is_refused(http: httpx2.AsyncClient) -> None:
    await begun(http)
    refused = await http.get("/weights/" + "1" * 300)
    assert refused.status_code == 422 and refused.json()["detail"][0]["type"] == "less_than_equal"


async def test_prompts_after_the_last_are_refused(http: httpx2.AsyncClient) -> None:
    await begun(http)
    assert (await http.post("/close")).json() == {"batches": 1}
    refused = await put(http, "/load_prompt_data", {"prompt": np.arange(4)})
    assert refused.status_code == 409 and "comes after the queue was closed" in refused.json()["detail"]


def request(**changes: object) -> JobRequest:
    fields = {"columns": COLUMNS, "tasks": TASKS, "engines": ["a", "b"], "batch_groups": 2, "group_size": 2}
    return JobRequest.model_validate(fields | changes)


async def weights() -> AsyncIterator[bytes]:
    yield save({"w": np.zeros(3, np.float32)})


class Time:
    def __init__(self) -> None:
        self.now = 0.0


def ask(task: str, reader: str, count: int, minimum: int = 1) -> ReceiveRequest:
    return ReceiveRequest(task=task, reader=reader, count=count, minimum=minimum, timeout_s=0.0)


async def respond(job: ServedJob, engine: str, count: int) -> int:
    """The engine samples what it is given, if anything; how many rows."""
    try:
        batch = await job.receive(ask("rollout", engine, count))
    except TimeoutError:
        return 0
    lengths = np.ones(len(batch), np.int64)
    await job.send(batch.lease, batch.rows, {"response": Ragged(batch.rows, lengths)})
    return len(batch)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.just(0)),
        st.tuples(st.just("admit"), st.integers(0, 12)),
        st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 6)),
        st.tuples(st.sampled_from(["newest a", "newest b"]), st.just(0)),
        st.tuples(st.just("train"), st.integers(1, 3)),
        st.tuples(st.just("sync"), st.just(0)),
    ),
    max_size=60,
)


@given(steps=STEPS, max_staleness=st.sampled_from([0.0, 0.5, 1.0, 2.5]))
def test_whatever_they_do_no_sample_lags_by_more_than_promised_and_each_is_trained_once(
    steps: list[tuple[str, int]], max_staleness: float
) -> None:
    async def play() -> None:
        with TemporaryDirectory() as folder:
            job = ServedJob(request(max_staleness=max_staleness), Path(folder), lambda: 0.0)
            trained: list[int] = []
            for verb, number in steps:
                try:
                    if verb == "load":
                        await job.load({"prompt": np.arange(4)})
                    elif verb == "admit":
                        await job.admit(number)
                    elif verb == "train":
                        batch = await job.receive(ask("train", "trainer", 2 * number, minimum=2))
                        if batch is not None:
                            assert {row // 4 for row in batch.rows.tolist()} == {job.version}
                            assert batch.ragged("response").values.tolist() == batch.rows.tolist()
                            trained += batch.rows.tolist()
                    elif verb == "sync":
                        await job.sync(0 if job.version is None else job.version + 1, weights())
                    elif verb.startswith("newest"):
                        await job.loaded_by(verb[-1], job.version or 0)
                    else:
                        await respond(job, verb, number)
                except (Conflict, TimeoutError):
                    pass
                ledger = job.ledger()
                assert ledger["loaded"] == ledger["trained"] + ledger["generated_untrained"] + ledger["not_generated"]
            assert len(set(trained)) == len(trained) == job.trained
            assert sum(job.lags.values()) == job.trained
            assert all(0 <= lag <= math.ceil(max_staleness) for lag in job.lags)
            assert len(os.listdir(folder)) <= 2

    asyncio.run(play())


async def test_rows_of_a_silent_engine_go_to_another_and_come_too_late(tmp_path: Path) -> None:
    time = Time()
    job = ServedJob(request(), tmp_path, lambda: time.now)
    await job.load({"prompt": np.arange(4)})
    await job.sync(0, weights())
    await job.admit(2)
    for engine in ("a", "b"):
        await job.loaded_by(engine, 0)
    lost = await job.receive(ask("rollout", "a", 4))
    assert lost is not None and len(lost) == 4
    time.now = 10.5
    assert await respond(job, "b", 4) == 4
    late = {"response": Ragged(lost.rows, np.ones(4, np.int64))}
    with pytest.raises(Conflict, match=f"lease {lost.lease} of task rollout has run out, and its rows went out again"):
        await job.send(lost.lease, lost.rows, late)
    batch = await job.receive(ask("train", "trainer", 4))
    assert batch is not None and sorted(batch.rows.tolist()) == [0, 1, 2, 3]


async def test_a_version_is_taken_in_turn_and_once_its_batch_was_received(tmp_path: Path) -> None:
    job = ServedJob(request(), tmp_path, lambda: 0.0)
    with pytest.raises(Conflict, match="version 3 does not follow None; the next one is 0"):
        await job.sync(3, weights())
    await job.sync(0, weights())
    with pytest.raises(Conflict, match="batch 0 has 4 rows that the trainer has not received yet"):
        await job.sync(1, weights())

    async def torn() -> AsyncIterator[bytes]:
        yield b"\x07"

    job.trained = 4
    with pytest.raises(ValueError, match="the weights are no safetensors"):
        await job.sync(1, torn())
    assert job.version == 0 and os.listdir(tmp_path) == ["version_0.safetensors"]


async def test_an_engine_that_waits_is_told_of_newer_weights_at_once(tmp_path: Path) -> None:
    job = ServedJob(request(), tmp_path, lambda: 0.0)
    await job.sync(0, weights())
    await job.loaded_by("a", 0)
    waiting = asyncio.ensure_future(job.receive(ReceiveRequest(task="rollout", reader="a", count=1, timeout_s=60.0)))
    await asyncio.sleep(0)
    job.trained = 4
    await job.sync(1, weights())
    with pytest.raises(TimeoutError, match="engine 'a' has version 0, and there is 1"):
        await waiting


@pytest.mark.parametrize("turns", range(4))
async def test_what_an_engine_was_given_as_it_went_is_given_to_another(tmp_path: Path, turns: int) -> None:
    tasks = TASKS | {"rollout": {"reads": ["prompt"], "writes": ["response"]}}  # for good: there is no lease to run out
    job = ServedJob(request(tasks=tasks), tmp_path, lambda: 0.0)
    await job.load({"prompt": np.arange(4)})
    await job.sync(0, weights())
    for engine in ("a", "b"):
        await job.loaded_by(engine, 0)
    asked = ReceiveRequest(task="rollout", reader="a", count=4, timeout_s=60.0)
    waiting = asyncio.ensure_future(job.receive(asked, left))
    while not job.queue.waiting_now():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await job.admit(2)
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises((asyncio.CancelledError, TimeoutError)):
        await waiting
    assert await respond(job, "b", 4) == 4


async def left() -> bool:
    return True
