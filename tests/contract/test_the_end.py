"""How an engine ends: closed, or killed. Last of its tests (conftest.py): what ran is gone afterwards."""

import os
import signal

import pytest

from tests.contract.conftest import OneAtATime
from tests.contract.subject import NAME, Subject

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_closing_tells_who_waits_and_leaves_no_process(subject: Subject, running_engine: OneAtATime) -> None:
    async with subject.collecting([]) as samples:
        await running_engine.close()
        failure = await samples.failure()
    assert isinstance(failure, RuntimeError) and NAME in str(failure)
    with pytest.raises(RuntimeError, match=NAME):
        await subject.engine.resume()


@pytest.mark.parametrize("embeddings", ["untied"])  # that engine has done its work
async def test_a_killed_engine_is_noticed_and_named(subject: Subject, running_engine: OneAtATime) -> None:
    processes = subject.processes()
    if not processes:
        pytest.skip(f"{subject.under_test.name} runs in the process that uses it: nothing can be killed alone")
    async with subject.busy() as samples:
        os.kill(processes[0], signal.SIGKILL)
        failure = await samples.failure()
    assert isinstance(failure, RuntimeError) and NAME in str(failure)
    version = subject.engine.version + 1
    with pytest.raises(RuntimeError, match=NAME):
        await subject.engine.load_weights(version, subject.weights(version))
    with pytest.raises(RuntimeError, match=NAME):
        await subject.engine.resume()
    await running_engine.close()
