from collections.abc import Iterator

import pytest

from tests.support.fsdp_samples import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World() as world:
        yield world
