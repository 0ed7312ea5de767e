"""Which engines the suite runs on, and one running engine for all tests of it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import psutil
import pytest
import pytest_asyncio
import torch

from tests.contract.engine_under_test import EngineUnderTest
from tests.contract.registered import REGISTERED, engine_called
from tests.contract.subject import WAIT_S, Subject, waiting_for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", metavar="NAME", help="contract: a registered engine, or module:Class of your own")


def pytest_configure(config: pytest.Config) -> None:
    try:
        engines_to_test(config)
    except (ValueError, ImportError, AttributeError) as wrong:
        raise pytest.UsageError(f"--engine: {wrong}") from wrong


def engines_to_test(config: pytest.Config) -> list[EngineUnderTest]:
    """The one that --engine names; else those without a marker, and those whose marker -m asks for."""
    if chosen := config.getoption("--engine", default=None):
        return [engine_called(chosen)]
    asked = config.getoption("-m")
    return [engine for engine in REGISTERED.values() if engine.marker is None or engine.marker in asked]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "under_test" in metafunc.fixturenames:
        engines = [
            pytest.param(engine, id=engine.name, marks=getattr(pytest.mark, engine.marker) if engine.marker else ())
            for engine in engines_to_test(metafunc.config)
        ]
        metafunc.parametrize("under_test", engines, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One engine after the other, tied embeddings first, its end last: an engine is started when the one before is
    needed no more, and once."""

    def engine_model_and_end(item: pytest.Item) -> tuple[str, bool, bool]:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        under_test = parameters.get("under_test")
        ends = item.path.name == "test_the_end.py"
        return (under_test.name if under_test else "", parameters.get("embeddings") == "untied", ends)

    places = [place for place, item in enumerate(items) if "under_test" in getattr(item, "fixturenames", ())]
    ordered = sorted((items[place] for place in places), key=engine_model_and_end)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


class OneAtATime:
    """The engine that runs now. Starting one may take a minute, so it stays until another one is asked for."""

    def __init__(self) -> None:
        self._key: tuple[str, bool] | None = None
        self._subject: Subject | None = None

    async def get(self, under_test: EngineUnderTest, tied: bool) -> Subject:
        key = (under_test.name, tied)
        if self._subject is None or key != self._key:
            await self.close()
            self._key, self._subject = key, await Subject.started(under_test, tied)
        return self._subject

    async def reset(self) -> None:
        """Ready for another test; an engine that cannot be made so is closed."""
        if self._subject is not None:
            try:
                await self._subject.reset()
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        """Close what runs, and see to it that none of its processes stays."""
        subject, self._subject = self._subject, None
        if subject is not None:
            processes = subject.processes()
            async with waiting_for("the engine to close"):
                await subject.engine.close()
            left = await asyncio.to_thread(processes_that_stay, processes)
            assert not left, f"{subject.under_test.name} is closed, and its processes {left} still run"


def processes_that_stay(processes: Sequence[int]) -> list[int]:
    running = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            running.append(psutil.Process(process))
    _, left = psutil.wait_procs(running, timeout=WAIT_S)
    return [process.pid for process in left]


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def running_engine() -> AsyncIterator[OneAtATime]:
    threads, running = torch.get_num_threads(), OneAtATime()
    torch.set_num_threads(1)  # as a device of a CPU job; several wait for each other on a busy machine
    yield running
    await running.close()
    torch.set_num_threads(threads)


@pytest.fixture
def embeddings() -> str:
    """A test that is parametrised by `embeddings`, "tied" and "untied", runs on both kinds of models."""
    return "tied"


@pytest_asyncio.fixture(loop_scope="session")
async def subject(under_test: EngineUnderTest, embeddings: str, running_engine: OneAtATime) -> AsyncIterator[Subject]:
    """The engine, idle, with weights that `subject.model` knows."""
    yield await running_engine.get(under_test, embeddings == "tied")
    await running_engine.reset()
