"""Ray leaves files, sockets and its log handles to the garbage collector, and warns of itself."""

import pytest

IGNORED = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]
"""Marks of a module whose tests start Ray."""
