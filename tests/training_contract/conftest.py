"""Which training engines the suite runs on, and one run of each layout for all tests of it."""

import pytest

from tests.training_contract.under_test import PLAIN, REGISTERED, Layout, Run, Runs, WorldUnderTest, run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--training-engine", metavar="NAME", help="contract: a registered engine, or module:Class")


def worlds_to_test(config: pytest.Config) -> list[WorldUnderTest]:
    """The one that --training-engine names; else those without a marker, and those whose marker -m asks for."""
    chosen = config.getoption("--training-engine", default=None)
    if chosen is None:
        asked = config.getoption("-m")
        return [world for world in REGISTERED.values() if world.marker is None or world.marker in asked]
    if chosen not in REGISTERED and ":" not in chosen:
        raise pytest.UsageError(f"--training-engine: {chosen} is none of {', '.join(REGISTERED)}, and no module:Class")
    return [REGISTERED.get(chosen) or WorldUnderTest(name=chosen, path=chosen, layouts=(Layout(), Layout(data=2)))]


def marks_of(world: WorldUnderTest, layout: Layout) -> list[str]:
    slow = layout.long or layout.tensor > 1  # of two ranks too, which take as long as four that share otherwise
    return [*([world.marker] if world.marker else []), *(["slow"] if slow else [])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = [
            pytest.param(
                (world, layout, model),
                id=f"{world.name}-{layout}-{model}",
                marks=[getattr(pytest.mark, mark) for mark in marks_of(world, layout)],
            )
            for world in worlds_to_test(metafunc.config)
            for layout in world.layouts
            for model in layout.models
        ]
        metafunc.parametrize("case", cases)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Each layout's run, begun when it is first asked for; once, also where it fails."""
    done: dict[tuple[str, str], Run | RuntimeError] = {}

    def run_of(under_test: WorldUnderTest, layout: Layout) -> Run:
        key = under_test.name, str(layout)
        if key not in done:
            try:
                done[key] = run(under_test, layout, tmp_path_factory.mktemp("states"))
            except RuntimeError as error:
                done[key] = error
        if isinstance(found := done[key], RuntimeError):
            pytest.fail(str(found), pytrace=False)
        return found

    return run_of


@pytest.fixture
def plain(case: tuple[WorldUnderTest, Layout, str], runs: Runs) -> Run:
    """The reference: samples one by one, on one rank, for as many steps."""
    return runs(PLAIN, PLAIN.layouts[case[1].long])
