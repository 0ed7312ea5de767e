"""The service over HTTP: what each verb answers, and what it refuses."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load, save

from harness.rpc.http_server import serving
from harness.service.app import service_app
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
