"""Every operation of the service's description, asked with what fits it and with what does not, from a fixed seed: each
answer is one that the description has, and who behaves is served meanwhile and afterwards."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from harness.rpc.http_server import serving
from harness.service.app import service_app
from tests.support.mutations import spoilt
from tests.support.served_jobs import COLUMNS, TASKS

pytestmark = pytest.mark.slow

TOKEN = "a token"
JOB = {"columns": COLUMNS, "tasks": TASKS, "engines": ["a"], "batch_groups": 2, "group_size": 2, "max_staleness": 1}
ANSWER_S = 60.0
AS_DESCRIBED = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

DESCRIPTION = schemathesis.openapi.from_dict(service_app(TOKEN, Path()).openapi())
OPERATIONS = {found.ok().label: found.ok() for found in DESCRIPTION.get_all_operations()}
REQUESTS = 218  # of an operation; nine of thirteen take anything: 2,000 in all


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Where it answers, from a thread of its own."""
    loop, listening, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    where = list[str]()

    async def serve() -> None:
        async with serving(service_app(TOKEN, folder, lambda: 0.0)) as url:
            where.append(url)
            listening.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    try:
        assert listening.wait(ANSWER_S)
        yield where[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


class Client:
    """Somebody who behaves: engine, trainer, and all."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["Authorization"] = f"Bearer {TOKEN}"

    def ask(self, verb: str, path: str, **sent: object) -> requests.Response:
        answer = self._session.request(verb, self._url + path, timeout=ANSWER_S, **sent)  # type: ignore[arg-type]
        assert answer.status_code == 200, answer.text
        return answer

    def put(self, path: str, tensors: Mapping[str, np.ndarray]) -> None:
        self.ask("POST", path, data=save(dict(tensors)))

    def receive(self, task: str) -> requests.Response:
        return self.ask("POST", "/recv_experience_data", json={"task": task, "reader": "a", "count": 4})

    def batch(self, number: int) -> None:
        """From its prompts to the trainer, which has this version."""
        self.put(f"/sync_actor_model?version={number}", {"w": np.full(3, number)})
        self.put("/load_prompt_data", {"prompt": np.arange(4)})
        self.ask("POST", "/engines/a/version", json={"version": number})
        self.ask("POST", "/admit", json={"below": 2 * number + 2})
        given = self.receive("rollout")
        response = {"response": np.arange(4), "response.lengths": np.ones(4, np.int64)}
        rows = {"rows": load(given.content)["rows"]}
        self.put(f"/send_experience_data?lease={given.headers['X-Lease']}", rows | response)
        assert load(self.receive("train").content)["rows"].tolist() == [4 * number + row for row in range(4)]

    def close(self) -> None:
        self._session.close()


@st.composite
def asked(draw: st.DrawFn, operation: schemathesis.APIOperation) -> Case:
    """What fits its schema, or just does not; half of it about what is there, or nearly. None waits for long."""
    case: Case = draw(st.one_of(operation.as_strategy(mode) for mode in GenerationMode))
    known = JOB if operation.path == "/init_engines" else {"task": "rollout", "reader": "a", "version": 0, "below": 4}
    if isinstance(case.body, dict) and draw(st.booleans()):
        case.body |= {name: known[name] for name in known if name in case.body and draw(st.booleans())}
    if isinstance(case.body, bytes) and draw(st.booleans()):
        tensors = save({"prompt": np.arange(4), "rows": np.arange(4)})
        case.body = spoilt(tensors, draw(st.randoms(use_true_random=False)))
    if "name" in case.path_parameters and draw(st.booleans()):
        case.path_parameters["name"] = "a"
    for sent in (case.query, case.body):
        if isinstance(sent, dict) and ("timeout_s" in sent or operation.path == "/recv_experience_data"):
            wait = sent.get("timeout_s", 30.0)
            sent["timeout_s"] = min(wait, 0.01) if isinstance(wait, int | float) else wait
    return case


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_is_asked_is_answered_as_described(label: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    statuses = Counter[int]()
    with served(tmp_path) as url:
        honest = Client(url)
        honest.ask("POST", "/init_engines", json=JOB)
        honest.batch(0)

        @seed(0)
        @settings(max_examples=REQUESTS, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(asked(OPERATIONS[label]), st.sampled_from(["a guess", *[TOKEN] * 9]))
        def ask(case: Case, token: str) -> None:
            answer = case.call(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=ANSWER_S)
            case.validate_response(answer, AS_DESCRIBED)
            assert (answer.status_code == 401) == (token != TOKEN)
            statuses[answer.status_code] += 1
            assert honest.ask("GET", "/health").json()["job"]

        ask()
        assert statuses[401] and statuses.total() > statuses[401]
        if label != "POST /close":
            honest.batch(1)
        assert honest.ask("GET", "/ledger").json()["not_generated"] == 0
        honest.close()
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
